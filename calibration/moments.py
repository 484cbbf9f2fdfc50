"""Centred second moments that stream and merge.

For rows x and y the sums kept are n, the means, and `Σ (x − x̄)(y − ȳ)ᵀ`. Two sets of rows merge by the pairwise
update `M = M₁ + M₂ + (n₁ n₂ / n) δ_x δ_yᵀ` with δ the difference of means (Chan, Golub and LeVeque 1979), so no pass
over the data is needed for centring and large means cost no digits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbridge.errors import CalibrationError
from kvbridge.pair import ModelPair

VARIABLES = ("source.keys", "source.values", "target.keys", "target.values")
MomentBlock = tuple[str, str]
PARTS = ("first", "rest")


def source_variable(kind: str) -> str:
    return f"source.{kind}"


def target_variable(kind: str) -> str:
    return f"target.{kind}"


@dataclass(slots=True)
class Moments:
    """Count, means, centred squares, and the wanted centred cross products of some variables.

    Attributes:
        rows: tokens seen.
        mean: per variable `[p]`, fp64.
        square: per variable, centred sum of squares of each coordinate `[p]`, fp64.
        cross: per wanted pair of variables, centred sum of products `[p, q]`, fp64.
    """

    rows: int
    mean: dict[str, Tensor]
    square: dict[str, Tensor]
    cross: dict[MomentBlock, Tensor]

    @classmethod
    def zeros(cls, widths: dict[str, int], blocks: Iterable[MomentBlock]) -> Moments:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            0,
            {name: zeros(width) for name, width in widths.items()},
            {name: zeros(width) for name, width in widths.items()},
            {(a, b): zeros(widths[a], widths[b]) for a, b in sorted(blocks)},
        )

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
        )

    def tensors(self) -> dict[str, Tensor]:
        named = {f"mean/{name}": value for name, value in self.mean.items()}
        named |= {f"square/{name}": value for name, value in self.square.items()}
        return named | {f"cross/{a}/{b}": value for (a, b), value in self.cross.items()}

    @classmethod
    def from_tensors(cls, rows: int, named: dict[str, Tensor]) -> Moments:
        moments = cls(rows, {}, {}, {})
        for key, value in named.items():
            kind, *names = key.split("/")
            if kind == "cross":
                moments.cross[names[0], names[1]] = value
            else:
                getattr(moments, kind)[names[0]] = value
        return moments


@dataclass(slots=True)
class CalibrationMoments:
    """All moments of one calibration: per split (`fit`, `held_out`) and part (`first` positions of a block, `rest`).

    Attributes:
        sets: moments by (split, part).
        info: what they were collected from and how; `identity` within it decides what may be resumed or merged.
    """

    sets: dict[tuple[str, str], Moments]
    info: dict[str, Any] = field(default_factory=dict)

    def select(self, split: str, *, first: bool) -> Moments:
        """Moments of a split, with or without the first positions of each block."""
        rest = self.sets[split, "rest"]
        if not first:
            return rest
        both = rest.clone()
        both.merge(self.sets[split, "first"])
        return both

    def require_pair(self, pair: ModelPair) -> None:
        """Refuse moments of another pair.

        Raises:
            PairMismatchError: naming both fingerprints.
        """
        stored = self.info["identity"].items()
        pair.require({key.removeprefix("pair."): value for key, value in stored}, "this calibration")

    def require(self, blocks: Iterable[MomentBlock]) -> None:
        """Refuse to go on without the cross moments that a mapper reads.

        Raises:
            CalibrationError: naming the first one that was not gathered.
        """
        gathered = self.sets["fit", "rest"].cross
        for a, b in sorted(blocks):
            if (a, b) not in gathered:
                raise CalibrationError(
                    f"these moments hold no products of {a} and {b}, which this mapper reads; calibrate with it."
                )

    def merge(self, other: CalibrationMoments) -> None:
        """Add the moments of another shard of the same calibration."""
        for key, moments in self.sets.items():
            moments.merge(other.sets[key])

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        named = {
            f"{split}/{part}/{key}": value.contiguous()
            for (split, part), moments in self.sets.items()
            for key, value in moments.tensors().items()
        }
        rows = {f"{split}/{part}": moments.rows for (split, part), moments in self.sets.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(named, partial, metadata={"info": json.dumps(self.info), "rows": json.dumps(rows)})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> CalibrationMoments:
        """Read what `save` wrote.

        Raises:
            CalibrationError: the file is missing or is not one of moments.
        """
        if not path.is_file():
            raise CalibrationError(f"{path}: no moments there; run `kvbridge calibrate` first.")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                info, rows = json.loads(metadata["info"]), json.loads(metadata["rows"])
                named = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            sets: dict[tuple[str, str], dict[str, Tensor]] = {}
            for key, value in named.items():
                split, part, rest = key.split("/", 2)
                sets.setdefault((split, part), {})[rest] = value
            loaded = cls({at: Moments.from_tensors(rows["/".join(at)], tensors) for at, tensors in sets.items()}, info)
            loaded._check()
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is damaged or holds no moments ({error}); delete it and calibrate again."
            ) from error
        return loaded

    def _check(self) -> None:
        """Raise `ValueError` where a part is missing, misshapen or not finite."""
        if not isinstance(self.info.get("identity"), dict):
            raise ValueError("no identity")
        for at in ((split, part) for split in ("fit", "held_out") for part in PARTS):
            moments = self.sets[at]
            if not moments.mean or moments.mean.keys() != moments.square.keys():
                raise ValueError(f"{'/'.join(at)} lacks a variable")
            widths = {name: len(mean) for name, mean in moments.mean.items()}
            if any(block.shape != (widths[a], widths[b]) for (a, b), block in moments.cross.items()):
                raise ValueError(f"{'/'.join(at)} has a block of another shape")
            if not all(torch.isfinite(tensor).all() for tensor in moments.tensors().values()):
                raise ValueError(f"{'/'.join(at)} holds NaN or infinite numbers")
