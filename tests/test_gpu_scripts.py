"""The scripts that check, time and tune the kernels on a card: what of them runs without one."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tiny_models import relative_error

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_checks")


@pytest.fixture
def tiny(script: types.ModuleType) -> tuple[Any, Any]:
    return script.Model("tiny", 9, 32, 2, 2, 16, 64, 128), script.Model("small", 2, 48, 4, 2, 16, 64, 128)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "rest"])
def test_every_map_passes_its_gate_and_a_wrong_one_does_not(
    script: types.ModuleType, tiny: tuple[Any, Any], quick: bool
) -> None:
    if torch.cuda.is_available():
        pytest.skip("scripts/gpu_checks.py itself runs there")
    for name in script.MAPS:
        if (name == "basis of 256 and branch of 64") != quick:
            continue
        prepared = script.Prepared.make(name, tiny, torch.device("cpu"), torch.float32)
        assert prepared.error(tokens=3) < 1e-5
        prepared.products(3)()
    if quick:
        prepared.program.bias.add_(1.0)
        assert prepared.error(tokens=3) > script.LARGEST_ERROR


def test_plain_products_are_those_of_the_map(script: types.ModuleType, tiny: tuple[Any, Any]) -> None:
    cases = importlib.import_module("kernel_cases")
    from kvbridge.kernels.reference import slot_affine

    forms = importlib.import_module("kernel_shapes").make_map(
        "all heads, k=8", tiny[0].side, tiny[1].side, torch.device("cpu"), torch.float32
    )
    slots = torch.randn(2 * 9 * 2, 1, 5, 16)
    rows = slots[:, 0].transpose(0, 1).flatten(1)
    made = cases._plain(forms[0], rows)
    assert relative_error(made, slot_affine(forms[0], slots, range(2))[:, 0]) < 1e-5


def test_results_become_a_table_and_an_exit_code(script: types.ModuleType) -> None:
    good = {"map": "joint", "pair": "a → b", "tokens": 512, "error": 0.004, "ms": 0.5, "torch_ms": 0.4}
    good |= {"floor_ms": 0.3, "share_of_floor": 0.6}
    late = {"map": "joint", "pair": "a → b", "tokens": 2048, "skipped": "out of time"}
    results = {"device": "card", "torch": "2", "triton": "3", "command": "`x`", "copy_rate": 4e12, "product_rate": 7e14}
    results |= {"tests": {"passed": True, "summary": "9 passed"}, "cases": [good, late]}
    shown = "\n".join(script.markdown(results))
    assert "| a → b | joint | 512 | 0.40% | 0.500 | 0.300 | 60% | 0.400 |" in shown
    assert "out of time" in shown
    assert not script.failed(results)
    assert script.failed(results | {"cases": [good | {"error": float("inf")}]})
    assert script.failed(results | {"tests": {"passed": False, "summary": ""}})


def test_the_roofline_page_shows_what_its_script_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    roofline = importlib.import_module("roofline")
    page = (ROOT / "docs/roofline.md").read_text()
    assert "\n".join(roofline.table(2048, 989.0, 4.8)) in page


def test_a_tuned_entry_is_found_by_the_key_under_which_it_is_written(
    script: types.ModuleType, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = importlib.import_module("tune_kernels")
    prepared = script.Prepared.make("basis of 256", tiny, torch.device("cpu"), torch.float32)
    found = {"tokens": 16, "warps": 2, "stages": 5}
    keys = tuning.tuned_keys(prepared, 300, (9, 0))
    monkeypatch.setattr(tuning.config, "tuned", lambda: dict.fromkeys(keys, found))
    program = prepared.program
    assert len(keys) == 2
    for half in (8, program.reduce_half):
        for rows, stages in ((300, 5), (600, 2)):
            tile = tuning.config.choose_product(rows, half, program.depth, program.stored, program.dtype, (9, 0))
            assert tile.stages == stages
