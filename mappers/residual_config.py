"""Settings of the residual branch that is trained on a frozen map: `mapper.residual` of every mapper."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.errors import UsageError

NO_BRANCH = "none"
KINDS_OF_BRANCH = ("linear", "quadratic", "gelu")
LOSSES = ("mse", "attention", "kl")


@dataclass(frozen=True)
class ResidualConfig:
    """What is added to a map after its fit, `B φ(A x)`, and what it is trained for.

    Attributes:
        kind: `none`, or the form of the branch: `linear`, `quadratic` (the product of two linear maps) or `gelu`.
        rank: width of the branch, `R`.
        loss: what training lowers: the error of the states (`mse`), of what the target's attention makes of them
            (`attention`), or the divergence of the target's next tokens from native ones (`kl`).
    """

    kind: str = NO_BRANCH
    rank: int = 128
    loss: str = "kl"

    def __post_init__(self) -> None:
        for option, given, known in (
            ("kind", self.kind, (NO_BRANCH, *KINDS_OF_BRANCH)),
            ("loss", self.loss, LOSSES),
        ):
            if given not in known:
                raise UsageError(f"mapper.residual.{option}={given}: expected one of {', '.join(known)}.")
        if self.rank < 1:
            raise UsageError(f"mapper.residual.rank={self.rank}: expected 1 or more.")

    @property
    def wanted(self) -> bool:
        """Whether a branch is trained at all."""
        return self.kind != NO_BRANCH
