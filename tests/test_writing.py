"""Maps that write into a target's cache: every form against the fp32 reference, whatever the shapes and dtypes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import WritingMap
from kvbridge.kernels import FormMap, capability
from kvbridge.kernels.reference import apply_forms
from kvbridge.rotary import RotaryCodec
from kvbridge.states import CachedStates, ContentStates
from tiny_maps import (
    BATCH,
    LAYERS,
    MAPS,
    SHAPES,
    TARGET_LAYERS,
    Shape,
    make_cached,
    make_forms,
    make_native,
    make_rotary,
)
from tiny_models import relative_error

pytestmark = pytest.mark.usefixtures("poisoned")
EVERY = range(TARGET_LAYERS)
# What rounding the cache, and rows and weights where products are in its dtype, may leave.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}


def room(shape: Shape, layers: range, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A destination inside a longer cache, full of NaN."""
    whole = torch.full((2, len(layers), BATCH, shape[2], tokens + 5, shape[3]), torch.nan, dtype=dtype)
    return whole[..., 3 : 3 + tokens, :]


def expected(forms: FormMap, source: CachedStates, layers: range, native: ContentStates, rotary: RotaryCodec) -> Tensor:
    made = apply_forms(forms.forms, source.content(), layers, native)
    return torch.stack((rotary.apply(made.keys, made.positions), made.values))


