"""Equal-length token blocks: one per document, in seeded order, before any document gives a second."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.corpus import Corpus
from kvbridge.tokens import encode

SPLITS = ("fit", "held_out")


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that every prompt begins with."""
    ids = encode(tokenizer, "a")
    return ids[: len(ids) - len(tokenizer("a", add_special_tokens=False)["input_ids"])]


@dataclass(frozen=True, slots=True)
class Openings:
    """Documents, known by how they begin.

    Attributes:
        length: tokens that are compared.
        known: the first so many of each, as bytes of 32-bit numbers.
    """

    length: int
    known: Container[bytes]

    def __contains__(self, ids: Sequence[int]) -> bool:
        return np.asarray(ids[: self.length], dtype=np.int32).tobytes() in self.known


NOTHING_KNOWN = Openings(0, ())


@dataclass(frozen=True, slots=True)
class BlockSet:
    """Token blocks on disk, in the order in which they were drawn.

    Attributes:
        tokens: `[blocks, block]`, memory-mapped from a temporary file.
        split: 0 for fit and 1 for held-out, per block.
        documents: how many documents gave a block.
    """

    tokens: np.memmap
    split: np.ndarray
    documents: int

    def __len__(self) -> int:
        return len(self.split)

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens and of how they are split."""
        hasher = hashlib.sha256(f"{self.tokens.shape}".encode())
        hasher.update(self.tokens.data)
        hasher.update(self.split.data)
        return hasher.hexdigest()[:16]

    def partners(self, numbers: list[int], pairing: str) -> list[int]:
        """The blocks that the target reads where the source reads these.

        They are the same ones, or for a pairing that is `shuffled` the next of the same split, cyclically: of another
        document, where each gives one.
        """
        if pairing == "same":
            return numbers

        def following(number: int) -> int:
            after = np.roll(self.split == self.split[number], -number - 1)
            return int((number + 1 + after.argmax()) % len(self))

        return [following(number) for number in numbers]

    def batch(self, indices: list[int]) -> torch.Tensor:
        """Token ids `[B, T]` of the blocks at `indices`."""
        return torch.from_numpy(np.asarray(self.tokens[indices], dtype=np.int64))


def pieces(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    seed: int,
    skip: int = 0,
    known: Openings = NOTHING_KNOWN,
) -> Iterator[tuple[int, list[int]]]:
    """(number of the document in seeded order, one block of it), first blocks of all documents first.

    Documents that are too short for one block are not counted, so that they do not unbalance the splits. Blocks after a
    document's first start with the tokenizer's own prefix (a BOS token where it adds one), as prompts do.

    Args:
        corpus: the text.
        tokenizer: the pair's.
        block: tokens per block.
        seed: of the order.
        skip: documents at its beginning that are left out.
        known: documents that are left out too.
    """
    prefix = opening(tokenizer)
    fresh = block - len(prefix)
    texts = (encode(tokenizer, text)[len(prefix) :] for _, text in corpus.shuffled(seed))
    spans: list[tuple[int, int, int]] = []
    with tempfile.TemporaryFile() as stored:
        for number, ids in enumerate(ids for ids in texts if len(ids) >= fresh):
            first = prefix + ids[:fresh]
            if number >= skip and first not in known:
                spans.append((number, stored.tell(), len(ids)))
                stored.write(np.asarray(ids, dtype=np.int32).tobytes())
                yield number, first
        # Later blocks come from the tokens on disk: no text is tokenised twice.
        for turn in range(1, max((length for _, _, length in spans), default=0) // fresh):
            for number, start, length in spans:
                if length >= (turn + 1) * fresh:
                    stored.seek(start + turn * fresh * np.dtype(np.int32).itemsize)
                    piece = np.frombuffer(stored.read(fresh * np.dtype(np.int32).itemsize), dtype=np.int32)
                    yield number, prefix + piece.tolist()


def first_blocks(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, block: int, seed: int) -> Iterator[list[int]]:
    """The first block of every document that is long enough, in the seeded order in which a `Draw` draws."""
    before = -1
    for number, ids in pieces(corpus, tokenizer, block, seed):
        if number <= before:
            return
        before = number
        yield ids
