"""Products of variables: how they are named, and how a wanted one is put together from those that are stored.

A variable is named by the text of a span of layers: `target.keys[0:5]`, or `target.keys` for all layers of the model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvbridge.errors import CalibrationError, UsageError
from kvbridge.variables import VARIABLES, Span

MomentBlock = tuple[str, str]
# Stands for the source's keys and values, where a calibration makes a sketch of them.
SKETCH = "source.sketch"
KNOWN = (SKETCH, *VARIABLES)
# Stands for the last layer of a model whose depth is not known.
UNKNOWN_END = 2**31


@dataclass(frozen=True, slots=True)
class Extent:
    """Layers `start … stop − 1` of one variable of moments."""

    variable: str
    start: int
    stop: int

    @classmethod
    def of(cls, name: str, layers: Mapping[str, int]) -> Extent:
        """Read a variable's name.

        Args:
            name: text of a span.
            layers: how many layers each variable has, where known.

        Raises:
            UsageError: the name is no span of layers.
        """
        found = re.fullmatch(r"([A-Za-z_.]+)(?:\[(\d+):(\d+)\])?", name)
        if found is None:
            raise UsageError(f"{name!r} is no span of layers; write target.keys, or target.keys[0:5] for five.")
        return cls(found[1], int(found[2] or 0), int(found[3] or layers.get(found[1], UNKNOWN_END)))

    def __len__(self) -> int:
        return self.stop - self.start

    def name(self, layers: Mapping[str, int]) -> str:
        """The name by which moments know it: without brackets where it is all layers."""
        if self.start == 0 and self.stop == layers.get(self.variable, UNKNOWN_END):
            return self.variable
        return f"{self.variable}[{self.start}:{self.stop}]"

    def covers(self, other: Extent) -> bool:
        return self.variable == other.variable and self.start <= other.start and other.stop <= self.stop

    def cut(self, stored: Iterable[Extent]) -> list[Extent]:
        """This extent in pieces that end where a stored one begins or ends."""
        inner = {edge for extent in stored if extent.variable == self.variable for edge in (extent.start, extent.stop)}
        edges = sorted({self.start, self.stop, *(edge for edge in inner if self.start < edge < self.stop)})
        return [Extent(self.variable, start, stop) for start, stop in itertools.pairwise(edges)]

    def columns(self, piece: Extent, width: int) -> slice:
        """Where a covered piece lies in rows of this extent that are `width` wide.

        Raises:
            CalibrationError: it is a part, and how many layers this extent has is not known.
        """
        if self == piece:
            return slice(0, width)
        if self.stop == UNKNOWN_END:
            raise CalibrationError(
                f"these moments do not say how many layers {self.variable} has, so layers {piece.start} … "
                f"{piece.stop - 1} cannot be cut out; calibrate anew."
            )
        one = width // len(self)
        return slice((piece.start - self.start) * one, (piece.stop - self.start) * one)


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of a wanted product, and the stored block that holds it.

    Attributes:
        first: layers of the wanted product's first variable.
        second: layers of its second one.
        block: name of the stored block.
        swapped: whether the block holds the product of the second variable with the first.
    """

    first: Extent
    second: Extent
    block: MomentBlock
    swapped: bool


def canonical(a: str, b: str) -> MomentBlock:
    """The order in which a product of two variables is stored."""

    def place(name: str) -> tuple[int, str, int, int]:
        extent = Extent.of(name, {})
        known = KNOWN.index(extent.variable) if extent.variable in KNOWN else len(KNOWN)
        return known, extent.variable, extent.start, extent.stop

    first, second = sorted((a, b), key=place)
    return first, second


def joint_blocks(inputs: Iterable[str | Span], outputs: Iterable[str | Span]) -> frozenset[MomentBlock]:
    """What a least-squares map reads that makes all `outputs` from all `inputs` together."""
    features, made = [str(name) for name in inputs], [str(name) for name in outputs]
    pairs = itertools.chain(itertools.combinations_with_replacement(features, 2), itertools.product(features, made))
    return frozenset(canonical(a, b) for a, b in pairs)


def plain_blocks(blocks: Iterable[MomentBlock], layers: Mapping[str, int]) -> frozenset[MomentBlock]:
    """The same blocks under the names by which they are stored: `target.keys` for all layers, in canonical order.

    Args:
        blocks: pairs of variables.
        layers: how many layers each variable has.

    Raises:
        UsageError: a name is no span, or reaches beyond its model.
    """

    def plain(name: str) -> str:
        span = Span.parse(name, layers.get(name.partition("[")[0], 1))
        return Extent(span.variable, span.start, span.stop).name(layers)

    return frozenset(canonical(plain(a), plain(b)) for a, b in blocks)


def tiles(wanted: MomentBlock, stored: Iterable[MomentBlock], layers: Mapping[str, int]) -> Iterator[Tile | None]:
    """The stored pieces of a product, in order of its rows and then its columns; `None` for one that is missing."""
    first, second = (Extent.of(name, layers) for name in wanted)
    oriented: list[tuple[Extent, Extent, MomentBlock, bool]] = []
    for block in stored:
        x, y = (Extent.of(name, layers) for name in block)
        oriented += [(x, y, block, False), (y, x, block, True)]
    useful = [at for at in oriented if at[0].variable == first.variable and at[1].variable == second.variable]

    def held(row: Extent, column: Extent) -> Tile | None:
        found = next((at for at in useful if at[0].covers(row) and at[1].covers(column)), None)
        return Tile(row, column, found[2], found[3]) if found else None

    whole = held(first, second)
    if whole is not None:
        yield whole
        return
    for row in first.cut(at[0] for at in useful):
        for column in second.cut(at[1] for at in useful):
            yield held(row, column)


def missing_products(
    wanted: Iterable[MomentBlock], stored: Iterable[MomentBlock], layers: Mapping[str, int]
) -> list[MomentBlock]:
    """Those of the wanted products that cannot be put together from the stored ones."""
    known = list(stored)
    exact = set(known)
    return [
        block for block in sorted(wanted) if block not in exact and not all(tiles(canonical(*block), known, layers))
    ]
