"""Which maps and plans are worth measuring: every map of a bridge under every plan of a grid that it can follow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbridge.bridge import Bridge
from kvbridge.errors import CacheError, PlanError, UsageError
from kvbridge.eval.documents import Document
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.kernels import FormMap
from kvbridge.plan import HandoffPlan
from kvbridge.planner import require_saving


@dataclass
class PlannerConfig:
    """Which plans are measured, on how much text, and which maps are refused.

    Attributes:
        documents: documents of `eval.corpus` on which every map and plan is scored; 0 shows what a bridge holds.
        max_share: plans that cost more of the target's prefill FLOPs are not measured.
        dearest: share of prefill FLOPs from which on a map is refused before it is fitted; at 1 it costs what it saves.
        budgets: shares of prefill FLOPs for which the best point is printed.
        sizes: print how large calibration and map of a pair will be, from its models' configs alone, and stop.
        memory_gb: with `sizes`, how much memory there is, in 10⁹ bytes; where a stage takes more, it says which
            settings help.
        native_tail: tails that are tried.
        native_head: native heads that are tried; empty for the one that each map needs, or else 0.
        native_attended: shares of the carried tokens to read natively that are tried.
        tail_recompute: numbers of recomputed last layers that are tried, with maps that can.
    """

    documents: int = 20
    max_share: float = 0.5
    dearest: float = 1.0
    budgets: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.15, 0.25])
    sizes: bool = False
    memory_gb: float = 80.0
    native_tail: list[int] = field(default_factory=lambda: [1, 16])
    native_head: list[int] = field(default_factory=list)
    native_attended: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.1, 0.15, 0.2])
    tail_recompute: list[int] = field(default_factory=lambda: [0, 1])

    def __post_init__(self) -> None:
        if self.documents < 0:
            raise UsageError(f"planner.documents={self.documents}: expected 0 or more.")
        if self.memory_gb <= 0:
            raise UsageError(f"planner.memory_gb={self.memory_gb:g}: expected more than 0.")
        if not (0 < self.max_share <= 1 and self.dearest > 0):
            raise UsageError(
                f"planner.max_share={self.max_share:g}, planner.dearest={self.dearest:g}: expected a share between 0 "
                "and 1, and one above 0."
            )
        if not all(0 < budget < 1 for budget in self.budgets):
            raise UsageError(f"planner.budgets={self.budgets}: expected shares between 0 and 1.")
        empty = [name for name in ("native_tail", "native_attended", "tail_recompute") if not getattr(self, name)]
        if empty:
            raise UsageError(f"planner.{empty[0]}=[]: give at least one value to try.")

    def plans(self, sinks: int, needed: int | None) -> list[HandoffPlan]:
        """Every plan of the grid, for a map that reads target layers up to `needed`.

        Raises:
            PlanError: a number is out of range.
        """
        heads = self.native_head or [needed or 0]
        tried = itertools.product(heads, self.tail_recompute, self.native_tail, self.native_attended)
        return [HandoffPlan(sinks, head, tail, recompute, attended) for head, recompute, tail, attended in tried]


class Candidate(NamedTuple):
    """A map and a plan that are worth measuring."""

    map: str
    plan: HandoffPlan
    share: float


def candidates(
    bridge: Bridge, cost: ModelCost, documents: Sequence[Document], config: PlannerConfig, sinks: int
) -> list[Candidate]:
    """All maps of a bridge under all plans of the grid that they can follow, within the share that is looked at.

    Raises:
        PlanError: nothing is left; where a map costs as much as it saves, that is said.
    """
    found: dict[tuple[str, HandoffPlan], float] = {}
    refusals: list[str] = []
    length = documents[0].prompt.shape[1]
    for name in bridge.maps:
        mapping = FormMap.of(bridge, name)
        for plan in config.plans(sinks, mapping.needs_native_head()):
            try:
                mapping.require_plan(plan, cost.layers)
                require_saving(f"map {name}", mapping, plan, cost, length)
            except (CacheError, PlanError) as error:
                refusals.append(str(error))
                continue
            # The scaffolding of a chat is always read natively.
            plan = documents[0].plan(plan)
            found[name, plan] = prefill_share(cost, plan, length, mapping)
    kept = [Candidate(*which, share) for which, share in found.items() if share <= config.max_share]
    if kept:
        return kept
    if found:
        (name, plan), share = min(found.items(), key=lambda each: each[1])
        raise PlanError(
            f"no map and plan costs planner.max_share={config.max_share:.0%} of the target's prefill or less; the "
            f"cheapest, map {name}, costs {share:.0%}. Raise it, or fit a smaller map."
        )
    raise PlanError(refusals[0])
