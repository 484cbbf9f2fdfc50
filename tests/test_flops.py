"""Operation counts against numbers worked out by hand and against torch's own counter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kvbridge.flops import ModelCost, affordable_tail, handoff_flops, prefill_share
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan
from tiny_models import ARCHITECTURES, kv_model, other_model

# Hidden 64, 4 query and 2 KV heads of 16, intermediate 96, vocabulary 128, 3 layers.
PROJECTIONS = 2 * (64 * 64 + 2 * 64 * 32)
PER_TOKEN = PROJECTIONS + 2 * (64 * 64 + 3 * 64 * 96)
PER_PAIR = 2 * 2 * 4 * 16
HEAD = 2 * 64 * 128
COST = ModelCost(layers=3, per_token=PER_TOKEN, projections=PROJECTIONS, per_pair=PER_PAIR, head=HEAD)


@dataclass(frozen=True)
class Dense:
    """A map of a fixed cost per target layer."""

    per_layer: int = 1000

    def flops_per_token(self, layers: range) -> int:
        return self.per_layer * len(layers)


plans = st.builds(
    HandoffPlan,
    sinks=st.integers(0, 6),
    native_head=st.sampled_from([None, 0, 1]),
    native_tail=st.integers(1, 30),
    native_attended=st.sampled_from([0.0, 0.2]),
)
lengths = st.integers(1, 120)
costs = st.sampled_from([0, 1000, PER_TOKEN, 10 * PER_TOKEN]).map(Dense)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt_neox"])
def test_counts_a_layer_as_by_hand(architecture: str) -> None:
    assert ModelCost.of(kv_model(architecture)) == COST


def test_counts_a_layer_without_gate_and_with_all_heads() -> None:
    per_token = 2 * (64 * 3 * 64 + 64 * 64 + 2 * 64 * 96)
    assert ModelCost.of(kv_model("gpt_neox")) == ModelCost(3, per_token, 2 * 64 * 3 * 64, PER_PAIR, HEAD)


def test_counts_the_experts_that_a_token_meets() -> None:
    model = other_model("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    assert ModelCost.of(KVModel.wrap(model)).per_token == PER_TOKEN + 2 * 3 * 64 * 96


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_token_costs_what_torch_counts(architecture: str) -> None:
    model = kv_model(architecture)
    model.model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.model(torch.tensor([[5]]), use_cache=False)
    finally:
        model.model.set_attn_implementation("sdpa")
    # torch counts the angles of the rotary tables too.
    assert ModelCost.of(model).prefill(1) == pytest.approx(counter.get_total_flops(), abs=100)


def test_a_prefill_attends_causally() -> None:
    assert COST.prefill(1) == 3 * (PER_TOKEN + PER_PAIR) + HEAD
    assert COST.prefill(10) == 3 * (10 * PER_TOKEN + 55 * PER_PAIR) + HEAD
    assert COST.read(4, 6, 7, layers=2) == 2 * (2 * PER_TOKEN + (8 + 9) * PER_PAIR)


@settings(deadline=None)
@given(lengths, st.data())
def test_reading_in_two_parts_costs_the_same(length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, length))
    parts = COST.read(0, cut, 0, 3) + COST.read(cut, length, cut, 3)
    assert parts + COST.head == COST.prefill(length)


def test_parts_of_a_hand_off_as_by_hand() -> None:
    # 2 sinks, 14 carried, 4 in the tail; layer 0 runs, layer 1 stops after its projections, layer 2 is mapped.
    parts = handoff_flops(COST, HandoffPlan(sinks=2, native_head=1, native_tail=4), 20, Dense(700))
    assert parts == {
        "sinks": 3 * (2 * PER_TOKEN + 3 * PER_PAIR),
        "head": 16 * PER_TOKEN + 136 * PER_PAIR + 16 * PROJECTIONS,
        "map": 14 * 700,
        "recompute": 0,
        "scout": 0,
        "attended": 0,
        "tail": 3 * (4 * PER_TOKEN + (4 * 16 + 10) * PER_PAIR) + HEAD,
    }


@pytest.mark.parametrize(("scouts", "read"), [(3, 3), (9, 4)], ids=["some-of-the-tail", "all-of-it"])
def test_attended_tokens_and_their_scouts_as_by_hand(scouts: int, read: int) -> None:
    # 2 sinks, 14 carried, of which 4 are read again, 4 in the tail; everything before the tail counts as seen.
    plan = HandoffPlan(sinks=2, native_head=1, native_tail=4, native_attended=0.25, scouts=scouts)
    without = handoff_flops(COST, replace(plan, native_attended=0.0), 20, Dense(700))
    assert handoff_flops(COST, plan, 20, Dense(700)) == without | {
        "scout": 3 * (read * PER_TOKEN + (read * 16 + read * (read + 1) // 2) * PER_PAIR),
        "attended": 3 * 4 * (PER_TOKEN + 16 * PER_PAIR),
    }
    nothing = handoff_flops(COST, plan, 20, None)
    assert (nothing["scout"], nothing["attended"]) == (0, 0)


@pytest.mark.parametrize(
    ("native_head", "expected"), [(None, 0), (0, 16 * PROJECTIONS)], ids=["layer-0-mapped", "layer-0-exact"]
)
def test_an_exact_layer_0_costs_its_projections(native_head: int | None, expected: int) -> None:
    parts = handoff_flops(COST, HandoffPlan(2, native_head, 4), 20, Dense())
    assert (parts["head"], parts["map"]) == (expected, 14 * 1000 * (3 if native_head is None else 2))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, 14 * PROJECTIONS), (2, 14 * PER_TOKEN + (14 * 2 + 105) * PER_PAIR + 14 * PROJECTIONS)],
)
def test_a_recompute_costs_its_layers_but_for_the_rest_of_the_last(layers: int, expected: int) -> None:
    cost = replace(COST, layers=4)
    plan = HandoffPlan(sinks=2, native_head=None, native_tail=4, tail_recompute=layers)
    parts = handoff_flops(cost, plan, 20, Dense(700))
    assert (parts["recompute"], parts["map"]) == (expected, 14 * 700 * (4 - layers))
    without = handoff_flops(cost, replace(plan, tail_recompute=0), 20, Dense(700))
    assert (parts["sinks"], parts["tail"]) == (without["sinks"], without["tail"])
    assert prefill_share(cost, plan, 20, Dense(700)) == sum(parts.values()) / cost.prefill(20)


def test_without_a_map_the_tail_sees_sinks_alone() -> None:
    parts = handoff_flops(COST, HandoffPlan(2, 0, 4), 20, None)
    assert (parts["head"], parts["map"]) == (0, 0)
    assert parts["tail"] == 3 * (4 * PER_TOKEN + (4 * 2 + 10) * PER_PAIR) + HEAD


@pytest.mark.parametrize("mapping", [None, Dense()], ids=["nothing-carried", "mapped"])
@pytest.mark.parametrize("length", [1, 7, 20])
def test_share_of_an_all_native_plan_is_one(length: int, mapping: Dense | None) -> None:
    assert prefill_share(COST, HandoffPlan(sinks=4, native_tail=16), length, mapping) == 1.0


@settings(deadline=None)
@given(plans, st.integers(60, 120), st.sampled_from(["sinks", "native_head", "native_tail", "native_attended", "map"]))
def test_share_grows_with_every_part(plan: HandoffPlan, length: int, part: str) -> None:
    share = partial(prefill_share, COST, prompt_length=length)
    cheap = Dense(0)
    if part == "map":
        assert share(plan=plan, mapping=Dense(1)) > share(plan=plan, mapping=cheap)
        return
    if part in ("sinks", "native_tail"):
        # They leave fewer tokens to attend to.
        plan = replace(plan, native_attended=0.0)
    larger = plan.to_dict()
    step = 0.1 if part == "native_attended" else 1
    larger[part] = 0 if larger[part] is None else larger[part] + step
    if larger["native_head"] == 2:
        return
    assert share(plan=HandoffPlan(**larger), mapping=cheap) > share(plan=plan, mapping=cheap)


@settings(deadline=None)
@given(plans, lengths, costs)
def test_an_affordable_tail_stays_within_the_budget_and_uses_it_up(
    plan: HandoffPlan, length: int, mapping: Dense
) -> None:
    def cost_of(tail: int) -> int:
        bought = HandoffPlan(sinks=plan.sinks, native_head=None, native_tail=tail)
        return sum(handoff_flops(COST, bought, length, None).values())

    budget = sum(handoff_flops(COST, plan, length, mapping).values())
    tail = affordable_tail(COST, plan, length, mapping)
    assert tail >= plan.native_tail
    assert cost_of(tail) <= budget
    assert tail >= length - plan.sinks or cost_of(tail + 1) > budget
