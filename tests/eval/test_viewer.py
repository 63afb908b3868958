"""eval/viewer.py: the packed maps are the model's, and the page shows them, in a real browser where there is one."""

import base64
import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from eval import viewer
from model.attention.probe import probe
from model.config import DecoderConfig
from model.decoder import Decoder
from tests.variants import stirred
from training.checkpoint import load_run


def data_of(path: Path) -> dict:
    """The data inside a viewer page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), flags=re.S).group(1))


def maps_of(data: dict, example: int, model: int) -> np.ndarray:
    """(all heads, T, T) as the page holds them."""
    packed, length = data["maps"][example][model], len(data["examples"][example]["tokens"])
    return unpack(base64.b64decode(packed["maps"]), base64.b64decode(packed["scales"]), length)


def unpack(values: bytes, scales: bytes, length: int) -> np.ndarray:
    """What `viewer.pack` was given, (heads, T, T), to its precision, as the viewer's script does it."""
    rows, columns = np.tril_indices(length)
    share = np.frombuffer(values, np.int8).reshape(-1, len(rows)) / viewer.STEPS
    largest = np.frombuffer(scales, "<f4").reshape(-1, length)
    maps = np.zeros((len(largest), length, length))
    maps[:, rows, columns] = np.sign(share) * share**2 * largest[:, rows]
    return maps


@torch.inference_mode()
def directly(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    with probe(model, torch.arange(len(tokens))) as maps:
        model(torch.from_numpy(tokens)[None])
    return torch.cat([layer[0] for layer in maps.layers]).numpy()


@pytest.mark.parametrize("layers", ["b", "d", "i", "v", "bd"])
def test_packed_maps_are_the_models_to_the_stated_precision(layers):
    cfg = DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=40, vocab_size=50)
    model = stirred(Decoder(cfg).eval(), 0.2, 0)  # maps far from uniform
    tokens = np.arange(33) * 7 % 50
    seen = viewer.look(model, tokens)
    wanted, packed = directly(model, tokens), unpack(*viewer.pack(np.concatenate(seen.maps)), len(tokens))
    assert packed.shape == wanted.shape and packed.shape[1:] == (33, 33)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    error = np.abs(packed - wanted) / largest
    assert error.max() <= 1 / 127  # half a step of the root, 0.5 / 127, times its slope 2 at the largest weight
    small = np.abs(wanted) < 0.01 * largest
    assert error[small].max() <= 0.1 / 127 + (0.5 / 127) ** 2  # the slope is 0.2 there
    assert (wanted < -1e-3).any() == (packed < -1e-3).any() == (layers in ("d", "v", "bd"))


@pytest.mark.parametrize("layers", ["d", "v", "bd", "i"])
def test_a_differential_head_is_its_first_map_less_lambda_times_its_second_and_nan_is_refused(layers):
    model = Decoder(DecoderConfig(layers=layers, n_layer=2, n_head=4, d_model=32, context=40, vocab_size=50)).eval()
    read = []
    model.register_forward_pre_hook(lambda *_: read.append(1))
    seen = viewer.look(model, np.arange(33) * 7 % 50)
    assert len(read) == 1  # one pass gives the maps and the two maps of each
    assert [second is not None for second in seen.second_maps] == [letter in "dv" for letter in (layers * 2)[:2]]
    for maps, second in zip(seen.maps, seen.second_maps, strict=True):
        if second is not None:
            lam = 1 - maps.sum(-1, keepdims=True)
            first = maps + lam * second  # a softmax, as the second map is
            for one in (first, second):
                assert one.min() >= -1e-6 and one.sum(-1) == pytest.approx(1, abs=1e-5)
                assert not np.triu(one, 1).any()
            assert not np.allclose(first, second, atol=1e-4)
    torch.nn.init.constant_(model.blocks[0].attention_norm.weight, torch.nan)
    with pytest.raises(ValueError, match="diverged, so leave its run out"):
        viewer.look(model, np.arange(9))


def test_nothing_is_still_nothing_and_sums_survive():
    maps = np.zeros((1, 40, 40), dtype=np.float32)
    maps[0, 39] = np.where(np.arange(40) == 0, 0.61, 0.01)  # a sink, and noise of 0.01 everywhere
    packed = unpack(*viewer.pack(maps), 40)
    assert not packed[0, :39].any()
    assert packed[0, 39, 1:].sum() == pytest.approx(0.39, rel=0.05)  # whole steps of 1/127 of 0.61 would give 0.19 or 0.37


