"""What each step of a training does: its rate, documents and hand-off positions, all from the seed and its number.

Nothing is drawn from a generator that lives on between steps, so that a resumed training goes on with the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvbridge.errors import UsageError
from kvbridge.mappers.residual_config import ResidualConfig

# Before the first hand-off as many tokens are carried at least.
LEAST_CARRIED = 16


def rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Learning rate of step `0 … steps − 1`: linear up, then a cosine down to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of one forward pass.

    Attributes:
        documents: their numbers.
        starts: hand-off positions, in order.
    """

    documents: list[int]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The batches of a training.

    Attributes:
        config: how many of what.
        documents: how many there are.
        tokens: of each.
        sinks: first tokens, never carried.
    """

    config: ResidualConfig
    documents: int
    tokens: int
    sinks: int

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise UsageError(
                f"mapper.residual.suffix={self.config.suffix}: documents of {self.tokens} tokens leave no room for "
                f"{LEAST_CARRIED} carried tokens after {self.sinks} sinks; give fewer, or a longer calibration.block."
            )

    @property
    def first(self) -> int:
        """The earliest hand-off."""
        return self.sinks + LEAST_CARRIED

    @property
    def last(self) -> int:
        """The latest hand-off."""
        return self.tokens - self.config.suffix

    def _generator(self, *numbers: int) -> torch.Generator:
        # A large odd multiplier keeps neighbouring seeds apart.
        seed = self.config.seed
        for number in numbers:
            seed = (seed * 6364136223846793005 + number + 1) % 2**63
        return torch.Generator().manual_seed(seed)

    def batches(self, stage: int, step: int) -> list[Batch]:
        """The batches of one step: every document once before any comes again."""
        size, made = self.config.batch, []
        for part in range(self.config.accumulate):
            first = (step * self.config.accumulate + part) * size
            chosen = [self._document(stage, first + at) for at in range(size)]
            generator = self._generator(stage, step, part)
            starts = torch.randint(self.first, self.last + 1, (self.config.suffixes,), generator=generator)
            made.append(Batch(chosen, starts.sort().values.tolist()))
        return made

    def _document(self, stage: int, number: int) -> int:
        turn, at = divmod(number, self.documents)
        return int(torch.randperm(self.documents, generator=self._generator(stage, turn))[at])

    def looks(self) -> list[int]:
        """Hand-off positions at which the KL is watched: the middle and the last one."""
        return sorted({(self.first + self.last) // 2, self.last})
