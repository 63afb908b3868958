"""Warnings for the reader of a report: runs that are not finished, evaluations that are missing, training that differs."""

from collections import Counter

from eval.common import command_of
from eval.report.measured import EVALUATIONS
from eval.report.runs import Arm, Run


def notes(runs: list[Run], arms: list[Arm]) -> list[str]:
    """Warnings for the reader, one line each. runs: also those that their arms leave out."""
    kept = [run for arm in arms for run in arm.runs]
    lines = [line for run in runs for line in _notes_of(run, any(run is other for other in kept))]
    if len({run.train[-1]["tokens"] for run in kept if run.train}) > 1:
        lines.append("the runs were trained on different numbers of tokens, so comparing their losses is not fair")
    if mixed := mixed_precision(kept):
        lines.append(mixed)
    seeds = [{run.seed for run in arm.runs} for arm in arms]
    if any(arm.several for arm in arms) and any(of_arm != seeds[0] for of_arm in seeds):
        lines.append("the arms have different seeds: a difference is over the seeds that both of its arms have")
    return lines


def mixed_precision(runs: list[Run]) -> str | None:
    """A note where `dtype=auto` meant different dtypes on the machines of the runs."""
    dtypes = Counter(run.facts["dtype"] for run in runs if "dtype" in run.facts)
    if len(dtypes) < 2:
        return None
    counts = " and ".join(f"{dtype} ({count})" for dtype, count in sorted(dtypes.items()))
    return f"runs were trained in {counts}, so their differences include those of rounding: set dtype to train all alike"


def _notes_of(run: Run, kept: bool) -> list[str]:
    lines, left_out = [], "" if kept else ", and left out of its arm"
    diverged = run.diverged or (not run.finished and run.skipped > run.step)  # no loss was finite after the last logged one
    if not (run.finished or diverged):
        steps = f"at step {run.step:,} of {run.config['steps']:,}"
        lines.append(f"{run.label} is not finished, {steps}{left_out}: continue it with resume=true")
    wanted = ("mqar",) if run.config["data"]["source"] == "mqar" else EVALUATIONS
    if absent := [name for name in wanted if name not in run.evals]:
        commands = ", ".join(f"python -m eval.{name} run={run.folder}" for name in absent)
        lines.append(f"{run.label} has no {', '.join(absent)}: run {commands}")
    if diverged:
        lines.append(f"{run.label} diverged{left_out}: its training loss is not finite; lower optim.lr and train it again")
    if old := [name for name, content in run.evals.items() if content.get("step", run.step) < run.step]:
        again = f"run python -m eval.{command_of(old[0])} run={run.folder} again, with the settings in eval/{old[0]}.json"
        lines.append(f"{run.label} was trained further after {', '.join(old)}: {again}")
    return lines
