"""eval/report on run folders: what the page holds."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from eval import perplexity
from eval.report import __main__ as report
from eval.report.page import compared, drawn_by
from eval.report.runs import Arm, arms_of, read_run, read_runs
from eval.report.tables import differences, headline_table, notes, sections, verdicts
from tests.eval.conftest import edit, further


def listed(folders: list[Path]) -> str:
    return f"runs=[{','.join(map(str, folders))}]"


@pytest.fixture
def reported(call, tmp_path):
    """reported("runs=[...]") -> the page r.html of a report, what was printed, and its JSON."""

    def make(runs: str, viewer: str = "false") -> tuple[str, str, dict]:
        out = tmp_path / "r.html"
        printed = call(report, runs, f"out={out}", f"viewer={viewer}")
        return out.read_text(), printed, json.loads(out.with_suffix(".json").read_text())

    return make


def test_the_page_is_whole_and_self_contained(evaluated, call, tmp_path):
    runs, out = [evaluated("one", "b"), evaluated("two", "d")], tmp_path / "pages" / "report.html"
    printed, page = call(report, listed(runs), f"out={out}"), out.read_text()
    assert "<h1>Baseline and diff: loss" in page
    sources = re.findall(r'src="([^"]{1,30})', page)
    assert len(sources) == 1 + 2 + 2 + 2 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.search(r'(src|href)="(https?:)?//|@import|<script|url\(', page)
    places = [page.index(text) for text in ("<b>Not resolved</b>", 'href="report_viewer.html"', '<table class="arms">')]
    assert places == sorted(places) and (out.parent / "report_viewer.html").stat().st_size > 100_000
    assert "Differences" not in page and "not measured" not in page  # of one seed each
    assert "docs/METHODS.md" in page and "prefers-color-scheme: dark" in page
    assert [path.name for path in (out.parent / "figures").iterdir()] == ["loss.png"]
    content = json.loads(out.with_suffix(".json").read_text())
    assert [run["variant"] for run in content["runs"]] == ["baseline", "diff"] and content.keys() >= {"machine", "verdicts"}
    cells = {row["name"]: row["cells"][0] for row in content["results"]}
    results = content["runs"][0]["evals"]["perplexity"]["results"]
    assert cells["parameters in total"]["text"] == "20k" and cells["tokens"]["value"] == 2560
    assert cells["training loss, last tenth"]["value"] == pytest.approx(5.2)
    assert cells["bits per byte"]["value"] == results["bits_per_byte"]
    assert cells["test loss (nats per token)"]["text"] == f"{results['loss']:.3f} ± {results['se']:.3f}"
    assert "needle accuracy, N=1" in printed and str(out) in printed and "note" not in printed


def needle_results(accuracy: float) -> dict:
    pair = {"needles": 1, "asked": 1, "samples": 2, "accuracy": accuracy, "se": 0.1}
    return {"accuracy": 0.5, "pairs": [pair | {"rank_accuracy": None}], "cells": [pair | {"length": 160, "depth": 0.5}]}


def test_the_sentence_about_the_runs_names_processors_and_dtypes(make_run):
    runs = [read_run(make_run("one")), read_run(make_run("two"))]
    runs[0].facts |= {"machine": {"cpu": "A", "gpu": "none", "torch": "2.13.0"}, "dtype": "float32"}
    runs[1].facts |= {"machine": {"cpu": "B", "gpu": "none", "torch": "2.13.0"}, "dtype": "bfloat16"}
    assert "; A, torch 2.13.0, float32 / B, torch 2.13.0, bfloat16; code " in compared(runs)
    assert any("trained in bfloat16 (1) and float32 (1)" in note for note in notes(runs, [Arm("both", runs=runs)]))
    for run, share in zip(runs, (0.5, 0.9), strict=True):
        run.config["data"] |= {"source": "mqar", "mqar": {"distractors": share}}
    assert any("different data.mqar" in note for note in notes(runs, [Arm("both", runs=runs)]))


def test_names_are_never_markup(make_run, call, tmp_path):
    name = "<img src=x onerror=alert(1)>|<script>alert(2)<"
    run, out = make_run(name), tmp_path / "r.html"
    call(report, f"runs=['{run}']", f"out={out}")
    tables = out.with_suffix(".md").read_text()
    assert all(line.count("|") - line.count("\\|") == 3 for line in tables.splitlines() if line.startswith("|"))
    for page in (out.read_text(), (tmp_path / "r_viewer.html").read_text(), tables):
        assert "<img src=x" not in page and "<script>alert" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page


def test_long_names_are_shortened_and_stand_once_in_full(make_run, reported, tmp_path):
    long = "nano-text-data.nametiny-tokenizer.namebytes-dir-tmp-shards-weight50-steps30-batch_tokens960-warmup2-context192"
    for name in ("diff-lr1e-3", "baseline-lr1e-3"):
        make_run(f"{name}-{long}-s1", name[0])
    page, printed, content = reported(f"runs={tmp_path / 'runs'}")
    assert f"baseline: baseline-lr1e-3-{long}-s1" in printed
    assert [arm["arm"] for arm in content["arms"]] == ["baseline", "diff"]
    assert content["verdicts"][0].startswith("diff compared with baseline (n = 1 seed)")
    assert page.count(f'<td class="name">diff-lr1e-3-{long}-s1</td>') == 1


def test_runs_are_read_from_a_folder_and_by_a_glob(tmp_path):
    for name in ("x/diff", "x/baseline", "x/figures", "y/one"):
        (tmp_path / name).mkdir(parents=True)
        if "figures" not in name:
            (tmp_path / name / "config.yaml").touch()
    both = [f"{tmp_path}/x/baseline", f"{tmp_path}/x/diff"]
    assert report.run_folders([tmp_path / "x"]) == report.run_folders([f"{tmp_path}/x/*"]) == both
    twice = [f"{tmp_path}/y/one", f"{tmp_path}/none*", f"{tmp_path}/y"]
    assert report.run_folders(twice) == [f"{tmp_path}/y/one", f"{tmp_path}/none*"]


@pytest.mark.parametrize(
    ("name", "code", "fix"),
    (("figures/loss.png", errno.ENOSPC, "free some space"), ("r.html", errno.EIO, "copy the file to another one")),
)
def test_a_failing_disk_is_one_line_that_names_the_file_and_the_fix(make_run, refused, monkeypatch, tmp_path, name, code, fix):
    real = os.fsync

    def fails(file):
        if Path(f"/proc/self/fd/{file}").readlink().name.startswith(f".{Path(name).name}."):
            raise OSError(code, os.strerror(code))
        real(file)

    monkeypatch.setattr(os, "fsync", fails)
    reason = refused(report, f"runs=[{make_run('one')}]", f"out={tmp_path / 'r.html'}", "viewer=false")
    assert str(tmp_path / name) in reason and fix in reason


def test_the_verdict_says_what_differs_and_what_could_have_been_seen(seeded):
    losses = {1: 2.0, 2: 2.1, 3: 2.2}
    better = {seed: loss - 0.10 - 0.001 * seed for seed, loss in losses.items()}
    folders = seeded("b", losses) + seeded("d", better) + seeded("i", {1: 2.01, 2: 2.08, 3: 2.2})
    arms = arms_of(read_runs([str(folder) for folder in folders]))
    less = differences(arms, headline_table(arms))
    diff, introspective = verdicts(arms, less)
    assert diff.startswith("diff compared with baseline (n = 3 seeds): test loss −0.1020 [−0.1045, −0.0995], better.")
    (none,) = [c for c in less if c.arm == "introspective" and c.metric.startswith("test loss")]
    assert "No difference detected" in introspective and f"test loss ({none.detectable:.3g})" in introspective
    assert "There is only one arm" in verdicts(arms[:1], [])[0]
    one = arms_of(read_runs([str(folder) for folder in (folders[0], folders[3])]))
    (single,) = verdicts(one, differences(one, headline_table(one)))
    assert "(n = 1 seed): test loss −0.101" in single and "One seed cannot tell" in single


def test_an_arm_without_an_evaluation_is_shown_and_equal_differences_are_named(seeded, reported):
    arms = [seeded("b", {1: 2.0, 2: 2.1}), seeded("d", {1: 1.9, 2: 2.0}), seeded("i", {1: 1.9, 2: 2.0})]
    for folder in (*arms[0], *arms[1]):
        further(folder, "needle", needle_results(float(folder in arms[1])))
    page, _, content = reported(listed(sum(arms, [])))
    _, _, shown = page.split("<summary>Differences as numbers")  # of losses, of retrieval
    assert '<td class="missing">not measured</td>' in shown
    verdict, other = content["verdicts"]
    assert "needle accuracy +1.00 (the same in every seed), better" in verdict.replace("−", "-")
    assert "needle accuracy" not in other


def test_what_is_not_measured_or_not_finished_is_named_and_a_half_finished_seed_is_left_out(seeded, make_run, reported):
    folders, part = seeded("b", {1: 2.0, 2: 2.2, 3: 9.9}), make_run("part", "d")
    edit(part / "config.yaml", "steps", 9)
    page, printed, content = reported(listed([folders[0], part]))
    assert "part is not finished, at step 4 of 9" in printed
    assert "baseline-s1 has no needle, attention_noise: run python -m eval.needle" in printed
    missing = sum(cell["value"] is None for row in content["results"] for cell in row["cells"])
    assert page.count('<td class="missing">not measured</td>') == missing >= 3
    lines = (folders[2] / "metrics.jsonl").read_text().splitlines()[:3]
    (folders[2] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (arm,) = arms_of(read_runs([str(folder) for folder in folders]))
    assert [run.seed for run in arm.runs] == [1, 2]
    assert "baseline-s3 is not finished, at step 2 of 4, and left out of its arm" in reported(listed(folders))[1]
    assert len(arms_of(read_runs([str(folders[2])]))) == 1  # alone it is shown, and noted


def test_seeds_are_one_arm_with_means_and_paired_differences(seeded, reported, tmp_path):
    folders = seeded("b", {1: 2.00, 2: 2.10, 3: 2.30}) + seeded("d", {3: 2.25, 1: 1.90, 2: 2.06})
    arms = arms_of(read_runs([str(folder) for folder in folders]))
    assert [(arm.name, [run.seed for run in arm.runs]) for arm in arms] == [("baseline", [1, 2, 3]), ("diff", [3, 1, 2])]
    rows = {row.name: row for row in headline_table(arms)}
    cell = rows["test loss (nats per token)"].cells[0]
    sd = (sum((x - 32 / 15) ** 2 for x in (2.0, 2.1, 2.3)) / 2) ** 0.5
    assert (cell.value, cell.sd, cell.values) == (pytest.approx(32 / 15), pytest.approx(sd), [2.0, 2.1, 2.3])
    assert cell.text == f"2.133 ± {sd:.3f}" and rows["tokens"].cells[0].text == "2.56k"
    assert rows["seed"].cells[1].text == "3, 1, 2"
    (less,) = [c for c in differences(arms, list(rows.values())) if c.metric == "test loss (nats per token)"]
    assert list(less.by_seed.values()) == pytest.approx([-0.10, -0.04, -0.05]) and list(less.by_seed) == [1, 2, 3]
    page, printed, content = reported(listed(folders), viewer="true")
    for text in (f"{less.mean:+.4f} [{less.low:+.4f}, {less.high:+.4f}]", "baseline (n = 3)", "arms: 2"):
        assert text in printed
    assert f"{less.mean:.4f}".replace("-", "−") in page and "standard deviation over the seeds" in page
    assert page.count("Differences, paired by seed") == 1
    opening = page[: page.index("<h2")]  # whether the difference is resolved, and its figure beside that
    assert '<p class="verdict"><b>' in opening and 'alt="Paired differences' in opening
    loss = page[page.index('<h2 id="loss">') : page.index('<h2 id="cost">')]  # the main numbers, and the others folded
    shown, folded, _ = re.split("<details><summary>.*?</summary>", loss)
    assert "test loss" in shown and "bits per byte" not in shown and "bits per byte" in folded
    assert [arm["seeds"] for arm in content["arms"]] == [[1, 2, 3], [3, 1, 2]] and len(content["runs"]) == 6
    assert any(d["name"].startswith("test loss") and d["n"] == 3 for d in content["differences"])
    assert "| difference to baseline [95 % interval] | diff |" in (tmp_path / "r.md").read_text()


def test_further_evaluations_have_a_section_each(seeded, reported):
    folders = seeded("b", {1: 2.0, 2: 2.1}) + seeded("d", {1: 1.9, 2: 2.0})
    for i, folder in enumerate(folders):
        bits = [{"bits": 8, "loss_change": 0.1 * i, "loss_change_se": 0.01}, {"bits": 4, "loss_change": 1.0 + i}]
        further(folder, "quantization", {"bits": bits, "windows": 7, "per_layer": [{"layer": 0, "x": 1.0}]}, samples=5)
        further(folder, "quantization_of", {"loss": 1.0})  # its figure stands in another section
    filtered = {"exact_match,strict-match": 0.4, "exact_match_stderr,strict-match": 0.05}
    further(folders[0], "harness", {"tasks": {"copa": {"acc": 0.5, "acc_stderr": 0.05}, "gsm8k": filtered}})
    arms = arms_of(read_runs([str(f) for f in folders]))
    harness, quantization, _ = sorted(sections(arms), key=lambda s: s.name)
    assert [image.path.name for image in drawn_by(arms, "quantization", "")] == ["quantization.png"] * 2
    assert quantization.settings == {"windows": 7}
    names = {row.name: row for row in quantization.rows}
    assert list(names) == ["bits=8 · loss_change", "bits=4 · loss_change"]
    assert names["bits=8 · loss_change"].cells[1].value == pytest.approx(0.25)
    row, other = harness.rows
    assert other.name == "tasks · gsm8k · exact_match,strict-match"  # and no row of its standard error
    assert row.name == "tasks · copa · acc" and row.cells[0].text == "0.500 (n = 1)" and row.cells[1].value is None
    for folder in folders:
        further(folder, "perplexity_essays", {"loss": 3.5, "text": "essays<1>.txt"}, text="/there/essays<1>.txt")
    page, _, content = reported(listed(folders))
    assert "On essays&lt;1&gt;.txt." in page and "(<code>python -m eval.perplexity</code>)</p>" in page
    assert "Quantization</h2>" in page and page.count('alt="Quantization, ') == 2
    (less,) = [d for d in content["differences"] if d["name"] == "bits=4 · loss_change"]
    assert less["differences"] == pytest.approx([2.0, 2.0])
    further(folders[0], "icl", {"accuracy": 0.5}, shots=4, batch=2)
    further(folders[1], "icl", {"accuracy": 0.5}, shots=4, batch=8)
    read_runs([str(folder) for folder in folders])  # another batch size is no other measurement


def test_of_two_tokenizers_only_bits_per_byte_of_one_text_are_compared(evaluated, make_run, call, reported, refused, tmp_path):
    book, out = tmp_path / "book.txt", f"out={tmp_path / 'none.html'}"
    book.write_text("The cat sat on the mat, and the dog slept. " * 40)
    bpe = build_tokenizer(TokenizerConfig(name="bpe", vocab_size=270), [book.read_text()])
    runs = [evaluated("one"), make_run("two", "d", tokenizer=bpe)]
    call(perplexity, f"run={runs[0]}", f"text={book}", "training_counts=false")
    assert "compare bits per byte (eval.perplexity text=FILE)" in refused(report, listed(runs), out)
    call(perplexity, f"run={runs[1]}", f"text={book}", "training_counts=false")
    bits = [json.loads((run / "eval" / "perplexity_book.json").read_text())["results"]["bits_per_byte"] for run in runs]
    page, printed, content = reported(listed(runs))
    (row,) = [row for row in content["results"] if row["group"] not in ("Model", "Training")]
    assert [cell["value"] for cell in row["cells"]] == bits and row["better"] == "lower" and not content["evaluations"]
    assert f"bits per byte of book.txt {bits[1] - bits[0]:+.3f}".replace("-", "−") in printed
    assert "only the bits per byte of a common text" in printed and "has no perplexity" not in printed
    assert "<img" not in page and "Retrieval" not in page
    book.write_text("Another text. " * 100)
    call(perplexity, f"run={runs[1]}", f"text={book}", "name=book", "training_counts=false")
    assert "eval.perplexity on different text" in refused(report, listed(runs), out)


def test_no_number_of_a_diverged_run_is_shown_or_compared(seeded, reported):
    folders = seeded("b", {1: 2.0, 2: 2.1}) + seeded("d", {1: 1.9, 2: 2.0})
    for i, folder in enumerate(folders):
        further(folder, "needle", needle_results(0.5 + i / 10))
        further(folder, "quantization", {"bits": [{"bits": 8, "loss_change": 0.1 * i}]})
    for folder in folders[2:]:  # the whole arm
        further(folder, "icl", {"accuracy": 0.5})
        (folder / "diverged.json").write_text('{"error": "the loss is nan at step 5"}')
    runs = read_runs([str(folder) for folder in folders])
    arms = arms_of(runs)
    rows = [*headline_table(arms), *(row for part in sections(arms) for row in part.rows)]
    shown = [row for row in rows if row.group not in ("Model", "Training") and row.cells[1].n]
    assert not shown and not differences(arms, rows)
    assert [part.name for part in sections(arms)] == ["quantization"]  # icl has no number left
    assert runs[2].evals["needle"] and not arms[1].runs[0].results("needle")
    page, _, _ = reported(listed(folders))
    assert "diverged: its training loss is not finite" in page and "Heatmap of needle accuracy" in page
    assert f"run={folders[2]}" not in page  # no evaluation would help
    assert 'length, baseline"' in page and 'length, diff"' not in page
    assert 'alt="Quantization, diff"' not in page


def test_settings_are_named_once_and_are_no_rows(seeded, reported):
    folders = seeded("b", {1: 2.0}) + seeded("d", {1: 1.9})
    for i, folder in enumerate(folders):
        cell = {"needles": 1, "asked": 1, "samples": 2, "accuracy": 0.1 * i, "se": 0.01}
        cells = [{"length": 160, "depth": depth} | cell for depth in (0.0, 0.5)]
        further(folder, "needle_passkey", {"accuracy": 0.5, "cells": cells, "context": 160}, seed=0)
        further(folder, "outliers", {"logits": {"top1": 9.5 + i}, "windows": 8, "length": 160, "tokens": 1280})
    parts = {part.name: part for part in sections(arms_of(read_runs([str(folder) for folder in folders])))}
    assert parts["needle_passkey"].settings == {"context": 160}
    rows = [row.name for row in parts["needle_passkey"].rows]
    assert len(rows) == 3 and all(name.endswith("accuracy") for name in rows)
    assert [row.name for row in parts["outliers"].rows] == ["logits · top1"]
    caption = "windows 8, length 160, tokens 1,280. (<code>python -m eval.outliers</code>)"
    assert caption in " ".join(reported(listed(folders))[0].split())


def test_without_checkpoints_and_evaluations_there_are_curves_and_no_viewer(make_run, reported, tmp_path):
    run = make_run("one")
    shutil.rmtree(run / "checkpoints")
    page, printed, _ = reported(listed([run]), viewer="true")
    assert "note: no attention viewer: " in printed and "one has no perplexity, needle, attention_noise: run python" in printed
    assert "report_viewer" not in page and not (tmp_path / "r_viewer.html").exists()
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["loss.png"]


def test_nothing_sticks_out_of_the_window(dom, seeded, call, tmp_path):
    folders = seeded("b", {1: 2.0, 2: 2.1}) + seeded("d", {1: 1.9, 2: 2.0})
    call(report, listed(folders), f"out={tmp_path / 'report.html'}")
    # In a frame, because Chromium's window is never narrower than 500 px.
    measure = "<script>parent.postMessage(`${innerWidth} ${document.documentElement.scrollWidth}`, '*')</script>"
    listen = "<title></title><script>onmessage = e => document.title = e.data</script>"
    for page in (tmp_path / "report.html", tmp_path / "report_viewer.html"):
        page.write_text(page.read_text().replace("</body>", f"{measure}</body>").replace("<details>", "<details open>"))
        for width in (390, 1280):
            frame = tmp_path / "frame.html"
            frame.write_text(f'{listen}<iframe src="{page.name}" style="width:{width}px;height:900px;border:0"></iframe>')
            title = re.search(r"<title>(.*?)</title>", dom(f"file://{frame}")).group(1)
            assert title == f"{width} {width}", page.name
