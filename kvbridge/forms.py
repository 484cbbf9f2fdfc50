"""Executable forms: what a fitted map is made of once the fitting method no longer matters.

A form is data (weights and index tables) with checks; `kvbridge.kernels` executes it. One form makes either the keys
or the values of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.states import ContentStates

KINDS = ("keys", "values")


@runtime_checkable
class Map(Protocol):
    """Anything that turns source content states into target content states."""

    def apply(self, states: ContentStates, layers: range) -> ContentStates:
        """Target content states of the target `layers`, in order, at the positions of `states`."""
        ...


def input_slot(kind: str, layer: int, head: int, layers: int, heads: int) -> int:
    """Number of the input slot (kind, layer, head) of a source with `layers` layers of `heads` KV heads."""
    return (KINDS.index(kind) * layers + layer) * heads + head


@dataclass(frozen=True, slots=True)
class SlotAffine:
    """Per target layer and head, a table of input slots and one dense map: `y = Σ_j x[slot_j] W_j + b`.

    Covers ridge over all heads of k layers, head-local ridge, unequal head counts and `D_s ≠ D_t`. `S` is the number
    of input slots of one output head (`k · H_s` over all heads, `k` head by head).

    Attributes:
        slots: input slots, numbered as `input_slot` does.
        weight: one map per slot, from `D_s` to `D_t`.
        bias: added to the sum.
    """

    name: ClassVar[str] = "slot_affine"

    slots: Int[Tensor, "L_t H_t S"]
    weight: Float[Tensor, "L_t H_t S D_s D_t"]
    bias: Float[Tensor, "L_t H_t D_t"]

    def __post_init__(self) -> None:
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
        if self.slots.numel() and int(self.slots.min()) < 0:
            raise CacheError("a slot-affine form has a negative input slot.")

    @property
    def layers(self) -> int:
        """Target layers, `L_t`."""
        return self.slots.shape[0]

    def flops_per_token(self, layers: range) -> int:
        """Multiply-adds counted as two operations, for one token and the target `layers`."""
        return 2 * self.weight[layers.start : layers.stop].numel()

    def tensors(self) -> dict[str, Tensor]:
        return {"slots": self.slots, "weight": self.weight, "bias": self.bias}

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> SlotAffine:
        """The same form with weights in another dtype (the bias stays in fp32) or on another device."""
        return SlotAffine(
            self.slots.to(device), self.weight.to(device=device, dtype=dtype), self.bias.to(device=device)
        )


Form = SlotAffine
FORMS: dict[str, type[Form]] = {SlotAffine.name: SlotAffine}
