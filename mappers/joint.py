"""Every target layer from the keys and values of all source layers together, beside what the target knows natively.

Keys predict values and values keys; the published recipe, which keeps them apart, leaves that out. The full-rank map is
affordable where there are few KV heads; `shared_basis` makes it cheap for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvbridge.calibration import CalibrationMoments, MomentBlock
from kvbridge.forms import SharedBasis
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap
from kvbridge.mappers.joint_inputs import (
    JointFit,
    JointProblem,
    candidates,
    check_options,
    choose_penalties,
    finished_map,
    joined,
    needed_blocks,
    solve_joint,
)


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
    """

    name: ClassVar[str] = "joint"

    native_head: int | None = 0
    boundary: int | None = None
    penalties: list[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2])
    other_kind: list[float] = field(default_factory=lambda: [1.0])
    native: list[float] = field(default_factory=lambda: [1.0])

    def __post_init__(self) -> None:
        check_options(
            self.native_head, self.boundary, self.penalties, {"other_kind": self.other_kind, "native": self.native}
        )

    def blocks(self) -> frozenset[MomentBlock]:
        return needed_blocks(self.native_head, self.boundary)

    def solve(
        self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry
    ) -> tuple[JointProblem, JointFit]:
        """Choose the penalty of each layer and kind on held-out moments, then solve.

        Raises:
            CalibrationError: too few rows, or singular normal equations.
            UsageError: native head and boundary do not fit the target.
        """
        problem = JointProblem.of(moments, source, target, self.native_head, self.boundary)
        chosen = choose_penalties(problem, candidates(self.penalties, self.other_kind, self.native))
        return problem, solve_joint(problem, chosen)

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Solve, and make the full-rank form.

        Raises:
            CalibrationError, UsageError: as `solve`.
        """
        problem, solved = self.solve(moments, source, target)
        expand = solved.weight / problem.spread[:, None].float()
        bias = problem.bias(solved.weight, problem.outputs)
        form = SharedBasis(
            problem.inputs, joined(problem.outputs), None, expand, bias, target.kv_heads, target.head_dim
        )
        return finished_map(problem, (form,), solved.weight)
