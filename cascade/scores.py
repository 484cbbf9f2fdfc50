"""How unsure the source is of its answer: one number, the larger the less it should answer alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.errors import UsageError


@dataclass(slots=True)
class Progress:
    """What is known of an answer so far.

    Attributes:
        prompt_tokens: of the whole conversation before the answer.
        first: the source's logits of the first token of the answer.
        text: the prompt, or the last message of a chat; empty where it was given as tokens.
        task: what the caller says the prompt is; `None` where nothing is said.
        tokens: drafted by the source.
        log_probabilities: that the source's unchanged distribution gave each of them, in nats.
        finished: the source has ended its answer.
    """

    prompt_tokens: int
    first: Float[Tensor, "V"]
    text: str = ""
    task: str | None = None
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    finished: bool = False


@runtime_checkable
class Score(Protocol):
    """A measure of doubt."""

    def score(self, progress: Progress) -> float | None:
        """The doubt about an answer; `None` where more of it must be drafted first."""
        ...


@dataclass(frozen=True, slots=True)
class FirstTokenEntropy:
    """Entropy of the source's first token, in nats."""

    def score(self, progress: Progress) -> float | None:
        probabilities = progress.first.float().softmax(dim=-1)
        return -float(torch.special.xlogy(probabilities, probabilities).sum())


@dataclass(frozen=True, slots=True)
class FirstTokenMargin:
    """1 − (p₁ − p₂), the probabilities that the source gives its two likeliest first tokens."""

    def score(self, progress: Progress) -> float | None:
        best, second = progress.first.float().softmax(dim=-1).topk(2).values.tolist()
        return 1.0 - (best - second)


@dataclass(frozen=True, slots=True)
class MeanSurprise:
    """Minus the mean log-probability of the first tokens that the source drafts, in nats.

    Attributes:
        tokens: how many are drafted before it is known; fewer where the answer ends before.

    Raises:
        UsageError: there is none.
    """

    tokens: int = 8

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"MeanSurprise(tokens={self.tokens}): give 1 or more tokens to draft.")

    def score(self, progress: Progress) -> float | None:
        drafted = progress.log_probabilities[: self.tokens]
        if len(drafted) < self.tokens and not progress.finished:
            return None
        return -sum(drafted) / max(len(drafted), 1)


SCORES: dict[str, Callable[..., Score]] = {
    "first_token_entropy": FirstTokenEntropy,
    "first_token_margin": FirstTokenMargin,
    "mean_surprise": MeanSurprise,
}
