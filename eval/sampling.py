"""How a generation task's next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import UsageError

SETTINGS = ("do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: only so many of the likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that together reach this probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Sampling:
        """From lm-eval's normalised generation settings.

        Raises:
            UsageError: one of them would change the text and is not supported, or is out of range.
        """
        unread = sorted(name for name in settings if name not in SETTINGS and settings[name] is not None)
        if unread:
            raise UsageError(
                f"generation setting {unread[0]}={settings[unread[0]]} is not supported; expected until, "
                f"max_gen_toks, {', '.join(SETTINGS)}."
            )
        if not settings.get("do_sample"):
            return cls()
        temperature, top_k, top_p = (settings.get(name) for name in SETTINGS[1:])
        chosen = cls(1.0 if temperature is None else float(temperature), int(top_k or 0), float(top_p or 1.0))
        if chosen.temperature < 0 or chosen.top_k < 0 or not 0 < chosen.top_p <= 1:
            raise UsageError(f"{chosen}: expected temperature ≥ 0, top_k ≥ 0 and 0 < top_p ≤ 1.")
        return chosen

    def choose(self, logits: Float[Tensor, "1 V"]) -> Int[Tensor, "1 1"]:
        """The next token.

        Not `kvbridge.cascade.sampling`: that draws from a generator of its own, and equal seeds would give other texts.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        ordered, tokens = (logits.float() / self.temperature).sort(dim=-1, descending=True)
        if self.top_k:
            ordered[:, self.top_k :] = -torch.inf
        probabilities = ordered.softmax(dim=-1)
        # A token stays if those before it do not reach top_p, so the first always stays.
        probabilities[probabilities.cumsum(dim=-1) - probabilities >= self.top_p] = 0
        return tokens.gather(-1, torch.multinomial(probabilities, 1))
