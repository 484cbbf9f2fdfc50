"""Attended tokens: what the scouts record against eager attention, the tokens chosen, and what reading them gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache

from kvbridge import attended, attention, compat
from kvbridge.assembly import assemble
from kvbridge.errors import PlanError, UnsupportedModelError
from kvbridge.eval.arms import equal_cost_tail, read_context, standard_arms
from kvbridge.eval.documents import Document
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.model import KVModel
from kvbridge.native import exact_states
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_bridge import random_form
from tiny_models import ARCHITECTURES, kv_model, random_ids, tiny_model
from tiny_pair import tiny_pair

TOKENS = 40
HELD = 12
PLAN = HandoffPlan(sinks=4, native_head=0, native_tail=6, native_attended=0.25, scouts=3)


def native_states(model: KVModel, plan: HandoffPlan, ids: Tensor, held: int = 0) -> ContentStates:
    split, layers = plan.split(ids.shape[1], held), plan.mapped_layers(model.geometry.layers)
    return model.content(model.read(ids)).layers(layers).span(split.carried_start, split.carried_stop)


def wrong_states(model: KVModel, plan: HandoffPlan, ids: Tensor, held: int = 0) -> ContentStates:
    """What a bad map would carry: the right size, and nothing to do with the prompt."""
    states = native_states(model, plan, ids, held)
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(part.shape, generator=generator) for part in (states.keys, states.values))
    return replace(states, keys=keys, values=values)


def before_the_tail(model: KVModel, plan: HandoffPlan, ids: Tensor, carried: ContentStates) -> Cache:
    """Sinks, native head and carried states by concatenation."""
    split, layers = plan.split(ids.shape[1]), plan.mapped_layers(model.geometry.layers)
    native, cache = model.read(ids[:, : split.carried_stop]), compat.empty_cache(model.model)
    for layer in range(model.geometry.layers):
        keys, values = compat.layer_tensors(native, layer)
        if layer in layers:
            mapped = (
                model.rotary.apply(carried.keys[layer - layers.start], carried.positions),
                carried.values[layer - layers.start],
            )
            keys, values = (
                torch.cat((own[:, :, : split.carried_start], other), dim=2)
                for own, other in zip((keys, values), mapped, strict=True)
            )
        cache.update(keys, values, layer)
    return cache


@pytest.fixture
def scouted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the scouts of every hand-off record."""
    found: list[Tensor] = []
    scout = attended.scout

    def spy(*given: Any) -> Tensor:
        found.append(scout(*given))
        return found[-1]

    monkeypatch.setattr(attended, "scout", spy)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scouts_record_what_eager_attention_gives(architecture: str, scouted: list[Tensor]) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    carried = wrong_states(model, PLAN, ids)
    handoff = assemble(model, PLAN, ids, carried)
    eager, positions = tiny_model(architecture), torch.arange(TOKENS - 3, TOKENS)
    eager.set_attn_implementation("eager")
    cache = before_the_tail(model, PLAN, ids, carried)
    with torch.no_grad():
        output = compat.run(eager, ids[:, positions], cache, position_ids=positions[None], output_attentions=True)
    expected = sum(layer[0, :, :, 4 : TOKENS - 6].sum(dim=(0, 1)) for layer in output.attentions)
    torch.testing.assert_close(scouted[0], expected, rtol=1e-4, atol=1e-5)
    assert expected.max() > 1.2 * expected.min()
    chosen = (4 + expected.topk(round(0.25 * 30)).indices).sort().values
    assert torch.equal(handoff.attended, chosen)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_attended_tokens_are_read_over_the_mapped_rest(architecture: str) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    carried = wrong_states(model, PLAN, ids)
    handoff = assemble(model, PLAN, ids, carried)
    whole = before_the_tail(model, PLAN, ids, carried)
    for position in handoff.attended.tolist():
        read = compat.copy_cache(whole, model.model, position)
        model.extend(read, ids[:, position : position + 1], position)
        for layer in range(model.geometry.layers):
            for kept, new in zip(compat.layer_tensors(whole, layer), compat.layer_tensors(read, layer), strict=True):
                kept[:, :, position] = new[:, :, position]
    logits = model.extend(whole, ids[:, -6:], TOKENS - 6)
    torch.testing.assert_close(handoff.logits, logits[:, -1], rtol=0, atol=2e-5)
    for layer in range(model.geometry.layers):
        pairs = zip(compat.layer_tensors(handoff.cache, layer), compat.layer_tensors(whole, layer), strict=True)
        for given, wanted in pairs:
            torch.testing.assert_close(given, wanted, rtol=0, atol=2e-5)


