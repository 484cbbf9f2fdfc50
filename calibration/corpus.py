"""Where text comes from: local `.txt`, `.jsonl` and `.gz` files, folders of them, or hub datasets by streaming."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge import embedded
from kvbridge.errors import CorpusError
from kvbridge.fingerprint import digest

LOCAL_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
SHUFFLE_BUFFER = 10_000
EMBEDDED_TEXT = {"calibration": str(embedded.CALIBRATION_TEXT), "eval": str(embedded.EVALUATION_TEXT)}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of one text field.

    Attributes:
        name: the path or hub id it was opened by.
        fingerprint: digest of the files' bytes, or of hub id, configuration, split and revision.
        data: a `datasets.Dataset` (local, memory-mapped) or `datasets.IterableDataset` (hub, streamed).
        field: the column that holds the text.
    """

    name: str
    fingerprint: str
    data: Any
    field: str

    def in_order(self) -> Iterator[tuple[str, str]]:
        """(id, text) of every document in file order."""
        return self._documents(self.data)

    def shuffled(self, seed: int) -> Iterator[tuple[str, str]]:
        """(id, text) of every document in a seeded order; a streamed corpus is shuffled within a buffer."""
        if hasattr(self.data, "n_shards") and not hasattr(self.data, "select"):
            return self._documents(self.data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))
        return self._documents(self.data.shuffle(seed=seed))

    def _documents(self, data: Any) -> Iterator[tuple[str, str]]:
        for number, row in enumerate(data):
            text = row.get(self.field)
            if not isinstance(text, str):
                raise CorpusError(
                    f"document {number} of {self.name} has no text in field {self.field!r} "
                    f"(fields: {', '.join(map(str, row))}); set the field that holds it."
                )
            name = row.get("id")
            yield digest(text) if name is None else str(name), text


@dataclass
class CorpusConfig:
    """Which text is read.

    Attributes:
        corpus: path of a `.txt`, `.jsonl` or `.gz` file, a folder of them, a hub dataset, or `embedded` for the
            embedded pair's own text.
        corpus_config: configuration of a hub dataset.
        corpus_split: split of a hub dataset.
        corpus_revision: revision of a hub dataset.
        text_field: column that holds the text.
    """

    corpus: str = ""
    corpus_config: str | None = None
    corpus_split: str = "train"
    corpus_revision: str | None = None
    text_field: str = "text"

    def open(self, group: str) -> Corpus:
        """Open the corpus that configuration group `group` names.

        Raises:
            CorpusError: none is named, or nothing readable is there.
        """
        if not self.corpus:
            raise CorpusError(f"{group}.corpus is empty: give a text file, a folder of them, or a hub dataset.")
        return open_corpus(
            EMBEDDED_TEXT[group] if self.corpus == "embedded" else self.corpus,
            config=self.corpus_config,
            split=self.corpus_split,
            revision=self.corpus_revision,
            field=self.text_field,
        )


def _local_files(path: Path) -> list[Path]:
    if path.is_file():
        if not path.name.endswith(LOCAL_SUFFIXES):
            raise CorpusError(f"corpus {path}: expected a file that ends in {', '.join(LOCAL_SUFFIXES)}.")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(LOCAL_SUFFIXES))
    if not files:
        raise CorpusError(f"corpus folder {path} holds no file that ends in {', '.join(LOCAL_SUFFIXES)}.")
    if len({_kind(file) for file in files}) > 1:
        raise CorpusError(f"corpus folder {path} mixes .txt and .jsonl files; give one kind.")
    return files


def _kind(file: Path) -> str:
    return ".txt" if file.name.removesuffix(".gz").endswith(".txt") else ".jsonl"


def _hash_files(files: list[Path]) -> str:
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, "sha256").digest())
    return hasher.hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _open_local(path: Path, field: str) -> Corpus:
    import datasets

    files = _local_files(path)
    names, kind = [str(file) for file in files], _kind(files[0])
    datasets.disable_progress_bars()
    # What cannot be parsed is told once, by the error below.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        if kind == ".txt":
            data = datasets.load_dataset("text", data_files=names, split="train", sample_by="document")
        else:
            data = datasets.load_dataset("json", data_files=names, split="train")
    except Exception as error:
        # datasets wraps every parse error in classes of its own that share no useful base.
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration):
            raise CorpusError(f"corpus {path} holds no document.") from error
        raise CorpusError(f"corpus {path} could not be read as {kind}: {_first_line(cause)}") from error
    if len(data) == 0 or (kind == ".txt" and not any(data["text"])):
        raise CorpusError(f"corpus {path} holds no document.")
    return Corpus(str(path), _hash_files(files), data, field)


def _open_hub(name: str, config: str | None, split: str, revision: str | None, field: str) -> Corpus:
    import datasets

    try:
        data = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:
        raise CorpusError(
            f"corpus {name!r} is neither a local file or folder nor a dataset that could be streamed: "
            f"{_first_line(error)}"
        ) from error
    return Corpus(name, digest([name, config, split, revision]), data, field)


def open_corpus(
    corpus: str, *, config: str | None = None, split: str = "train", revision: str | None = None, field: str = "text"
) -> Corpus:
    """Open a local file or folder, or a hub dataset by streaming.

    Args:
        corpus: path, or hub id such as `HuggingFaceFW/fineweb-edu`.
        config: configuration of a hub dataset.
        split: split of a hub dataset.
        revision: revision of a hub dataset.
        field: column that holds the text.

    Raises:
        CorpusError: nothing readable is there.
    """
    path = Path(corpus).expanduser()
    if path.exists():
        return _open_local(path, field)
    if corpus.endswith(LOCAL_SUFFIXES) or corpus.startswith((".", "/", "~")) or corpus.count("/") > 1:
        raise CorpusError(f"corpus {corpus}: no such file or folder.")
    return _open_hub(corpus, config, split, revision, field)