def test_the_command_writes_a_self_contained_page(make_run, tokenizer, call, tmp_path):
    assert [viewer.shown(tokenizer, token) for token in (65, 10, 0xC3, 9, 256)] == ["A", "↵", "⟨c3⟩", "⇥", "⟨end of text⟩"]
    one, two, out = make_run("one", "b"), make_run("two", "d"), tmp_path / "v.html"
    printed = call(viewer, f"runs=[{one},{two}]", f"out={out}", "prompt='Where </script> is it?'")
    assert f"viewer  {out}" in printed and "MB" in printed
    page, data = out.read_text(), data_of(out)
    assert not re.search(r'(src|href)="|@import|url\(|https?://', page) and "prefers-color-scheme: dark" in page
    assert page.count("</script>") == 2  # the data close no script
    assert [model["label"] for model in data["models"]] == ["one", "two"]
    assert [model["heads"] for model in data["models"]] == [[4, 4], [2, 2]]
    assert [model["differential"] for model in data["models"]] == [[False, False], [True, True]]
    needles = [(n, one) for n, one in enumerate(data["examples"]) if "needle" in one["spans"]]
    for i, model in enumerate(data["models"]):  # the head whose queries look most at the needles
        masses = sum(maps_of(data, n, i)[:, one["query"], slice(*one["spans"]["needle"])].sum(-1) for n, one in needles)
        layer, head = model["best"]
        assert masses[sum(model["heads"][:layer]) + head] == pytest.approx(masses.max(), abs=1e-3)
    titles = [example["title"] for example in data["examples"]]
    assert titles == ["your prompt", *(f"needle at {d} % of the context" for d in (10, 50, 90)), "text"]
    for example in data["examples"][1:4]:
        assert len(example["tokens"]) == 96
        start, stop = example["spans"]["needle"]
        text = "".join(example["tokens"])
        assert "".join(example["tokens"][start:stop]).startswith("↵The magic number of ") and text.endswith(".")
        assert "".join(example["tokens"][: example["query"] + 1]).endswith(" is ")
        spans = list(example["spans"].values())
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    model = load_run(two)
    tokens = np.array([model.tokenizer.eot, *model.tokenizer.encode("Where </script> is it?")])
    wanted = directly(model.model, tokens)
    assert maps_of(data, 0, 1) == pytest.approx(wanted, abs=float(np.abs(wanted).max()) / 127)
    guess, share = data["maps"][0][1]["next"][-1][0]
    with torch.inference_mode():
        probabilities = model.model(torch.from_numpy(tokens)[None])[0, -1].softmax(-1)
    assert guess == viewer.shown(model.tokenizer, int(probabilities.argmax()))
    assert share == pytest.approx(probabilities.max().item(), abs=1e-4)


def texts_of(dom: Callable[[str], str], page: Path, address: str = "", script: str = "") -> dict[str, str]:
    """id -> text of each element of the page at `address`, after its scripts and `script`; address: where it is then."""
    texts = "...[...document.body.querySelectorAll('[id]:not(script)')].map(e => ({[e.id]: e.textContent}))"
    told = f"document.title = JSON.stringify(Object.assign({{address: location.hash}}, {texts}))"
    shown = page.with_name("told.html")
    shown.write_text(page.read_text().replace("</body>", f"<script>{script}; {told}</script></body>"))
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom(f"file://{shown}{address}"), re.S).group(1)))


def test_a_browser_shows_the_numbers_first_of_the_best_head_and_lambda_can_be_moved(dom, make_run, call, tmp_path):
    two, one, out = make_run("two", "d"), make_run("one", "b"), tmp_path / "v.html"
    call(viewer, f"runs=[{two},{one}]", f"out={out}")
    texts, data = texts_of(dom, out, "#example=1&query=50&a=1.1.2&b=0.0.all"), data_of(out)
    assert texts["query"] == f"query 50: {data['examples'][1]['tokens'][50]}"
    rows = [maps_of(data, 1, 1)[4 + 2, 50], maps_of(data, 1, 0)[:2, 50].mean(0)]  # layer 1 head 2; mean of layer 0
    for side, row in zip("AB", rows, strict=True):
        sums = re.search(r"The row sums to (\S+?)[,.](?: |$)", texts[f"says{side}"]).group(1)
        assert float(sums.replace("−", "-")) == pytest.approx(row.sum(), abs=6e-3)
        shown = re.findall(r"([a-z ]+)(−?[\d.]+)", texts[f"shares{side}"])
        spans = {name: span for name, span in data["examples"][1]["spans"].items() if span[0] <= 50}
        assert [name for name, _ in shown] == list(spans) and "needle" in spans
        for (_, mass), (start, stop) in zip(shown, spans.values(), strict=True):
            assert float(mass.replace("−", "-")) == pytest.approx(row[start : min(51, stop)].sum(), abs=6e-4)
        assert texts[f"tokens{side}"] == "".join(data["examples"][1]["tokens"])
    layer, head = data["models"][0]["best"]
    texts = texts_of(dom, out, script="const s = document.getElementById('lambdaA'); s.value = '0.5'; s.oninput()")
    assert texts["lambdaSaysA"].startswith("0.50 (trained: 0.")
    sums = re.search(r"The row sums to (\S+?)[,.](?: |$)", texts["saysA"]).group(1)
    assert float(sums) == pytest.approx(0.5, abs=0.02)  # 1 less lambda
    assert texts["query"].startswith(f"query {data['examples'][0]['query']}:")
    assert f"a=0.{layer}.{head}" in texts["address"]


def test_examples_that_do_not_fit_and_runs_of_different_tokenizers_are_refused(make_run, refused, tmp_path):
    one, two, out = make_run("one"), make_run("two"), tmp_path / "v.html"
    build_tokenizer(TokenizerConfig(name="bpe", vocab_size=260), ["some text to learn from " * 20]).save(two)
    assert "give prompt=" in refused(viewer, f"runs=[{one}]", f"out={out}", f"prompt={'x' * 400}")
    assert "tokenizer" in refused(viewer, f"runs=[{one},{two}]", f"out={out}")
    assert not out.exists()
