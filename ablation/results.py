"""The files of an ablation, runs/ablate/NAME/: scripts/ablate.py has them written, and the report reads them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ablation import tuning
from ablation.experiment import AblateConfig
from configs.files import write_atomic, write_json
from configs.provenance import result_record
from eval.report.figures import draw_differences, draw_forest, draw_grid, draw_losses
from eval.report.grid import Comparison, fit_rows
from eval.report.pooled import Pooled, parts_table, profile, unit
from eval.report.runs import Arm
from eval.report.tables import markdown

FAMILIES = ("gap_*", "grid_*")  # figures that not every command draws


class Results:
    """The comparison of the arms that have finished runs. tuned: search -> the learning rates that it chose."""

    def __init__(self, cfg: AblateConfig, arms: list[Arm], tuned: Mapping[str, tuning.Tuned]) -> None:
        self.cfg, self.tuned = cfg, tuned
        arms = [arm for arm in arms if arm.runs]
        self.comparison = Comparison(arms, cfg.metrics, cfg.compared)
        self.pooled = Pooled(self.comparison, cfg.pairs, cfg.branch, cfg.covariate)
        self.profiles = {name: one for name, path in cfg.profiles.items() if (one := profile(arms, path, cfg.pairs))}
        self.fits = self.comparison.fit_sizes(self.comparison.compared[0]) if cfg.fit else None

    def write(self, folder: Path, missing: int, epochs: float | None, overlap: Mapping[str, float] | None) -> None:
        """Write results.json and table.md to `folder`; print the table.

        missing: runs that are not finished. epochs: how often training read the prepared text; overlap: test text -> the
        share of it that occurs in the training text; None where it is not known.
        """
        partial = f", partial: {missing} {'runs are' if missing > 1 else 'run is'} missing" if missing else ""
        runs = [run for arm in self.comparison.arms for run in arm.runs]
        longest = max(run.value("train.tokens") or 1 for run in runs)
        title = f"{folder.name}{tuning.in_title(self.tuned, self.cfg.tune, longest)}{partial}"
        seeds, tuned = list(dict.fromkeys(run.seed for run in runs)), tuning.tuning_notes(self.tuned, self.cfg.tune)
        remarks = [*tuned, *self.comparison.notes(seeds, epochs), *self._text_notes(overlap)]
        results = {
            "title": title,
            "arms": self.comparison.as_json(),
            "tuning": tuning.as_json(self.tuned),
            **self.pooled.as_json(),
            "profiles": {name: one.as_json() for name, one in self.profiles.items()},
            "fits": self.fits,
            "epochs": epochs,
            "overlap": overlap or {},
            "notes": remarks,
        }
        page = [table for point in self.pooled.points for table in self.pooled.tables(point)]
        for name, one in self.profiles.items():
            page += [f"{name}:", *tables] if (tables := one.tables(self.pooled.points[-1])) else []
        if alone := [one for metric in self.cfg.forest for one in self.pooled.alone(metric)]:
            page.append(markdown(parts_table(alone, "part, paired by seed (forest.png)")).rstrip())
        page += [*self.pooled.remarks(), *self.pooled.by_seed()]
        page += [markdown(lines).rstrip() for lines in (self.comparison.lines(), self.fits and fit_rows(self.fits)) if lines]
        page += tuning.rates_table(self.tuned)
        write_json(folder / "results.json", result_record("ablation", folder.name, self.cfg, results, seeds=seeds))
        text = "\n\n".join([f"**{title}**", *page, *remarks, *self.pooled.notes()]) + "\n"
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
        absent = [f"{name} ({path})" for name, path in self.cfg.metrics.items() if not self.comparison.measured(name)]
        absent += [f"{name} ({path})" for name, path in self.cfg.profiles.items() if name not in self.profiles]
        return notes + [f"Without a column or table, because no run has numbers there: {', '.join(absent)}."] * bool(absent)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the figures in place of those of an earlier command. Returns their paths."""
        for path in [path for family in FAMILIES for path in folder.glob(f"{family}.png")]:
            path.unlink()
        cfg, paths = self.cfg, draw_ablation(folder, self.pooled, self.fits)
        for metric in self.comparison.compared if cfg.branch else ():
            paths += self.pooled.draw(folder, metric, unit(cfg.metrics[metric]))
        panels = {title: self.pooled.alone(metric) for metric, title in cfg.forest.items()}
        if any(panels.values()):
            paths.append(folder / "forest.png")
            draw_forest(paths[-1], panels)
        return paths


def draw_ablation(folder: Path, pooled: Pooled, fits: dict[str, Any] | None) -> list[Path]:
    """Draw the losses, the differences of the compared metrics and, with fits over sizes, the first metric over them."""
    comparison, paths = pooled.comparison, [folder / "loss.png", folder / "difference.png"]
    draw_losses(paths[0], comparison.arms)
    draw_differences(paths[1], comparison.arms, {name: pooled.drawn(name) for name in comparison.compared})
    if fits:
        metric = comparison.compared[0]
        paths.append(folder / "grid_{}.png".format(re.sub(r"\W", "_", metric)))
        draw_grid(paths[-1], [(arm, comparison.summary(metric, arm)) for arm in comparison.arms], metric, fits)
    return paths
