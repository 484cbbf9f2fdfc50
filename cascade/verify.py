"""Verification of drafted tokens: what comes out has the distribution of the verifying model, whatever was drafted.

Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). With q the
distribution that a token was drawn from and p the verifier's own, both after temperature, top-p, top-k and penalty:

    accept with probability min(1, p(token) / q(token)), else draw from (p − q)⁺ and drop what was drafted after it

It holds if how much is drafted does not depend on p. Greedy sampling is the case of one-hot p and q.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kvbridge.cascade.sampling import check_logits, draw
from kvbridge.cascade.writing import Writing


@dataclass(slots=True)
class Draft:
    """Tokens that wait for verification.

    Attributes:
        tokens: in order.
        distributions: what each was drawn from.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Float[Tensor, "V"]] = field(default_factory=list)

    def add(self, logits: Float[Tensor, "V"], writing: Writing) -> int | None:
        """Draw one more token from the drafting model's logits, of those that the target knows.

        Returns:
            The token, or `None` where the logits are no distribution: a broken cache drafts nothing.
        """
        logits = logits[: writing.vocabulary].float()
        if not logits.logsumexp(dim=-1).isfinite():
            return None
        distribution = writing.distribution(logits, self.tokens)
        token = draw(distribution, writing.generator)
        self.tokens.append(token)
        self.distributions.append(distribution)
        return token


@dataclass(slots=True)
class Tally:
    """How drafting went.

    Attributes:
        drafted: tokens that were verified.
        accepted: those that stayed.
        passes: forward passes of the verifier.
    """

    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification."""
        self.drafted, self.accepted, self.passes = self.drafted + drafted, self.accepted + accepted, self.passes + 1

    def include(self, other: Tally) -> None:
        """Count what another has counted."""
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.passes += other.passes

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; `None` where none was drafted."""
        return self.accepted / self.drafted if self.drafted else None


def verify(logits: Float[Tensor, "K V"], draft: Draft, writing: Writing) -> list[int]:
    """The drafted tokens that are accepted and one that the verifier draws itself.

    Args:
        logits: the verifier's, at the places of the drafted tokens and the one after them.
        draft: what is verified.
        writing: whose committed tokens it follows.

    Raises:
        CacheError: the verifier's logits are not finite.
    """
    check_logits(logits)
    for at, (token, q) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
        p = writing.distribution(logits[at], draft.tokens[:at])
        q = pad(q.to(p.device), (0, len(p) - len(q)))
        level = float(torch.rand((), generator=writing.generator, dtype=torch.float64))
        if level * float(q[token]) < float(p[token]):
            continue
        residual = (p - q).clamp_(min=0)
        # Rounding can leave nothing of two distributions that are all but equal.
        return [*draft.tokens[:at], draw(residual if residual.any() else p, writing.generator)]
    return [*draft.tokens, draw(writing.distribution(logits[len(draft.tokens)], draft.tokens), writing.generator)]
