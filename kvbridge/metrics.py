"""Fidelity of next-token distributions, position by position, in nats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How one arm's distributions compare with the native ones at each position.

    Attributes:
        kl: `KL(native ‖ arm)`.
        top1: 1 where both arg max agree.
        nll: negative log-likelihood that the arm gives the token that follows.
        acceptance: `Σ_v min(p_native, p_arm)`, what speculative decoding would accept.
    """

    kl: Float[Tensor, "T"]
    top1: Float[Tensor, "T"]
    nll: Float[Tensor, "T"]
    acceptance: Float[Tensor, "T"]


def kl_divergence(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """`KL(p ‖ q)` of log-probabilities; what p never gives adds nothing."""
    return (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(dim=-1)


def fidelity(native: Float[Tensor, "T V"], arm: Float[Tensor, "T V_arm"], following: Int[Tensor, "T"]) -> Fidelity:
    """Compare logits position by position, in fp32 (fp64 where the native logits are).

    Where the two vocabularies are padded to different sizes, both are cut to the smaller one and renormalised.

    Args:
        native: logits of the target on its own cache.
        arm: logits of the arm, at the same positions.
        following: the token that follows each position.
    """
    shared = min(native.shape[-1], arm.shape[-1])
    precision = torch.promote_types(native.dtype, torch.float32)
    p = native[..., :shared].to(precision).log_softmax(dim=-1)
    q = arm[..., :shared].to(precision).log_softmax(dim=-1)
    return Fidelity(
        kl=kl_divergence(p, q),
        top1=(p.argmax(dim=-1) == q.argmax(dim=-1)).float(),
        nll=-q.gather(-1, following[:, None])[:, 0],
        acceptance=torch.minimum(p, q).exp().sum(dim=-1),
    )


Number = float | np.ndarray


def gap_recovered(nll_source: Number, nll_arm: Number, nll_native: Number) -> Number:
    """Share of the source-to-target gap that an arm closes: 0 for the source, 1 for the target itself."""
    return (nll_source - nll_arm) / (nll_source - nll_native)
