"""Columns of the workspace `[x | z]`, and the segments of the cache that fill those of `x`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbridge.errors import CacheError
from kvbridge.kernels.triton.sides import Side
from kvbridge.variables import KINDS, Span

# Whose memory a segment lies in; also the row of the slot table that places it.
SOURCE, TARGET, STREAM = range(3)
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring coordinates that are read together.

    Attributes:
        memory: `SOURCE` or `TARGET` for a cache, `STREAM` for a residual stream of the target.
        kind: 0 for keys, 1 for values.
        layer: in the model.
        head: in the layer.
        dim: first coordinate in the head.
        column: where it goes.
        width: coordinates.
        rotated: whether it is the rotary part of a key.
        normed: whether it is divided by its root mean square.
        interleaved: rotary convention of its model.
    """

    memory: int
    kind: int
    layer: int
    head: int
    dim: int
    column: int
    width: int
    rotated: bool
    normed: bool
    interleaved: bool


@dataclass(slots=True)
class Workspace:
    """Columns handed out so far, each layer of a variable on a multiple of `ALIGNED`.

    Attributes:
        source: shape of the source's rows.
        target: shape of the target's own rows that are read.
        columns: first column of each (variable, layer).
        pitch: columns in all.
    """

    source: Side
    target: Side
    columns: dict[tuple[str, int], int] = field(default_factory=dict)
    pitch: int = 0

    def take(self, width: int) -> int:
        """The first of `width` new columns."""
        first = self.pitch
        self.pitch += -(-width // ALIGNED) * ALIGNED
        return first

    def width(self, variable: str) -> int:
        """Coordinates of one layer of a variable."""
        role, states = variable.split(".")
        side = self.source if role == "source" else self.target
        return side.heads * side.head_dim if states in KINDS else side.hidden

    def reserve(self, spans: Iterable[Span]) -> None:
        """Give columns to every layer of `spans`, neighbours side by side.

        Raises:
            CacheError: a span reaches beyond its model.
        """
        for span in spans:
            side = self.source if span.role == "source" else self.target
            if span.stop > side.layers:
                raise CacheError(
                    f"the map reads {span}; the {span.role} has {side.layers} layers. The bridge belongs to another "
                    "pair."
                )
        for variable, layer in sorted({(span.variable, layer) for span in spans for layer in span.layers}):
            if (variable, layer) not in self.columns:
                self.columns[variable, layer] = self.take(self.width(variable))

    def runs(self, spans: Iterable[Span]) -> list[tuple[int, int, int]]:
        """Where the row of some spans lies: (workspace column, coordinate of the row, length), layer by layer."""
        found, row = [], 0
        for span in spans:
            width = self.width(span.variable)
            for layer in span.layers:
                found.append((self.columns[span.variable, layer], row, width))
                row += width
        return found

    def segments(self) -> list[Segment]:
        """What fills the columns of `x`."""
        found = []
        for (variable, layer), column in self.columns.items():
            role, states = variable.split(".")
            if states not in KINDS:
                width, normed = self.target.hidden, states == "normed_residual"
                found.append(Segment(STREAM, 0, layer, 0, 0, column, width, False, normed, self.source.interleaved))
                continue
            side, memory = (self.source, SOURCE) if role == "source" else (self.target, TARGET)
            for head in range(side.heads):
                for dim, width, rotated in parts(states, side, side.head_dim):
                    place = column + head * side.head_dim + dim
                    kind = KINDS.index(states)
                    # What is not rotated has no convention: it goes with the source's.
                    paired = side.interleaved if rotated else self.source.interleaved
                    found.append(Segment(memory, kind, layer, head, dim, place, width, rotated, False, paired))
        return found


def parts(states: str, side: Side, widest: int) -> list[tuple[int, int, bool]]:
    """One head as (first coordinate, width, whether it is rotated); what is not rotated is cut to `widest`."""
    rotary = side.rotary if states == "keys" else 0
    whole = [(0, rotary, True)] if rotary else []
    rest = range(rotary, side.head_dim, widest)
    return whole + [(first, min(widest, side.head_dim - first), False) for first in rest]
