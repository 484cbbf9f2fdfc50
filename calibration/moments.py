"""Centred second moments that stream and merge.

For rows x and y the sums kept are n, the means, and `Σ (x − x̄)(y − ȳ)ᵀ`. Two sets of rows merge by the pairwise
update `M = M₁ + M₂ + (n₁ n₂ / n) δ_x δ_yᵀ` with δ the difference of means (Chan, Golub and LeVeque 1979), so no pass
over the data is needed for centring and large means cost no digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.assemble import fill_product, missing_sentence, vector
from kvbridge.calibration.products import Extent, MomentBlock, missing_products
from kvbridge.errors import CalibrationError
from kvbridge.variables import Span

# Means and squares of these are gathered whatever a mapper reads.
CACHE_VARIABLES = ("source.keys", "source.values", "target.keys", "target.values")
PARTS = ("first", "rest")
# One product of many rows costs much less than products of a few that are each added to the sums: on two cores 8192 at
# once cost 40 % less than 2048, for rows of 22,000 numbers. Wider rows wait in fewer, so that they fit this many bytes.
ROWS_PER_PRODUCT = 8192
FEWEST_ROWS_PER_PRODUCT = 2048
HELD_BYTES = 1_000_000_000


def rows_per_product(width: int) -> int:
    """How many rows of so many fp32 numbers wait for one product."""
    return min(ROWS_PER_PRODUCT, max(FEWEST_ROWS_PER_PRODUCT, HELD_BYTES // (4 * width)))


def source_variable(kind: str) -> str:
    return f"source.{kind}"


def target_variable(kind: str) -> str:
    return f"target.{kind}"


def no_products(widths: Mapping[str, int], blocks: Iterable[MomentBlock]) -> Mapping[MomentBlock, Tensor]:
    """Products of no rows: zeros that take no memory and cannot be added to."""
    zero = torch.zeros((), dtype=torch.float64)
    return MappingProxyType({(a, b): zero.expand(widths[a], widths[b]) for a, b in sorted(blocks)})


@contextmanager
def rounded_factors() -> Iterator[None]:
    """While open, fp32 products on a CPU round their factors to bfloat16, where it multiplies that natively."""
    backend: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


@dataclass(slots=True)
class Moments:
    """Count, means, centred squares, and the wanted centred cross products of some variables.

    A variable is named by the text of a span; of two products `(a, b)` and `(b, a)` one is stored. The methods put
    together what is asked for from what is stored, so `target.keys[3:9]` may be cut from `target.keys` or from two of
    its parts.

    Attributes:
        summed: rows in the sums.
        mean: per variable `[p]`, fp64.
        square: per variable, centred sum of squares of each coordinate `[p]`, fp64.
        cross: per wanted pair of variables, centred sum of products `[p, q]`, fp64; those of no rows take no memory.
        layers: how many layers `source.keys` and so on have; without it no part of such a variable can be cut out.
        held: batches of rows per variable `[n, p]` that wait for one product of them all.
    """

    summed: int
    mean: dict[str, Tensor]
    square: dict[str, Tensor]
    # Tensors, but declared as anything: a check of types would read one from its file.
    cross: Mapping[MomentBlock, Any]
    layers: dict[str, int] = field(default_factory=dict)
    held: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def zeros(
        cls, widths: dict[str, int], blocks: Iterable[MomentBlock], layers: dict[str, int] | None = None
    ) -> Moments:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            0,
            {name: zeros(width) for name, width in widths.items()},
            {name: zeros(width) for name, width in widths.items()},
            no_products(widths, blocks),
            dict(layers or {}),
        )

    @property
    def rows(self) -> int:
        """Tokens seen."""
        return self.summed + self.held_rows

    @property
    def held_rows(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self.held)

    def means(self, variables: Iterable[str | Span]) -> Float[Tensor, "p"]:
        """Means of some variables, one after the other.

        Raises:
            CalibrationError: one was not gathered.
        """
        return vector(self.mean, self._names(variables), self.layers)

    def squares(self, variables: Iterable[str | Span]) -> Float[Tensor, "p"]:
        """Centred sums of squares of some variables, one after the other.

        Raises:
            CalibrationError: one was not gathered.
        """
        return vector(self.square, self._names(variables), self.layers)

    def gram(self, variables: Iterable[str | Span]) -> Float[Tensor, "p p"]:
        """`XᵀX` of some variables side by side, centred; of one variable it is what is stored, not to be changed.

        Raises:
            CalibrationError: a product was not gathered.
        """
        names = self._names(variables)
        if len(names) == 1 and (names[0], names[0]) in self.cross:
            return self.cross[names[0], names[0]]
        places = self._places(names)
        out = torch.empty(places[-1].stop, places[-1].stop, dtype=torch.float64)
        for at, a in enumerate(names):
            for other, b in enumerate(names[: at + 1]):
                fill_product(out[places[at], places[other]], (a, b), self.cross, self.layers)
                if other < at:
                    out[places[other], places[at]] = out[places[at], places[other]].T
        return out

    def cross_products(self, inputs: Iterable[str | Span], outputs: Iterable[str | Span]) -> Float[Tensor, "p q"]:
        """`XᵀY` of inputs and outputs, centred; of one stored block it is that block, not to be changed.

        Raises:
            CalibrationError: a product was not gathered.
        """
        rows, columns = self._names(inputs), self._names(outputs)
        if len(rows) == len(columns) == 1 and (rows[0], columns[0]) in self.cross:
            return self.cross[rows[0], columns[0]]
        down, across = self._places(rows), self._places(columns)
        out = torch.empty(down[-1].stop, across[-1].stop, dtype=torch.float64)
        for a, row in zip(rows, down, strict=True):
            for b, column in zip(columns, across, strict=True):
                fill_product(out[row, column], (a, b), self.cross, self.layers)
        return out

    def require(self, blocks: Iterable[MomentBlock]) -> None:
        """Refuse to go on without the cross moments that a mapper reads.

        Raises:
            CalibrationError: naming the first one that was not gathered.
        """
        for a, b in missing_products(blocks, self.cross, self.layers):
            raise CalibrationError(missing_sentence(a, b))

    def _names(self, variables: Iterable[str | Span]) -> list[str]:
        return [Extent.of(str(name), self.layers).name(self.layers) for name in variables]

    def _places(self, names: list[str]) -> list[slice]:
        ends = list(itertools.accumulate(len(self.means([name])) for name in names))
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]

    def add(self, rows: Mapping[str, Float[Tensor, "N p"]], precision: torch.dtype = torch.float64) -> None:
        """Add rows of all variables; products run in `precision` on rows centred at their own mean."""
        count = len(next(iter(rows.values())))
        if count == 0:
            return
        self._own()
        total = self.summed + count
        weight = math.sqrt(self.summed * count / total)
        centred = {}
        for name, before in self.mean.items():
            mean = rows[name].mean(dim=0, dtype=torch.float64)
            shift = mean - before
            # One more row, the weighted difference of means, makes the rank-one update a part of the product.
            below = torch.cat((rows[name].double() - mean, weight * shift[None]))
            self.square[name] += below.square().sum(dim=0)
            before += shift * (count / total)
            centred[name] = below.to(torch.float64 if precision == torch.float64 else torch.float32)
        with rounded_factors() if precision == torch.bfloat16 else nullcontext():
            for (a, b), products in self.cross.items():
                products += centred[a].T @ centred[b]
        self.summed = total

    def hold(
        self,
        rows: Mapping[str, Float[Tensor, "N p"]],
        precision: torch.dtype = torch.float64,
        enough: int | None = None,
    ) -> None:
        """Take rows of all variables, to be added together with others once there are enough for one product.

        Args:
            rows: of every variable.
            precision: of the products.
            enough: rows; by default as many as their width lets wait.
        """
        # A copy, so that a few rows do not keep the whole block alive that they are a view of.
        self.held.append({name: rows[name].clone(memory_format=torch.contiguous_format) for name in self.mean})
        if self.held_rows >= (enough or rows_per_product(sum(map(len, self.mean.values())))):
            self.settle(precision)

    def settle(self, precision: torch.dtype = torch.float64) -> None:
        """Add all rows that are held."""
        if self.held:
            self.add({name: torch.cat([batch[name] for batch in self.held]) for name in self.mean}, precision)
            self.held = []

    def merge(self, other: Moments) -> None:
        """Add another set of rows to this one.

        Raises:
            CalibrationError: the two hold different variables or blocks.
        """
        if self.cross.keys() != other.cross.keys() or self.mean.keys() != other.mean.keys():
            raise CalibrationError("moments of different variables cannot be merged; calibrate both with one mapper.")
        if other.summed:
            self._own()
            total = self.summed + other.summed
            weight = self.summed * other.summed / total
            delta = {name: other.mean[name] - self.mean[name] for name in self.mean}
            for name in self.mean:
                self.square[name] += other.square[name] + weight * delta[name].square()
                self.mean[name] += delta[name] * (other.summed / total)
            for (a, b), block in self.cross.items():
                block += other.cross[a, b]
                block.addr_(delta[a], delta[b], alpha=weight)
            self.summed = total
        for batch in other.held:
            self.hold(batch)

    def clone(self) -> Moments:
        """A copy in memory that can be added to; held rows, which never change, are shared."""
        return Moments(
            self.summed,
            {name: value.clone() for name, value in self.mean.items()},
            {name: value.clone() for name, value in self.square.items()},
            {block: value.clone() for block, value in self.cross.items()} if self.summed else self.cross,
            dict(self.layers),
            list(self.held),
        )

    def _own(self) -> None:
        """Give products that lie in a file, or nowhere yet, memory of their own, so that they can be added to."""
        if not isinstance(self.cross, dict):
            contiguous = torch.contiguous_format
            self.cross = {block: value.clone(memory_format=contiguous) for block, value in self.cross.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name, to be stored; products of no rows are left out."""
        named = {f"mean/{name}": value for name, value in self.mean.items()}
        named |= {f"square/{name}": value for name, value in self.square.items()}
        if self.held:
            named |= {f"held/{name}": torch.cat([batch[name] for batch in self.held]) for name in self.mean}
        products = self.cross if self.summed else {}
        return named | {f"cross/{a}/{b}": value for (a, b), value in products.items()}
