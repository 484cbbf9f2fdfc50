"""Opening text: what is read, in which order, under which fingerprint, and what is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from kvbridge.calibration import Corpus, CorpusConfig, open_corpus
from kvbridge.errors import CorpusError

TEXTS = ["first line\nsecond line\n", "a second document", "größer", ""]


@pytest.fixture(autouse=True)
def _own_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def json_lines(texts: list[str], field: str = "text", ids: bool = False) -> str:
    rows = [{"id": f"d{at}"} | {field: text} if ids else {field: text} for at, text in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(corpus: Corpus) -> list[str]:
    return [text for _, text in corpus.in_order()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".json.gz"])
def test_reads_lines_of_json_in_file_order(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"corpus{suffix}", json_lines(TEXTS, ids=True))
    assert list(open_corpus(str(path)).in_order()) == [(f"d{at}", text) for at, text in enumerate(TEXTS)]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"corpus{suffix}", TEXTS[0])
    assert texts(open_corpus(str(path))) == [TEXTS[0]]


def test_a_folder_is_read_in_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "nested/c.txt.gz"):
        write(tmp_path / name, f"text of {name}")
    write(tmp_path / "notes.md", "not text for us")
    assert texts(open_corpus(str(tmp_path))) == ["text of a.txt", "text of b.txt", "text of nested/c.txt.gz"]


def test_the_suffix_decides_the_kind_whatever_else_the_name_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "book.txt.jsonl", json_lines(["one", "two"]))
    assert texts(open_corpus(str(path))) == ["one", "two"]


def test_reads_the_field_that_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", json_lines(["one", "two"], field="body"))
    assert texts(CorpusConfig(corpus=str(path), text_field="body").open("calibration")) == ["one", "two"]


def test_documents_without_an_id_are_told_apart_by_their_text(tmp_path: Path) -> None:
    lines = json_lines(["one", "two"]) + json.dumps({"text": "three", "id": "named"}) + "\n"
    names = [name for name, _ in open_corpus(str(write(tmp_path / "corpus.jsonl", lines))).in_order()]
    assert len(set(names)) == 3
    assert names[2] == "named"
    again = open_corpus(str(write(tmp_path / "other.jsonl", json_lines(["two"]))))
    assert next(again.in_order())[0] == names[1]


def test_a_seed_gives_one_order_and_another_seed_another(tmp_path: Path) -> None:
    corpus = open_corpus(
        str(write(tmp_path / "corpus.jsonl", json_lines([f"text {at}" for at in range(50)], ids=True)))
    )
    orders = [list(corpus.shuffled(seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(corpus.in_order())
    assert list(corpus.in_order())[:2] == [("d0", "text 0"), ("d1", "text 1")]


def test_the_fingerprint_depends_on_bytes_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", json_lines(TEXTS))
    moved = Path(shutil.copy(path, tmp_path / "renamed.json"))
    changed = write(tmp_path / "changed.jsonl", json_lines([*TEXTS[:-1], "x"]))
    prints = [open_corpus(str(at), field=field).fingerprint for at, field in ((path, "text"), (moved, "body"))]
    assert prints[0] == prints[1] != open_corpus(str(changed)).fingerprint


def test_the_fingerprint_covers_every_file_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", "two")
    first = open_corpus(str(tmp_path)).fingerprint
    write(tmp_path / "b.txt", "changed")
    assert open_corpus(str(tmp_path)).fingerprint != first


@pytest.mark.parametrize("name", ["none.jsonl", "folder", "./relative", "a/b/c"])
def test_refuses_a_missing_path(tmp_path: Path, name: str) -> None:
    given = name if name.startswith(".") or "/" in name else str(tmp_path / name)
    with pytest.raises(CorpusError, match=r"^corpus \S+: no such file or folder\.$"):
        open_corpus(given)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("corpus.csv", "text\n", r"corpus\.csv: expected a file that ends in \.txt, \.txt\.gz, \.jsonl"),
        ("empty.jsonl", "", r"empty\.jsonl holds no document\."),
        ("empty.jsonl.gz", "", r"empty\.jsonl\.gz holds no document\."),
        ("empty.txt", "", r"empty\.txt holds no document\."),
        (
            "v1.final.jsonl",
            '{"text": "x"}\n{"text": oops}\n',
            r"could not be read as \.jsonl: JSON parse error: .* row 1",
        ),
    ],
)
def test_refuses_what_is_no_text(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    with pytest.raises(CorpusError, match=sentence) as caught:
        open_corpus(str(write(tmp_path / name, content)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("latin.txt", b"\xff\xfe\xfa", r"could not be read as \.txt: 'utf-8' codec can't decode"),
        ("plain.jsonl.gz", b'{"text": "x"}\n', r"could not be read as \.jsonl: Not a gzipped file"),
    ],
)
def test_refuses_bytes_of_another_kind(tmp_path: Path, name: str, data: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=sentence):
        open_corpus(str(tmp_path / name))


def test_a_refusal_prints_nothing_besides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CorpusError):
        open_corpus(str(write(tmp_path / "corpus.jsonl", "{oops\n")))
    assert not caplog.records


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"readme.md": ""}, r"holds no file that ends in \.txt"),
        ({"a.txt": "x", "b.jsonl": json_lines(["x"])}, r"mixes \.txt and \.jsonl files; give one kind\."),
    ],
    ids=["no-text", "mixed"],
)
def test_refuses_a_folder_without_one_kind_of_text(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(CorpusError, match=rf"^corpus folder {tmp_path} {sentence}"):
        open_corpus(str(tmp_path))


def test_refuses_a_missing_field_by_the_fields_there_are(tmp_path: Path) -> None:
    corpus = open_corpus(str(write(tmp_path / "corpus.jsonl", json_lines(["x"], field="body", ids=True))))
    with pytest.raises(CorpusError, match=r"document 0 of \S+ has no text in field 'text' \(fields: id, body\); set"):
        texts(corpus)


def test_refuses_a_document_without_text_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", json_lines(["x", "y"]) + '{"text": null}\n')
    with pytest.raises(CorpusError, match=r"document 2 of \S+ has no text in field 'text'"):
        texts(open_corpus(str(path)))


@pytest.mark.parametrize("group", ["calibration", "eval"])
def test_refuses_no_corpus_by_its_setting(group: str) -> None:
    with pytest.raises(CorpusError, match=rf"^{group}\.corpus is empty: give a text file"):
        CorpusConfig().open(group)


def test_streams_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = datasets.Dataset.from_list([{"body": f"text {at}", "id": at} for at in range(30)])

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.IterableDataset:
        asked.append((args, kwargs))
        return rows.to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = CorpusConfig(corpus="owner/name", corpus_config="en", corpus_revision="abc", text_field="body")
    corpus = settings.open("calibration")
    assert asked == [(("owner/name", "en"), {"split": "train", "revision": "abc", "streaming": True})]
    assert list(corpus.in_order())[:2] == [("0", "text 0"), ("1", "text 1")]
    orders = [list(corpus.shuffled(seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == sorted(corpus.in_order())
    settings.corpus_revision = "def"
    assert settings.open("calibration").fingerprint != corpus.fingerprint


def test_refuses_a_hub_dataset_that_cannot_be_reached() -> None:
    with pytest.raises(CorpusError, match=r"corpus 'nobody/nothing' is neither a local file or folder nor a dataset"):
        open_corpus("nobody/nothing")
