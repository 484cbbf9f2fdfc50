"""Maps that write through the Triton kernels, in the interpreter or on a card: the operator, and the choice of it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvbridge.errors import CacheError
from kvbridge.kernels import FormMap, capability
from kvbridge.kernels.launching import run_program
from kvbridge.kernels.reference import apply_forms
from kvbridge.rotary import RotaryCodec
from kvbridge.states import CachedStates, ContentStates
from kvbridge.variables import Span
from tiny_maps import (
    BATCH,
    MADE,
    NATIVE,
    SHAPES,
    STREAM,
    TARGET_LAYERS,
    Shape,
    Turning,
    make_basis,
    make_branch,
    make_cached,
    make_form,
    make_native,
    make_rotary,
)
from tiny_models import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, SHAPE = 3, SHAPES["equal"]
READ = (Span("source.keys", 1, 3), *NATIVE)
EVERY = range(TARGET_LAYERS)
EXACT = 3e-6


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The Triton kernels are chosen on every device; what they were asked to run is counted."""
    monkeypatch.setattr(importlib.import_module("kvbridge.kernels.execute"), "runs_triton", lambda device: True)
    launching, counted = importlib.import_module("kvbridge.kernels.launching"), []
    run = launching.run
    monkeypatch.setattr(launching, "run", lambda *given, **more: counted.append(given[0]) or run(*given, **more))
    return counted


def room(layers: range, dtype: torch.dtype = torch.float32) -> Tensor:
    """A destination inside a longer cache, full of NaN."""
    shape = 2, len(layers), BATCH, SHAPE[2], TOKENS + 5, SHAPE[3]
    whole = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    return whole[..., 3 : 3 + TOKENS, :]


def everything() -> FormMap:
    """Reads the source, the native head and its stream; makes all states and a boundary stream, a branch adding."""
    with DEVICE:
        basis = make_basis(SHAPE, READ, MADE + STREAM, 4)
        branch = make_branch(SHAPE, "quadratic", MADE[:1] + STREAM)
        return FormMap((basis, replace(branch, inputs=READ[:1], reduce=branch.reduce[: 2 * 2 * 16])))


def slots() -> FormMap:
    with DEVICE:
        return FormMap(tuple(make_form(SHAPE, 1, kind=kind) for kind in ("keys", "values")))


