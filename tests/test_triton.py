"""The Triton kernels against the reference, in the interpreter, or on a card where there is one.

Products are in fp32 or fp16: the interpreter's dot of bf16 operands is garbage, and its fp32 → bf16 stores truncate.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvbridge.errors import CacheError
from kvbridge.forms import Form
from kvbridge.kernels.triton import Pages, Side, compile_map, run
from kvbridge.kernels.triton.config import choose_depth, choose_product
from kvbridge.kernels.triton.weights import block_table
from kvbridge.storage import dequantise, input_octaves, quantise
from tiny_models import relative_error
from triton_cases import Case, basis_form, branch_form, pages, side, slot_forms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = 2e-6
PAIRS = {
    "equal": (side(4, 2, 16), side(2, 2, 16)),
    "wider-target": (side(3, 2, 16), side(2, 3, 24)),
    "narrower-target": (side(3, 4, 24), side(2, 1, 16)),
    "partial-rotary": (side(3, 2, 12, 4), side(2, 2, 20, 6)),
    "interleaved": (side(3, 2, 16, interleaved=True), side(2, 1, 12, 8, interleaved=True)),
    "two-conventions": (side(3, 2, 8, interleaved=True), side(2, 1, 12)),
    "no-rotation": (side(3, 2, 5, 0), side(2, 1, 7, 0)),
}


# One of each kind of rotation runs always; the interpreter takes seconds for each of the rest.
QUICK = {("equal", 1), ("interleaved", 1), ("no-rotation", 8)}
EVERY = [
    pytest.param(*PAIRS[name], k, id=f"{name}-{k}", marks=() if (name, k) in QUICK else pytest.mark.slow)
    for name in PAIRS
    for k in (1, 8)
]


def on_device(forms: tuple[Form, ...]) -> tuple[Form, ...]:
    return tuple(form.to(device=DEVICE) for form in forms)


class Ran:
    """What the kernels wrote for one case, beside what the reference makes."""

    def __init__(
        self,
        case: Case,
        forms: tuple[Form, ...],
        *,
        native: int | None = None,
        layers: range | None = None,
        given: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        rounded: tuple[Form, ...] | None = None,
    ) -> None:
        case, layers = replace(case, device=DEVICE), layers or range(case.target.layers)
        source = case.cache(case.source, case.source.layers, given)
        head = None if native is None else case.cache(case.target, native + 1, given)
        streams = {
            layer: torch.randn(case.batch, case.tokens, case.target.hidden, device=DEVICE).to(given)
            for layer in range(0 if native is None else native + 1)
        }
        forms = on_device(forms)
        self.expected, self.expected_streams = case.expected(on_device(rounded or forms), layers, source, head, streams)
        self.made = torch.full_like(self.expected, float("nan"))
        program = compile_map(forms, layers, case.source, case.target, dtype=dtype, stored=stored, device=DEVICE)
        self.streams = run(
            program,
            pages(source),
            pages(self.made),
            case.tables,
            native=None if head is None else pages(head),
            streams={layer: stream.flatten(0, 1) for layer, stream in streams.items()},
        )

    @property
    def error(self) -> float:
        return relative_error(self.made, self.expected)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is NaN."""
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **options: (
            made.fill_(float("nan")) if (made := empty(*size, **options)).is_floating_point() else made.fill_(-(2**40))
        ),
    )


@pytest.mark.parametrize(("source", "target", "k"), EVERY)
def test_a_slot_affine_map_equals_the_reference(source: Side, target: Side, k: int) -> None:
    case = Case(replace(source, layers=max(source.layers, k)), target, tokens=7 if k == 1 else 1)
    assert Ran(case, slot_forms(case, k)).error < EXACT


@pytest.mark.parametrize(
    ("pair", "rank"),
    [
        pytest.param(PAIRS["interleaved"], 9, id="interleaved-rank-9"),
        pytest.param(PAIRS["interleaved"], None, id="interleaved-full-rank", marks=pytest.mark.slow),
        pytest.param(PAIRS["wider-target"], 9, id="halves-rank-9", marks=pytest.mark.slow),
        pytest.param(PAIRS["wider-target"], None, id="halves-full-rank", marks=pytest.mark.slow),
    ],
)
def test_a_shared_basis_with_the_targets_own_states_equals_the_reference(
    pair: tuple[Side, Side], rank: int | None
) -> None:
    case = Case(*pair, tokens=9, batch=2)
    ran = Ran(case, (basis_form(case, rank, native=1, stream=True),), native=1, layers=range(0, 1))
    assert ran.error < EXACT
    (layer,) = ran.streams
    assert relative_error(ran.streams[layer].view_as(ran.expected_streams[layer]), ran.expected_streams[layer]) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["linear", "gelu", "quadratic"])
