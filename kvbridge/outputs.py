"""Where the outputs of a form stand among the columns of its last weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.variables import KINDS, Span


def require_floating(name: str, tensors: dict[str, Tensor], axes: dict[str, int]) -> None:
    """Refuse parts of a form that are not floating-point tensors with so many axes.

    Raises:
        CacheError: naming what was given.
    """
    for part, count in axes.items():
        if part in tensors and not (tensors[part].is_floating_point() and tensors[part].ndim == count):
            given = ", ".join(f"{part} {tensor.dtype}{list(tensor.shape)}" for part, tensor in tensors.items())
            wanted = ", ".join(f"{part} of {count}" for part, count in axes.items())
            raise CacheError(f"a {name} form has floating-point parts with these axes: {wanted}; given: {given}.")


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows of some outputs, one after the other, each laid out as `Span` says.

    Attributes:
        outputs: keys, values, or the residual stream at the input of single layers of the target.
        width: numbers in one row of all of them; what keys and values do not take is the residual stream's.
        kv_heads: KV heads of the target, `H_t`.
        head_dim: width of one, `D_t`.
    """

    outputs: tuple[Span, ...]
    width: int
    kv_heads: int
    head_dim: int

    def require(self, name: str, inputs: Sequence[Span]) -> None:
        """Refuse outputs that are not those of a target, or whose rows are not of this width.

        Args:
            name: of the form, for messages.
            inputs: what it reads.

        Raises:
            CacheError: naming what does not fit.
        """
        if not inputs or not self.outputs:
            raise CacheError(f"a {name} form names no inputs or no outputs; give at least one span of each.")
        wrong = [s for s in self.outputs if s.role != "target" or s.states not in (*KINDS, "residual")]
        if wrong:
            raise CacheError(f"a {name} form makes {wrong[0]}; expected target.keys, target.values or target.residual.")
        residuals = self._layers("residual")
        rest = self.width - self._layers(*KINDS) * self.kv_heads * self.head_dim
        fits = rest > 0 and rest % residuals == 0 if residuals else rest == 0
        if self.kv_heads < 1 or self.head_dim < 1 or not fits:
            raise CacheError(
                f"a {name} form expands to {self.width} numbers, which are not the rows of "
                f"{', '.join(map(str, self.outputs))} with {self.kv_heads} KV heads × {self.head_dim}."
            )

    def _layers(self, *states: str) -> int:
        return sum(len(span.layers) for span in self.outputs if span.states in states)

    def layer_width(self, span: Span) -> int:
        """Numbers that one layer of an output takes."""
        kv_width = self.kv_heads * self.head_dim
        if span.states in KINDS:
            return kv_width
        return (self.width - self._layers(*KINDS) * kv_width) // self._layers("residual")

    def places(self) -> dict[tuple[str, int], slice]:
        """The columns of every layer that is made, by variable and layer."""
        found, first = {}, 0
        for span in self.outputs:
            width = self.layer_width(span)
            for at, layer in enumerate(span.layers):
                found[span.variable, layer] = slice(first + at * width, first + (at + 1) * width)
            first += len(span.layers) * width
        return found

    def columns(self, layers: range) -> list[tuple[Span, slice]]:
        """The outputs that belong to the target `layers`, and where they stand.

        These are the keys and values of `layers`, and the residual stream at the input of layer `layers.stop`, from
        which a tail recompute starts.
        """
        found, places = [], self.places()
        for span in self.outputs:
            wanted = layers if span.states in KINDS else range(layers.stop, layers.stop + 1)
            start, stop = max(span.start, wanted.start), min(span.stop, wanted.stop)
            if start < stop:
                first, last = places[span.variable, start], places[span.variable, stop - 1]
                found.append((Span(span.variable, start, stop), slice(first.start, last.stop)))
        return found
