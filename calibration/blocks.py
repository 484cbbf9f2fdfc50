"""Equal-length token blocks: one per document, in seeded order, before any document gives a second."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import CorpusError, UsageError
from kvbridge.tokens import encode

SPLITS = ("fit", "held_out")
MOST_TOKENS = 10**11


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

    def partner(self, number: int, pairing: str) -> int:
        """The block that the target reads where the source reads block `number`.

        It is the same one, or for a pairing that is `shuffled` the next of the same split, cyclically: of another
        document, where each gives one.
        """
        if pairing == "same":
            return number
        after = np.roll(self.split == self.split[number], -number - 1)
        return int((number + 1 + after.argmax()) % len(self))

    def batch(self, indices: list[int]) -> torch.Tensor:
        """Token ids `[B, T]` of the blocks at `indices`."""
        return torch.from_numpy(np.asarray(self.tokens[indices], dtype=np.int64))


def _pieces(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, block: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """(number of the document in seeded order, one block of it), first blocks of all documents first.

    Documents that are too short for one block are not counted, so that they do not unbalance the splits.
    """
    prefix = opening(tokenizer)
    fresh = block - len(prefix)
    spans: list[tuple[int, int]] = []
    with tempfile.TemporaryFile() as stored:
        for _, text in corpus.shuffled(seed):
            ids = encode(tokenizer, text)[len(prefix) :]
            if len(ids) >= fresh:
                spans.append((stored.tell(), len(ids)))
                stored.write(np.asarray(ids, dtype=np.int32).tobytes())
                yield len(spans) - 1, prefix + ids[:fresh]
        # Later blocks come from the tokens on disk: no text is tokenised twice.
        for turn in range(1, max((length for _, length in spans), default=0) // fresh):
            for number, (start, length) in enumerate(spans):
                if length >= (turn + 1) * fresh:
                    stored.seek(start + turn * fresh * np.dtype(np.int32).itemsize)
                    piece = np.frombuffer(stored.read(fresh * np.dtype(np.int32).itemsize), dtype=np.int32)
                    yield number, prefix + piece.tolist()


def first_blocks(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, block: int, seed: int) -> Iterator[list[int]]:
    """The first block of every document that is long enough, in the seeded order in which `draw_blocks` draws."""
    before = -1
    for number, ids in _pieces(corpus, tokenizer, block, seed):
        if number <= before:
            return
        before = number
        yield ids


def draw_blocks(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int,
    block: int,
    held_out: float,
    seed: int,
    skip: int = 0,
    known: Openings = NOTHING_KNOWN,
) -> BlockSet:
    """Draw the blocks of one calibration.

    Every `1 / held_out`-th document of the seeded order belongs to the held-out split, whole. Blocks after a
    document's first start with the tokenizer's own prefix (a BOS token where it adds one), as prompts do.

    Args:
        corpus: the text.
        tokenizer: the pair's.
        tokens: size of the fit split; the held-out split comes on top.
        block: tokens per block.
        held_out: size of the held-out split as a share of the fit split, below 1; 0 for none.
        seed: of the order.
        skip: documents at its beginning that give no block.
        known: documents that give none either.

    Raises:
        UsageError: a number is out of range.
        CorpusError: the corpus has too few long enough documents.
    """
    if held_out and not 1e-4 <= held_out < 1:
        raise UsageError(
            f"calibration.held_out={held_out}: expected 0, or a share from 0.0001 up to, not including, 1."
        )
    if block < 16 or not block <= tokens <= MOST_TOKENS:
        raise UsageError(
            f"calibration.tokens={tokens} with calibration.block={block}: expected blocks of 16 tokens or more, and "
            f"between one block and {MOST_TOKENS:,} tokens."
        )
    wanted = {"fit": tokens // block, "held_out": math.ceil(tokens // block * held_out)}
    period = round(1 / held_out) + 1 if held_out else 0
    total = sum(wanted.values())
    with tempfile.TemporaryFile() as file:
        stored = np.memmap(file, dtype=np.int32, mode="w+", shape=(total, block))
    split = np.zeros(total, dtype=np.uint8)
    drawn = dict.fromkeys(SPLITS, 0)
    documents, left_out = set[int](), set[int]()
    for number, ids in _pieces(corpus, tokenizer, block, seed):
        if number < skip or number in left_out:
            continue
        if number not in documents and ids in known:
            left_out.add(number)
            continue
        name = "held_out" if period and number % period == period - 1 else "fit"
        if drawn[name] < wanted[name]:
            row = sum(drawn.values())
            stored[row], split[row] = ids, SPLITS.index(name)
            drawn[name] += 1
            documents.add(number)
        if drawn == wanted:
            return BlockSet(stored, split, len(documents))
    raise CorpusError(
        f"corpus {corpus.name} gives {drawn['fit']} fit and {drawn['held_out']} held-out blocks of {block} tokens; "
        f"calibration.tokens={tokens} needs {wanted['fit']} and {wanted['held_out']}. "
        "Give more text (a .txt file is one document), fewer tokens or a shorter block."
    )