def test_a_residual_branch_adds_to_either_form(activation: str) -> None:
    case = Case(*PAIRS["narrower-target"], tokens=5)
    for frozen in (slot_forms(case, 1), (basis_form(case, 16),)):
        assert Ran(case, (branch_form(case, activation, 6), *frozen)).error < EXACT


def test_two_forms_share_a_basis_and_branches_add_up() -> None:
    case = Case(*PAIRS["equal"], tokens=5)
    forms = basis_form(case, 8), branch_form(case, "gelu", 4), branch_form(case, "quadratic", 3)
    assert Ran(case, forms).error < EXACT


@pytest.mark.parametrize(
    "given", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=["bf16", "fp16"]
)
def test_reads_every_dtype(given: torch.dtype) -> None:
    case = Case(*PAIRS["equal"], tokens=5)
    assert Ran(case, slot_forms(case, 1), given=given).error < EXACT


def test_half_precision_products_stay_near_the_reference() -> None:
    case = Case(*PAIRS["equal"], tokens=17)
    forms = basis_form(case, 16), branch_form(case, "gelu", 4)
    assert Ran(case, forms, dtype=torch.float16).error < 2e-3


def test_weights_kept_as_whole_numbers_are_dequantised_in_the_kernel() -> None:
    case = Case(*PAIRS["wider-target"], tokens=5)
    forms = basis_form(case, 20), branch_form(case, "quadratic", 6)
    assert Ran(case, forms, rounded=tuple(map(_rounded, forms)), stored=torch.int8).error < EXACT


def _rounded(form: Form) -> Form:
    """The form with the weights that int8 storage gives back."""
    parts = {}
    for name in ("reduce", "expand"):
        weight = getattr(form, name)
        octave = input_octaves(weight)
        parts[name] = dequantise(*quantise(weight / octave[:, None], (0,)), (0,)) * octave[:, None]
    return replace(form, **parts)


def _blocks(case: Case, layout: str, layers: int, slots: Tensor) -> tuple[Tensor, Pages]:
    """A poisoned paged cache in the layout of an engine, 5 blocks of 4 slots, and its pages."""
    heads, width = case.target.heads, case.target.head_dim
    if layout == "keys beside values":  # [blocks, H, block_size, 2 D]
        cache = torch.full((layers, 5, heads, 4, 2 * width), float("nan"), device=DEVICE)
        return cache, Pages.of(list(cache[..., :width]), list(cache[..., width:]), slots)
    cache = torch.full((layers, 2, 5, 4, heads, width), float("nan"), device=DEVICE)  # [2, blocks, block_size, H, D]
    keys, values = cache.transpose(3, 4).unbind(1)
    return cache, Pages.of(list(keys), list(values), slots)


