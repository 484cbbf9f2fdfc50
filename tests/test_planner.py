"""The planner's own decisions: the front, the choice within a budget, and the maps that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import PlanError
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.mappers import Ridge
from kvbridge.mappers.base import CostedMapper, Unfitted
from kvbridge.plan import HandoffPlan
from kvbridge.planner import AutoPlan, Choice, Point, best_within, choose, pareto, plan_text, points_at, require_saving
from tiny_pair import tiny_pair

COST = ModelCost(layers=3, per_token=10_000, projections=2_000, per_pair=40, head=5_000)


@dataclass(frozen=True)
class Dense:
    """A map of a fixed cost per target layer."""

    per_layer: int = 1000

    def flops_per_token(self, layers: range) -> int:
        return self.per_layer * len(layers)


def measured(name: str = "ridge", share: float = 0.1, kl: float = 0.5, **plan: Any) -> dict[str, Any]:
    interval = {"mean": kl, "ci95": [kl - 0.01, kl + 0.01], "n": 20}
    return {
        "map": name,
        "plan": HandoffPlan(**plan).to_dict(),
        "share": share,
        "kl": interval,
        "documents": 20,
        "text": "0123456789abcdef",
    }


coordinates = st.tuples(st.sampled_from([0.05, 0.1, 0.2, 0.4]), st.sampled_from([0.1, 0.2, 0.3]))
some_points = st.lists(coordinates, max_size=12)


def points_of(values: list[tuple[float, float]]) -> list[Point]:
    return [Point.of(measured(share=share, kl=kl)) for share, kl in values]


@given(some_points)
def test_the_front_is_what_nothing_beats(values: list[tuple[float, float]]) -> None:
    def beaten(at: int) -> bool:
        share, kl = values[at]
        return any(s <= share and k <= kl and (s, k) != (share, kl) for s, k in values)

    assert sorted(pareto(values)) == [at for at in range(len(values)) if not beaten(at)]


@given(some_points, st.sampled_from([0.01, 0.1, 0.15, 0.3, 0.9]))
def test_the_best_within_a_budget_is_on_the_front(values: list[tuple[float, float]], budget: float) -> None:
    best = best_within(points_of(values), budget)
    affordable = [(kl, share) for share, kl in values if share <= budget]
    if not affordable:
        assert best is None
        return
    assert best is not None
    assert (best.kl, best.share) == min(affordable)
    assert (best.share, best.kl) in [values[at] for at in pareto(values)]


def test_a_choice_says_what_it_was_made_from() -> None:
    found = [measured("wide", 0.14, 0.2), measured("narrow", 0.1, 0.3, native_tail=1), measured("dear", 0.3, 0.1)]
    choice = choose([Point.of(each) for each in found], AutoPlan(budget=0.15))
    assert isinstance(choice, Choice)
    assert (choice.point.map, choice.point.plan) == ("wide", HandoffPlan())
    said = choice.to_dict()
    assert said == {
        "budget": 0.15,
        "map": "wide",
        "plan": HandoffPlan().to_dict(),
        "share": 0.14,
        "kl": found[0]["kl"],
        "documents": 20,
        "text": "0123456789abcdef",
        "points": choice.points,
    }
    other = choose([Point.of(each) for each in found[:2]], AutoPlan(budget=0.15))
    assert other.points != choice.points


def test_of_equal_points_the_cheaper_is_chosen() -> None:
    found = [measured("a", 0.12, 0.2), measured("b", 0.1, 0.2), measured("c", 0.05, 0.3)]
    assert choose([Point.of(each) for each in found], AutoPlan()).point.map == "b"


def test_no_points_and_none_within_the_budget_say_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"^the bridge has no measured points, .*`kvbridge plan`\.$"):
        choose([], AutoPlan())
    points = [Point.of(measured("a", 0.3)), Point.of(measured("b", 0.2, native_tail=1))]
    said = r"costs 10\.0% .* or less; the cheapest, map b with 4 sinks, native head 0, native tail 1, costs 20\.0%\."
    with pytest.raises(PlanError, match=said):
        choose(points, AutoPlan(budget=0.1))
    with pytest.raises(PlanError, match=r"no points with plan\.sinks=0 \(it has some with 4\)"):
        choose(points, AutoPlan(sinks=0))


def test_shares_are_those_of_the_prompt_at_hand() -> None:
    maps = {"ridge": Dense(), "wide": Dense(9000)}
    found = [measured("ridge", 0.9), measured("wide", 0.9), measured("gone", 0.1)]
    for length in (64, 512):
        points = points_at(found, maps, COST, length)
        assert [point.map for point in points] == ["ridge", "wide"]
        for point in points:
            assert point.share == prefill_share(COST, HandoffPlan(), length, maps[point.map])
    short = points_at(found, maps, COST, 20)
    assert all(point.share == 1.0 for point in short)


def test_a_plan_from_the_future_is_an_error() -> None:
    found = measured()
    found["plan"]["oracle"] = 1
    with pytest.raises(PlanError, match=r"point of map ridge has a plan that this kvbridge does not know .*oracle"):
        points_at([found], {"ridge": Dense()}, COST, 64)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"budget": 0.0}, r"^plan\.budget=0: "),
        ({"budget": 1.0}, r"^plan\.budget=1: "),
        ({"sinks": -1}, r"^plan\.sinks=-1: "),
    ],
    ids=str,
)
def test_refuses_numbers_out_of_range(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        AutoPlan(**given_)


def test_a_plan_in_words() -> None:
    more = HandoffPlan(native_attended=0.15, tail_recompute=1)
    assert plan_text(more) == "4 sinks, native head 0, native tail 16, 15% attended, tail recompute 1"
    assert plan_text(HandoffPlan()) == "4 sinks, native head 0, native tail 16"
    assert plan_text(HandoffPlan(sinks=0, native_head=None, native_tail=1)) == "0 sinks, no native head, native tail 1"


# Maps that cost what they save


def test_refuses_a_map_that_costs_what_it_saves() -> None:
    plan, length = HandoffPlan(), 64
    for per_layer in range(1000, 40_000, 500):
        mapping = Dense(per_layer)
        share = prefill_share(COST, plan, length, mapping)
        if share < 1:
            require_saving("the map", mapping, plan, COST, length)
            continue
        with pytest.raises(PlanError, match=r"^the map costs (\d+)% of .* 64 tokens and saves (\d+)% of it; give one"):
            require_saving("the map", mapping, plan, COST, length)
        require_saving("the map", mapping, plan, COST, length, dearest=100.0)
    with pytest.raises(PlanError):
        require_saving("the map", Dense(), plan, COST, length, dearest=0.1)


def test_a_plan_that_carries_nothing_is_not_the_maps_fault() -> None:
    require_saving("the map", Dense(10**9), HandoffPlan(native_tail=64), COST, 32)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_mapper_knows_the_cost_of_its_map_before_the_fit(heads: str) -> None:
    pair = tiny_pair()
    source, target = pair.source.geometry, pair.target.geometry
    for k in (1, 2, 9):
        mapper = Ridge(k=k, heads=heads)
        assert isinstance(mapper, CostedMapper)
        slots = min(k, 3) * (2 if heads == "all" else 1)
        weights = 2 * 3 * 4 * slots * 16 * 32
        assert Unfitted(mapper, source, target).flops_per_token(range(1, 4)) == 2 * weights