def cached(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32) -> CachedStates:
    return make_cached(shape, tokens, make_rotary(shape[1] // 2 * 2, dtype=dtype), dtype)


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("shape", [SHAPES[name] for name in ("equal", "wider-target", "narrower-target")], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_writes_what_the_reference_makes(name: str, shape: Shape, tokens: int) -> None:
    mapping, source, native = FormMap(make_forms(name, shape)), cached(shape, tokens), make_native(shape, tokens)
    rotary, place = make_rotary(shape[3]), room(shape, EVERY, tokens)
    residual = mapping.write(source, EVERY, place, rotary, native)
    assert relative_error(place, expected(mapping, source, EVERY, native, rotary)) < TOLERANCE[torch.float32]
    reference = apply_forms(mapping.forms, source.content(), EVERY, native)
    assert residual.keys() == reference.residual.keys()
    for layer, stream in reference.residual.items():
        assert relative_error(residual[layer], stream) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", MAPS)
def test_applies_what_the_reference_makes(name: str) -> None:
    shape = SHAPES["wider-target"]
    mapping, source, native = FormMap(make_forms(name, shape)), cached(shape, 7), make_native(shape, 7)
    reference = apply_forms(mapping.forms, source.content(), range(1, 3), native)
    for given in (source, source.content()):
        made = mapping.apply(given, range(1, 3), native)
        assert relative_error(made.keys, reference.keys) < TOLERANCE[torch.float32]
        assert relative_error(made.values, reference.values) < TOLERANCE[torch.float32]
        assert made.keys.dtype == torch.float32
        assert torch.equal(made.positions, source.positions)


@pytest.mark.parametrize("in_bf16", [True, False], ids=["bf16-products", "fp32-products"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["k-8", "joint-and-branch", "basis-and-branch"])
def test_rounds_no_more_than_the_cache(
    name: str, dtype: torch.dtype, in_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capability, "cpu_multiplies_bf16", lambda: in_bf16)
    shape = SHAPES["wider-target"]
    mapping, source, native = FormMap(make_forms(name, shape)), cached(shape, 31, dtype), make_native(shape, 31)
    rotary, place = make_rotary(shape[3], dtype=dtype), room(shape, EVERY, 31, dtype)
    mapping.write(source, EVERY, place, rotary, native)
    error = relative_error(place, expected(mapping, source, EVERY, native, rotary))
    assert error < TOLERANCE[dtype]
    # Products in fp32 leave the cache's own rounding alone.
    if dtype == torch.bfloat16 and not in_bf16:
        assert error < 3e-3
    assert mapping.packed(capability.product_dtype(dtype, place.device)).rows


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_takes_weights_in_any_dtype(stored: torch.dtype) -> None:
    shape = SHAPES["equal"]
    forms = FormMap(tuple(form.to(dtype=stored) for form in make_forms("joint-and-branch", shape)))
    source, native, rotary, place = cached(shape, 7), make_native(shape, 7), make_rotary(16), room(shape, EVERY, 7)
    forms.write(source, EVERY, place, rotary, native)
    assert relative_error(place, expected(forms, source, EVERY, native, rotary)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("width", [4, 16], ids=["partial", "whole"])
def test_rotates_as_the_models_do(width: int, interleaved: bool) -> None:
    shape, rotary = SHAPES["equal"], make_rotary(width, interleaved)
    mapping, native = FormMap(make_forms("basis", shape)), make_native(shape, 7)
    source, place = make_cached(shape, 7, rotary, torch.float32), room(shape, EVERY, 7)
    mapping.write(source, EVERY, place, rotary)
    assert relative_error(place, expected(mapping, source, EVERY, native, rotary)) < TOLERANCE[torch.float32]


def test_writes_layer_by_layer_what_it_writes_at_once() -> None:
    shape = SHAPES["wider-target"]
    mapping, source, native = FormMap(make_forms("joint-and-branch", shape)), cached(shape, 7), make_native(shape, 7)
    rotary, at_once, by_layer = make_rotary(24), room(shape, EVERY, 7), room(shape, EVERY, 7)
    mapping.write(source, EVERY, at_once, rotary, native)
    for at, layer in enumerate(mapping.write_layers(source, EVERY, by_layer, rotary, native)):
        assert layer == EVERY[at]
        assert torch.equal(by_layer[:, : at + 1], at_once[:, : at + 1])
        assert by_layer[:, at + 1 :].isnan().all()


def test_writes_nothing_beside_its_place() -> None:
    shape = SHAPES["equal"]
    mapping, source, rotary = FormMap(make_forms("k-8", shape)), cached(shape, 7), make_rotary(16)
    whole = torch.full((2, 2, BATCH, 2, 12, 16), 5.0)
    mapping.write(source, range(1, 3), whole[..., 3:10, :], rotary)
    assert (whole[..., :3, :] == 5).all()
    assert (whole[..., 10:, :] == 5).all()
    assert (whole[..., 3:10, :] != 5).all()


def test_a_form_map_is_a_map_that_writes() -> None:
    assert isinstance(FormMap(make_forms("k-1", SHAPES["equal"])), WritingMap)


def test_packs_once_and_shares_what_fits() -> None:
    forms = make_forms("one-basis", SHAPES["equal"])
    mapping = FormMap(forms)
    assert mapping.packed(torch.float32) is mapping.packed(torch.float32)
    # Gathered once, reduced once.
    assert len(mapping.packed(torch.bfloat16).rows) == 2
    weights = [term.weight for pieces in mapping.packed(torch.float32).pieces.values() for term in pieces[0].terms]
    assert {w.untyped_storage().data_ptr() for w in weights} == {f.expand.untyped_storage().data_ptr() for f in forms}


def test_heads_that_read_the_same_slots_share_a_product() -> None:
    packed = FormMap(make_forms("k-8", SHAPES["wider-target"])).packed(torch.float32)
    assert {len(pieces) for pieces in packed.pieces.values()} == {1}
    apart = FormMap(make_forms("k-1", SHAPES["wider-target"])).packed(torch.float32)
    assert {len(pieces) for pieces in apart.pieces.values()} == {3}


# What it refuses


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_refuses_what_is_not_finite(kind: str) -> None:
    shape = SHAPES["equal"]
    mapping, source, rotary = FormMap(make_forms("k-1", shape)), cached(shape, 7), make_rotary(16)
    broken = tuple(tensor.clone() for tensor in getattr(source, kind))
    for tensor in broken:
        tensor[0, 1, 3, 2] = torch.inf
    with pytest.raises(CacheError, match=r"states of layer \d: (keys|values) hold NaN or infinite numbers"):
        mapping.write(replace(source, **{kind: broken}), EVERY, room(shape, EVERY, 7), rotary)


def test_refuses_what_overflows_the_cache() -> None:
    shape = SHAPES["equal"]
    keys, values = make_forms("k-1", shape)
    mapping = FormMap((keys, replace(values, bias=values.bias + 1e5)))
    with pytest.raises(CacheError, match=r"states of layer 0: values hold NaN or infinite numbers"):
        mapping.write(cached(shape, 7), EVERY, room(shape, EVERY, 7, torch.float16), make_rotary(16))


def test_refuses_another_target() -> None:
    shape = SHAPES["wider-target"]
    with pytest.raises(
        CacheError, match=r"cache has room for \(2, 3, 2, 2, 7, 16\). The bridge belongs to another target"
    ):
        FormMap(make_forms("basis", shape)).write(
            cached(shape, 7), EVERY, room(SHAPES["equal"], EVERY, 7), make_rotary(16)
        )


def test_refuses_a_source_with_fewer_layers() -> None:
    shape = SHAPES["equal"]
    source = cached(shape, 7)
    fewer = replace(source, keys=source.keys[:-1], values=source.values[:-1])
    with pytest.raises(CacheError, match=rf"the source states have {LAYERS - 1} layers. The bridge belongs to another"):
        FormMap(make_forms("basis", shape)).write(fewer, EVERY, room(shape, EVERY, 7), make_rotary(16))
