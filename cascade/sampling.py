"""How the next token is chosen: from logits to a distribution, and from a distribution to a token.

The order is that of transformers' `generate`: repetition penalty, temperature, top-k, top-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError, UsageError


def _whole(value: Any) -> bool:
    return isinstance(value, int)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a caller asks of a continuation.

    Attributes:
        max_new_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        top_p: only the likeliest tokens that together reach this probability.
        top_k: only so many of the likeliest tokens; 0 for all.
        repetition_penalty: logits of earlier tokens, those of the prompt included, are divided by it where they are
            positive and multiplied by it where they are negative; 1 leaves them alone.
        stop: strings before which the text ends.
        seed: of every random draw.

    Raises:
        UsageError: a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed, expected in (
            ("max_new_tokens", _whole(self.max_new_tokens) and self.max_new_tokens >= 1, "a whole number, 1 or more"),
            ("temperature", _number(self.temperature) and self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", _whole(self.top_k) and self.top_k >= 0, "a whole number, 0 (all tokens) or more"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty) and self.repetition_penalty > 0,
                "more than 0; 1 is none",
            ),
            ("stop", all(isinstance(stop, str) and stop for stop in self.stop), "strings of one character or more"),
            ("seed", _whole(self.seed) and 0 <= self.seed < 2**63, "a whole number, 0 or more and below 2⁶³"),
        ):
            if not allowed:
                raise UsageError(f"{name}={getattr(self, name)!r}: give {expected}.")

    def generator(self) -> torch.Generator:
        """A source of random numbers that starts at `seed`; on the CPU, whatever the model runs on."""
        return torch.Generator().manual_seed(self.seed)


def check_logits(logits: Float[Tensor, "*K V"]) -> None:
    """Refuse logits from which no text may be made.

    Raises:
        CacheError: one is NaN, or a row has nothing finite.
    """
    if bool(torch.isnan(logits).any()) or not bool(torch.isfinite(logits).any(dim=-1).all()):
        raise CacheError("the logits hold NaN, or nothing finite; the cache behind them must not be used.")


def process_logits(
    logits: Float[Tensor, "V"], params: SamplingParams, previous: Int[Tensor, "N"]
) -> Float[Tensor, "V"]:
    """The distribution that the next token is drawn from, in fp32; greedy is all mass on the first largest logit.

    Args:
        logits: of one position.
        params: how they are changed.
        previous: tokens before that position, the prompt's included.
    """
    scores = logits.float()
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        seen[previous] = True
        penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    if params.temperature == 0:
        return torch.zeros_like(scores).scatter_(0, scores.argmax(dim=-1, keepdim=True), 1.0)
    scores = scores / params.temperature
    if 0 < params.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1.0:
        ordered, tokens = scores.sort()
        left_out = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        # The likeliest token always stays.
        left_out[-1] = False
        scores = scores.masked_fill(torch.empty_like(left_out).scatter_(0, tokens, left_out), -torch.inf)
    return scores.softmax(dim=-1)


def draw(weights: Float[Tensor, "V"], generator: torch.Generator) -> int:
    """A token drawn in proportion to `weights`, not all zero; one of weight zero is never drawn."""
    cumulative = weights.double().cumsum(dim=-1)
    level = torch.rand((), generator=generator, dtype=torch.float64).to(weights.device) * cumulative[-1]
    # The product can round up to the whole sum, which the last token of some weight reaches first.
    last = torch.searchsorted(cumulative, cumulative[-1])
    return int(torch.minimum(torch.searchsorted(cumulative, level, right=True), last))
