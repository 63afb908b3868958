"""eval/harness.py: lm-eval's HFLM over a run against the model computed directly, and lm-eval on tasks made here."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from eval import harness
from eval.scoring import score
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.variants import stirred
from training import checkpoint

EXACT = 1e-5  # float32 logits of a padded batch and of a row alone differ by rounding: some 1e-6


def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval.models.huggingface", reason="needs the optional package lm-eval[hf]", exc_type=ImportError)


def decoder(layers: str, **more: object) -> Decoder:
    """A model whose greedy choices vary: weights far from their small initial values."""
    cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=24, vocab_size=257, **more)
    return stirred(Decoder(cfg, seed=5).eval(), 0.15, 5)


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    """What lm-eval hands to a model, as far as a model looks at it."""
    return [SimpleNamespace(args=argument, task_name="made-up") for argument in arguments]


def lm(tokenizer, layers: str = "b", length: int | None = None, **more: object) -> harness.RunLM:
    needs_lm_eval()
    return harness.RunLM(SimpleNamespace(model=decoder(layers, **more), tokenizer=tokenizer), 3, length)


def scored(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-probability and greedy flag of the project's scorer."""
    hits, logprobs = score(model, [np.array(context)], [[np.array(continuation)]], batch=1)
    return float(logprobs[0][0]), bool(hits[0][0])


GPT2 = {"position": "learned", "norm": "layernorm"}
STACKS = [("d", {}), ("i", {}), ("b", GPT2)]


@pytest.mark.parametrize(("layers", "more"), STACKS)
def test_log_likelihoods_are_those_of_our_scorer(tokenizer, layers, more):
    model = lm(tokenizer, layers, **more)
    pairs = [("The sea", " is blue"), ("", "Once"), ("A context that is too long for this model", " indeed"), ("a ", "b")]
    answers = model.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, answers, strict=True):
        # A space that ends the context belongs to the continuation: lm-eval's rule.
        targets = tokenizer.encode(" b" if context == "a " else continuation)
        read = [tokenizer.eot, *tokenizer.encode(context + continuation)][-25 : -len(targets)]
        wanted, flag = scored(model.model.decoder, read, targets)
        assert (logprob, greedy) == (pytest.approx(wanted, abs=EXACT), flag)
    assert [model.is_cut(*pair) for pair in pairs] == [False, False, True, False]
    assert not model.is_cut("A whole text, which is read in windows")
    assert model.is_cut("twenty bytes of it", {"max_gen_toks": 8})


def test_a_continuation_that_merges_with_its_context_is_not_certain(tokenizer, monkeypatch):
    """Of "the" + " c" + "at" one token, " cat", remains: lm-eval alone scores nothing, with log-probability 0."""
    model = lm(tokenizer)
    ids = {"the c": [256, 1, 2], "the cat": [256, 1, 3], "the cow": [256, 1, 4], "the core": [256, 1, 2, 5]}
    monkeypatch.setattr(model, "tok_encode", lambda text, **_: ids[text])
    answers = model.loglikelihood(requests(("the c", "at"), ("the c", "ow"), ("the c", "ore")), disable_tqdm=True)
    wanted = [scored(model.model.decoder, *row) for row in (([256, 1], [3]), ([256, 1], [4]), ([256, 1, 2], [5]))]
    assert answers == [(pytest.approx(logprob, abs=EXACT), greedy) for logprob, greedy in wanted]


def test_rolling_log_likelihood_is_the_sum_over_windows(tokenizer):
    model = lm(tokenizer, "d")
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    texts = ["A long text, longer than the twenty-four tokens of context.", "short"]
    for text, total in zip(texts, model.loglikelihood_rolling(requests(*((text,) for text in texts))), strict=True):
        rows = map(make_disjoint_window, get_rolling_token_windows(tokenizer.encode(text), tokenizer.eot, 24, 1))
        assert total == pytest.approx(sum(scored(model.model.decoder, *row)[0] for row in rows), abs=5 * EXACT)


@pytest.mark.parametrize(("layers", "more"), STACKS)
def test_decoding_in_batches_is_decoding_alone(tokenizer, layers, more):
    model = lm(tokenizer, layers, **more)
    contexts = ["Hello", "It was", "a", "Where", "What is"]
    texts = model.generate_until(requests(*((context, {"until": [], "max_gen_toks": 6}) for context in contexts)))
    for context, text in zip(contexts, texts, strict=True):
        prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode(context)]])
        new = model.model.decoder.generate(prompt, 6)[0, prompt.shape[1] :].tolist()
        new = new[: new.index(tokenizer.eot)] if tokenizer.eot in new else new
        assert text == tokenizer.decode(new)
    assert len(set(texts)) > 1  # the models do not say the same whatever they read
    assert model.max_gen_toks == 12  # half the context, where a task does not say how many


