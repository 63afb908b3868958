"""The files of an ablation, runs/ablate/NAME/: scripts/ablate.py has them written, and the report reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ablation import tuning
from ablation.experiment import AblateConfig
from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.report import study_tables
from eval.report.comparison import Comparison, fit_sizes, profile
from eval.report.figures import draw_differences, draw_forest, draw_gap, draw_grid, draw_losses, draw_plane, slug
from eval.report.runs import Arm

DOCUMENTS = ("metric", "part", "arm", "reference", "n", "mean", "sd", "low", "high", "p", "p_holm")
OPTIONAL_FIGURES = ("gap_*", "grid_*", "forest", "plane")  # that not every command draws


class Results:
    """The comparison of the arms that have finished runs. tuned: search -> the learning rates that it chose."""

    def __init__(self, cfg: AblateConfig, arms: list[Arm], tuned: Mapping[str, tuning.Tuned]) -> None:
        self.cfg, self.tuned = cfg, tuned
        arms = [arm for arm in arms if arm.runs]
        self.comparison = Comparison(arms, cfg.metrics, cfg.compared, cfg.pairs, cfg.branch, cfg.covariate)
        self.profiles = {name: one for name, path in cfg.profiles.items() if (one := profile(arms, path, cfg.pairs))}
        self.fits = fit_sizes(self.comparison, self.comparison.compared[0]) if cfg.fit else None

    def write(self, folder: Path, missing: int, epochs: float | None, overlap: Mapping[str, float] | None) -> None:
        """Write results.json and table.md to `folder`; print the table. epochs, overlap: None where not known."""
        partial = f", partial: {missing} {'runs are' if missing > 1 else 'run is'} missing" if missing else ""
        comparison, tables = self.comparison, study_tables.tables
        runs = [run for arm in comparison.arms for run in arm.runs]
        longest = max(run.value("train.tokens") or 1 for run in runs)
        title = f"{folder.name}{tuning.in_title(self.tuned, self.cfg.tune, longest)}{partial}"
        seeds, tuned = list(dict.fromkeys(run.seed for run in runs)), tuning.tuning_notes(self.tuned, self.cfg.tune)
        remarks = [*tuned, *study_tables.notes(comparison, seeds, epochs), *self._text_notes(overlap)]
        results = {
            "title": title,
            "arms": comparison.arms_json(),
            "tuning": tuning.as_json(self.tuned),
            **comparison.models_json(),
            "profiles": {name: one.models_json() for name, one in self.profiles.items()},
            "fits": self.fits,
            "epochs": epochs,
            "overlap": overlap or {},
            "notes": remarks,
        }
        page = [table for point in comparison.points for table in tables(comparison, point)]
        for name, one in self.profiles.items():
            page += [f"{name}:", *of_profile] if (of_profile := tables(one, comparison.points[-1])) else []
        if alone := [one for metric in self.cfg.forest for one in comparison.alone(metric)]:
            page.append(study_tables.difference_table(alone, "part, paired by seed (forest.png)"))
        if documents := [one for metric in comparison.compared for one in comparison.over_documents(metric)]:
            results["over_documents"] = [one.numbers(*DOCUMENTS) for one in documents]
            page.append(study_tables.difference_table(documents, "part, paired by document"))
        by_seed = [study_tables.table_by_seed(comparison, point) for point in comparison.points]
        page += [*study_tables.remarks(comparison), *filter(None, by_seed), study_tables.overview(comparison)]
        page += [study_tables.fit_table(self.fits)] if self.fits else []
        page += tuning.rates_table(self.tuned, self.cfg.tune)
        write_json(folder / "results.json", result_record("ablation", folder.name, self.cfg, results, seeds=seeds))
        text = "\n\n".join([f"**{title}**", *page, *remarks, *study_tables.error_notes(comparison)]) + "\n"
        write_atomic(folder / "table.md", text.encode())
        print(text)

    def _text_notes(self, overlap: Mapping[str, float] | None) -> list[str]:
        """Whether the test texts occur in the training text, and which metrics and profiles are not shown."""
        notes = []
        if overlap:
            shares = ", ".join(f"{text} {share:.2%}" for text, share in overlap.items())
            notes.append(f"Share of the 13-word sequences of each test text that occur in the training text: {shares}.")
        elif overlap is None:
            notes.append("Made from records alone: whether the test texts occur in the training text was not checked.")
        measured = set(self.comparison.table["metric"])
        absent = [f"{name} ({path})" for name, path in self.cfg.metrics.items() if name not in measured]
        absent += [f"{name} ({path})" for name, path in self.cfg.profiles.items() if name not in self.profiles]
        return notes + [f"Without a column or table, because no run has numbers there: {', '.join(absent)}."] * bool(absent)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the figures in place of those of an earlier command. Returns their paths."""
        for path in [path for name in OPTIONAL_FIGURES for path in folder.glob(f"{name}.png")]:
            path.unlink()
        cfg, paths = self.cfg, draw_ablation(folder, self.comparison, self.fits)
        for metric in self.comparison.compared if cfg.branch else ():
            if effects := [one for one in self.comparison.effects if one.metric == metric]:
                unit = " (nats)" if cfg.metrics[metric].endswith(("loss", "by_octave")) else ""
                paths.append(folder / f"gap_{slug(metric)}.png")
                draw_gap(paths[-1], self.comparison.arms, effects, f"{metric}: arm less {self.comparison.arms[0].arm}{unit}")
        panels = {title: self.comparison.alone(metric) for metric, title in cfg.forest.items()}
        if any(panels.values()):
            paths.append(folder / "forest.png")
            draw_forest(paths[-1], panels)
        if cfg.plane:
            paths.append(folder / "plane.png")
            last = [arm for arm in self.comparison.arms if arm.point == self.comparison.points[-1]]
            draw_plane(paths[-1], last, {title: self.comparison.drawn(metric) for metric, title in cfg.plane.items()})
        return paths


def draw_ablation(folder: Path, comparison: Comparison, fits: dict[str, Any] | None) -> list[Path]:
    """Draw the losses, the differences of the compared metrics and, with fits over sizes, the first metric over them."""
    paths = [folder / "loss.png", folder / "difference.png"]
    draw_losses(paths[0], comparison.arms)
    draw_differences(paths[1], comparison.arms, {name: comparison.drawn(name) for name in comparison.compared})
    if fits:
        metric = comparison.compared[0]
        paths.append(folder / f"grid_{slug(metric)}.png")
        draw_grid(paths[-1], [(arm, comparison.summary(metric, arm)) for arm in comparison.arms], metric, fits)
    return paths
