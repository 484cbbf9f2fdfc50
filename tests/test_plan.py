"""The arithmetic of a hand-off plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import PlanError
from kvbridge.plan import HandoffPlan, Split


@pytest.mark.parametrize(
    ("plan", "length", "expected"),
    [
        (HandoffPlan(4, 0, 16), 100, Split(4, 84, 100)),
        (HandoffPlan(4, 0, 16), 21, Split(4, 5, 21)),
        (HandoffPlan(4, 0, 16), 20, Split(0, 0, 20)),
        (HandoffPlan(4, 0, 16), 3, Split(0, 0, 3)),
        (HandoffPlan(0, None, 1), 2, Split(0, 1, 2)),
        (HandoffPlan(0, None, 1), 1, Split(0, 0, 1)),
    ],
    ids=["long", "one-carried", "just-too-short", "shorter-than-sinks", "two-tokens", "one-token"],
)
def test_splits_a_prompt(plan: HandoffPlan, length: int, expected: Split) -> None:
    assert plan.split(length) == expected


@given(sinks=st.integers(0, 40), tail=st.integers(1, 40), length=st.integers(1, 120))
def test_sinks_carried_and_tail_partition_the_prompt(sinks: int, tail: int, length: int) -> None:
    split = HandoffPlan(sinks=sinks, native_tail=tail).split(length)
    parts = [
        *range(split.carried_start),
        *range(split.carried_start, split.carried_stop),
        *range(split.carried_stop, split.prompt_length),
    ]
    assert parts == list(range(length))
    assert split.carried + split.native == length
    assert split.carried_stop < length
    assert split.carried == max(0, length - sinks - tail)
    assert split.carried_start == (sinks if split.carried else 0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sinks": -1}, r"plan\.sinks=-1: .*0 or more"),
        ({"native_head": -2}, r"plan\.native_head=-2: .*0 or more layers, or null to map layer 0 too"),
        ({"tail_recompute": -1}, r"plan\.tail_recompute=-1: give the number of last layers, 0 or more"),
        ({"native_tail": 0}, r"plan\.native_tail=0: .*at least the last prompt token; give 1 or more"),
        ({"native_attended": -0.1}, r"plan\.native_attended=-0\.1: .*share of the carried tokens .* below 1"),
        ({"native_attended": 1.0}, r"plan\.native_attended=1.0: .*0 or more and below 1"),
        ({"native_attended": float("nan")}, r"plan\.native_attended=nan: .*0 or more and below 1"),
        ({"scouts": 0}, r"plan\.scouts=0: .*1 or more"),
    ],
    ids=["sinks", "native-head", "tail-recompute", "native-tail", "share-below-0", "share-1", "share-nan", "scouts"],
)
def test_refuses_numbers_out_of_range(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        HandoffPlan(**settings)


@pytest.mark.parametrize("length", [0, -3])
def test_refuses_an_empty_prompt(length: int) -> None:
    with pytest.raises(PlanError, match=r"prompt is empty; .*at least one token"):
        HandoffPlan().split(length)


@pytest.mark.parametrize(
    ("native_head", "mapped"), [(None, range(0, 4)), (0, range(1, 4)), (2, range(3, 4))], ids=["none", "zero", "most"]
)
def test_a_native_head_of_m_makes_layers_up_to_m_exact(native_head: int | None, mapped: range) -> None:
    assert HandoffPlan(native_head=native_head).mapped_layers(4) == mapped


@pytest.mark.parametrize("native_head", [3, 9])
def test_refuses_a_native_head_that_leaves_nothing_to_map(native_head: int) -> None:
    with pytest.raises(
        PlanError,
        match=rf"native_head={native_head} makes all 4 target layers exact; give at most 2, or run the target",
    ):
        HandoffPlan(native_head=native_head).mapped_layers(4)


@pytest.mark.parametrize(("native_head", "mapped"), [(None, range(0, 2)), (0, range(1, 2))], ids=["none", "zero"])
def test_a_tail_recompute_of_n_leaves_the_last_n_layers_out(native_head: int | None, mapped: range) -> None:
    assert HandoffPlan(native_head=native_head, tail_recompute=2).mapped_layers(4) == mapped


@pytest.mark.parametrize(("native_head", "recompute", "most"), [(1, 2, 1), (0, 3, 2), (None, 4, 3), (2, 9, 0)])
def test_refuses_head_and_recompute_that_leave_nothing_to_map(
    native_head: int | None, recompute: int, most: int
) -> None:
    head = "null" if native_head is None else native_head
    with pytest.raises(
        PlanError,
        match=rf"native_head={head} and plan\.tail_recompute={recompute} leave none of 4 target layers to map; give "
        rf"plan\.tail_recompute={most} or less",
    ):
        HandoffPlan(native_head=native_head, tail_recompute=recompute).mapped_layers(4)


def test_describes_itself_by_value() -> None:
    plan = HandoffPlan(sinks=2, native_head=None, native_tail=3, native_attended=0.25, scouts=2)
    assert plan.to_dict() == {
        "sinks": 2,
        "native_head": None,
        "native_tail": 3,
        "tail_recompute": 0,
        "native_attended": 0.25,
        "scouts": 2,
    }
    assert HandoffPlan(**plan.to_dict()) == plan
