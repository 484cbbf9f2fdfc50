"""The form that corrects a frozen map: a narrow branch, trained, whose output is added to what other forms make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.outputs import OutputRows, require_floating
from kvbridge.variables import Span

# How many columns of `reduce` make one number of the branch's `R`.
ACTIVATIONS = {"linear": 1, "quadratic": 2, "gelu": 1}


@dataclass(frozen=True, slots=True)
class ResidualBranch:
    """What is added to the frozen forms of the same map: `φ(x A + a) B + b`.

    `x` is the concatenation of the inputs' rows and the result that of the outputs' rows, each row laid out as `Span`
    says: `p` and `q` are their widths, `R` the rank and `W` that of `A`. All scales (of inputs that were whitened for
    training, of outputs in units of their spread) are folded into the weights.

    Attributes:
        inputs: what it reads.
        outputs: what it adds to; some form of the map must make it.
        activation: `φ`: `linear` for none, `gelu` for the exact GELU, `quadratic` for `u ∘ v` of the two halves of its
            argument, which is twice as wide as the rank.
        reduce: `A`.
        offset: `a`.
        expand: `B`.
        bias: `b`.
        kv_heads: KV heads of the target, `H_t`.
        head_dim: width of one, `D_t`.

    Raises:
        CacheError: the parts do not fit each other.
    """

    name: ClassVar[str] = "residual_branch"

    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    activation: str
    reduce: Float[Tensor, "p W"]
    offset: Float[Tensor, "W"]
    expand: Float[Tensor, "R q"]
    bias: Float[Tensor, "q"]
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise CacheError(
                f"a residual branch has the activation {self.activation!r}, expected one of {', '.join(ACTIVATIONS)}."
            )
        require_floating("residual-branch", self.tensors(), {"reduce": 2, "offset": 1, "expand": 2, "bias": 1})
        wide = self.rank * ACTIVATIONS[self.activation]
        if not self.rank or self.reduce.shape[1] != wide or self.offset.shape[0] != wide:
            raise CacheError(
                f"a {self.activation} residual branch of rank {self.rank} reduces to {self.reduce.shape[1]} numbers "
                f"with an offset of {self.offset.shape[0]}, expected {wide or 'a rank of 1 or more'}."
            )
        if self.bias.shape[0] != self.expand.shape[1]:
            raise CacheError(
                f"a residual branch expands to {self.expand.shape[1]} numbers and has a bias of "
                f"{self.bias.shape[0]}; both must agree."
            )
        self.rows.require("residual-branch", self.inputs)

    @property
    def rank(self) -> int:
        """Numbers between the two weight matrices, `R`."""
        return self.expand.shape[0]

    def describe(self) -> str:
        """Activation and rank, for people."""
        return f"{self.activation}, rank {self.rank}"

    @property
    def rows(self) -> OutputRows:
        """Where the outputs stand among the columns of `expand`."""
        return OutputRows(self.outputs, self.expand.shape[1], self.kv_heads, self.head_dim)

    @property
    def input_width(self) -> int:
        """Numbers in one row of the inputs, `p`."""
        return self.reduce.shape[0]

    def columns(self, layers: range) -> list[tuple[Span, slice]]:
        """The outputs that belong to the target `layers`, and where they stand, as `OutputRows.columns` says."""
        return self.rows.columns(layers)

    def flops_per_token(self, layers: range) -> int:
        """Multiply-adds with weights counted as two operations, for one token and what belongs to the `layers`."""
        made = sum(columns.stop - columns.start for _, columns in self.columns(layers))
        return 2 * (self.reduce.numel() + self.rank * made) if made else 0

    def tensors(self) -> dict[str, Tensor]:
        return {"reduce": self.reduce, "offset": self.offset, "expand": self.expand, "bias": self.bias}

    def options(self) -> dict[str, Any]:
        """What is not a tensor, as JSON values."""
        return {
            "inputs": [str(span) for span in self.inputs],
            "outputs": [str(span) for span in self.outputs],
            "activation": self.activation,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ResidualBranch:
        """The same form with `B` in another dtype or on another device; `A`, offset and bias stay in fp32.

        Large weights cancel in `A` where inputs were whitened: in bf16 it adds a quarter of noise (docs/residual.md).
        """
        return ResidualBranch(
            self.inputs,
            self.outputs,
            self.activation,
            self.reduce.to(device=device),
            self.offset.to(device=device),
            self.expand.to(device=device, dtype=dtype),
            self.bias.to(device=device),
            self.kv_heads,
            self.head_dim,
        )


def join_branches(branches: Iterable[ResidualBranch]) -> list[ResidualBranch]:
    """As few branches as add the same: those of one activation that read and make the same become one.

    Its rank is the sum of theirs.
    """
    groups: dict[tuple[str, tuple[Span, ...], tuple[Span, ...]], list[ResidualBranch]] = {}
    for branch in branches:
        groups.setdefault((branch.activation, branch.inputs, branch.outputs), []).append(branch)
    return [_joined(group) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(branches: list[ResidualBranch]) -> ResidualBranch:
    factors = range(ACTIVATIONS[branches[0].activation])

    def columns(weights: list[Tensor]) -> Tensor:
        # The branches' columns of each factor of φ stand together.
        return torch.cat([weight.chunk(len(factors), dim=-1)[factor] for factor in factors for weight in weights], -1)

    return replace(
        branches[0],
        reduce=columns([branch.reduce for branch in branches]),
        offset=columns([branch.offset for branch in branches]),
        expand=torch.cat([branch.expand for branch in branches]),
        bias=torch.stack([branch.bias for branch in branches]).sum(dim=0),
    )
