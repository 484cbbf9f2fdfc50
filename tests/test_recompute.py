"""Tail recompute: exact given the boundary on every architecture, in first and later hand-offs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from kvbridge import compat
from kvbridge.assembly import assemble, hand_off
from kvbridge.errors import CacheError
from kvbridge.forms import SharedBasis
from kvbridge.kernels import FormMap
from kvbridge.layer_pass import run_tail
from kvbridge.native import exact_states, read_boundary
from kvbridge.plan import HandoffPlan
from kvbridge.variables import Span
from tiny_models import ARCHITECTURES, kv_model, random_ids

TOKENS, LAYERS = 40, 4
PLANS = {
    "last-layer": HandoffPlan(sinks=4, native_head=0, native_tail=6, tail_recompute=1),
    "two-layers": HandoffPlan(sinks=4, native_head=0, native_tail=6, tail_recompute=2),
    "no-sinks": HandoffPlan(sinks=0, native_head=None, native_tail=1, tail_recompute=3),
}


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    return kv_model(architecture, dtype, layers=LAYERS)


def assert_native(handoff: Any, model: Any, ids: Tensor, atol: float = 2e-5) -> None:
    cache, logits = model.prefill(ids)
    torch.testing.assert_close(handoff.logits, logits[:, -1], rtol=0, atol=atol)
    for layer in range(LAYERS):
        pairs = zip(compat.layer_tensors(handoff.cache, layer), compat.layer_tensors(cache, layer), strict=True)
        for given, wanted in pairs:
            torch.testing.assert_close(given, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("last", [1, 2, 3], ids="n-{}".format)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_native_boundary_gives_the_native_keys_and_values(architecture: str, last: int) -> None:
    model, ids, sinks = model_of(architecture), random_ids(TOKENS, batch=2), 4
    first, cache = LAYERS - last, model.read(ids)
    boundary = read_boundary(model, ids, first)[:, sinks:]
    past = [compat.layer_tensors(model.read(ids[:, :sinks]), layer) for layer in range(first, LAYERS)]
    modules = list(compat.decoder_layers(model.model))
    made = run_tail(model.model, boundary, first, torch.arange(sinks, TOKENS), past if last > 1 else ())
    assert len(made) == last
    for layer, tensors in zip(range(first, LAYERS), made, strict=True):
        for given, wanted in zip(tensors, compat.layer_tensors(cache, layer), strict=True):
            torch.testing.assert_close(given, wanted[:, :, sinks:], rtol=0, atol=2e-5)
    now = compat.decoder_layers(model.model)
    assert all(one is other and not one._forward_pre_hooks for one, other in zip(now, modules, strict=True))
    assert len(now) == LAYERS


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "gpt_neox", "cohere-interleaved"])
def test_carrying_exact_states_gives_the_native_cache(architecture: str, plan: HandoffPlan) -> None:
    model, ids = model_of(architecture), random_ids(TOKENS)
    handoff = assemble(model, plan, ids, exact_states(model, plan, ids))
    assert_native(handoff, model, ids)
    assert handoff.seconds.keys() >= {"recompute", "forward"}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_later_hand_off_recomputes_over_what_is_held(plan: HandoffPlan) -> None:
    model, ids = model_of("llama"), random_ids(TOKENS)
    for turn in (2, 24):
        held = model.read(ids[:, :turn])
        split = plan.split(TOKENS, held=turn)
        carried = exact_states(model, replace(plan, sinks=0, native_tail=1), ids)
        carried = carried.span(split.carried_start, split.carried_stop)
        assert_native(assemble(model, plan, ids, carried, held=held), model, ids)
        assert held.get_seq_length() == turn


def test_a_wrong_boundary_changes_the_recomputed_layers_alone() -> None:
    model, ids, plan = model_of("llama"), random_ids(TOKENS), PLANS["two-layers"]
    exact = exact_states(model, plan, ids)
    wrong = replace(exact, residual={2: exact.residual[2].flip(1)})
    given, native = (assemble(model, plan, ids, states).cache for states in (wrong, exact))
    same = [torch.equal(given.layers[at].keys[:, :, :34], native.layers[at].keys[:, :, :34]) for at in range(LAYERS)]
    assert same == [True, True, False, False]
    assert torch.equal(given.layers[3].keys[:, :, :4], native.layers[3].keys[:, :, :4])


def test_a_map_makes_the_boundary_that_the_plan_recomputes_from() -> None:
    """`h_2` of a map that only copies: what enters layer 0 natively is taken for what enters layer 2."""
    model, ids, plan = model_of("llama"), random_ids(TOKENS), PLANS["two-layers"]
    width, hidden = model.geometry.kv_heads * model.geometry.head_dim, model.geometry.hidden_size
    read = (Span("target.residual", 0, 1),)
    made = (Span("target.keys", 1, 2), Span("target.values", 1, 2), Span("target.residual", 2, 3))
    expand = torch.cat((torch.zeros(hidden, 2 * width), torch.eye(hidden)), dim=1)
    form = SharedBasis(read, made, None, expand, torch.zeros(expand.shape[1]), model.geometry.kv_heads, 16)
    mapping = FormMap((form,))
    mapping.require_plan(plan, LAYERS)
    handoff = hand_off(model, plan, mapping, model.content(model.read(ids)), ids)
    embedded = read_boundary(model, ids, 0)[:, 4:34]
    past = [compat.layer_tensors(model.read(ids[:, :4]), layer) for layer in (2, 3)]
    expected = run_tail(model.model, embedded, 2, torch.arange(4, 34), past)
    for layer, (keys, values) in zip((2, 3), expected, strict=True):
        torch.testing.assert_close(handoff.cache.layers[layer].keys[:, :, 4:34], keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(handoff.cache.layers[layer].values[:, :, 4:34], values, rtol=0, atol=1e-5)
    other = FormMap(
        (replace(form, outputs=(Span("target.keys", 1, 3), Span("target.residual", 2, 3))), values_form(form))
    )
    with pytest.raises(CacheError, match=r"input of layer 3, which the map does not make; give plan\.tail_recompute=2"):
        other.require_plan(PLANS["last-layer"], LAYERS)


def values_form(form: SharedBasis) -> SharedBasis:
    """Values of two layers from the same inputs."""
    width = 2 * form.kv_heads * form.head_dim
    return replace(form, outputs=(Span("target.values", 1, 3),), expand=form.expand[:, :width], bias=form.bias[:width])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda h: {}, r"lack the residual stream at the input of layer 2, from which the plan recomputes"),
        (lambda h: {1: h}, r"lack the residual stream at the input of layer 2"),
        (lambda h: {2: h[:, 1:]}, r"input of layer 2 has shape \(1, 29, 64\), expected \(1, 30, 64\)"),
        (lambda h: {2: h[..., :32]}, r"input of layer 2 has shape \(1, 30, 32\)"),
        (lambda h: {2: h * float("nan")}, r"recomputed layer 2: keys hold NaN"),
    ],
    ids=["none", "other-layer", "tokens", "width", "nan"],
)
def test_refuses_a_boundary_that_does_not_fit(spoil: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The shape checker of the test run would be first; the own check is what users meet.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model, ids, plan = model_of("llama"), random_ids(TOKENS), PLANS["two-layers"]
    exact = exact_states(model, plan, ids)
    with pytest.raises(CacheError, match=sentence):
        assemble(model, plan, ids, replace(exact, residual=spoil(exact.residual[2])))
