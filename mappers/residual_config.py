"""Settings of the residual branch that is trained on a frozen map: `mapper.residual` of every mapper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbridge.branch import ACTIVATIONS
from kvbridge.errors import UsageError

NO_BRANCH = "none"
KINDS_OF_BRANCH = tuple(ACTIVATIONS)
LOSSES = ("mse", "attention", "on_policy", "kl")
COUNTS = (
    "rank", "steps", "batch", "accumulate", "suffixes", "suffix", "queries", "directions", "documents",
    "block", "dev_documents", "evaluate_every", "patience",
)  # fmt: skip


@dataclass(frozen=True)
class ResidualConfig:
    """What is added to a map after its fit, `B φ(A x)`, and what it is trained for.

    Attributes:
        kind: `none`, or the form of the branch: `linear`, `quadratic` (the product of two linear maps) or `gelu`.
        rank: width of the branch, `R`.
        loss: what training lowers: the error of the states (`mse`), of what the target's attention makes of them, for
            its native queries (`attention`) or for those that it has while it reads on over the mapped cache
            (`on_policy`), or the divergence of the target's next tokens from native ones (`kl`).
        steps: optimiser steps.
        attention_steps: steps on the attention loss before those on `loss`.
        on_policy_steps: steps on the on-policy loss after them.
        unfreeze_steps: steps on `loss` at the end in which the weights of the map are trained with the branch.
        unfreeze_rate: peak of Adam's rate in these; for the map's weights it is relative to their own size.
        batch: documents per forward pass.
        accumulate: forward passes per step, shared among the processes that accelerate started.
        suffixes: hand-offs per document, at random positions; they are read in one forward pass.
        suffix: tokens that the target reads after each of them.
        queries: positions per document whose queries the attention losses take.
        attention_rate: peak of Adam's rate in the attention steps that come first.
        learning_rate: peak of Adam's rate in those on `loss` and on-policy; every peak is reached after `warmup` steps
            of its stage, and lowered to 0 by a cosine.
        warmup: steps.
        clip: largest norm of the gradient.
        directions: leading principal directions of the inputs that the branch reads, whitened; `null` reads every
            input in units of its own spread, which trained better on the embedded pair.
        documents: training documents, their first `block` tokens each.
        block: tokens per document; `null` takes those of `calibration.block`.
        fresh: train on documents that the moments have not seen; `false` takes those of the moments.
        chat: read every document as what a user says in the chat template of the target, from its start to that of
            the answer; all of it counts in `block`.
        dev_documents: documents, seen by neither, on which the KL is watched.
        evaluate_every: steps between two looks at it.
        patience: so many looks without a new best end a stage.
        checkpoint_seconds: most time between two checkpoints.
        keep_readings: leave on disk what both models made of the documents, for another training in the same folder.
        seed: of the weights, and of the order of documents and hand-offs.
    """

    kind: str = NO_BRANCH
    rank: int = 128
    loss: str = "kl"
    steps: int = 400
    attention_steps: int = 0
    on_policy_steps: int = 0
    unfreeze_steps: int = 0
    unfreeze_rate: float = 1e-4
    batch: int = 1
    accumulate: int = 2
    suffixes: int = 4
    suffix: int = 64
    queries: int = 64
    attention_rate: float = 3e-4
    learning_rate: float = 2e-4
    warmup: int = 20
    clip: float = 1.0
    directions: int | None = None
    documents: int = 400
    block: int | None = None
    fresh: bool = True
    chat: bool = False
    dev_documents: int = 16
    evaluate_every: int = 20
    patience: int = 8
    checkpoint_seconds: float = 300.0
    keep_readings: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for option, given, known in (
            ("kind", self.kind, (NO_BRANCH, *KINDS_OF_BRANCH)),
            ("loss", self.loss, LOSSES),
        ):
            if given not in known:
                raise UsageError(f"mapper.residual.{option}={given}: expected one of {', '.join(known)}.")
        for option in COUNTS:
            given = getattr(self, option)
            if given is not None and given < 1:
                raise UsageError(f"mapper.residual.{option}={given}: expected 1 or more.")
        for option in ("attention_steps", "on_policy_steps", "unfreeze_steps", "warmup", "seed"):
            if getattr(self, option) < 0:
                raise UsageError(f"mapper.residual.{option}={getattr(self, option)}: expected 0 or more.")
        for option in ("attention_rate", "learning_rate", "unfreeze_rate", "clip", "checkpoint_seconds"):
            if not 0 < getattr(self, option) < math.inf:
                raise UsageError(f"mapper.residual.{option}={getattr(self, option)}: expected a number above 0.")

    @property
    def wanted(self) -> bool:
        """Whether a branch is trained at all."""
        return self.kind != NO_BRANCH

    def require_wanted(self) -> None:
        """Refuse settings that train nothing.

        Raises:
            UsageError: no kind of branch is given.
        """
        if not self.wanted:
            raise UsageError(f"kind={self.kind}: nothing is trained; give kind={' or kind='.join(KINDS_OF_BRANCH)}.")
