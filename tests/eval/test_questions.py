"""eval/tasks/questions.yaml, multiple choice from a local file: what it reads, refuses and measures."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval import harness
from eval.scoring import score
from training.checkpoint import load_run

pytest.importorskip("datasets", reason="needs the optional package datasets")
from eval.tasks.questions import load  # noqa: E402

ITEMS = [
    {"query": "A man sat on a roof. He", "endings": ["fell.", "was very old and tired.", "sang"], "label": 1},
    {"query": "It: rains.\u2028Today", "endings": ["Wörter", "words are here"], "label": "0"},
    {"query": "long " * 60, "endings": ["a much longer ending than that", "short", "x y z", "ok"], "label": 3},
]


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
    return path


def test_accuracies_are_those_of_our_scorer(make_run, call, refused, tmp_path):
    pytest.importorskip("lm_eval.models.huggingface", reason="needs the optional package lm-eval[hf]", exc_type=ImportError)
    run, file = make_run("a", "d"), write(tmp_path / "q.jsonl", *ITEMS)
    call(harness, f"run={run}", "tasks=[questions]", f"file={file}")
    results = json.loads((run / "eval" / "harness_q.json").read_text())["results"]
    loaded, hits = load_run(run), []
    encode = loaded.tokenizer.encode
    for question in load(str(file))["test"]:
        endings = question["endings"]
        tokens = [np.array(encode(f" {ending}")) for ending in endings]
        queries = [np.array([loaded.tokenizer.eot, *encode(question["query"])])[-(161 - len(row)) :] for row in tokens]
        sums = [score(loaded.model, [query], [[row]], batch=1)[1][0][0] for query, row in zip(queries, tokens, strict=True)]
        lengths = ([1] * len(endings), list(map(len, endings)), [len(ending.encode()) for ending in endings])
        hits.append([np.argmax(np.divide(sums, length)) == question["label"] for length in lengths])
    measured = [results["tasks"]["questions"][name] for name in ("acc", "acc_norm", "acc_bytes")]
    assert measured == pytest.approx(np.mean(hits, axis=0))
    assert (results["tasks"]["questions"]["samples"], results["truncated"], results["text"]) == (3, 4, "q.jsonl")
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other" / "q.jsonl", ITEMS[0])
    assert "give this one a name with name=" in refused(harness, f"run={run}", "tasks=[questions]", f"file={other}")


def test_files_that_cannot_be_read_are_refused_and_a_line_that_is_no_question_is_named(tmp_path):
    lines = [{"query": "q"}, ITEMS[0] | {"label": 3}, ITEMS[0] | {"endings": ["one"]}, [1], ITEMS[0] | {"endings": "yes"}]
    for wrong in lines:
        with pytest.raises(ValueError, match="wrong.jsonl line 2 is not a question"):
            load(str(write(tmp_path / "wrong.jsonl", ITEMS[0], wrong)))
    with pytest.raises(ValueError, match="is empty"):
        load(str(write(tmp_path / "empty.jsonl")))
    with pytest.raises(ValueError, match="add file=FILE"):
        load()
