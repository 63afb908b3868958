"""The questions of the lm-eval task `questions`, read from the file that the metadata `file` names."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(file: str | None = None, **_: object) -> dict[str, datasets.Dataset]:
    """{"test": the questions of `file`}: JSON lines with "query", "endings" and "label", the right ending's number from 0.

    ValueError without a file, or for a line that is not a question.
    """
    if file is None:
        raise ValueError("the task questions reads a file: add file=FILE, JSON lines with query, endings and label")
    lines = enumerate(Path(file).read_bytes().split(b"\n"), 1)
    questions = [question(f"{Path(file).name} line {number}", line) for number, line in lines if line.strip()]
    if not questions:
        raise ValueError(f"{file} is empty: give file= a file of JSON lines with query, endings and label")
    return {"test": datasets.Dataset.from_list(questions)}


def question(where: str, line: bytes) -> dict[str, Any]:
    """One line as {"query", "endings", "label"}. ValueError that names the line if it is not a question."""
    try:
        item = json.loads(line)
        query, endings, label = item["query"].strip(), [ending.strip() for ending in item["endings"]], int(item["label"])
        if isinstance(item["endings"], list) and 0 <= label < len(endings) > 1 and all(endings):
            return {"query": query, "endings": endings, "label": label}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    wanted = '{"query": "...", "endings": ["...", "..."], "label": 0}'
    raise ValueError(f"{where} is not a question with two or more endings: write each line like {wanted}")
