"""eval/multiple_choice.py against a loop over single endings, and on wrong files."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import multiple_choice as mc
from eval.common import open_run

ITEMS = [
    {"query": "A man sat on a roof. He", "endings": ["fell.", "was very old and tired.", "sang"], "label": 1},
    {
        "activity_label": "It",
        "ctx_a": "rains [title]",
        "ctx_b": "today",
        "endings": ["Wörter", "[step] words are  here"],
        "label": "0",
    },
    {"query": "long " * 60, "endings": ["a much longer ending than that", "short", "x y z", "ok"], "label": 3},
]


def write(path: Path, items: list) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_every_number_is_that_of_a_loop_over_endings(make_run, tmp_path):
    run = open_run(mc.MultipleChoiceConfig(run=str(make_run("a", "d"))))
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(4)  # an untrained model hardly tells endings apart
    questions = mc.read_questions(write(tmp_path / "q.jsonl", ITEMS))
    results = mc.evaluate(run, questions, batch=2)
    hits, losses = {name: [] for name in mc.METRICS}, []
    for question in questions:
        scores = []
        longest = max(len(ending.encode()) for ending in question.endings) + 1
        query = [run.tokenizer.eot, *run.tokenizer.encode(question.query)][-(160 + 1 - longest) :]
        for ending in question.endings:
            tokens = query + run.tokenizer.encode(" " + ending)
            with torch.no_grad():
                log_probabilities = run.model(torch.tensor([tokens]))[0].double().log_softmax(-1)
            steps = range(len(query) - 1, len(tokens) - 1)
            total = sum(float(log_probabilities[t, tokens[t + 1]]) for t in steps)
            scores.append((total, total / len(steps), total / len(ending.encode())))
        for i, name in enumerate(mc.METRICS):
            hits[name].append(float(np.argmax([score[i] for score in scores]) == question.label))
        losses.append(-scores[question.label][1])
    for name in mc.METRICS:
        assert results[name] == pytest.approx(np.mean(hits[name]))
        assert results[f"{name}_se"] == pytest.approx(np.std(hits[name], ddof=1) / 3**0.5)
    assert results["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert results["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert (results["samples"], results["truncated"], results["skipped"]) == (3, 1, 0)


def test_metrics_by_hand():
    question = mc.Question("q", ("aaaaaa", "bb"), 0)
    tokens = [np.arange(4), np.arange(1)]
    results = mc.summarise([question], [tokens], [np.array([-4.0, -2.0])])
    assert (results["acc"], results["acc_norm"], results["acc_norm_bytes"]) == (0, 1, 1)
    assert (results["loss"], results["margin"]) == (1.0, 1.0)


def test_a_tie_is_no_answer():
    question = mc.Question("q", ("x", "x"), 0)
    results = mc.summarise([question], [[np.zeros(1), np.zeros(1)]], [np.array([-2.0, -2.0])])
    assert results["acc"] == 0


def test_hellaswags_own_file_and_wikihows_marks(tmp_path):
    item = {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "endings": ["[step] a", "b"], "label": 1}
    path = tmp_path / "h.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(item).encode()))
    assert mc.read_questions(path) == [mc.Question("Roof: A man sits. He", ("a", "b"), 1)]
    path = tmp_path / "separator.jsonl"
    path.write_text(json.dumps({"query": "a\u2028b", "endings": ["c", "d"], "label": 0}, ensure_ascii=False) + "\r\n")
    assert mc.read_questions(path) == [mc.Question("a\u2028b", ("c", "d"), 0)]
    assert mc.clean(" Do it [title] Now [header] and  then ") == "Do it. Now and then"


def test_the_command_writes_json_and_figure(make_run, call, capsys, tmp_path):
    run = make_run("a", "i")
    call(mc, f"run={run}", f"file={write(tmp_path / 'q.jsonl', ITEMS)}", "limit=2")
    results = json.loads((run / "eval" / "multiple_choice_q.json").read_text())["results"]
    assert results["samples"] == 2 and len(results["sha256"]) == 64
    assert capsys.readouterr().out.startswith("multiple_choice_q  a: acc ")
    assert (run / "figures" / "multiple_choice_q.png").stat().st_size > 10_000


def test_a_run_without_a_right_answer_has_a_figure_without_a_warning(tmp_path, recwarn):
    results = dict.fromkeys([*mc.METRICS, *(f"{name}_se" for name in mc.METRICS)], 0.0)
    mc.draw(tmp_path / "f.png", results | {"chance": 0.25, "samples": 3}, "a", "#000000")
    assert not [str(one.message) for one in recwarn if "ylim" in str(one.message)]


def test_each_file_keeps_its_result(make_run, call, refused, tmp_path):
    run, folder = make_run("a"), tmp_path / "other"
    folder.mkdir()
    first, second = write(tmp_path / "q.jsonl", ITEMS), write(tmp_path / "r.v2.jsonl", ITEMS[:1])
    for file in (first, second):
        call(mc, f"run={run}", f"file={file}")
    assert {path.stem for path in (run / "eval").iterdir()} == {"multiple_choice_q", "multiple_choice_r"}
    (folder / "q.jsonl").write_bytes(second.read_bytes())
    assert "name of its own with name=" in refused(mc, f"run={run}", f"file={folder / 'q.jsonl'}")
    call(mc, f"run={run}", f"file={folder / 'q.jsonl'}", "name=own")
    assert (run / "eval" / "multiple_choice_own.json").is_file()
    (folder / "q.jsonl").write_bytes(first.read_bytes())
    call(mc, f"run={run}", f"file={folder / 'q.jsonl'}", "limit=1")  # a moved file replaces its result
    assert json.loads((run / "eval" / "multiple_choice_q.json").read_text())["results"]["samples"] == 1


def test_wrong_input_is_one_line(make_run, refused, tmp_path):
    run = make_run("a")

    def reason(*items: object) -> str:
        return refused(mc, f"run={run}", f"file={write(tmp_path / 'wrong.jsonl', list(items))}")

    good = ITEMS[0]
    for wrong in (
        {"query": "q"},
        good | {"label": 3},
        good | {"endings": ["one"]},
        good | {"label": None},
        [1],
        7,
        good | {"label": True},
        good | {"label": 1.0},
        good | {"endings": "yes"},
    ):
        assert "line 2" in reason(good, wrong)
    assert "is empty" in reason()
    assert "shorter endings" in reason(good | {"endings": ["a" * 200, "b" * 200]})
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    assert "another file" in refused(mc, f"run={run}", f"file={tmp_path / 'broken.jsonl.gz'}")
    damaged = gzip.compress(bytes(range(256)) * 9)
    (tmp_path / "broken.jsonl.gz").write_bytes(damaged[:40] + b"\xff\xff\xff\xff" + damaged[44:])
    assert "another file" in refused(mc, f"run={run}", f"file={tmp_path / 'broken.jsonl.gz'}")
    assert not (run / "eval").exists()
