"""Executable forms: what a fitted map is made of once the fitting method no longer matters.

A form is data (weights and index tables) with checks; `kvbridge.kernels` executes it. A map is a tuple of forms,
each of which makes other layers or another kind of the target's states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.branch import ResidualBranch
from kvbridge.errors import CacheError
from kvbridge.rotary import RotaryCodec
from kvbridge.shared_basis import SharedBasis
from kvbridge.slot_affine import SlotAffine, input_slot
from kvbridge.states import CachedStates, ContentStates
from kvbridge.variables import KINDS, Span

__all__ = [
    "FORMS",
    "KINDS",
    "Form",
    "Map",
    "ResidualBranch",
    "SharedBasis",
    "SlotAffine",
    "WritingMap",
    "branches_of",
    "flops_per_token",
    "frozen_forms",
    "input_slot",
    "needed_native_head",
    "require_distinct",
    "same_forms",
]


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


@runtime_checkable
class WritingMap(Map, Protocol):
    """A map that writes what it makes into the target's cache, rotated, without content states in between."""

    def write(
        self,
        source: ContentStates | CachedStates,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec,
        native: ContentStates | None = None,
    ) -> dict[int, Float[Tensor, "B T E"]]:
        """Fill the keys and values of the target `layers`, in order, at the positions of `source`.

        Args:
            source: of all layers of the source.
            layers: the target layers wanted.
            destination: keys and values as the target caches them, to be written; any strides.
            rotary: of the target.
            native: as for `apply`.

        Returns:
            The residual stream at the input of layer `layers.stop`, where the map makes it.

        Raises:
            CacheError: the map cannot read the states, or makes numbers that are not finite.
        """
        ...


Form = SlotAffine | SharedBasis | ResidualBranch
FORMS: dict[str, type[Form]] = {form.name: form for form in (SlotAffine, SharedBasis, ResidualBranch)}


def frozen_forms(forms: Iterable[Form]) -> list[SlotAffine | SharedBasis]:
    """The forms of a map that make states of their own, in order."""
    return [form for form in forms if not isinstance(form, ResidualBranch)]


def branches_of(forms: Iterable[Form]) -> list[ResidualBranch]:
    """The residual branches of a map, in order."""
    return [form for form in forms if isinstance(form, ResidualBranch)]


def require_distinct(forms: Iterable[Form]) -> None:
    """Refuse forms of one map that make the same states twice, and branches that add to states which none makes.

    Raises:
        CacheError: naming the layer.
    """
    forms = tuple(forms)
    made = _made(frozen_forms(forms))
    if len(made) > len(set(made)):
        variable, layer = next(each for each in made if made.count(each) > 1)
        raise CacheError(f"two forms of one map make {variable} of layer {layer}; give one form for each layer.")
    bare = [each for each in _made(branches_of(forms)) if each not in made]
    if bare:
        variable, layer = bare[0]
        raise CacheError(
            f"a residual branch adds to {variable} of layer {layer}, which no other form of the map makes; give a "
            "branch on layers that the map makes."
        )


def _made(forms: Iterable[Form]) -> list[tuple[str, int]]:
    return [(span.variable, layer) for form in forms for span in form.outputs for layer in span.layers]


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


def same_forms(one: Iterable[Form], other: Iterable[Form]) -> bool:
    """Whether two maps are of the same forms in the same order, with the same numbers wherever they lie."""
    mine, theirs = tuple(one), tuple(other)
    return len(mine) == len(theirs) and all(map(_same_form, mine, theirs))


def _same_form(one: Form, other: Form) -> bool:
    if type(one) is not type(other) or one.options() != other.options():
        return False
    mine, theirs = one.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(_same_tensor(mine[name], theirs[name]) for name in mine)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return one is other or (alike and torch.equal(one, other.to(one.device)))
