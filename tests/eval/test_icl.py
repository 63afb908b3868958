"""eval/icl.py: its episodes, its accuracies for a model that knows the answers, its files."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from data.retrieval import EVAL_EVERY
from eval import icl
from eval.icl import Episode, Example, IclConfig

BANKING = 'text,category\nWhere is my card?,card_arrival\n"My card, is it\nlost?", lost_card\nOne more top up,top_up\n'


def test_synthetic_episodes():
    cfg, task = IclConfig(classes=3, words=4), icl.load_task(IclConfig())
    episodes = [icl.draw_episode(task, cfg, i, 30, 4) for i in range(20)]
    for episode in episodes:
        assert len(set(episode.labels)) == 3
        assert all((int(n) * 2654435761 % 2**32 >> 16) % EVAL_EVERY == 0 for n in episode.labels)  # not in training
        assert len({e.text for e in episode.questions}) == 12 and {*Counter(e.label for e in episode.questions).values()} == {4}
        assert {e.text for e in episode.demonstrations[:12]} == {e.text for e in episode.questions}
        assert set(Counter(e.text for e in episode.demonstrations).values()) == {2, 3}
        kinds = {label: {e.text for e in episode.questions if e.label == label} for label in episode.labels}
        assert all(any(words <= set(kind.split()) for kind in icl.WORDS.values()) for words in kinds.values())
    assert len({tuple(episode.labels) for episode in episodes}) == 20
    fewer = icl.draw_episode(task, cfg, 7, 5, 4)
    assert fewer.demonstrations == episodes[7].demonstrations[:5] and fewer.questions == episodes[7].questions


def oracle(tokenizer, model, jobs, batch, done):
    """Scores for a model that looks the question up in the prompt, and finds all labels alike where it is not there."""
    tables = []
    for job in jobs:
        prompt, labels = tokenizer.decode(job.prefix[1:]), [tokenizer.decode(ids) for ids in job.continuations]
        questions = [tokenizer.decode(question) for question in job.questions]
        tables.append(np.array([[float(question + label in prompt) for label in labels] for question in questions]))
        done(1)
    return [], tables


def test_a_model_that_recalls(tokenizer, monkeypatch):
    monkeypatch.setattr(icl, "score_jobs", partial(oracle, tokenizer))
    model = SimpleNamespace(cfg=SimpleNamespace(context=320))
    run = SimpleNamespace(model=model, tokenizer=tokenizer, config={"data": {"retrieval": {"digits": 4}}})
    cfg = IclConfig(shots=[2, 8, 16], episodes=6)
    results = icl.evaluate(run, icl.load_task(cfg), cfg)
    for key in ("accuracy", "text_shown"):
        assert [row[key] for row in results["shots"]] == pytest.approx([0.25, 1.0, 1.0])  # 2 of 8 words; a tie is wrong
    assert [row["recall"] for row in results["shots"]] == [1.0] * 3
    assert [row["new"] for row in results["shots"]] == [0.0, None, None]
    assert results["chance"] == 0.25 and results["accuracy"] == 1.0
    assert results["shots"][2]["label_loss"] == pytest.approx(math.log(math.e + 3) - 1)


def test_shots_are_those_that_fit(tokenizer):
    task = icl.load_task(IclConfig())
    episodes = [icl.draw_episode(task, IclConfig(), i, 40, 4) for i in range(5)]
    writer = icl.Writer(task, tokenizer)
    shots = icl.fitting_shots(writer, episodes, 320)
    for n, fits in ((shots[-1], True), (shots[-1] + 1, False)):
        made = [writer.job(replace(episode, demonstrations=episode.demonstrations[:n])) for episode in episodes]
        lengths = [len(job.prefix) + max(map(len, job.questions)) + max(map(len, job.continuations)) for job in made]
        assert (max(lengths) <= 320) == fits
    assert shots[:-1] == [2**i for i in range(len(shots) - 1)]
    with pytest.raises(ValueError, match="longer context"):
        icl.fitting_shots(writer, episodes, 60)


def test_the_questions_of_a_file_are_never_demonstrations(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text("text,label\n" + "".join(f"question {i} about {label},{label}\n" for i in range(30) for label in "ab"))
    cfg = IclConfig(examples=str(file), queries=7)
    task = icl.load_task(cfg)
    assert (task.name, len(task.questions), len(task.demonstrations)) == ("x", 12, 48)
    assert not {e.text for e in task.questions} & {e.text for e in task.demonstrations}
    episode = icl.draw_episode(task, cfg, 3, 20, 4)
    assert len(set(episode.demonstrations)) == 20 and len(set(episode.questions)) == 7 and episode.labels == ["a", "b"]
    with pytest.raises(ValueError, match="use at most shots="):
        icl.draw_episode(task, cfg, 0, 49, 4)


def test_prompts_are_text_that_repeats_itself(tokenizer):
    task = icl.Task("trec", *icl.OF_A_FILE, [], [])
    episode = Episode([Example("Why ?", "description")], [Example("Who ?", "human")], ["description", "human"])
    job = icl.Writer(task, tokenizer).job(episode)
    assert job.prefix[0] == tokenizer.eot
    assert tokenizer.decode(job.prefix[1:]) == "Text: Why ?\nLabel: description\n"
    assert [tokenizer.decode(q) for q in job.questions] == ["Text: Who ?\nLabel:"]
    assert [tokenizer.decode(label) for label in job.continuations] == [" description\n", " human\n"]


def test_the_command_on_a_file(make_run, call, tmp_path):
    run, file = make_run("a"), tmp_path / "bank.csv"
    file.write_text(BANKING)
    assert icl.read_examples(file)[1] == Example("My card, is it lost?", "lost card")
    for seed in (0, 1):  # another division of one file, and no other file
        call(icl, f"run={run}", f"examples={file}", "shots=[1]", "episodes=1", f"seed={seed}")
    call(icl, f"run={run}", f"examples={file}", f"test={file}", "shots=[2]", "episodes=2", "name=bank")
    content = json.loads((run / "eval" / "icl_bank.json").read_text())
    expected = {"task": "bank", "classes": 3, "queries": 3, "text": "bank.csv"}
    assert content["results"] == content["results"] | expected and content["config"]["examples"] == str(file)
    assert not (run / "eval" / "icl.json").exists()


def test_wrong_files_are_named(tmp_path) -> None:
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    for examples, questions, says in (
        ("no,header\n", None, "train.csv has no examples: give a CSV file"),
        ("text,category\nhello,a\nworld\n", None, "example 2 of .*train.csv has no label"),
        ('text,category\n"' + "never closed " * 12_000, None, "has no examples"),
        ("text,category\na,b\nc,b\n", None, "has one label"),
        (BANKING, "text,category\nhello,greeting\n", r"no demonstration has \(greeting\)"),
        (BANKING, "text,category\n", "test.csv has no examples"),
    ):
        train.write_text(examples)
        test.write_text(questions or "")
        with pytest.raises(ValueError, match=says):
            icl.load_task(IclConfig(examples=str(train), **({"test": str(test)} if questions else {})))
