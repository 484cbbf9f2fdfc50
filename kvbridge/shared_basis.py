"""The form that reads whole rows: one basis for many outputs, or a full-rank joint map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.outputs import OutputRows, require_floating
from kvbridge.variables import Span


@dataclass(frozen=True, slots=True)
class SharedBasis:
    """One basis for many outputs: `z = x P`, `y = z B + b`; without `P` a full-rank joint map, `z = x`.

    `x` is the concatenation of the inputs' rows and `y` of the outputs' rows, each row laid out as `Span` says: `p` and
    `q` are their widths, `R` that of the basis (`p` without `P`).

    Attributes:
        inputs: what it reads.
        outputs: what it makes: keys, values, or the residual stream at the input of single layers.
        reduce: `P`; forms of one map may share one tensor, and then `z` is computed once for them.
        expand: `B`.
        bias: `b`.
        kv_heads: KV heads of the target, `H_t`.
        head_dim: width of one, `D_t`.

    Raises:
        CacheError: the parts do not fit each other.
    """

    name: ClassVar[str] = "shared_basis"

    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    reduce: Float[Tensor, "p R"] | None
    expand: Float[Tensor, "R q"]
    bias: Float[Tensor, "q"]
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_floating("shared-basis", self.tensors(), {"reduce": 2, "expand": 2, "bias": 1})
        if self.reduce is not None and self.reduce.shape[1] != self.expand.shape[0]:
            raise CacheError(
                f"a shared-basis form reduces to {self.reduce.shape[1]} directions and expands "
                f"{self.expand.shape[0]}; both must agree."
            )
        if self.bias.shape[0] != self.expand.shape[1]:
            raise CacheError(
                f"a shared-basis form expands to {self.expand.shape[1]} numbers and has a bias of "
                f"{self.bias.shape[0]}; both must agree."
            )
        self.rows.require("shared-basis", self.inputs)

    @property
    def rows(self) -> OutputRows:
        """Where the outputs stand among the columns of `expand`."""
        return OutputRows(self.outputs, self.expand.shape[1], self.kv_heads, self.head_dim)

    @property
    def input_width(self) -> int:
        """Numbers in one row of the inputs, `p`."""
        return (self.expand if self.reduce is None else self.reduce).shape[0]

    def columns(self, layers: range) -> list[tuple[Span, slice]]:
        """The outputs that belong to the target `layers`, and where they stand, as `OutputRows.columns` says."""
        return self.rows.columns(layers)

    def reduce_flops(self, layers: range) -> int:
        """Operations of `z = x P` for one token, none where nothing is made for the target `layers`."""
        return 2 * self.reduce.numel() if self.reduce is not None and self.columns(layers) else 0

    def flops_per_token(self, layers: range) -> int:
        """Multiply-adds counted as two operations, for one token and what belongs to the target `layers`."""
        made = sum(columns.stop - columns.start for _, columns in self.columns(layers))
        return self.reduce_flops(layers) + 2 * self.expand.shape[0] * made

    def describe(self) -> str:
        """The rank in words: that of the basis, which a fit may have chosen below the one asked for."""
        return "full rank" if self.reduce is None else f"rank {self.expand.shape[0]}"

    def tensors(self) -> dict[str, Tensor]:
        reduce = {} if self.reduce is None else {"reduce": self.reduce}
        return reduce | {"expand": self.expand, "bias": self.bias}

    def options(self) -> dict[str, Any]:
        """What is not a tensor, as JSON values."""
        return {
            "inputs": [str(span) for span in self.inputs],
            "outputs": [str(span) for span in self.outputs],
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> SharedBasis:
        """The same form with weights in another dtype (the bias stays in fp32) or on another device."""
        return SharedBasis(
            self.inputs,
            self.outputs,
            None if self.reduce is None else self.reduce.to(device=device, dtype=dtype),
            self.expand.to(device=device, dtype=dtype),
            self.bias.to(device=device),
            self.kv_heads,
            self.head_dim,
        )
