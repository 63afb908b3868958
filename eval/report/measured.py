"""What makes results of one evaluation comparable: the settings that were given, and what was measured with them."""

from pathlib import Path
from typing import Any

from eval.common import INPUTS
from eval.needle_text import trained_digits

EVALUATIONS = ("perplexity", "needle", "attention_noise")  # wanted of every run; others are shown where they exist
NO_MATTER = ("device", "batch", "name", "ngram", "orders")  # change no number; ngram was always 2, orders is gone
# Counts and digests in results. What older code did not record is not compared.
RECORDED = ("sha256", "input_sha256", "length", "windows", "tokens", "task", "episodes", "queries", "needles")


def settings_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The settings in an evaluation's JSON that were given, the same on every machine: of a path, only its last part."""
    given = {key: value for key, value in evaluation.get("config", {}).items() if key != "run" and value is not None}
    return given | {key: Path(given[key]).name for key in (*INPUTS, "include_path") if key in given}


def measured(name: str, evaluation: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings, text and shape of a result, equal in results that can be compared. What is not known is not there.

    name: of the result. evaluation: its JSON. config: the configuration of its run.
    """
    results, settings = evaluation["results"], settings_of(evaluation)
    if name == "perplexity":
        frequent = (results.get("recall") or {}).get("rare_at_most")
        known = {"text": results.get("sha256", ""), "ngram": settings.get("ngram", 2), "frequent": frequent}
    elif name in EVALUATIONS:
        given = {key: settings.get(key) for key in ("seed", "text", "shards", "samples")}
        given["digits"] = trained_digits(config)  # of the numbers to find
        known = _shape(results) | {"settings": given, "windows": settings.get("windows")}
    else:
        given = {key: value for key, value in settings.items() if key not in NO_MATTER}
        known = _shape(results) | {"settings": given | {key: sorted(given[key]) for key in ("tasks",) if key in given}}
    return {key: value for key, value in known.items() if value is not None}


def _shape(results: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {key: results.get(key) for key in RECORDED}
    if "cells" in results:
        shape["cells"] = [[cell.get(key) for key in ("length", "depth", "needles", "asked")] for cell in results["cells"]]
    if isinstance(absolute := results.get("absolute"), dict):
        shape["depths"] = list(absolute.get("depths", ()))
    if isinstance(shots := results.get("shots"), list):
        shape["shots"] = [row.get("shots") for row in shots]
    return shape | {f"documents of {task}": about.get("sha256") for task, about in results.get("per_task", {}).items()}
