"""The benchmark command: nothing is timed on a red gate, and what it writes is whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Run
from kvbridge.eval import bench as bench_module
from kvbridge.eval.bench_floor import product_shapes
from kvbridge.eval.bench_report import COLUMNS, STEP_COLUMNS
from kvbridge.kernels import FormMap
from kvbridge.kernels.steps import STEPS
from tiny_bridge import random_bridge
from tiny_maps import SHAPES, TARGET_LAYERS, make_forms
from tiny_pair import tiny_pair

SMALL = ("bench.lengths=[40,60]", "bench.repeats=2", "bench.documents=2", "plan.native_tail=8")


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    folder = tmp_path / "bridge"
    random_bridge(tiny_pair()).save_pretrained(folder)
    return folder


def test_writes_table_figure_and_numbers(kvbridge: Run, bridge: Path, tmp_path: Path) -> None:
    ran = kvbridge("bench", f"bridge={bridge}", "out=timed", *SMALL)
    assert (ran.code, ran.errors) == (0, [])
    folder = tmp_path / "timed" / "bench"
    assert {path.name for path in folder.iterdir()} == {"bench.json", "bench.md", "bench.svg"}
    found = json.loads((folder / "bench.json").read_text())
    assert list(found["lengths"]) == ["40", "60"]
    assert found["gate"]["relative_error"] < found["gate"]["limit"]
    assert found["product_dtype"] == "float32"
    assert found["quality"]["documents"] == 2
    for length, each in found["lengths"].items():
        assert each["carried"] == int(length) - 4 - 8
        assert len(each["rounds"]) == 2
        one = each["rounds"][0]
        assert one["cold"] == pytest.approx(one["warm"] + one["source"])
        assert one["warm"] >= one["head"] + one["map"] + one["forward"]
        assert each["floor_s"] >= each["plain_product_s"]
        assert 0 < sum(one[f"map_{step}"] for step in STEPS) <= one["map"]
    page = (folder / "bench.md").read_text()
    for columns in (COLUMNS, STEP_COLUMNS):
        assert "| " + " | ".join(columns) + " |" in page
    assert (folder / "bench.svg").read_text().startswith("<svg")


def test_a_red_gate_times_nothing(kvbridge: Run, bridge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*given: Any) -> Any:
        made = right(*given)
        return replace(made, values=made.values.roll(1, dims=-2))

    right = bench_module.apply_forms
    monkeypatch.setattr(bench_module, "apply_forms", shifted)
    ran = kvbridge("bench", f"bridge={bridge}", "out=timed", *SMALL)
    assert ran.code == 2
    assert "what the map writes differs from the reference by" in ran.errors[-1]
    assert not (tmp_path / "timed").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("bench.lengths=[40,40]", "bench.lengths=[40,40]: expected prompt lengths of 2 tokens or more, each once."),
        ("bench.repeats=0", "bench.repeats=0, bench.documents=2: expected 1 or more of each."),
        ("bench.lengths=[12]", "bench.lengths=12: the plan carries nothing of so few tokens; give longer prompts."),
    ],
)
def test_refuses_what_cannot_be_timed(kvbridge: Run, bridge: Path, override: str, sentence: str) -> None:
    kept = [each for each in SMALL if each.split("=")[0] != override.split("=")[0]]
    ran = kvbridge("bench", f"bridge={bridge}", "out=timed", *kept, override)
    assert (ran.code, ran.errors) == (2, [f"kvbridge: error: {sentence}"])


@pytest.mark.parametrize("name", ["k-1", "k-8", "joint", "basis", "one-basis", "basis-and-branch"])
def test_plain_products_are_those_of_the_map(name: str) -> None:
    mapping = FormMap(make_forms(name, SHAPES["wider-target"]))
    for layers in (range(TARGET_LAYERS), range(1, 2)):
        plain = sum(2 * inner * outer for inner, outer in product_shapes(mapping.packed(torch.float32), layers))
        assert plain == mapping.flops_per_token(layers)
