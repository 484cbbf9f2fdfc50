"""One application of a packed map: rows made once, when they are first read, and pieces written layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.kernels.ops import gather_layers, project_rows, write_heads
from kvbridge.kernels.packed import Gathered, PackedMap, Piece, Projected, Term
from kvbridge.kernels.reference import require_span, span_rows
from kvbridge.rotary import RotaryCodec
from kvbridge.states import CachedStates, ContentStates, check_finite
from kvbridge.variables import KINDS, Span

Source = ContentStates | CachedStates


def require_read(gathered: Gathered, source: Source, native: ContentStates | None) -> list[tuple[Span, int]]:
    """The spans that a map reads and the width of each, where the states have them.

    Raises:
        CacheError: they are of another source or pair, or the plan has no native head that makes them.
    """
    spans = gathered.inputs or tuple(Span(f"source.{kind}", 0, len(source.keys)) for kind in KINDS)
    widths = [require_span(span, source if span.role == "source" else native) for span in spans]
    width, found = sum(widths), source.keys[0].shape[-1]
    if gathered.slot_width is not None:
        if width < gathered.needs or found != gathered.slot_width:
            raise CacheError(
                f"the map reads {gathered.needs // gathered.slot_width} input slots of width {gathered.slot_width}; "
                f"the source states have {width // found} of width {found}. The bridge belongs to another source."
            )
    elif width != gathered.needs:
        raise CacheError(
            f"the map reads {gathered.needs} numbers per token from {', '.join(map(str, gathered.inputs))}; the "
            f"states have {width} there. The bridge belongs to another pair."
        )
    return list(zip(spans, widths, strict=True))


def refuse_unusable(destination: Float[Tensor, "2 L B H T D"], layers: range, written: Iterable[int]) -> None:
    """Refuse those of the written layers that hold a number which is not finite.

    Raises:
        CacheError: naming the layer.
    """
    for layer in written:
        keys, values = destination[:, layers.index(layer)]
        check_finite(keys, values, f"states of layer {layer}")


class Writing:
    """Writes layers of the target's states into a destination.

    Args:
        packed: the map.
        source: of all layers of the source.
        layers: the target layers in `destination`.
        destination: keys and values to be written; any strides.
        rotary: of the target; `None` leaves the keys de-rotated.
        native: what the target has computed itself at the same positions.
    """

    def __init__(
        self,
        packed: PackedMap,
        source: Source,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec | None,
        native: ContentStates | None,
    ) -> None:
        self.packed, self.source, self.native = packed, source, native
        self.layers, self.destination = layers, destination
        self.tables = (None, None) if rotary is None else rotary.tables(source.positions)
        self.interleaved = rotary is not None and rotary.interleaved
        self._made: dict[int, Tensor] = {}
        self._finite: dict[int, list[Tensor]] = {}

    def write(self, layer: int) -> None:
        """Write the keys and values of one target layer.

        Raises:
            CacheError: the map cannot read the states.
        """
        found = self._finite.setdefault(layer, [])
        for part, kind in enumerate(KINDS):
            tables = self.tables if kind == "keys" else (None, None)
            for piece in self.packed.pieces[kind, layer]:
                heads = slice(piece.heads.start, piece.heads.stop)
                place = self.destination[part, self.layers.index(layer)][:, heads]
                found.append(write_heads(*self._products(piece), piece.bias, *tables, self.interleaved, place))

    def require_finite(self) -> None:
        """Refuse what was written since the last call if a number is not finite.

        Raises:
            CacheError: naming the layer.
        """
        written, self._finite = self._finite, {}
        if not all(torch.stack([flag for flags in written.values() for flag in flags]).tolist()):
            refuse_unusable(self.destination, self.layers, written)

    def residual(self) -> dict[int, Float[Tensor, "B T E"]]:
        """The residual stream at the input of the layer after the last, in fp32, where the map makes it."""
        boundary = self.layers.stop
        for piece in self.packed.pieces.get(("residual", boundary), ()):
            rows, weights = self._products(piece)
            made = [
                project_rows(x, weight, None, "linear", torch.float32) for x, weight in zip(rows, weights, strict=True)
            ]
            batch = self.destination.shape[2]
            return {boundary: (torch.stack(made).sum(dim=0) + piece.bias).unflatten(0, (batch, -1))}
        return {}

    def _products(self, piece: Piece) -> tuple[list[Tensor], list[Tensor]]:
        return [self._read(term) for term in piece.terms], [term.weight for term in piece.terms]

    def _read(self, term: Term) -> Float[Tensor, "N r"]:
        rows = self._rows(term.rows)
        if term.slots is None:
            return rows
        width = term.weight.shape[0] // len(term.slots)
        if isinstance(term.slots, range):
            return rows[:, term.slots.start * width : term.slots.stop * width]
        return rows.unflatten(1, (-1, width)).index_select(1, term.slots).flatten(1)

    def _rows(self, number: int) -> Float[Tensor, "N p"]:
        if number not in self._made:
            rows = self.packed.rows[number]
            self._made[number] = self._gather(rows) if isinstance(rows, Gathered) else self._project(rows)
        return self._made[number]

    def _project(self, rows: Projected) -> Float[Tensor, "N R"]:
        return project_rows(self._rows(rows.of), rows.weight, rows.offset, rows.activation, self.packed.dtype)

    def _gather(self, gathered: Gathered) -> Float[Tensor, "N p"]:
        """The rows of some spans, each checked to be there, in the map's dtype."""
        source, native = self.source, self.native
        spans, widths = zip(*require_read(gathered, source, native), strict=True)
        tokens = source.keys[0].shape[0] * source.tokens
        rows = source.keys[0].new_empty((tokens, sum(widths)), dtype=self.packed.dtype)
        for span, place in zip(spans, rows.split(list(widths), dim=1), strict=True):
            states = source if span.role == "source" else native
            if span.states in KINDS and states is not None:
                codec = states.rotary if isinstance(states, CachedStates) and span.states == "keys" else None
                tables = codec.inverse_tables(states.positions) if codec else (None, None)
                tensors = list(getattr(states, span.states)[span.start : span.stop])
                gather_layers(tensors, *tables, codec is not None and codec.interleaved, place)
            elif native is not None:
                place.copy_(span_rows(span, native).flatten(0, 1))
        return rows
