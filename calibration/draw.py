"""Which blocks a calibration draws, found again from what its moments say of themselves."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import SPLITS, BlockSet, Openings, pieces
from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import CorpusError, UsageError

MOST_TOKENS = 10**11


@dataclass(frozen=True, slots=True)
class Draw:
    """All that decides which blocks of a corpus are drawn, and what earlier calibrations drew before.

    Every `1 / held_out`-th document of the seeded order belongs to the held-out split, whole.

    Attributes:
        tokens: size of the fit split; the held-out split comes on top.
        block: tokens per block.
        held_out: size of the held-out split as a share of the fit split, below 1; 0 for none.
        seed: of the order of documents.
        skip: documents at its beginning that give no block.
        added: draws of the calibrations whose sums are added; none of their documents is drawn again.

    Raises:
        UsageError: a number is out of range.
    """

    tokens: int
    block: int
    held_out: float
    seed: int
    skip: int = 0
    added: tuple[Draw, ...] = ()

    def __post_init__(self) -> None:
        if self.held_out and not 1e-4 <= self.held_out < 1:
            raise UsageError(
                f"calibration.held_out={self.held_out}: expected 0, or a share from 0.0001 up to, not including, 1."
            )
        if self.block < 16 or not self.block <= self.tokens <= MOST_TOKENS:
            raise UsageError(
                f"calibration.tokens={self.tokens} with calibration.block={self.block}: expected blocks of 16 tokens "
                f"or more, and between one block and {MOST_TOKENS:,} tokens."
            )

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Draw:
        """The draw of finished moments, from their identity."""
        known: dict[str, Any] = {name: identity[key] for name, key in DRAWN.items() if key in identity}
        known["added"] = tuple(cls.of(each) for each in known.get("added", ()))
        return cls(**known)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest blocks of all parts, by which their documents can be told apart."""
        return min(self.block, *(each.shortest for each in self.added)) if self.added else self.block

    def blocks(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> BlockSet:
        """The blocks of this calibration alone.

        Raises:
            CorpusError: the corpus has too few long enough documents.
        """
        return self.parts(corpus, tokenizer)[-1]

    def parts(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> list[BlockSet]:
        """The blocks of every calibration that is added, and of this one last.

        Raises:
            CorpusError: the corpus has too few long enough documents.
        """
        earlier = [part for each in self.added for part in each.parts(corpus, tokenizer)]
        seen = {row[: self.shortest].tobytes() for part in earlier for row in part.tokens}
        return [*earlier, self._drawn(corpus, tokenizer, Openings(self.shortest, seen))]

    def splits(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[bytes, int]:
        """Number of the split of every document of all parts, by its first `length` tokens."""
        found = {}
        for part in self.parts(corpus, tokenizer):
            found |= {row[:length].tobytes(): int(split) for row, split in zip(part.tokens, part.split, strict=True)}
        return found

    def _drawn(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, known: Openings) -> BlockSet:
        fit = self.tokens // self.block
        wanted = {"fit": fit, "held_out": math.ceil(fit * self.held_out)}
        period = round(1 / self.held_out) + 1 if self.held_out else 0
        total = sum(wanted.values())
        with tempfile.TemporaryFile() as file:
            stored = np.memmap(file, dtype=np.int32, mode="w+", shape=(total, self.block))
        split = np.zeros(total, dtype=np.uint8)
        drawn = dict.fromkeys(SPLITS, 0)
        documents = set[int]()
        for number, ids in pieces(corpus, tokenizer, self.block, self.seed, self.skip, known):
            name = "held_out" if period and number % period == period - 1 else "fit"
            if drawn[name] < wanted[name]:
                row = sum(drawn.values())
                stored[row], split[row] = ids, SPLITS.index(name)
                drawn[name] += 1
                documents.add(number)
            if drawn == wanted:
                return BlockSet(stored, split, len(documents))
        raise CorpusError(
            f"corpus {corpus.name} gives {drawn['fit']} fit and {drawn['held_out']} held-out blocks of {self.block} "
            f"tokens; calibration.tokens={self.tokens} needs {wanted['fit']} and {wanted['held_out']}. "
            "Give more text (a .txt file is one document), fewer tokens or a shorter block."
        )


# What decides a draw, by the names that an identity gives it.
DRAWN = {setting.name: f"calibration.{setting.name}" for setting in fields(Draw)}
ADDED = DRAWN["added"]
