"""Which documents a calibration draws, found again from what its moments say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import BlockSet, Openings, draw_blocks
from kvbridge.calibration.config import CalibrationConfig
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

    @classmethod
    def wanted(cls, config: CalibrationConfig, added: Mapping[str, Any] | None) -> Draw:
        """The draw that settings ask for, where it adds to moments of the identity `added`."""
        earlier = () if added is None else (cls.of(added),)
        return cls(config.tokens, config.block, config.held_out, config.seed, config.skip, earlier)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest blocks of all parts, by which their documents can be told apart."""
        return min(self.block, *(each.shortest for each in self.added)) if self.added else self.block

    def parts(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> list[BlockSet]:
        """The blocks of every calibration that is added, and of this one last.

        Raises:
            UsageError, CorpusError: as `draw_blocks`.
        """
        earlier = [part for each in self.added for part in each.parts(corpus, tokenizer)]
        seen = {row[: self.shortest].tobytes() for part in earlier for row in part.tokens}
        own = draw_blocks(
            corpus, tokenizer, tokens=self.tokens, block=self.block, held_out=self.held_out, seed=self.seed,
            skip=self.skip, known=Openings(self.shortest, seen),
        )  # fmt: skip
        return [*earlier, own]

    def splits(self, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[bytes, int]:
        """Number of the split of every document of all parts, by its first `length` tokens."""
        found = {}
        for part in self.parts(corpus, tokenizer):
            found |= {row[:length].tobytes(): int(split) for row, split in zip(part.tokens, part.split, strict=True)}
        return found