def cached(dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> CachedStates:
    with DEVICE:
        return make_cached(shape, TOKENS, make_rotary(8, dtype=dtype), dtype)


def head() -> ContentStates:
    with DEVICE:
        return make_native(SHAPE, TOKENS)


def codec(dtype: torch.dtype = torch.float32) -> RotaryCodec:
    """The target's rotation."""
    with DEVICE:
        return make_rotary(16, dtype=dtype)


def expected(mapping: FormMap, source: CachedStates, layers: range, native: ContentStates | None) -> ContentStates:
    return apply_forms(mapping.forms, source.content(), layers, native)


def rotated(made: ContentStates, rotary: RotaryCodec) -> Tensor:
    return torch.stack((rotary.apply(made.keys, made.positions), made.values))


@pytest.mark.parametrize("content", [False, True], ids=["cached", "content"])
def test_writes_what_the_reference_makes(content: bool, launches: list[Any]) -> None:
    mapping, source, native, rotary = everything(), cached(), head(), codec()
    place, wanted = room(EVERY), expected(mapping, source, EVERY, native)
    streams = mapping.write(source.content() if content else source, EVERY, place, rotary, native)
    assert len(launches) == 1
    assert relative_error(place, rotated(wanted, rotary)) < EXACT
    assert streams.keys() == wanted.residual.keys() == {TARGET_LAYERS}
    assert relative_error(streams[TARGET_LAYERS], wanted.residual[TARGET_LAYERS]) < EXACT


def test_reads_half_precision_beside_a_native_head_in_fp32(launches: list[Any]) -> None:
    mapping, source, native = everything(), cached(torch.float16), head()
    rotary, place = codec(torch.float16), room(EVERY, torch.float16)
    streams = mapping.write(source, EVERY, place, rotary, native)
    wanted = expected(mapping, source, EVERY, native)
    assert len(launches) == 1
    assert relative_error(place.float(), rotated(wanted, rotary)) < 3e-3
    assert streams[TARGET_LAYERS].dtype == torch.float32
    assert relative_error(streams[TARGET_LAYERS], wanted.residual[TARGET_LAYERS]) < 3e-3


def test_compiles_once_and_binds_what_lies_where_it_lay_once(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, rotary, first, second, part = slots(), codec(), cached(), cached(), range(1, 2)
    bound, places, binding = [], [room(part), room(part)], importlib.import_module("kvbridge.kernels.triton.binding")
    make = binding.Binding._bound
    monkeypatch.setattr(binding.Binding, "_bound", lambda self, *given: bound.append(self) or make(self, *given))
    for source, place, times in (
        (first, places[0], 1),
        (first, places[0], 1),
        (second, places[0], 2),
        (second, places[1], 3),
    ):
        place.fill_(torch.nan)
        mapping.write(source, part, place, rotary)
        assert len(bound) == times
        assert relative_error(place, rotated(expected(mapping, source, part, None), rotary)) < EXACT
    assert len(set(map(id, launches))) == 1
    mapping.write(first, range(2, 3), room(part), rotary)
    assert len(set(map(id, launches))) == 2


def unequal_layers(source: CachedStates) -> CachedStates:
    return replace(source, values=tuple(tensor.contiguous() for tensor in source.values))


class Uneven(Turning):
    """The two members of a pair are turned by different angles."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        stretch = torch.linspace(1, 2, cos.shape[-1], device=cos.device)
        return cos * stretch, sin * stretch


def two_angles(source: CachedStates) -> CachedStates:
    with DEVICE:
        return replace(source, rotary=RotaryCodec(Uneven(8, False), torch.float32, False))


@pytest.mark.parametrize("change", [unequal_layers, two_angles], ids=["unequal-layers", "two-angles"])
def test_leaves_to_plain_torch_what_the_kernels_cannot_read(change: Any, launches: list[Any]) -> None:
    mapping, rotary, place = slots(), codec(), room(range(1, 2))
    source = change(cached())
    mapping.write(source, range(1, 2), place, rotary)
    assert not launches
    assert relative_error(place, rotated(expected(mapping, source, range(1, 2), None), rotary)) < EXACT


def test_refuses_what_plain_torch_refuses(launches: list[Any]) -> None:
    mapping, source, native, rotary = everything(), cached(), head(), codec()
    with pytest.raises(CacheError, match="the plan has no native head"):
        mapping.write(source, EVERY, room(EVERY), rotary)
    fewer = replace(source, keys=source.keys[:2], values=source.values[:2])
    with pytest.raises(CacheError, match="the source states have 2 layers"):
        mapping.write(fewer, EVERY, room(EVERY), rotary, native)
    with pytest.raises(CacheError, match="belongs to another target"):
        mapping.write(source, EVERY, room(range(2)), rotary, native)
    with pytest.raises(CacheError, match="input slots of width 16"):
        slots().write(cached(shape=(1, 16, 2, 16)), EVERY, room(EVERY), rotary)
    assert not launches
    keys, values = slots().forms
    broken = FormMap((keys, replace(values, bias=torch.full_like(values.bias, torch.nan))))
    with pytest.raises(CacheError, match="states of layer 1: values hold NaN or infinite numbers"):
        broken.write(source, range(1, 2), room(range(1, 2)), rotary)


def sample(mapping: FormMap, layers: range, native: ContentStates | None) -> tuple[Any, ...]:
    """Arguments of the operator, as a hand-off gives them."""
    seen: list[tuple[Any, ...]] = []
    launching = importlib.import_module("kvbridge.kernels.launching")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "run_program", lambda *given: seen.append(given) or run_program(*given))
        mapping.write(cached(), layers, room(layers), codec(), native)
    return seen[0]


def test_the_operator_passes_torchs_own_checks() -> None:
    mapping = everything()
    torch.library.opcheck(run_program, sample(mapping, EVERY, head()))


def test_a_write_compiles_into_one_graph() -> None:
    mapping, layers = slots(), range(1, 2)
    number, keys, values, _, _, _, tables, begin, place = sample(mapping, layers, None)

    def handed(keys: list[Tensor], values: list[Tensor], tables: Tensor, place: Tensor) -> Tensor:
        torch.ops.kvbridge.run_program(number, keys, values, [], [], [], tables, begin, place)
        return place.sum(dtype=torch.float32).isfinite()

    made = torch.full_like(place, torch.nan)
    assert torch.compile(handed, fullgraph=True, backend="aot_eager")(keys, values, tables, made)
    assert torch.equal(made, place)


def test_the_kernels_run_on_cuda_alone() -> None:
    assert not capability.runs_triton(torch.device("cpu"))
    assert not capability.runs_triton(torch.device("mps"))
