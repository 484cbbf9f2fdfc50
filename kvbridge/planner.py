"""Which map and plan to hand off with: measured points, their Pareto front, and the best point within a budget.

A point is one map under one plan, with the KL that it had on planning documents and its share of the target's prefill
FLOPs. KL is a fact about the text it was measured on; the share is counted anew for the prompt length at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbridge.errors import PlanError
from kvbridge.fingerprint import digest
from kvbridge.flops import CostedMap, ModelCost, handoff_flops, prefill_share
from kvbridge.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """Leave map and plan to the planner: the lowest KL that a share of prefill FLOPs buys.

    Attributes:
        budget: largest share of the target's prefill FLOPs that a hand-off may cost.
        sinks: first tokens of the prompt, computed by the target; points with other sinks are not looked at.

    Raises:
        PlanError: a number is out of range.
    """

    budget: float = 0.15
    sinks: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise PlanError(
                f"plan.budget={self.budget:g}: expected a share of the target's prefill FLOPs between 0 and 1."
            )
        if self.sinks < 0:
            raise PlanError(f"plan.sinks={self.sinks}: give the number of first tokens to compute natively, 0 or more.")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured map and plan.

    Attributes:
        map: name of the map in its bridge.
        plan: what the target computes natively.
        share: of the target's prefill FLOPs.
        kl: mean over the planning documents.
        measured: all that the bridge holds of it.
    """

    map: str
    plan: HandoffPlan
    share: float
    kl: float
    measured: dict[str, Any]

    @property
    def text(self) -> str:
        """The plan in a few words."""
        return plan_text(self.plan)

    @classmethod
    def of(cls, measured: dict[str, Any]) -> Point:
        """A point as a bridge holds it.

        Raises:
            PlanError: its plan has settings that this kvbridge does not know.
        """
        try:
            plan = HandoffPlan(**measured["plan"])
        except TypeError as error:
            raise PlanError(
                f"a measured point of map {measured['map']} has a plan that this kvbridge does not know ({error}); "
                "upgrade kvbridge, or measure again with `kvbridge plan`."
            ) from error
        return cls(measured["map"], plan, measured["share"], measured["kl"]["mean"], measured)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the planner has chosen, and from what.

    Attributes:
        point: map and plan, with the share at the prompt length at hand.
        budget: that it was chosen for.
        points: fingerprint of all points that it was chosen from.
    """

    point: Point
    budget: float
    points: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values for results: the choice, what it was expected to be worth, and from what it was chosen."""
        measured = self.point.measured
        return {
            "budget": self.budget,
            "map": self.point.map,
            "plan": self.point.plan.to_dict(),
            "share": self.point.share,
            "kl": measured["kl"],
            "documents": measured["documents"],
            "text": measured["text"],
            "points": self.points,
        }


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points for which no other is as good in both coordinates and better in one; lower is better."""
    front, best = [], float("inf")
    for at in sorted(range(len(points)), key=lambda at: points[at]):
        if points[at][1] < best or (front and points[at] == points[front[-1]]):
            front.append(at)
            best = points[at][1]
    return front


def points_at(
    measured: Iterable[dict[str, Any]], maps: Mapping[str, CostedMap], cost: ModelCost, prompt_length: int
) -> list[Point]:
    """The measured points of these maps, with their shares at one prompt length.

    Raises:
        PlanError: a plan has settings that this kvbridge does not know, or does not fit the target.
    """
    points = [Point.of(each) for each in measured if each["map"] in maps]
    return [replace(point, share=prefill_share(cost, point.plan, prompt_length, maps[point.map])) for point in points]


def best_within(points: Sequence[Point], budget: float) -> Point | None:
    """The point of lowest KL whose share is at most the budget, and of equals the cheapest."""
    return min(
        (point for point in points if point.share <= budget), key=lambda point: (point.kl, point.share), default=None
    )


def choose(points: Sequence[Point], auto: AutoPlan) -> Choice:
    """The best map and plan within a budget.

    Args:
        points: with their shares at the prompt length at hand.
        auto: the budget, and the sinks wanted.

    Raises:
        PlanError: there are no points with these sinks, or none within the budget.
    """
    wanted = [point for point in points if point.plan.sinks == auto.sinks]
    if not wanted:
        other = ", ".join(str(sinks) for sinks in sorted({point.plan.sinks for point in points}))
        known = f"points with plan.sinks={auto.sinks} (it has some with {other})" if points else "measured points"
        raise PlanError(f"the bridge has no {known}, so no plan can be chosen; measure some with `kvbridge plan`.")
    best = best_within(wanted, auto.budget)
    if best is None:
        cheapest = min(wanted, key=lambda point: point.share)
        raise PlanError(
            f"no measured point costs {auto.budget:.1%} of the target's prefill or less; the cheapest, map "
            f"{cheapest.map} with {cheapest.text}, costs {cheapest.share:.1%}. Raise plan.budget, or "
            "measure cheaper maps and plans with `kvbridge plan`."
        )
    return Choice(best, auto.budget, digest([point.measured for point in points]))


def plan_text(plan: HandoffPlan) -> str:
    """A plan in a few words; what it leaves out is not asked for."""
    values = asdict(plan)
    head = "no native head" if values["native_head"] is None else f"native head {values['native_head']}"
    words = [f"{values['sinks']} sinks", head, f"native tail {values['native_tail']}"]
    if values["native_attended"]:
        words.append(f"{values['native_attended']:.0%} attended")
    if values["tail_recompute"]:
        words.append(f"tail recompute {values['tail_recompute']}")
    return ", ".join(words)


def require_saving(
    name: str, mapping: CostedMap, plan: HandoffPlan, cost: ModelCost, prompt_length: int, dearest: float = 1.0
) -> None:
    """Refuse a map that costs as much as it saves.

    Args:
        name: what the map is called in the message.
        mapping: the map, or what is known of its cost before it is fitted.
        plan: what the target computes natively besides.
        cost: of the target.
        prompt_length: `T`.
        dearest: share of the target's prefill FLOPs from which on the whole hand-off is refused; at 1 the map costs
            what it saves.

    Raises:
        PlanError: naming what the map costs and what it saves.
    """
    parts, native = handoff_flops(cost, plan, prompt_length, mapping), cost.prefill(prompt_length)
    whole, spent = sum(parts.values()), parts["map"]
    if spent and whole >= dearest * native:
        saved = native - whole + spent
        raise PlanError(
            f"{name} costs {spent / native:.0%} of the target's own prefill of {prompt_length} tokens and saves "
            f"{saved / native:.0%} of it; give one that reads or makes less (a lower rank, fewer layers), or let the "
            "target read the prompt."
        )