@pytest.mark.parametrize("layout", ["keys beside values", "keys before values"])
def test_writes_paged_blocks_and_skips_slots_that_are_none(layout: str) -> None:
    case = replace(Case(*PAIRS["wider-target"], tokens=7), device=DEVICE)
    forms = on_device(slot_forms(case, 1))
    slots = torch.tensor([18, 3, -1, 0, 7, -1, 12], device=DEVICE)
    live = slots >= 0
    cache, destination = _blocks(case, layout, case.target.layers, slots)
    source = case.cache(case.source, case.source.layers, torch.float32)
    expected, _ = case.expected(forms, range(case.target.layers), source, None, {})
    program = compile_map(
        forms, range(case.target.layers), case.source, case.target, dtype=torch.float32, device=DEVICE
    )
    run(program, pages(source), destination, case.tables)
    for kind, tensors in enumerate((destination.keys, destination.values)):
        for layer, tensor in enumerate(tensors):
            rows = tensor[slots[live] // 4, :, slots[live] % 4]  # [N, H, D]
            assert relative_error(rows.transpose(0, 1), expected[kind, layer, 0][:, live]) < EXACT
    written = 2 * case.target.layers * int(live.sum()) * case.target.heads * case.target.head_dim
    assert int(torch.isfinite(cache).sum()) == written


def test_reads_paged_blocks_with_gaps() -> None:
    case = replace(Case(*PAIRS["equal"], tokens=6), device=DEVICE)
    forms = on_device(slot_forms(case, 1))
    source = case.cache(case.source, case.source.layers, torch.float32)
    slots = torch.tensor([9, 2, 15, 4, 19, 0], device=DEVICE)
    swapped = replace(case, target=case.source)
    cache, paged = _blocks(swapped, "keys beside values", case.source.layers, slots)
    for kind, tensors in enumerate((paged.keys, paged.values)):
        for layer, tensor in enumerate(tensors):
            tensor[slots // 4, :, slots % 4] = source[kind, layer, 0].transpose(0, 1)
    assert not torch.isfinite(cache).all()
    expected, _ = case.expected(forms, range(case.target.layers), source, None, {})
    made = torch.full_like(expected, float("nan"))
    program = compile_map(
        forms, range(case.target.layers), case.source, case.target, dtype=torch.float32, device=DEVICE
    )
    run(program, paged, pages(made), case.tables)
    assert relative_error(made, expected) < EXACT


def test_takes_at_most_three_launches_whatever_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    running = importlib.import_module("kvbridge.kernels.triton.run")
    launches = []
    for name in ("gather", "reduce", "expand"):
        monkeypatch.setattr(running, name, lambda *_, name=name, **__: launches.append(name))
    for layers in (2, 6):
        case = Case(side(layers, 2, 16), side(layers, 2, 16))
        forms = *slot_forms(case, 1), branch_form(case, "gelu", 4), branch_form(case, "quadratic", 4)
        Ran(case, forms)
        assert launches == ["gather", "reduce", "expand"]
        launches.clear()


def test_refuses_caches_that_do_not_fit() -> None:
    case = Case(*PAIRS["equal"])
    forms, layers = (basis_form(case, 8, native=1),), range(2)
    program = compile_map(forms, layers, case.source, case.target, dtype=torch.float32, device="cpu")
    source, made = case.cache(case.source, 4, torch.float32), case.cache(case.target, 2, torch.float32)
    with pytest.raises(CacheError, match="give them as native"):
        run(program, pages(source), pages(made), case.tables)
    with pytest.raises(CacheError, match="residual stream of layer 0"):
        run(program, pages(source), pages(made), case.tables, native=pages(made))
    with pytest.raises(CacheError, match="3 layers of 2 × 16; the map needs 4"):
        run(program, pages(source[:, :3]), pages(made), case.tables)
    with pytest.raises(CacheError, match="give a slot table"):
        run(program, pages(source), pages(made[..., :3, :]), case.tables)
    with pytest.raises(CacheError, match="rotary tables"):
        run(program, pages(source), pages(made), replace(case.tables, target=3))
    with pytest.raises(CacheError, match="does not make all keys and values of target layers 2"):
        compile_map(forms, range(3), case.source, case.target, dtype=torch.float32, device="cpu")
    with pytest.raises(CacheError, match="last axis contiguous"):
        Pages.of([source[0, 0].transpose(2, 3)], [source[0, 0].transpose(2, 3)])
    with pytest.raises(CacheError, match="laid out alike"):
        Pages.of([source[0, 0]], [source[0, 0].contiguous()])


def test_tables_of_live_models_have_one_angle_per_pair() -> None:
    for interleaved in (False, True):
        case = Case(side(1, 1, 8, interleaved=interleaved), side(1, 1, 6, 4, interleaved=interleaved))
        tables, cosines = case.tables, case.codec(case.target).tables(case.positions)[0]
        half = tables.flat[tables.target :][: case.tokens * 2].view(case.tokens, 2)
        assert torch.equal(half.repeat_interleave(2, -1) if interleaved else half.repeat(1, 2), cosines)


def test_runs_of_inputs_are_joined_and_cut() -> None:
    blocks = block_table([(0, 0, 48), (48, 48, 32), (160, 80, 40)], 32)
    assert blocks.tolist() == [[0, 0, 32], [32, 32, 32], [64, 64, 16], [160, 80, 32], [192, 112, 8]]


def test_shapes_of_programs_follow_sizes_and_architecture() -> None:
    assert choose_depth({128, 1024}, torch.bfloat16) == 64
    assert choose_depth({128, 1024}, torch.float32) == 32
    assert choose_depth({48}, torch.bfloat16) == 16
    assert choose_depth({72}, torch.bfloat16) == 32
    few, many = (choose_product(rows, 64, 64, torch.bfloat16, torch.bfloat16, (9, 0)).tokens for rows in (5, 4096))
    assert few == 16
    assert many == 128
