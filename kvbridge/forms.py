"""Executable forms: what a fitted map is made of once the fitting method no longer matters.

A form is data (weights and index tables) with checks; `kvbridge.kernels` executes it. A map is a tuple of forms,
each of which makes other layers or another kind of the target's states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.states import ContentStates
from kvbridge.variables import Span

KINDS = ("keys", "values")


@runtime_checkable
class Map(Protocol):
    """Anything that turns source content states into target content states."""

    def apply(self, source: ContentStates, layers: range, native: ContentStates | None = None) -> ContentStates:
        """Target content states of the target `layers`, in order, at the positions of `source`.

        Args:
            source: of all layers of the source.
            layers: the target layers wanted; a map that makes the residual stream at the input of layer
                `layers.stop` gives that too.
            native: what the target has computed itself at the same positions: layers `0 … m` and the residual stream
                at their inputs; `None` where the plan has no native head.
        """
        ...


def input_slot(kind: str, layer: int, head: int, layers: int, heads: int) -> int:
    """Number of the input slot (kind, layer, head) of a source with `layers` layers of `heads` KV heads."""
    return (KINDS.index(kind) * layers + layer) * heads + head


def _require_floating(name: str, tensors: dict[str, Tensor], axes: dict[str, int]) -> None:
    for part, count in axes.items():
        if part in tensors and not (tensors[part].is_floating_point() and tensors[part].ndim == count):
            given = ", ".join(f"{part} {tensor.dtype}{list(tensor.shape)}" for part, tensor in tensors.items())
            wanted = ", ".join(f"{part} of {count}" for part, count in axes.items())
            raise CacheError(f"a {name} form has floating-point parts with these axes: {wanted}; given: {given}.")


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
        _require_floating("shared-basis", self.tensors(), {"reduce": 2, "expand": 2, "bias": 1})
        if not self.inputs or not self.outputs:
            raise CacheError("a shared-basis form names no inputs or no outputs; give at least one span of each.")
        wrong = [s for s in self.outputs if s.role != "target" or s.states not in (*KINDS, "residual")]
        if wrong:
            raise CacheError(
                f"a shared-basis form makes {wrong[0]}; expected target.keys, target.values or target.residual."
            )
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
        residuals = sum(len(span.layers) for span in self.outputs if span.states == "residual")
        rest = self.expand.shape[1] - self._kv_layers() * self.kv_heads * self.head_dim
        fits = rest > 0 and rest % residuals == 0 if residuals else rest == 0
        if self.kv_heads < 1 or self.head_dim < 1 or not fits:
            named = ", ".join(map(str, self.outputs))
            raise CacheError(
                f"a shared-basis form expands to {self.expand.shape[1]} numbers, which are not the rows of {named} "
                f"with {self.kv_heads} KV heads × {self.head_dim}."
            )

    def _kv_layers(self) -> int:
        return sum(len(span.layers) for span in self.outputs if span.states in KINDS)

    @property
    def input_width(self) -> int:
        """Numbers in one row of the inputs, `p`."""
        return (self.expand if self.reduce is None else self.reduce).shape[0]

    def layer_width(self, span: Span) -> int:
        """Numbers that one layer of an output takes."""
        kv_width = self.kv_heads * self.head_dim
        if span.states in KINDS:
            return kv_width
        residuals = sum(len(each.layers) for each in self.outputs if each.states == "residual")
        return (self.expand.shape[1] - self._kv_layers() * kv_width) // residuals

    def columns(self, layers: range) -> list[tuple[Span, slice]]:
        """The outputs that belong to the target `layers`, and where they stand among the columns of `expand`.

        These are the keys and values of `layers`, and the residual stream at the input of layer `layers.stop`, from
        which a tail recompute starts.
        """
        found, first = [], 0
        for span in self.outputs:
            width = self.layer_width(span)
            wanted = layers if span.states in KINDS else range(layers.stop, layers.stop + 1)
            start, stop = max(span.start, wanted.start), min(span.stop, wanted.stop)
            if start < stop:
                columns = slice(first + (start - span.start) * width, first + (stop - span.start) * width)
                found.append((Span(span.variable, start, stop), columns))
            first += len(span.layers) * width
        return found

    def reduce_flops(self, layers: range) -> int:
        """Operations of `z = x P` for one token, none where nothing is made for the target `layers`."""
        return 2 * self.reduce.numel() if self.reduce is not None and self.columns(layers) else 0

    def flops_per_token(self, layers: range) -> int:
        """Multiply-adds counted as two operations, for one token and what belongs to the target `layers`."""
        made = sum(columns.stop - columns.start for _, columns in self.columns(layers))
        return self.reduce_flops(layers) + 2 * self.expand.shape[0] * made

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


Form = SlotAffine | SharedBasis
FORMS: dict[str, type[Form]] = {SlotAffine.name: SlotAffine, SharedBasis.name: SharedBasis}


def require_distinct(forms: Iterable[Form]) -> None:
    """Refuse forms of one map that make the same states twice.

    Raises:
        CacheError: naming the layer.
    """
    made = [(span.variable, layer) for form in forms for span in form.outputs for layer in span.layers]
    if len(made) > len(set(made)):
        variable, layer = next(each for each in made if made.count(each) > 1)
        raise CacheError(f"two forms of one map make {variable} of layer {layer}; give one form for each layer.")


def flops_per_token(forms: Iterable[Form], layers: range) -> int:
    """Operations that mapping one token into the target `layers` takes; a basis that forms share counts once."""
    total, counted = 0, set[tuple[int, tuple[Span, ...]]]()
    for form in forms:
        total += form.flops_per_token(layers)
        if isinstance(form, SharedBasis) and form.reduce is not None and form.columns(layers):
            basis = id(form.reduce), form.inputs
            total -= form.reduce_flops(layers) if basis in counted else 0
            counted.add(basis)
    return total


def needed_native_head(forms: Iterable[Form]) -> int | None:
    """The highest target layer that forms read; `None` where they read the source alone."""
    read = [span.stop - 1 for form in forms for span in form.inputs if span.role == "target"]
    return max(read, default=None)
