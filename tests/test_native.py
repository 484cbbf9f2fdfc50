"""What the target computes itself and gives to the map, against hooks on the live model and maps that only copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import compat
from kvbridge.assembly import assemble, hand_off
from kvbridge.errors import CacheError, PlanError
from kvbridge.eval.arms import mapped_arm, other_document_arm, read_context
from kvbridge.eval.documents import Document
from kvbridge.forms import SharedBasis
from kvbridge.kernels import FormMap
from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.native import compute_head
from kvbridge.plan import HandoffPlan
from kvbridge.variables import Span
from tiny_models import ARCHITECTURES, kv_model, random_ids
from tiny_pair import tiny_pair

TOKENS = 40
PLAN = HandoffPlan(sinks=4, native_head=1, native_tail=6)
CARRIED = slice(4, TOKENS - 6)


def live_residual(model: KVModel, ids: Tensor) -> list[Tensor]:
    """Residual stream at the input of every layer, by hooks on the model itself."""
    found: list[Tensor] = []

    def record(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(given[0] if given else named["hidden_states"])

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in compat.decoder_layers(model.model)]
    model.read(ids)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_pass_gives_the_residual_stream_and_leaves_the_model_alone(architecture: str) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS, batch=2)
    before = [(layer, dict(layer._forward_pre_hooks)) for layer in compat.decoder_layers(model.model)]
    head = run_head(model.model, ids, 1)
    expected = live_residual(model, ids)
    assert len(head.layers) == len(head.residual) == 2
    assert all(torch.equal(given, wanted) for given, wanted in zip(head.residual, expected, strict=False))
    after = [(layer, dict(layer._forward_pre_hooks)) for layer in compat.decoder_layers(model.model)]
    assert all(now[0] is then[0] and now[1] == then[1] == {} for now, then in zip(after, before, strict=True))


def test_a_head_gives_content_states_of_the_carried_tokens() -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    head = compute_head(model, PLAN, ids)
    assert head is not None
    states = head.states(model, CARRIED.start, CARRIED.stop)
    native = model.content(model.read(ids)).layers(range(2)).span(CARRIED.start, CARRIED.stop)
    torch.testing.assert_close(states.keys, native.keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(states.values, native.values, rtol=0, atol=1e-5)
    assert torch.equal(states.positions, native.positions)
    for layer, stream in enumerate(live_residual(model, ids)[:2]):
        torch.testing.assert_close(states.residual[layer], stream[:, CARRIED], rtol=0, atol=1e-5)
    with pytest.raises(CacheError, match=r"covers positions 0 … 33, asked for 4 … 34"):
        head.states(model, 4, 35)


@pytest.mark.parametrize("plan", [HandoffPlan(native_head=None), HandoffPlan(native_tail=TOKENS)], ids=["none", "tail"])
def test_there_is_no_head_where_the_plan_has_none_or_carries_nothing(plan: HandoffPlan) -> None:
    assert compute_head(kv_model(), plan, random_ids(TOKENS)) is None


def copying_map(model: KVModel, inputs: tuple[str, ...], outputs: tuple[str, ...], expand: Tensor) -> FormMap:
    spans = [tuple(Span.parse(text, model.geometry.layers) for text in side) for side in (inputs, outputs)]
    heads = model.geometry.kv_heads, model.geometry.head_dim
    return FormMap((SharedBasis(*spans, None, expand, torch.zeros(expand.shape[1]), *heads),))


def copies_layer_1(model: KVModel) -> FormMap:
    """A map that gives all later layers what the target has computed for layer 1, whatever the source says."""
    width, later = model.geometry.kv_heads * model.geometry.head_dim, model.geometry.layers - 2
    eye, rest = torch.eye(width).repeat(1, later), torch.zeros(width, later * width)
    expand = torch.cat([torch.cat(row, dim=1) for row in ((rest, rest), (eye, rest), (rest, rest), (rest, eye))])
    made = tuple(f"target.{kind}[2:{model.geometry.layers}]" for kind in ("keys", "values"))
    return copying_map(model, ("target.keys[0:2]", "target.values[0:2]"), made, expand)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_a_map_that_copies_native_features_puts_them_into_the_cache(architecture: str) -> None:
    model, ids = kv_model(architecture), random_ids(TOKENS)
    states = model.content(model.read(random_ids(TOKENS, seed=9)))
    handoff = hand_off(model, PLAN, copies_layer_1(model), states, ids)
    for kind in ("keys", "values"):
        made, native = (getattr(handoff.cache.layers[layer], kind)[:, :, CARRIED] for layer in (2, 1))
        torch.testing.assert_close(made, native, rtol=0, atol=1e-5)


def test_a_later_hand_off_gives_the_map_what_follows_alone() -> None:
    model, ids, turn = kv_model(), random_ids(TOKENS), 20
    mapping, states = copies_layer_1(model), model.content(model.read(ids))
    first = hand_off(model, PLAN, mapping, states.span(0, turn), ids[:, :turn])
    second = hand_off(model, PLAN, mapping, states, ids, held=first.cache)
    span = slice(turn, TOKENS - 6)
    for kind in ("keys", "values"):
        made, native = (getattr(second.cache.layers[layer], kind) for layer in (2, 1))
        torch.testing.assert_close(made[:, :, span], native[:, :, span], rtol=0, atol=1e-5)
        kept = getattr(first.cache.layers[2], kind)
        assert torch.equal(made[:, :, :turn], kept)
    past = [compat.layer_tensors(first.cache, layer) for layer in range(2)]
    again = run_head(model.model, ids[:, turn : TOKENS - 6], 1, past=[kv for kv in past if kv is not None])
    torch.testing.assert_close(second.cache.layers[1].keys[:, :, : span.stop], again.layers[1][0], rtol=0, atol=1e-5)


def test_another_document_gives_the_map_native_features_of_its_own() -> None:
    pair = tiny_pair()
    prompt, other = random_ids(TOKENS), random_ids(TOKENS, seed=1)
    context = read_context(pair, Document("d", prompt, random_ids(4)), other)
    mapping, native = copies_layer_1(pair.target), pair.target.read(other)
    reading = other_document_arm(pair, mapping, PLAN)(context)
    for layer in (1, 2, 3):
        for kind in ("keys", "values"):
            made = getattr(reading.cache.layers[layer], kind)[:, :, CARRIED]
            wanted = getattr(native.layers[1], kind)[:, :, CARRIED]
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)
    own = mapped_arm(pair, mapping, PLAN)(context)
    assert not torch.allclose(own.cache.layers[2].keys[:, :, CARRIED], reading.cache.layers[2].keys[:, :, CARRIED])


def test_keys_of_a_layer_are_a_linear_function_of_its_normed_residual_stream() -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    layer: Any = compat.decoder_layers(model.model)[1]
    gain = layer.input_layernorm.weight[:, None]
    expand = torch.cat([gain * part.weight.T for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)], dim=1)
    outputs = ("target.keys[2:3]", "target.values[2:3]")
    mapping = copying_map(model, ("target.normed_residual[1:2]",), outputs, expand.detach())
    handoff = hand_off(model, PLAN, mapping, model.content(model.read(ids)), ids)
    for kind in ("keys", "values"):
        made, native = (getattr(handoff.cache.layers[at], kind)[:, :, CARRIED] for at in (2, 1))
        torch.testing.assert_close(made, native, rtol=1e-3, atol=1e-3)


def test_a_map_and_a_plan_must_fit_each_other() -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    mapping, states = copies_layer_1(model), model.content(model.read(ids))
    mapping.require_plan(PLAN, 3)
    for head in (None, 0):
        plan = replace(PLAN, native_head=head)
        with pytest.raises(CacheError, match=r"makes no keys of target layers .*1, which the plan maps"):
            mapping.require_plan(plan, 3)
        with pytest.raises(CacheError, match=r"makes no keys of target layers .*1, which the plan maps"):
            hand_off(model, plan, mapping, states, ids)
    width = model.geometry.kv_heads * model.geometry.head_dim
    outputs = ("target.keys", "target.values")
    deep = copying_map(model, ("target.keys[1:2]",), outputs, torch.randn(width, 6 * width))
    with pytest.raises(CacheError, match=r"layers up to 1, and plan\.native_head=0; give plan\.native_head=1 or more"):
        deep.require_plan(replace(PLAN, native_head=0), 3)
    with pytest.raises(CacheError, match=r"layers up to 1, and plan\.native_head=null; give"):
        deep.require_plan(replace(PLAN, native_head=None), 3)
    with pytest.raises(PlanError, match="makes all 3 target layers exact"):
        deep.require_plan(replace(PLAN, native_head=2), 3)


def test_a_head_of_another_plan_is_refused() -> None:
    model, ids = kv_model(), random_ids(TOKENS)
    states = model.content(model.read(ids)).layers(range(2, 3)).span(CARRIED.start, CARRIED.stop)
    for other in (replace(PLAN, native_head=0), replace(PLAN, native_tail=3)):
        with pytest.raises(
            CacheError, match=r"head given covers .* = \(\d+, 1, 0, \d+\); the plan needs \(1, 1, 0, 34\)"
        ):
            assemble(model, PLAN, ids, states, head=compute_head(model, other, ids))