def test_what_cannot_be_is_refused(tokenizer):
    model = lm(tokenizer)
    with pytest.raises(ValueError, match="exceeds length=24: "):
        model.loglikelihood(requests(("x", "a continuation of more than 24 bytes")))
    for new in (0, 24):
        with pytest.raises(ValueError, match="from 1 to 23, or leave the task out"):
            model.generate_until(requests(("x", {"until": [], "max_gen_toks": new})))
    with pytest.raises(ValueError, match="learned positions: use length=24"):
        lm(tokenizer, length=48, **GPT2)
    with pytest.raises(ValueError, match="is not a folder: give a folder"):
        harness.task_manager(harness.HarnessConfig(tasks=["x"], include_path="nowhere"))
    with torch.no_grad():
        model.model.decoder.head.weight.mul_(torch.inf)
    with pytest.raises(ValueError, match="not finite: its training diverged"):
        model.loglikelihood(requests(("The sea", " is blue")))


TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "target_delimiter": " ", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "decoding": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{reply}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip
DOCUMENTS = [
    {"question": "The river was", "choices": ["brown", "made of stone", "loud"], "answer": 0},
    {"question": "Nobody knew where", "choices": ["it began", "x"], "answer": 0},
    {"question": "The rain had", "choices": ["a long road", "stopped"], "answer": 1},
]


def write_tasks(folder: Path, loaded: checkpoint.LoadedRun) -> None:
    """Three task files over three documents, one decoded answer right by construction."""
    folder.mkdir()
    prompt = torch.tensor([[loaded.tokenizer.eot, *loaded.tokenizer.encode(DOCUMENTS[0]["question"])]])
    reply = loaded.tokenizer.decode(loaded.model.generate(prompt, 8)[0, prompt.shape[1] :]).split("\n")[0]
    documents = [{**document, "reply": reply if i == 0 else "?!?"} for i, document in enumerate(DOCUMENTS)]
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": f"local_{name}", **data, **task}))


def test_task_files_and_lm_evals_own_command_on_the_exported_folder(make_run, monkeypatch, tmp_path, call, request):
    """The command of docs/interop.md, with the setting that it says for each kind of task, gives the same as ours."""
    needs_lm_eval()
    request.getfixturevalue("remote_code")
    import datasets
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    from scripts import export

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    run, folder = make_run("a", "d"), tmp_path / "tasks"
    loaded = checkpoint.load_run(run)
    write_tasks(folder, loaded)
    names = "tasks=[local_choice,local_rolling,local_decoding]"
    printed = call(harness, f"run={run}", names, f"include_path={folder}", "batch=2")
    assert printed.count("harness  a: local_") == 3
    results = json.loads((run / "eval" / "harness.json").read_text())["results"]
    choice, rolling, decoding = (results["tasks"][f"local_{name}"] for name in ("choice", "rolling", "decoding"))
    encode = loaded.tokenizer.encode
    right = 0
    for document in DOCUMENTS:
        context = [loaded.tokenizer.eot, *encode(document["question"])]
        scores = [scored(loaded.model, context, encode(f" {choice}"))[0] for choice in document["choices"]]
        right += scores.index(max(scores)) == document["answer"]
    assert choice["acc"] == pytest.approx(right / 3) and choice["samples"] == 3
    texts = [document["question"] for document in DOCUMENTS]
    nats = [scored(loaded.model, [loaded.tokenizer.eot], encode(t))[0] for t in texts]
    bits = -sum(nats) / torch.log(torch.tensor(2.0)).item() / sum(map(len, texts))
    assert rolling["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert results["lm_eval"] and results["length"] == 160 and results["truncated"] == 0
    call(export, f"run={run}", f"out={tmp_path / 'exported'}", "to=remote", "check=false")
    whole = lm_eval.tasks.TaskManager.__init__
    few = lambda self, *a, **o: whole(self, *a, **o | {"include_defaults": False})  # noqa: E731  # thousands of files
    monkeypatch.setattr(lm_eval.tasks.TaskManager, "__init__", few)
    exported = {}
    for names, add in (("local_choice,local_decoding", True), ("local_rolling", False)):
        model = f"pretrained={tmp_path / 'exported'},trust_remote_code=True,add_bos_token={add}"
        words = f"run --model hf --model_args {model} --batch_size 2 --device cpu --tasks {names}"
        words += f" --include_path {folder} --output_path {tmp_path / names}"
        monkeypatch.setattr("sys.argv", ["lm_eval", *words.split()])
        cli_evaluate()
        (written,) = (tmp_path / names).rglob("results_*.json")
        exported |= json.loads(written.read_text())["results"]
    assert exported["local_choice"]["acc,none"] == choice["acc"]
    assert exported["local_decoding"]["exact_match,none"] == decoding["exact_match"] == pytest.approx(1 / 3)
    assert exported["local_rolling"]["bits_per_byte,none"] == pytest.approx(rolling["bits_per_byte"], rel=1e-6)


def test_a_missing_package_is_named(make_run, refused, monkeypatch):
    run = make_run("a")
    monkeypatch.setattr(harness, "HFLM", int)  # as if lm-eval were installed
    assert "tasks is empty" in refused(harness, f"run={run}", "tasks=[]")
    assert "no file nowhere.jsonl" in refused(harness, f"run={run}", "tasks=[questions]", "file=nowhere.jsonl")
    monkeypatch.setattr(harness, "HFLM", object)
    assert "pip install 'lm-eval[hf]'" in refused(harness, f"run={run}", "tasks=[x]")
