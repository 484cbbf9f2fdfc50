"""Which documents a calibration draws, found again from what its moments say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import BlockSet, Openings, draw_blocks
from kvbridge.calibration.corpus import Corpus

ADDED = "calibration.added"


@dataclass(frozen=True, slots=True)
class Draw:
    """All that decides which blocks of a corpus are drawn, and what earlier calibrations drew before.

    Attributes:
        tokens: size of the fit split.
        block: tokens per block.
        held_out: size of the held-out split as a share of the fit split.
        seed: of the order of documents.
        skip: documents at its beginning that give no block.
        added: draws of the calibrations whose sums are added; none of their documents is drawn again.
    """

    tokens: int
    block: int
    held_out: float
    seed: int
    skip: int = 0
    added: tuple[Draw, ...] = ()

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Draw:
        """The draw of finished moments, from their identity."""
        numbers = {name: identity[f"calibration.{name}"] for name in ("tokens", "block", "held_out", "seed")}
        added = tuple(cls.of(each) for each in identity.get(ADDED, ()))
        return cls(**numbers, skip=identity.get("calibration.skip", 0), added=added)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest blocks of all parts, by which their documents can be told apart."""
        return min(self.block, *(each.shortest for each in self.added)) if self.added else self.block

    def blocks(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> BlockSet:
        """The blocks of this calibration alone.

        Raises:
            UsageError, CorpusError: as `draw_blocks`.
        """
        known = Openings(self.shortest, self._earlier(corpus, tokenizer, self.shortest))
        return draw_blocks(
            corpus, tokenizer, tokens=self.tokens, block=self.block, held_out=self.held_out, seed=self.seed,
            skip=self.skip, known=known,
        )  # fmt: skip

    def splits(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[bytes, int]:
        """Number of the split of every document that was drawn, by its first `length` tokens."""
        drawn = self.blocks(corpus, tokenizer)
        own = {row[:length].tobytes(): int(part) for row, part in zip(drawn.tokens, drawn.split, strict=True)}
        return self._earlier(corpus, tokenizer, length) | own

    def _earlier(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for each in self.added:
            found |= each.splits(corpus, tokenizer, length)
        return found
