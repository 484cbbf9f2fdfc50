"""Every target layer from the keys and values of all source layers together, beside what the target knows natively.

Keys predict values and values keys; the published recipe, which keeps them apart, leaves that out. The full-rank map is
affordable where there are few KV heads; `shared_basis` makes it cheap for the others.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvbridge.calibration import CalibrationMoments, MomentBlock
from kvbridge.calibration.sizes import FitShape
from kvbridge.errors import UsageError
from kvbridge.forms import KINDS, SharedBasis
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap
from kvbridge.mappers.fit_memory import joint_bytes
from kvbridge.mappers.joint_inputs import (
    JointProblem,
    Penalty,
    joined,
    made_layers,
    needed_blocks,
    read_spans,
)
from kvbridge.mappers.joint_solve import choose_penalties, finished_map, solve_joint
from kvbridge.variables import Span


@dataclass(frozen=True)
class Joint:
    """Full-rank ridge from all source keys and values.

    Attributes:
        native_head: the plan's native head, whose residual streams (at the inputs of layer 0 and of this layer) the map
            reads too; `None` reads the source alone.
        boundary: target layer whose residual stream is made in place of the keys and values from there on, for a plan
            with a tail recompute of so many layers; `None` makes keys and values of all layers.
        penalties: λ on the correlation scale (unit diagonal), to choose from for each layer and kind.
        other_kind: how many times dearer inputs of the other kind may be than those of the own, to choose from.
        native: how many times dearer what the target computes natively may be, to choose from.
        distance: by how much of itself λ may grow with each source layer of distance, to choose from; other than 0
            every target layer takes a factorisation of its own.
    """

    name: ClassVar[str] = "joint"

    native_head: int | None = 0
    boundary: int | None = None
    penalties: list[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2])
    other_kind: list[float] = field(default_factory=lambda: [1.0])
    native: list[float] = field(default_factory=lambda: [1.0])
    distance: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        for option, given in (("native_head", self.native_head), ("boundary", self.boundary)):
            if given is not None and given < 0:
                raise UsageError(f"mapper.{option}={given}: give a layer of the target, 0 or more, or null.")
        for option in ("penalties", "other_kind", "native", "distance"):
            values = list(getattr(self, option))
            least = 0 if option == "distance" else sys.float_info.min
            if not values or not all(least <= value < math.inf for value in values):
                raise UsageError(f"mapper.{option}={values}: give one or more positive numbers to choose from.")

    @property
    def candidates(self) -> list[Penalty]:
        """Every combination of λ and of how much dearer each group of inputs is than the own kind."""
        return [
            Penalty(own, own * other, own * native, distance)
            for own in self.penalties
            for other in self.other_kind
            for native in self.native
            for distance in self.distance
        ]

    def blocks(self) -> frozenset[MomentBlock]:
        return needed_blocks(self.native_head, self.boundary)

    def widths(self, source: KVGeometry, target: KVGeometry, layers: range) -> tuple[int, int]:
        """Numbers that the map reads, and those that it makes for the target `layers`, per token."""
        sides = {"source": source, "target": target}
        read = sum(span.width(sides[span.role]) for span in read_spans(self.native_head, source, target))
        made = len(set(layers).intersection(made_layers(self.native_head, self.boundary, target)))
        stream = target.hidden_size if self.boundary == layers.stop else 0
        return read, len(KINDS) * made * target.kv_heads * target.head_dim + stream

    def map_flops(self, source: KVGeometry, target: KVGeometry, layers: range) -> int:
        """Operations of the full-rank map for one token and the target `layers`."""
        read, made = self.widths(source, target, layers)
        return 2 * read * made

    def branch_width(self, source: KVGeometry, target: KVGeometry) -> int:
        return self.widths(source, target, range(0))[0]

    def fit_bytes(self, shape: FitShape) -> int:
        return joint_bytes(shape)

    def problem(
        self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry
    ) -> tuple[JointProblem, dict[Span, Penalty]]:
        """The regression, and the penalty of each layer and kind, chosen on held-out moments.

        Raises:
            CalibrationError: too few rows, or singular normal equations.
            UsageError: native head and boundary do not fit the target.
        """
        problem = JointProblem.of(moments, source, target, self.native_head, self.boundary)
        return problem, choose_penalties(problem, self.candidates)

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Solve one output after the other, and make the full-rank form.

        Raises:
            CalibrationError, UsageError: as `problem`.
        """
        problem, chosen = self.problem(moments, source, target)
        expand, bias, r2 = torch.empty(problem.input_width, problem.width), torch.empty(problem.width), {}
        for span, weight in solve_joint(problem, chosen, problem.outputs):
            columns = problem.columns[span]
            expand[:, columns], bias[columns] = problem.on_inputs(weight), problem.bias(weight, span)
            r2[span] = problem.r2(weight, span)
        form = SharedBasis(
            problem.inputs, joined(problem.outputs), None, expand, bias, target.kv_heads, target.head_dim
        )
        return finished_map(problem, (form,), r2, chosen)
