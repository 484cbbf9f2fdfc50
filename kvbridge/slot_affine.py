"""The form that reads single heads: a table of input slots and one dense map for each target layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.variables import KINDS, Span


def input_slot(kind: str, layer: int, head: int, layers: int, heads: int) -> int:
    """Number of the input slot (kind, layer, head) of a source with `layers` layers of `heads` KV heads."""
    return (KINDS.index(kind) * layers + layer) * heads + head


@dataclass(frozen=True, slots=True)
class SlotAffine:
    """Per target layer and head, a table of input slots and one dense map: `y = Σ_j x[slot_j] W_j + b`.

    Covers ridge over all heads of k layers, head-local ridge, unequal head counts and `D_s ≠ D_t`. `S` is the number
    of input slots of one output head (`k · H_s` over all heads, `k` head by head).

    Attributes:
        kind: what it makes, `keys` or `values`.
        slots: input slots, numbered as `input_slot` does.
        weight: one map per slot, from `D_s` to `D_t`.
        bias: added to the sum.

    Raises:
        CacheError: the parts do not fit each other.
    """

    name: ClassVar[str] = "slot_affine"

    kind: str
    slots: Int[Tensor, "L_t H_t S"]
    weight: Float[Tensor, "L_t H_t S D_s D_t"]
    bias: Float[Tensor, "L_t H_t D_t"]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CacheError(f"a slot-affine form makes {self.kind!r}, expected one of {', '.join(KINDS)}.")
        whole = not self.slots.is_floating_point()
        real = self.weight.is_floating_point() and self.bias.is_floating_point()
        if not (whole and real and self.slots.ndim == 3 and self.weight.ndim == 5):
            given = ", ".join(f"{name} {part.dtype}{list(part.shape)}" for name, part in self.tensors().items())
            raise CacheError(
                "a slot-affine form has a whole-number slot table of 3 axes, weights of 5 axes and a bias, both "
                f"floating-point; given: {given}."
            )
        if self.weight.shape[:3] != self.slots.shape:
            raise CacheError(
                f"a slot-affine form has weights for {tuple(self.weight.shape[:3])} (layer, head, slot) entries "
                f"and a slot table of {tuple(self.slots.shape)}; both must agree."
            )
        if self.bias.shape != (*self.slots.shape[:2], self.weight.shape[-1]):
            raise CacheError(
                f"a slot-affine form has a bias of shape {tuple(self.bias.shape)}, expected "
                f"{(*self.slots.shape[:2], self.weight.shape[-1])}."
            )
        if not self.slots.numel() or int(self.slots.min()) < 0:
            raise CacheError(
                f"a slot-affine form has a slot table of {tuple(self.slots.shape)} with "
                f"{'a negative input slot' if self.slots.numel() else 'no input slots'}; expected slots from 0."
            )

    @property
    def layers(self) -> int:
        """Target layers, `L_t`."""
        return self.slots.shape[0]

    @property
    def inputs(self) -> tuple[Span, ...]:
        """No spans: it reads single heads of the source, by slot."""
        return ()

    @property
    def outputs(self) -> tuple[Span, ...]:
        """All layers of its kind."""
        return (Span(f"target.{self.kind}", 0, self.layers),)

    def flops_per_token(self, layers: range) -> int:
        """Multiply-adds counted as two operations, for one token and the target `layers`."""
        return 2 * self.weight[layers.start : layers.stop].numel()

    def tensors(self) -> dict[str, Tensor]:
        return {"slots": self.slots, "weight": self.weight, "bias": self.bias}

    def options(self) -> dict[str, Any]:
        """What is not a tensor, as JSON values."""
        return {"kind": self.kind}

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> SlotAffine:
        """The same form with weights in another dtype (the bias stays in fp32) or on another device."""
        return SlotAffine(
            self.kind,
            self.slots.to(device),
            self.weight.to(device=device, dtype=dtype),
            self.bias.to(device=device),
        )
