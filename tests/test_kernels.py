"""Executing forms: every implementation against an explicit loop in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import KINDS, SlotAffine, input_slot
from kvbridge.kernels import FormMap
from kvbridge.kernels.reference import input_slots, slot_affine
from kvbridge.states import ContentStates
from kvbridge.variables import Span
from tiny_maps import BATCH, LAYERS, SHAPES, TARGET_LAYERS, Shape, make_form, make_states
from tiny_models import relative_error

pytestmark = pytest.mark.usefixtures("poisoned")
# Implementations that must agree with the loop.
EXECUTE: dict[str, Callable[[SlotAffine, Tensor, range], Tensor]] = {"reference": slot_affine}


def loop(form: SlotAffine, states: ContentStates, layers: range) -> Tensor:
    """`y = Σ_j x[slot_j] W_j + b`, one slot at a time in fp64."""
    source_layers, _, source_heads = states.keys.shape[:3]
    place = {
        input_slot(kind, layer, head, source_layers, source_heads): (kind, layer, head)
        for kind in KINDS
        for layer in range(source_layers)
        for head in range(source_heads)
    }
    batch, heads, width = states.keys.shape[1], form.slots.shape[1], form.weight.shape[-1]
    made = torch.zeros(len(layers), batch, heads, states.tokens, width, dtype=torch.float64)
    for at, layer in enumerate(layers):
        for head in range(heads):
            for row in range(batch):
                for j, slot in enumerate(form.slots[layer, head].tolist()):
                    kind, source_layer, source_head = place[slot]
                    x = getattr(states, kind)[source_layer, row, source_head].double()
                    made[at, row, head] += x @ form.weight[layer, head, j].double()
                made[at, row, head] += form.bias[layer, head].double()
    return made


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("tokens", [1, 7, 63])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("execute", EXECUTE.values(), ids=EXECUTE)
def test_equals_the_loop(execute: Callable[..., Tensor], shape: Shape, tokens: int, k: int) -> None:
    form, states, layers = make_form(shape, k), make_states(shape, tokens), range(TARGET_LAYERS)
    made = execute(form, input_slots(states), layers)
    assert made.dtype == torch.float32
    assert made.shape == (TARGET_LAYERS, BATCH, shape[2], tokens, shape[3])
    assert relative_error(made, loop(form, states, layers)) < 1e-6


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("execute", EXECUTE.values(), ids=EXECUTE)
def test_sums_in_fp32_whatever_it_is_given(
    execute: Callable[..., Tensor], given: torch.dtype, stored: torch.dtype
) -> None:
    shape = SHAPES["wider-target"]
    form, states = make_form(shape, 8, stored), make_states(shape, 7, given)
    made = execute(form, input_slots(states), range(TARGET_LAYERS))
    assert made.dtype == torch.float32
    assert relative_error(made, loop(form, states, range(TARGET_LAYERS))) < 1e-6


@pytest.mark.parametrize("layers", [range(1, 3), range(2, 3), range(0, 1)], ids=str)
@pytest.mark.parametrize("execute", EXECUTE.values(), ids=EXECUTE)
def test_makes_the_layers_asked_for(execute: Callable[..., Tensor], layers: range) -> None:
    shape = SHAPES["wider-target"]
    form, states = make_form(shape, 2), make_states(shape, 7)
    assert relative_error(execute(form, input_slots(states), layers), loop(form, states, layers)) < 1e-6


@pytest.mark.parametrize("layout", ["tokens-before-heads", "span", "one-for-all"])
def test_strided_states_give_what_contiguous_ones_give(layout: str) -> None:
    shape = SHAPES["equal"]
    states, form = make_states(shape, 63), make_form(shape, 8)
    if layout == "tokens-before-heads":
        strided = replace(
            states, **{kind: getattr(states, kind).transpose(2, 3).contiguous().transpose(2, 3) for kind in KINDS}
        )
    elif layout == "span":
        strided = states.span(5, 40)
    else:
        strided = replace(
            states, **{kind: getattr(states, kind)[:, :1].expand(-1, BATCH, -1, -1, -1) for kind in KINDS}
        )
    assert not strided.keys.is_contiguous()
    contiguous = ContentStates(strided.keys.contiguous(), strided.values.contiguous(), strided.positions)
    made = slot_affine(form, input_slots(strided), range(TARGET_LAYERS))
    assert torch.equal(made, slot_affine(form, input_slots(contiguous), range(TARGET_LAYERS)))
    assert relative_error(made, loop(form, strided, range(TARGET_LAYERS))) < 1e-6


def test_a_slot_is_the_head_that_its_number_names() -> None:
    states = make_states(SHAPES["equal"], 7)
    slots = input_slots(states)
    for kind in KINDS:
        for layer in range(LAYERS):
            for head in range(2):
                expected = getattr(states, kind)[layer, :, head]
                assert torch.equal(slots[input_slot(kind, layer, head, LAYERS, 2)], expected)


# FormMap


def make_map(shape: Shape = SHAPES["wider-target"], k: int = 2) -> FormMap:
    return FormMap(tuple(make_form(shape, k, seed=seed, kind=kind) for seed, kind in enumerate(KINDS, start=1)))


@pytest.mark.parametrize("layers", [range(TARGET_LAYERS), range(1, TARGET_LAYERS)], ids=str)
def test_a_map_makes_keys_and_values_at_the_positions_given(layers: range) -> None:
    mapping, states = make_map(), make_states(SHAPES["wider-target"], 7)
    made = mapping.apply(states, layers)
    for form in mapping.forms:
        assert isinstance(form, SlotAffine)
        assert relative_error(getattr(made, form.kind), loop(form, states, layers)) < 1e-6
    assert torch.equal(made.positions, states.positions)


def test_a_map_counts_two_operations_for_each_weight() -> None:
    heads, width, target_heads, target_width = SHAPES["wider-target"]
    per_layer = 2 * 2 * (2 * heads * width) * (target_heads * target_width)
    assert make_map().flops_per_token(range(1, 3)) == 2 * per_layer


@pytest.mark.parametrize(
    ("other", "found"),
    [((1, 16, 3, 24), "16 of width 16"), ((2, 8, 3, 24), "32 of width 8")],
    ids=["fewer-heads", "narrower"],
)
@pytest.mark.parametrize("foreign", KINDS)
def test_a_map_refuses_another_source(other: Shape, found: str, foreign: str) -> None:
    mapping, states = make_map(k=8), make_states(other, 7)
    (large,) = (form for form in mapping.forms if isinstance(form, SlotAffine) and form.kind == foreign)
    one_foreign = FormMap((large, *(make_form(other, 1, kind=kind) for kind in KINDS if kind != foreign)))
    with pytest.raises(CacheError) as caught:
        one_foreign.apply(states, range(TARGET_LAYERS))
    needed = int(large.slots.max()) + 1
    assert str(caught.value) == (
        f"the map reads {needed} input slots of width 16; the source states have {found}. "
        "The bridge belongs to another source."
    )


# Forms


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"slots": torch.zeros(3, 3, 5, dtype=torch.int32)},
            r"weights for \(3, 3, 4\) \(layer, head, slot\) entries and a slot table of \(3, 3, 5\); both must agree",
        ),
        ({"bias": torch.zeros(3, 3, 25)}, r"a bias of shape \(3, 3, 25\), expected \(3, 3, 24\)"),
        ({"slots": torch.full((3, 3, 4), -1, dtype=torch.int32)}, r"a negative input slot"),
        ({"slots": torch.zeros(3, 3, 4)}, r"slots torch\.float32\[3, 3, 4\]"),
        ({"weight": torch.zeros(3, 3, 4, 16 * 24)}, r"weight torch\.float32\[3, 3, 4, 384\]"),
        ({"bias": torch.zeros(3, 3, 24, dtype=torch.int32)}, r"bias torch\.int32\[3, 3, 24\]"),
        ({"kind": "queries"}, r"makes 'queries', expected one of keys, values"),
    ],
    ids=["slots", "bias", "negative", "fractional-slots", "flat-weight", "whole-bias", "kind"],
)
def test_a_form_refuses_parts_that_do_not_fit(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = make_form(SHAPES["wider-target"], 2)
    # The shape checker of the test run would be first; the form's own check is what users meet.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(CacheError, match=sentence):
        replace(form, **changes)


def test_a_form_keeps_its_bias_in_fp32() -> None:
    form = make_form(SHAPES["equal"], 1)
    half = form.to(dtype=torch.bfloat16)
    assert half.outputs == form.outputs == (Span("target.keys", 0, TARGET_LAYERS),)
    assert (half.weight.dtype, half.bias.dtype, half.slots.dtype) == (torch.bfloat16, torch.float32, torch.int32)
    assert torch.equal(half.slots, form.slots)
    assert form.layers == TARGET_LAYERS
