import bz2
import gzip
import json
import lzma
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from data import sources
from data.config import DataConfig
from data.sources import clean, open_corpus

DOCUMENTS = ["one\ntwo\n", "naïve 你好", "three " * 50]


def read(path: Path | str, **options) -> list[str]:
    return list(open_corpus(DataConfig("mine", "text", str(path), **options)))


def jsonl(path: Path, documents=DOCUMENTS, key="text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(documents)))
    return path


def refused(match: str, path: Path | str, error=ValueError, **options) -> None:
    with pytest.raises(error, match=match) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)


def test_stdlib_is_the_library_s_docstrings_parsed_not_imported_and_not_repeated(tmp_path, monkeypatch):
    for name in ("b.py", "a/__init__.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "idlelib/i.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""Text of {name}."""')
    (tmp_path / "pydoc_data").mkdir()
    topics = {"x": "a\n\nlong section here\n\nmore", "y": "long section here", "z": "something else"}
    (tmp_path / "pydoc_data" / "topics.py").write_text(f"topics = {topics}")
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = open_corpus(DataConfig("stdlib", "stdlib"))
    texts = ["a\n\nText of a/__init__.py.", "b\n\nText of b.py.", topics["x"], topics["z"]]
    assert list(corpus) == list(corpus) == texts

    module, seen = tmp_path / "package" / "module.py", set()
    source = (
        b'"""Title.\n\n    =====\n    Text."""\nraise SystemExit\n'
        b'class A:\n  """Title two."""\n  def f(self, x=1):\n    """F."""\n'
    )
    text = sources._docstrings(source, tmp_path, module, seen)
    assert text == "package.module\n\nTitle.\n\nText.\n\npackage.module.A\n\nTitle two.\n\npackage.module.A.f(self, x=1)\n\nF."
    assert sources._docstrings(source, tmp_path, module, seen) == ""
    assert sources._docstrings(b"def broken(:", tmp_path, module, seen) == ""
    assert clean("Title\n    =====\n\n\n\n    a  \n      b\x0c\n") == "Title\n\na\n  b"


def test_plain_text(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n\n".encode())
    assert read(path) == ["one\r\ntwo\n\n"]
    path.write_text("one\n<|endoftext|>\ntwo\n\n<|endoftext|>\n \n<|endoftext|>three")
    assert read(path) == ["one", "two", "three"]
    monkeypatch.setattr(sources, "TEXT_LIMIT", 2**14)
    path.write_text(text := "".join(f"line {i}\n" for i in range(5000)))
    parts = read(path)  # a long text is cut at line ends
    assert len(parts) > 1 and "".join(parts) == text
    assert all(part.endswith("\n") and len(part) <= 2 * 2**14 for part in parts)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": "one"}\n')
    assert read(path) == ["one"]
    path.write_text('{"text": 5, "id": 1}\n')
    refused("line 1 has no text under 'text' .it has a value of type int.: use data.column=NAME", path)


def test_the_command_that_converts_a_text_works(tmp_path):
    if not shutil.which("iconv"):
        pytest.skip("no iconv on this machine")
    path, new = tmp_path / "a.txt", tmp_path / "new.txt"
    for text, written, encoding in (
        ("naïve", "latin1", "latin1"),
        ("naïve", "utf-16", "utf-16"),
        ("plain", "utf-16-le", "utf-16"),
    ):
        path.write_bytes(text.encode(written))
        with pytest.raises(ValueError, match=f"not UTF-8 text: convert it first, e.g. iconv -f {encoding}") as caught:
            read(path)
        command = str(caught.value).partition("e.g. ")[2].replace("FILE", str(path)).replace("NEW", str(new))
        subprocess.run(command, shell=True, check=True)
        assert read(new) == [text]


def test_compressed_and_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="optional package pyarrow is not installed")
    from pyarrow import parquet

    def frames(content: bytes) -> bytes:
        return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (content[:50], content[50:]))

    content = jsonl(tmp_path / "a.jsonl").read_bytes()
    for suffix, pack in {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": frames}.items():
        path = tmp_path / f"b.jsonl.{suffix}"
        path.write_bytes(pack(content))
        assert read(path) == DOCUMENTS
        path.write_bytes(path.read_bytes()[:-12])
        refused("truncated", path)
    for path in (tmp_path, tmp_path / "a.jsonl*"):
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
        refused("a.jsonl and a.jsonl.gz look like one text twice: remove or rename one, or give path= a glob", path)
    assert read(tmp_path / "a.*.gz") == read(tmp_path / "a.jsonl") == DOCUMENTS
    parquet.write_table(pyarrow.table({"text": [*DOCUMENTS, None]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == DOCUMENTS
    refused("no text under 'body'.*it has text", tmp_path / "a.parquet", column="body")


def test_folders_and_globs_are_read_in_order_of_name_without_hidden_files_and_links_once(tmp_path):
    folder = tmp_path / ".kept" / "fold"
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".hidden.txt", "deep/.git/b.txt", "../elsewhere/c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "linked").symlink_to(tmp_path / ".kept" / "elsewhere")
    (folder / "deep" / "back").symlink_to(folder)
    (folder / "notes.md").write_text("ignored")
    jsonl(folder / "b.jsonl", ["b"])
    assert read(folder) == ["a.txt", "b", "../elsewhere/c.txt"]
    assert read(f"{tmp_path}/.kept/*") == ["../elsewhere/c.txt", "a.txt", "b"]
    assert read(folder / "*.jsonl") == read(f"{tmp_path}/.kept/**/b.jsonl") == ["b"]
    assert read(folder / ".hidden.txt") == [".hidden.txt"]
    assert list(open_corpus(DataConfig("shakespeare", "shakespeare", str(folder / "b.jsonl")))) == ["b"]


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        (tmp_path / "a.txt.zst").write_bytes(b"x")
        refused("pip install pyarrow", tmp_path / "a.txt.zst")
        without.setitem(sys.modules, "datasets", None)
        with pytest.raises(ValueError, match="pip install datasets"):
            rows(dataset="a/b")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match="cannot download tinyshakespeare .*path=FILE") as caught:
        list(open_corpus(DataConfig("shakespeare", "shakespeare")))
    assert "\n" not in str(caught.value)


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    module = pytest.importorskip("datasets", reason="optional package datasets is not installed")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


def rows(**options) -> list[str]:
    return list(open_corpus(DataConfig("mine", "hf", **options)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_or_says_why_not(tmp_path, datasets, streaming):
    """The package's text is 'An error occurred while generating the dataset'; the cause is below it."""
    (tmp_path / "set").mkdir()
    path, broken = jsonl(tmp_path / "set" / "mine.jsonl"), tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": "cut\n')
    folder, files = {"dataset": str(path.parent)}, {"dataset": "json", "data_files": str(path)}
    assert rows(**folder, streaming=streaming) == rows(**files, streaming=streaming) == DOCUMENTS
    for wrong, match in (
        (folder | {"column": "body"}, "it has text, id.*use data.column="),
        (folder | {"split": "dev"}, r"cannot load data set .*data\.split"),
        (files | {"data_files": str(tmp_path / "none*.jsonl")}, "cannot load data set json"),
        (files | {"data_files": str(broken)}, r"JSON parse error.*data=text path=.*/broken\.jsonl"),
        ({"dataset": "a/b"}, "cannot load data set a/b .*or use local files: data=text path=FILE"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            rows(**wrong, streaming=streaming)
        assert "\n" not in str(caught.value)


def test_a_path_takes_what_the_package_datasets_reads(tmp_path, datasets, monkeypatch):
    one = datasets.Dataset.from_dict({"text": DOCUMENTS, "id": [1, 2, 3]})
    one.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(tmp_path / "two")
    one.to_csv(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in DOCUMENTS]))
    jsonl(tmp_path / "a.ndjson")
    for name in ("saved", "two", "a.csv", "a.json", "a.ndjson"):
        assert read(tmp_path / name) == DOCUMENTS, name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "csv").mkdir()  # is not the file's content
    corpus = open_corpus(DataConfig("mine", "text", "a.csv"))
    assert list(corpus) == DOCUMENTS and corpus.identity["content"] == sources.content_of([tmp_path / "a.csv"])
    assert read(tmp_path / "two", split="test") == DOCUMENTS[:1]
    on_the_hub = DataConfig("mine", "hf", dataset="owner/name", data_files="a.parquet")
    assert sources.hugging_face(on_the_hub).identity["data_files"] == "a.parquet"
    refused("no text under 'id' .it has a value of type int.: use data.column=", tmp_path / "saved", column="id")
