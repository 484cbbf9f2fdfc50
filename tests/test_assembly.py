"""A hand-off against a plain two-forward reference, its exact parts, and every carried state it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.assembly import Handoff, assemble, hand_off
from kvbridge.errors import CacheError, PlanError
from kvbridge.model import KVModel
from kvbridge.native import compute_head
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_models import ARCHITECTURES, continue_with, kv_model, random_ids

TOKENS = 40
PLANS = {
    "usual": HandoffPlan(sinks=4, native_head=0, native_tail=6),
    "deep-head": HandoffPlan(sinks=1, native_head=1, native_tail=1),
    "all-mapped": HandoffPlan(sinks=3, native_head=None, native_tail=5),
    "no-sinks": HandoffPlan(sinks=0, native_head=None, native_tail=1),
}
NAN = float("nan")


def carried_states(model: KVModel, plan: HandoffPlan, *, batch: int = 1, tokens: int = TOKENS) -> ContentStates:
    """What a bad map would carry: content of about the right size that has nothing to do with the prompt."""
    split = plan.split(tokens)
    layers = len(plan.mapped_layers(model.geometry.layers))
    shape = (2, layers, batch, model.geometry.kv_heads, split.carried, model.geometry.head_dim)
    keys, values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return ContentStates(keys, values, torch.arange(split.carried_start, split.carried_stop))


def native_states(model: KVModel, plan: HandoffPlan, ids: Tensor) -> ContentStates:
    """What a perfect map would carry."""
    split = plan.split(ids.shape[1])
    states = model.content(model.read(ids)).span(split.carried_start, split.carried_stop)
    layers = plan.mapped_layers(model.geometry.layers)
    return replace(states, keys=states.keys[layers.start :], values=states.values[layers.start :])


def two_forwards(model: KVModel, plan: HandoffPlan, ids: Tensor, carried: ContentStates) -> tuple[DynamicCache, Tensor]:
    """The plain way: read the sinks, put everything before the tail into a cache by concatenation, read the tail."""
    split, layers = plan.split(ids.shape[1]), plan.mapped_layers(model.geometry.layers)
    prompt = model.read(ids[:, : split.carried_stop])
    sinks = model.read(ids[:, : split.carried_start]) if split.carried_start else None
    cache = compat.empty_cache(model.model)
    for layer in range(model.geometry.layers):
        if layer not in layers:
            keys, values = compat.layer_tensors(prompt, layer)
        else:
            keys = model.rotary.apply(carried.keys[layer - layers.start], carried.positions).to(model.dtype)
            values = carried.values[layer - layers.start].to(model.dtype)
            if sinks is not None:
                sink_keys, sink_values = compat.layer_tensors(sinks, layer)
                keys, values = torch.cat((sink_keys, keys), dim=2), torch.cat((sink_values, values), dim=2)
        cache.update(keys, values, layer)
    logits = model.extend(cache, ids[:, split.carried_stop :], split.carried_stop)
    return cache, logits[:, -1]


def assert_same_cache(given: DynamicCache, expected: DynamicCache, atol: float = 2e-5) -> None:
    assert len(given.layers) == len(expected.layers)
    for layer in range(len(expected.layers)):
        pairs = zip(compat.layer_tensors(given, layer), compat.layer_tensors(expected, layer), strict=True)
        for tensor, wanted in pairs:
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_forward_equals_two(architecture: str, plan: HandoffPlan) -> None:
    model = kv_model(architecture)
    ids, carried = random_ids(TOKENS, batch=2), carried_states(model, plan, batch=2)
    handoff = assemble(model, plan, ids, carried)
    cache, logits = two_forwards(model, plan, ids, carried)
    torch.testing.assert_close(handoff.logits, logits, rtol=0, atol=2e-5)
    assert_same_cache(handoff.cache, cache)
    assert (handoff.logits - model.prefill(ids)[1][:, -1]).abs().max() > 0.1


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_carrying_native_states_gives_the_native_cache(architecture: str, plan: HandoffPlan) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    handoff = assemble(model, plan, ids, native_states(model, plan, ids))
    cache, logits = model.prefill(ids)
    torch.testing.assert_close(handoff.logits, logits[:, -1], rtol=0, atol=2e-5)
    assert_same_cache(handoff.cache, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", [0, 1], ids="head-{}".format)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_native_head_layers_are_bit_equal_to_a_prefill(architecture: str, head: int, dtype: torch.dtype) -> None:
    model, ids = kv_model(architecture, dtype), random_ids(TOKENS)
    plan = HandoffPlan(sinks=4, native_head=head, native_tail=6)
    handoff = assemble(model, plan, ids, carried_states(model, plan))
    span = slice(4, TOKENS - 6)
    prefilled = model.read(ids[:, : span.stop])
    for layer in range(3):
        pairs = zip(compat.layer_tensors(handoff.cache, layer), compat.layer_tensors(prefilled, layer), strict=True)
        assert [torch.equal(given[:, :, span], wanted[:, :, span]) for given, wanted in pairs] == [layer <= head] * 2


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_rows_of_a_batch_do_not_touch_each_other(architecture: str) -> None:
    model, plan = kv_model(architecture), PLANS["usual"]
    ids, carried = random_ids(TOKENS, batch=3), carried_states(model, plan, batch=3)
    together = assemble(model, plan, ids, carried)
    for row in range(3):
        one = replace(carried, keys=carried.keys[:, row : row + 1], values=carried.values[:, row : row + 1])
        alone = assemble(model, plan, ids[row : row + 1], one)
        torch.testing.assert_close(together.logits[row], alone.logits[0], rtol=0, atol=2e-5)
        assert_same_cache(alone.cache, compat_row(together, model, row))


def compat_row(handoff: Handoff, model: KVModel, row: int) -> DynamicCache:
    cache = compat.copy_cache(handoff.cache, model.model)
    cache.batch_select_indices(torch.tensor([row]))
    return cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_carrying_nothing_is_a_run_on_sinks_and_tail_at_their_positions(architecture: str) -> None:
    model, ids, plan = kv_model(architecture), random_ids(TOKENS, batch=2), PLANS["usual"]
    handoff = assemble(model, plan, ids, None)
    held = torch.tensor([*range(4), *range(TOKENS - 6, TOKENS)])
    cache = compat.empty_cache(model.model)
    with torch.no_grad():
        logits = compat.run(model.model, ids[:, held], cache, position_ids=held[None]).logits[:, -1]
        closed_up = compat.run(model.model, ids[:, held], compat.empty_cache(model.model)).logits[:, -1]
    torch.testing.assert_close(handoff.logits, logits, rtol=0, atol=2e-5)
    assert_same_cache(handoff.cache, cache)
    assert (handoff.logits - closed_up).abs().max() > 1e-3
    assert handoff.next_position == TOKENS


@pytest.mark.parametrize("tokens", [1, 5, 10])
def test_a_short_prompt_is_read_natively(tokens: int) -> None:
    model, ids, plan = kv_model(), random_ids(tokens), PLANS["usual"]
    handoff = assemble(model, plan, ids, None)
    cache, logits = model.prefill(ids)
    assert handoff.split.carried == 0
    assert torch.equal(handoff.logits, logits[:, -1])
    assert_same_cache(handoff.cache, cache, atol=0)


def test_a_head_of_another_prompt_changes_the_native_head_alone() -> None:
    model, plan = kv_model(), PLANS["usual"]
    ids, other, carried = random_ids(TOKENS), random_ids(TOKENS, seed=1), carried_states(model, plan)
    handoff = assemble(model, plan, ids, carried, head=compute_head(model, plan, other))
    usual = assemble(model, plan, ids, carried)
    span = slice(4, TOKENS - 6)
    assert torch.equal(handoff.cache.layers[0].keys[:, :, span], model.read(other).layers[0].keys[:, :, span])
    assert torch.equal(handoff.cache.layers[1].keys[:, :, span], usual.cache.layers[1].keys[:, :, span])
    assert torch.equal(handoff.cache.layers[0].keys[:, :, :4], usual.cache.layers[0].keys[:, :, :4])
    assert not torch.equal(handoff.logits, usual.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generation_goes_on_from_the_cache(architecture: str) -> None:
    model, ids, plan = kv_model(architecture), random_ids(TOKENS), PLANS["usual"]
    handoff = assemble(model, plan, ids, native_states(model, plan, ids))
    first = handoff.logits.argmax(-1, keepdim=True)
    assert type(handoff.cache) is DynamicCache
    assert [type(layer).__name__ for layer in handoff.cache.layers] == ["DynamicLayer"] * 3
    assert handoff.cache.get_seq_length() == handoff.next_position == TOKENS
    plain = continue_with(model.model, ids, None, 9)
    assert [int(first), *continue_with(model.model, torch.cat((ids, first), dim=1), handoff.cache)] == plain
    assert handoff.cache.get_seq_length() == TOKENS + 8


def test_inputs_are_left_alone_and_steps_are_timed() -> None:
    model, ids, plan = kv_model(), random_ids(TOKENS), PLANS["usual"]
    carried = carried_states(model, plan)
    before = carried.keys.clone(), carried.values.clone(), ids.clone()
    handoff = assemble(model, plan, ids, carried)
    model.extend(handoff.cache, ids[:, :2], TOKENS)
    assert all(torch.equal(*pair) for pair in zip(before, (carried.keys, carried.values, ids), strict=True))
    assert handoff.seconds.keys() == {"head", "inject", "forward"}
    assert all(seconds > 0 for seconds in handoff.seconds.values())


def with_number(states: ContentStates, kind: str, number: float) -> ContentStates:
    getattr(states, kind)[1, 0, 1, 7, 3] = number
    return states


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda s: s.span(0, 29), r"cover 2 layers and 29 tokens; the plan needs 2 layers and 30 tokens"),
        (
            lambda s: replace(s, keys=s.keys[:1], values=s.values[:1]),
            r"cover 1 layers and 30 tokens; .* needs 2 layers",
        ),
        (lambda s: replace(s, positions=s.positions + 1), r"do not lie at positions 4 … 33, where the plan puts them"),
        (lambda s: replace(s, positions=s.positions.flip(0)), r"do not lie at positions 4 … 33"),
        (lambda s: with_number(s, "keys", NAN), r"states of layer 2: keys hold NaN or infinite"),
        (lambda s: with_number(s, "values", NAN), r"states of layer 2: values hold NaN or infinite"),
        (lambda s: with_number(s, "values", 1e5), r"states of layer 2: values hold NaN or infinite"),
        (
            lambda s: replace(s, keys=s.keys[:, :, :1], values=s.values[:, :, :1]),
            r"layers 1 … 2 have keys of shape \(2, 2, 1, 30, 16\).*expected \(2, 2, 2, 30, 16\)",
        ),
        (
            lambda s: replace(s, keys=s.keys[..., :8], values=s.values[..., :8]),
            r"keys of shape \(2, 2, 2, 30, 8\).*expected \(2, 2, 2, 30, 16\)",
        ),
        (
            lambda s: replace(s, keys=s.keys[:, :1], values=s.values[:, :1]),
            r"keys of shape \(2, 1, 2, 30, 16\).*expected \(2, 2, 2, 30, 16\)",
        ),
    ],
    ids=["tokens", "layers", "shifted", "reversed", "nan-keys", "nan-values", "overflow", "heads", "width", "batch"],
)
def test_refuses_carried_states_that_do_not_fit(spoil, sentence: str) -> None:
    model, plan = kv_model(dtype=torch.float16), PLANS["usual"]
    carried = spoil(carried_states(model, plan, batch=2))
    with pytest.raises(CacheError, match=sentence):
        assemble(model, plan, random_ids(TOKENS, batch=2), carried)


def test_refuses_a_plan_that_leaves_nothing_to_map() -> None:
    model, plan = kv_model(), HandoffPlan(native_head=2)
    carried = carried_states(model, HandoffPlan())
    with pytest.raises(PlanError, match=r"native_head=2 makes all 3 target layers exact"):
        assemble(model, plan, random_ids(TOKENS), carried)


def test_refuses_an_empty_prompt() -> None:
    with pytest.raises(PlanError, match="prompt is empty"):
        assemble(kv_model(), HandoffPlan(), torch.zeros(1, 0, dtype=torch.long), None)


class Recorder:
    """A map that returns the source's own states and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], range]] = []

    def apply(self, source: ContentStates, layers: range, native: ContentStates | None = None) -> ContentStates:
        self.asked.append((source.positions.tolist(), layers))
        return source.layers(layers)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_hand_off_maps_what_the_plan_carries_and_no_more(plan: HandoffPlan) -> None:
    model, ids, mapping = kv_model(), random_ids(TOKENS), Recorder()
    handoff = hand_off(model, plan, mapping, model.content(model.read(ids)), ids)
    split = plan.split(TOKENS)
    assert mapping.asked == [(list(range(split.carried_start, split.carried_stop)), plan.mapped_layers(3))]
    torch.testing.assert_close(handoff.logits, model.prefill(ids)[1][:, -1], rtol=0, atol=2e-5)
    assert handoff.seconds["map"] > 0


