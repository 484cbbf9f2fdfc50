"""In what a reduced-rank map's errors are counted: the square root of a metric on its outputs, head by head.

Multiplied by the root, errors of all outputs are alike, and the directions that matter most can be told apart; divided
by it, what these directions make is in the outputs' own units again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration import AttentionMetric
from kvbridge.forms import KINDS
from kvbridge.mappers.joint_inputs import JointProblem
from kvbridge.variables import Span

METRICS = ("coordinate", "head", "attention")
# Of the mean of a layer's squares; without it what attention does not see could not be divided again.
RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class ErrorUnits:
    """Roots of the metric of some outputs that stand one after the other.

    Attributes:
        roots: of each output, a number for each coordinate or a symmetric matrix `[H, D, D]` for its heads.
        inverses: of the same.
    """

    roots: tuple[Tensor, ...]
    inverses: tuple[Tensor, ...]

    def count(self, rows: Float[Tensor, "N q"]) -> Float[Tensor, "N q"]:
        """Bring rows of outputs into the units of their errors, in place."""
        return _multiply(rows, self.roots)

    def counted(self, rows: Float[Tensor, "N q"]) -> Float[Tensor, "N q"]:
        """Rows of outputs in the units of their errors."""
        return _multiply(rows.clone(), self.roots)

    def restored(self, rows: Float[Tensor, "N q"]) -> Float[Tensor, "N q"]:
        """Rows in the outputs' own units, of rows in those of their errors."""
        return _multiply(rows.clone(), self.inverses)


def _multiply(rows: Float[Tensor, "N q"], parts: Sequence[Tensor]) -> Float[Tensor, "N q"]:
    """Multiply rows by a block-diagonal matrix, in place, block by block."""
    at = 0
    for part in parts:
        place = slice(at, at + part.shape[0] * (part.shape[1] if part.ndim > 1 else 1))
        if part.ndim > 1:
            heads = rows[:, place].unflatten(1, part.shape[:2])
            rows[:, place] = torch.einsum("nhd,hde->nhe", heads, part).flatten(1)
        else:
            rows[:, place] *= part
        at = place.stop
    return rows


def error_units(
    problem: JointProblem, spans: Sequence[Span], metric: str, key_weight: float, attention: AttentionMetric | None
) -> ErrorUnits:
    """The units of some outputs.

    Under `attention` the keys and the values of every layer weigh the same, each as a whole, and a residual stream as
    much as those of all layers that are recomputed from it, evenly spread over its coordinates.

    Args:
        problem: the regression.
        spans: its outputs.
        metric: one of `METRICS`.
        key_weight: how many times as much the squared error of a key counts.
        attention: what the target's attention makes of errors, for the metric of that name.
    """
    pairs = []
    for span in spans:
        weight = key_weight if span.states == "keys" else 1.0
        if attention is None:
            pairs.append(_of_spread(_spread(problem, span, metric), weight))
        elif span.states in KINDS:
            pairs.append(_of_squares(weight * getattr(attention, span.states)[span.start]))
        else:
            spread = _spread(problem, span, "coordinate")
            pairs.append(_of_spread(spread, len(KINDS) * (problem.target.layers - span.start) / len(spread)))
    roots, inverses = zip(*pairs, strict=True)
    return ErrorUnits(roots, inverses)


def _spread(problem: JointProblem, span: Span, metric: str) -> Float[Tensor, "p"]:
    """Root mean square of each coordinate of an output, or of its head; 1 for a constant."""
    square = problem.fit.squares([span])
    if metric == "head":
        width = problem.target.head_dim
        square = square.reshape(-1, width).mean(dim=1).repeat_interleave(width)
    unit = (square / problem.fit.rows).sqrt()
    return torch.where(unit > 0, unit, torch.ones_like(unit))


def _of_spread(spread: Float[Tensor, "p"], weight: float) -> tuple[Float[Tensor, "p"], Float[Tensor, "p"]]:
    """Root and inverse of a weight for each coordinate over its square."""
    unit = spread / weight**0.5
    return (1 / unit).float(), unit.float()


def _of_squares(square: Float[Tensor, "H D D"]) -> tuple[Float[Tensor, "H D D"], Float[Tensor, "H D D"]]:
    """Root and inverse of each head's matrix, with the ridge."""
    ridge = RIDGE * float(square.diagonal(dim1=1, dim2=2).mean()) or 1.0
    values, vectors = torch.linalg.eigh(square)
    roots = (values.clamp_min(0) + ridge).sqrt()
    root, inverse = ((vectors * each[:, None]) @ vectors.mT for each in (roots, 1 / roots))
    return root.float(), inverse.float()