def divergence(native: Tensor, logits: Tensor) -> float:
    return float((native.softmax(-1) * (native.log_softmax(-1) - logits.log_softmax(-1))).sum())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reading_nearly_all_that_a_wrong_map_carries_approaches_native(architecture: str) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    native = model.prefill(ids)[1][:, -1]

    def kl(share: float) -> float:
        plan = replace(PLAN, native_attended=share)
        return divergence(native, assemble(model, plan, ids, wrong_states(model, plan, ids)).logits)

    assert kl(0.9) < 0.3 * kl(0.0)
    assert abs(kl(0.999)) < 1e-5


@pytest.mark.parametrize("held", [0, HELD], ids="held-{}".format)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_exact_stays_exact(architecture: str, held: int) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    holds = model.read(ids[:, :held]) if held else None
    handoff = assemble(model, PLAN, ids, native_states(model, PLAN, ids, held), held=holds)
    cache, logits = model.prefill(ids)
    split = PLAN.split(TOKENS, held)
    assert len(handoff.attended) == round(0.25 * split.carried)
    assert handoff.attended.min() >= split.carried_start
    assert handoff.attended.max() < split.carried_stop
    torch.testing.assert_close(handoff.logits, logits[:, -1], rtol=0, atol=2e-5)
    for layer in range(model.geometry.layers):
        pairs = zip(compat.layer_tensors(handoff.cache, layer), compat.layer_tensors(cache, layer), strict=True)
        for given, wanted in pairs:
            torch.testing.assert_close(given, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("recompute", [1, 2])
def test_no_sink_is_read_twice_beside_a_tail_recompute(recompute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    plan = replace(PLAN, native_head=None, tail_recompute=recompute)
    carried, logits = exact_states(model, plan, ids), model.prefill(ids)[1][:, -1]
    read: list[list[int]] = []
    run = compat.run

    def spy(module: Any, input_ids: Tensor | None, cache: Cache, **given: Any) -> Any:
        if input_ids is not None:
            read.append(given["position_ids"][0].tolist())
        return run(module, input_ids, cache, **given)

    monkeypatch.setattr(compat, "run", spy)
    handoff = assemble(model, plan, ids, carried)
    sinks, scouts = [0, 1, 2, 3], [37, 38, 39]
    first = [sinks, scouts] if recompute > 1 else [sinks + scouts]
    assert read == [*first, [*handoff.attended.tolist(), *range(TOKENS - 6, TOKENS)]]
    torch.testing.assert_close(handoff.logits, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scouts", [1, 6, 50])
def test_any_number_of_scouts_reads_the_tail_at_most(scouts: int) -> None:
    model, ids, plan = kv_model(), random_ids(TOKENS), replace(PLAN, scouts=scouts)
    handoff = assemble(model, plan, ids, native_states(model, plan, ids))
    torch.testing.assert_close(handoff.logits, model.prefill(ids)[1][:, -1], rtol=0, atol=2e-5)
    whole_tail = assemble(model, replace(plan, scouts=6), ids, native_states(model, plan, ids))
    assert torch.equal(handoff.attended, whole_tail.attended) == (scouts >= 6)


def test_of_equals_the_earlier_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    attention = torch.tensor([0.5] * 10 + [1.0] * 5 + [0.5] * 15)
    monkeypatch.setattr(attended, "scout", lambda *given: attention)
    handoff = assemble(model, PLAN, ids, wrong_states(model, PLAN, ids))
    assert handoff.attended.tolist() == [4, 5, 6, 14, 15, 16, 17, 18]


def test_the_model_keeps_its_own_attention_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = KVModel.wrap(tiny_model()), random_ids(TOKENS)
    before, layers = model.prefill(ids)[1], []

    def interrupt(model_given: Any, record: Callable[[Tensor], None]) -> Any:
        def meanwhile(probabilities: Tensor) -> None:
            layers.append(torch.equal(model.prefill(ids)[1], before))
            if len(layers) == 2:
                raise RuntimeError("interrupted")

        return recorded(model_given, meanwhile)

    recorded = attended.recorded_backbone
    monkeypatch.setattr(attended, "recorded_backbone", interrupt)
    with pytest.raises(RuntimeError, match="interrupted"):
        assemble(model, PLAN, ids, wrong_states(model, PLAN, ids))
    assert layers == [True, True]
    assert model.model.config._attn_implementation == "sdpa"
    assert all(layer.self_attn.config is model.model.config for layer in compat.decoder_layers(model.model))
    assert torch.equal(model.prefill(ids)[1], before)


def test_recording_computes_attention_in_half_precision_too() -> None:
    model, ids = kv_model(dtype=torch.bfloat16), random_ids(TOKENS)
    seen: list[Tensor] = []
    backbone, cache = attention.recorded_backbone(model.model, seen.append), compat.empty_cache(model.model)
    positions = torch.arange(TOKENS)
    mask = compat.causal_mask(positions, positions, torch.bfloat16)
    with torch.no_grad():
        compat.run(backbone, ids, cache, position_ids=positions[None], attention_mask=mask)
    assert [(tuple(one.shape), one.dtype) for one in seen] == [((1, 4, TOKENS, TOKENS), torch.float32)] * 3
    torch.testing.assert_close(seen[2].sum(-1), torch.ones(1, 4, TOKENS))
    own = model.read(ids)
    for layer in range(3):
        for given, wanted in zip(compat.layer_tensors(cache, layer), compat.layer_tensors(own, layer), strict=True):
            torch.testing.assert_close(given, wanted, rtol=0.05, atol=0.1)


def test_the_step_is_timed_and_left_out_where_nothing_is_chosen() -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    carried = wrong_states(model, PLAN, ids)
    assert assemble(model, PLAN, ids, carried).seconds.keys() == {"head", "inject", "scout", "forward"}
    usual = assemble(model, replace(PLAN, native_attended=0.0), ids, carried)
    one_in_100 = assemble(model, replace(PLAN, native_attended=0.01), ids, carried)
    for handoff in (usual, one_in_100):
        assert len(handoff.attended) == 0
        assert handoff.seconds.keys() == {"head", "inject", "forward"}
    assert torch.equal(usual.logits, one_in_100.logits)
    nothing = assemble(model, PLAN, ids, None)
    assert torch.equal(nothing.logits, assemble(model, replace(PLAN, native_attended=0.0), ids, None).logits)
    assert len(nothing.attended) == 0


def test_refuses_to_choose_for_a_batch() -> None:
    model, ids = kv_model(), random_ids(TOKENS, batch=2)
    with pytest.raises(PlanError, match=r"native_attended=0.25 chooses the tokens of one prompt, and 2 were given"):
        assemble(model, PLAN, ids, wrong_states(model, PLAN, ids))


def test_refuses_a_model_that_does_not_show_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    monkeypatch.setattr(attended, "recorded_backbone", lambda given, record: compat.backbone(given))
    with pytest.raises(UnsupportedModelError, match=r"0 of 3 layers of LlamaForCausalLM showed their attention"):
        assemble(model, PLAN, ids, wrong_states(model, PLAN, ids))


def test_refuses_attention_that_it_does_not_know() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match=r"Linear gives its attention softcap=, which recording"):
        attention._recorded_attention(torch.nn.Linear(1, 1), states, states, states, states, 1.0, softcap=50.0)


def test_arms_choose_among_what_they_carry(scouted: list[Tensor]) -> None:
    pair = tiny_pair()
    prompt, other = (random_ids(TOKENS, seed=seed) for seed in (0, 1))
    context = read_context(pair, Document("d0", prompt, random_ids(4)), other)
    arms = standard_arms(pair, FormMap(tuple(random_form(kind, pair) for kind in KINDS)), PLAN, TOKENS)
    readings = {name: arms[name](context) for name in ("mapped", "injected", "other_document", "no_context")}
    mapped, injected, other_document = scouted
    assert not torch.equal(mapped, other_document)
    native = pair.target.content(context.native.cache)
    torch.testing.assert_close(readings["injected"].logits, context.native.logits, rtol=0, atol=2e-5)
    assert readings["injected"].seconds["scout"] > 0
    # Layer 0 is exact: that of the other text but for sinks, attended tokens and tail.
    strange = pair.target.content(readings["other_document"].cache).keys[0] - native.keys[0]
    own = (strange.abs().amax(dim=(0, 1, 3)) < 1e-4).nonzero().flatten().tolist()
    chosen = (4 + other_document.topk(8).indices).tolist()
    assert own == sorted({*range(4), *chosen, *range(TOKENS - 6, TOKENS), *shared_tokens(prompt, other)})
    assert injected.shape == (TOKENS - 10,)


def shared_tokens(prompt: Tensor, other: Tensor) -> list[int]:
    return (prompt[0] == other[0]).nonzero().flatten().tolist()


def test_the_tail_of_equal_cost_pays_for_attended_tokens() -> None:
    pair = tiny_pair()
    mapping = FormMap(tuple(random_form(kind, pair) for kind in KINDS))
    with_them = equal_cost_tail(pair, mapping, PLAN, TOKENS)
    without = equal_cost_tail(pair, mapping, replace(PLAN, native_attended=0.0), TOKENS)
    assert with_them.native_attended == 0
    assert with_them.native_tail >= without.native_tail + 8