def test_hand_off_of_a_short_prompt_maps_nothing() -> None:
    model, ids, mapping = kv_model(), random_ids(8), Recorder()
    handoff = hand_off(model, PLANS["usual"], mapping, model.content(model.read(ids)), ids)
    assert mapping.asked == []
    assert torch.equal(handoff.logits, model.prefill(ids)[1][:, -1])


@pytest.mark.parametrize("tokens", [33, TOKENS - 1, TOKENS + 1])
def test_hand_off_refuses_a_source_that_has_read_another_length(tokens: int) -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    states = model.content(model.read(random_ids(tokens)))
    with pytest.raises(CacheError, match=rf"source has read {tokens} tokens and the prompt has {TOKENS}"):
        hand_off(model, PLANS["usual"], Recorder(), states, ids)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_second_hand_off_goes_on_from_what_the_target_holds(architecture: str, plan: HandoffPlan) -> None:
    model, ids, turn = kv_model(architecture), random_ids(TOKENS), 24
    first = assemble(model, plan, ids[:, :turn], native_states(model, plan, ids[:, :turn]))
    split, layers = plan.split(TOKENS, held=turn), plan.mapped_layers(model.geometry.layers)
    assert (split.held, split.carried_start) == (turn, turn)
    states = model.content(model.read(ids)).span(split.carried_start, split.carried_stop)
    carried = replace(states, keys=states.keys[layers.start :], values=states.values[layers.start :])
    second = assemble(model, plan, ids, carried, held=first.cache)
    cache, logits = model.prefill(ids)
    torch.testing.assert_close(second.logits, logits[:, -1], rtol=0, atol=2e-5)
    assert_same_cache(second.cache, cache)
    assert first.cache.get_seq_length() == turn
    nothing = assemble(model, HandoffPlan(native_tail=TOKENS - turn), ids, None, held=first.cache)
    torch.testing.assert_close(nothing.logits, logits[:, -1], rtol=0, atol=2e-5)


def test_an_unusable_held_cache_is_refused() -> None:
    model, plan, ids = kv_model("llama"), PLANS["usual"], random_ids(TOKENS)
    whole = model.read(ids)
    with pytest.raises(PlanError, match="nothing is left to read"):
        assemble(model, plan, ids, None, held=whole)
    short = compat.copy_cache(whole, model.model, 24)
    short.layers[1].keys = short.layers[1].keys[:, :, :-1]
    with pytest.raises(CacheError, match="at layer 1; expected"):
        assemble(model, plan, ids, None, held=short)
