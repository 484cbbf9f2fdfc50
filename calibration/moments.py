"""Centred second moments that stream and merge.

For rows x and y the sums kept are n, the means, and `Σ (x − x̄)(y − ȳ)ᵀ`. Two sets of rows merge by the pairwise
update `M = M₁ + M₂ + (n₁ n₂ / n) δ_x δ_yᵀ` with δ the difference of means (Chan, Golub and LeVeque 1979), so no pass
over the data is needed for centring and large means cost no digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.products import Extent, MomentBlock, missing_products, tiles
from kvbridge.errors import CalibrationError
from kvbridge.variables import Span

# Means and squares of these are gathered whatever a mapper reads.
CACHE_VARIABLES = ("source.keys", "source.values", "target.keys", "target.values")
PARTS = ("first", "rest")


def source_variable(kind: str) -> str:
    return f"source.{kind}"


def target_variable(kind: str) -> str:
    return f"target.{kind}"


@dataclass(slots=True)
class Moments:
    """Count, means, centred squares, and the wanted centred cross products of some variables.

    A variable is named by the text of a span; of two products `(a, b)` and `(b, a)` one is stored. The methods put
    together what is asked for from what is stored, so `target.keys[3:9]` may be cut from `target.keys` or from two of
    its parts.

    Attributes:
        rows: tokens seen.
        mean: per variable `[p]`, fp64.
        square: per variable, centred sum of squares of each coordinate `[p]`, fp64.
        cross: per wanted pair of variables, centred sum of products `[p, q]`, fp64.
        layers: how many layers `source.keys` and so on have; without it no part of such a variable can be cut out.
    """

    rows: int
    mean: dict[str, Tensor]
    square: dict[str, Tensor]
    cross: dict[MomentBlock, Tensor]
    layers: dict[str, int] = field(default_factory=dict)

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
            {(a, b): zeros(widths[a], widths[b]) for a, b in sorted(blocks)},
            dict(layers or {}),
        )

    def means(self, variables: Iterable[str | Span]) -> Float[Tensor, "p"]:
        """Means of some variables, one after the other.

        Raises:
            CalibrationError: one was not gathered.
        """
        return self._vector(self.mean, variables)

    def squares(self, variables: Iterable[str | Span]) -> Float[Tensor, "p"]:
        """Centred sums of squares of some variables, one after the other.

        Raises:
            CalibrationError: one was not gathered.
        """
        return self._vector(self.square, variables)

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
                self._fill(out[places[at], places[other]], a, b)
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
                self._fill(out[row, column], a, b)
        return out

    def require(self, blocks: Iterable[MomentBlock]) -> None:
        """Refuse to go on without the cross moments that a mapper reads.

        Raises:
            CalibrationError: naming the first one that was not gathered.
        """
        for a, b in missing_products(blocks, self.cross, self.layers):
            raise CalibrationError(
                f"these moments hold no products of {a} and {b}, which this mapper reads; calibrate with it."
            )

    def _names(self, variables: Iterable[str | Span]) -> list[str]:
        return [Extent.of(str(name), self.layers).name(self.layers) for name in variables]

    def _vector(self, stored: dict[str, Tensor], variables: Iterable[str | Span]) -> Float[Tensor, "p"]:
        parts = []
        known = {Extent.of(name, self.layers): value for name, value in stored.items()}
        for name in self._names(variables):
            whole = Extent.of(name, self.layers)
            for piece in [whole] if any(extent.covers(whole) for extent in known) else whole.cut(known):
                held = next((extent for extent in known if extent.covers(piece)), None)
                if held is None:
                    raise CalibrationError(f"these moments hold nothing of {name}; calibrate with this mapper.")
                parts.append(known[held][held.columns(piece, len(known[held]))])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _places(self, names: list[str]) -> list[slice]:
        ends = list(itertools.accumulate(len(self.means([name])) for name in names))
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]

    def _fill(self, out: Tensor, a: str, b: str) -> None:
        """Write the product of two variables."""
        whole = [Extent.of(name, self.layers) for name in (a, b)]
        for tile in tiles((a, b), self.cross, self.layers):
            if tile is None:
                raise CalibrationError(
                    f"these moments hold no products of {a} and {b}, which this mapper reads; calibrate with it."
                )
            held = self.cross[tile.block]
            first, second = (Extent.of(name, self.layers) for name in tile.block)
            if tile.swapped:
                held, first, second = held.T, second, first
            piece = held[first.columns(tile.first, held.shape[0]), second.columns(tile.second, held.shape[1])]
            out[whole[0].columns(tile.first, out.shape[0]), whole[1].columns(tile.second, out.shape[1])] = piece

    def add(self, rows: dict[str, Float[Tensor, "N p"]], precision: torch.dtype = torch.float64) -> None:
        """Add rows of all variables; products run in `precision` on rows centred at their own mean."""
        count = len(next(iter(rows.values())))
        if count == 0:
            return
        exact = {name: rows[name].double() for name in self.mean}
        mean = {name: value.mean(dim=0) for name, value in exact.items()}
        centred = {name: (value - mean[name]).to(precision) for name, value in exact.items()}
        share = {name: (mean[name] - self.mean[name]) for name in self.mean}
        weight = self.rows * count / (self.rows + count)
        for name, delta in share.items():
            self.square[name] += centred[name].double().square().sum(dim=0) + weight * delta.square()
        for (a, b), total in self.cross.items():
            total += centred[a].T @ centred[b]
            total.addr_(share[a], share[b], alpha=weight)
        self.rows += count
        for name, delta in share.items():
            self.mean[name] += delta * (count / self.rows)

    def merge(self, other: Moments) -> None:
        """Add another set of rows to this one.

        Raises:
            CalibrationError: the two hold different variables or blocks.
        """
        if self.cross.keys() != other.cross.keys() or self.mean.keys() != other.mean.keys():
            raise CalibrationError("moments of different variables cannot be merged; calibrate both with one mapper.")
        if other.rows == 0:
            return
        total = self.rows + other.rows
        weight = self.rows * other.rows / total
        delta = {name: other.mean[name] - self.mean[name] for name in self.mean}
        for name in self.mean:
            self.square[name] += other.square[name] + weight * delta[name].square()
            self.mean[name] += delta[name] * (other.rows / total)
        for (a, b), block in self.cross.items():
            block += other.cross[a, b]
            block.addr_(delta[a], delta[b], alpha=weight)
        self.rows = total

    def clone(self) -> Moments:
        return Moments(
            self.rows,
            {name: value.clone() for name, value in self.mean.items()},
            {name: value.clone() for name, value in self.square.items()},
            {block: value.clone() for block, value in self.cross.items()},
            dict(self.layers),
        )

    def tensors(self) -> dict[str, Tensor]:
        named = {f"mean/{name}": value for name, value in self.mean.items()}
        named |= {f"square/{name}": value for name, value in self.square.items()}
        return named | {f"cross/{a}/{b}": value for (a, b), value in self.cross.items()}

    @classmethod
    def from_tensors(cls, rows: int, named: dict[str, Tensor], layers: dict[str, int]) -> Moments:
        moments = cls(rows, {}, {}, {}, layers)
        for key, value in named.items():
            kind, *names = key.split("/")
            if kind == "cross":
                moments.cross[names[0], names[1]] = value
            else:
                getattr(moments, kind)[names[0]] = value
        return moments
