"""Reduced-rank regression: one basis of the inputs for all target layers, or for each of a few groups of them.

A joint map's predictions lie close to a space of far fewer directions than it has inputs. Of all maps of rank R the one
that loses least, in the units in which errors are counted, projects the full-rank predictions on their R leading
principal directions (Izenman 1975). They are found by subspace iteration (Halko, Martinsson and Tropp 2011); no matrix
of outputs by outputs is ever formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration import ATTENTION, CalibrationMoments, MomentBlock
from kvbridge.calibration.sizes import FitShape
from kvbridge.errors import UsageError
from kvbridge.forms import KINDS, SharedBasis
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap
from kvbridge.mappers.error_units import METRICS, ErrorUnits, error_units
from kvbridge.mappers.fit_memory import basis_bytes
from kvbridge.mappers.joint import Joint
from kvbridge.mappers.joint_inputs import JointProblem, joined
from kvbridge.mappers.joint_solve import finished_map, solve_joint
from kvbridge.variables import Span

ITERATIONS, OVERSAMPLED = 3, 32


def principal_outputs(
    gram: Float[Tensor, "p p"], weight: Float[Tensor, "p q"], rank: int, seed: int = 0
) -> Float[Tensor, "q R"]:
    """Leading principal directions of the predictions `x W`, most important first.

    Args:
        gram: centred products of the inputs.
        weight: `W`.
        rank: `R`, at most the smaller side of `W`.
        seed: of the directions that the iteration starts from.
    """
    width = min(rank + OVERSAMPLED, *weight.shape)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(weight.shape[1], width, generator=generator, dtype=weight.dtype)
    for _ in range(ITERATIONS):
        directions = weight.T @ (gram @ (weight @ torch.linalg.qr(directions).Q))
    directions = torch.linalg.qr(directions).Q
    made = weight @ directions
    order = torch.linalg.eigh((made.T @ (gram @ made)).double()).eigenvectors.flip(1)[:, :rank]
    return directions @ order.to(weight.dtype)


@dataclass(frozen=True)
class ReducedRank:
    """A joint map through a basis that its outputs share.

    Attributes:
        rank: most directions of one basis, `R`; held-out moments may choose fewer.
        groups: groups of neighbouring target layers with a basis of their own.
        metric: in what units errors are counted: the spread of each `coordinate`, that of each `head` as a whole, or
            what the target's `attention` makes of them.
        key_weight: how many times as much the squared error of a key counts as that of a value.
        joint: the full-rank map that is approximated.
    """

    name: ClassVar[str] = "shared_basis"

    rank: int = 1024
    groups: int = 1
    metric: str = "head"
    key_weight: float = 1.0
    joint: Joint = field(default_factory=Joint)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.groups < 1:
            raise UsageError(f"mapper.rank={self.rank}, mapper.groups={self.groups}: expected 1 or more of each.")
        if self.metric not in METRICS:
            raise UsageError(f"mapper.metric={self.metric}: expected one of {', '.join(METRICS)}.")
        if not 0 < self.key_weight < math.inf:
            raise UsageError(f"mapper.key_weight={self.key_weight:g}: expected a positive number.")

    def blocks(self) -> frozenset[MomentBlock]:
        return self.joint.blocks() | ({ATTENTION} if self._by_attention else frozenset())

    @property
    def _by_attention(self) -> bool:
        return self.metric == "attention"

    def map_flops(self, source: KVGeometry, target: KVGeometry, layers: range) -> int:
        """Operations for one token and the target `layers`; fewer where held-out moments choose a smaller rank."""
        read, made = self.joint.widths(source, target, layers)
        return 2 * min(self.rank, read, made) * (self.groups * read + made)

    def branch_width(self, source: KVGeometry, target: KVGeometry) -> int:
        return self.joint.branch_width(source, target)

    def fit_bytes(self, shape: FitShape) -> int:
        return basis_bytes(shape, self.rank + OVERSAMPLED, self.groups)

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Solve the joint regression, then keep the directions that matter most.

        Raises:
            CalibrationError: too few rows, singular normal equations, or no metric of attention where that is wanted.
            UsageError: native head and boundary do not fit the target.
        """
        attention = moments.require_attention() if self._by_attention else None
        problem, chosen = self.joint.problem(moments, source, target)
        forms, r2 = [], {}
        for spans in self._grouped(problem):
            places = problem.places(spans)
            full = torch.empty(len(problem.spread), places[spans[-1]].stop)
            for span, weight in solve_joint(problem, chosen, spans):
                full[:, places[span]] = weight
            units = error_units(problem, spans, self.metric, self.key_weight, attention)
            reduce, expand = self._factor(problem, full, spans, units)
            del full
            bias = torch.empty(expand.shape[1])
            for span, columns in places.items():
                weight = reduce @ expand[:, columns]
                bias[columns], r2[span] = problem.bias(weight, span), problem.r2(weight, span)
            scaled = problem.on_inputs(reduce)
            forms.append(
                SharedBasis(problem.inputs, joined(spans), scaled, expand, bias, target.kv_heads, target.head_dim)
            )
        return finished_map(problem, tuple(forms), r2, chosen)

    def _grouped(self, problem: JointProblem) -> list[list[Span]]:
        """Outputs of each group of neighbouring layers; a boundary's residual stream goes with the last one."""
        layers = sorted({span.start for span in problem.outputs if span.states in KINDS})
        size = math.ceil(len(layers) / self.groups)
        groups = [set(layers[at : at + size]) for at in range(0, len(layers), size)]
        last = len(groups) - 1
        return [
            [s for s in problem.outputs if (s.start in group if s.states in KINDS else number == last)]
            for number, group in enumerate(groups)
        ]

    def _factor(
        self, problem: JointProblem, weight: Float[Tensor, "p q"], spans: list[Span], units: ErrorUnits
    ) -> tuple[Float[Tensor, "p R"], Float[Tensor, "R q"]]:
        """Basis and its expansion, with as many directions as explain most of the held-out moments.

        The weights are overwritten, so that there is one matrix of their size.
        """
        scaled = units.count(weight)
        directions = principal_outputs(problem.correlation.float(), scaled, min(self.rank, *weight.shape))
        reduce = scaled @ directions
        kept = self._kept(problem, reduce, units.counted(directions.T).T, spans)
        return reduce[:, :kept].contiguous(), units.restored(directions.T)[:kept].contiguous()

    def _kept(
        self,
        problem: JointProblem,
        reduce: Float[Tensor, "p R"],
        directions: Float[Tensor, "q R"],
        spans: list[Span],
    ) -> int:
        """How many leading directions explain most of the held-out moments; all of them without held-out rows."""
        if not problem.held_out.rows:
            return reduce.shape[1]
        made = torch.zeros_like(reduce)
        for span, columns in problem.places(spans).items():
            made += problem.products(problem.held_out, problem.every(span)).float() @ directions[columns]
        explained = 2 * (reduce * made).sum(dim=0)
        explained -= (reduce * (problem.held_correlation @ reduce)).sum(dim=0)
        return int(explained.cumsum(dim=0).argmax()) + 1
