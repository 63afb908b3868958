"""The questions of the lm-eval task `questions`, read from the file that the metadata `file` names."""

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import datasets


def load(file: str | None = None, **_: object) -> dict[str, datasets.Dataset]:
    """{"test": the questions of `file`}: JSON lines (.jsonl or .jsonl.gz) with "query", "endings" and "label", the right
    ending's number from 0. HellaSwag's "activity_label", "ctx_a" and "ctx_b" may replace "query"; then WikiHow's marks go.

    ValueError without a file, or for a line that is not a question.
    """
    if file is None:
        raise ValueError("the task questions reads a file: add file=FILE, JSON lines with query, endings and label")
    try:
        text = (gzip.open if file.endswith(".gz") else open)(file, "rb").read().decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError):
        raise ValueError(f"{file} is not JSON lines in UTF-8, plain or .gz: give file= another file") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} is empty: give file= a file of JSON lines with query, endings and label")
    return {"test": datasets.Dataset.from_list([question(f"{Path(file).name} line {n}", line) for n, line in lines])}


def question(where: str, line: str) -> dict[str, Any]:
    """One line as {"query", "endings", "label"}. ValueError that names the line if it is not a question."""
    try:
        item = json.loads(line)
        tidy = str.strip if "query" in item else clean
        query = item["query"] if "query" in item else f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
        query, endings, label = tidy(query), [tidy(ending) for ending in item["endings"]], int(str(item["label"]))
        if not (
            query and isinstance(item["endings"], list) and len(endings) > 1 and all(endings) and 0 <= label < len(endings)
        ):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        wanted = '{"query": "...", "endings": ["...", "..."], "label": 0}'
        raise ValueError(f"{where} is not a question with two or more endings: write each line like {wanted}") from None
    return {"query": query, "endings": endings, "label": label}


def clean(text: str) -> str:
    """`text` without WikiHow's marks, as lm-eval cleans HellaSwag."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()
