"""The Triton kernels on a card: bf16 products at the widths of real models. They need nothing but the card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvbridge.kernels.triton import Side, compile_map, run
from tiny_models import relative_error
from triton_cases import Case, basis_form, branch_form, pages, slot_forms

pytestmark = pytest.mark.gpu
# Inputs, z and outputs are rounded to bf16; int8 weights add their own step.
BF16, INT8 = 8e-3, 2e-2
SOURCE = Side(12, 2, 64, 64, False, 896)
TARGET = Side(8, 2, 128, 128, False, 1536)


def mapped(case: Case, name: str, stored: torch.dtype | None) -> float:
    forms = {
        "slots": lambda: slot_forms(case, 8),
        "basis": lambda: (basis_form(case, 256, stream=True), branch_form(case, "gelu", 64)),
        "joint": lambda: (basis_form(case, None), branch_form(case, "quadratic", 64)),
    }[name]()
    forms = tuple(form.to(device="cuda") for form in forms)
    layers, bf16 = range(case.target.layers), torch.bfloat16
    source = case.cache(case.source, case.source.layers, bf16)
    expected, _ = case.expected(forms, layers, source, None, {})
    made = torch.full_like(expected, float("nan"), dtype=bf16)
    program = compile_map(forms, layers, case.source, case.target, dtype=bf16, stored=stored)
    run(program, pages(source), pages(made), case.tables)
    return relative_error(made.float(), expected)


@pytest.mark.parametrize("tokens", [1, 63, 100, 1000])
@pytest.mark.parametrize("name", ["slots", "basis", "joint"])
def test_bf16_products_stay_near_the_reference(name: str, tokens: int) -> None:
    assert mapped(Case(SOURCE, TARGET, tokens, batch=2, device="cuda"), name, None) < BF16


@pytest.mark.parametrize("name", ["slots", "basis", "joint"])
def test_int8_weights_stay_near_the_reference(name: str) -> None:
    assert mapped(Case(SOURCE, TARGET, 100, device="cuda"), name, torch.int8) < INT8


def test_two_runs_write_the_same_bits() -> None:
    case = Case(SOURCE, TARGET, 200, device="cuda")
    forms = (basis_form(case, 256).to(device="cuda"),)
    source = case.cache(case.source, case.source.layers, torch.bfloat16)
    program = compile_map(forms, range(8), case.source, case.target, dtype=torch.bfloat16)
    first, second = (
        torch.full((2, 8, 1, 2, 200, 128), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    for made in (first, second):
        run(program, pages(source), pages(made), case.tables)
    assert torch.equal(first, second)
