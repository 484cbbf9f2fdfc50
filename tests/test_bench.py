"""The benchmark command: nothing is timed on a red gate, and what it writes is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import Run
from kvbridge import assembly, compat
from kvbridge.eval import bench as bench_module
from kvbridge.eval.bench import Bench
from kvbridge.eval.bench_floor import product_shapes
from kvbridge.eval.bench_report import COLUMNS, STEP_COLUMNS
from kvbridge.kernels import FormMap
from kvbridge.kernels.steps import STEPS
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
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
        assert one["warm"] >= one["head"] + one["map"] + one["forward"]
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


class TokenClock:
    """A clock that only reading moves: a second for a token of the source, ten for one of the target."""

    def __init__(self, pair: ModelPair) -> None:
        self.now = 0.0
        self.handles = [
            # A native head stops before the last layer.
            compat.decoder_layers(model.model)[-1].register_forward_pre_hook(self.moved_by(seconds), with_kwargs=True)
            for model, seconds in ((pair.source, 1.0), (pair.target, 10.0))
        ]

    def moved_by(self, seconds: float) -> Callable[..., None]:
        def read(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = given[0] if given else named["hidden_states"]
            self.now += seconds * hidden.shape[1]

        return read

    def perf_counter(self) -> float:
        # Nothing takes no time at all.
        self.now += 1e-6
        return self.now


@pytest.fixture
def timed_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on the tiny pair whose seconds are those of the token clock."""
    pair = tiny_pair()
    clock = TokenClock(pair)
    monkeypatch.setattr(assembly, "time", clock)
    yield Bench(pair, FormMap.of(random_bridge(pair)), HandoffPlan(native_tail=8), 2)
    for handle in clock.handles:
        handle.remove()


def test_cold_counts_the_sources_reading_and_warm_does_not(timed_bench: Bench) -> None:
    found = timed_bench.time_length(torch.arange(2, 42)[None], copied=1.0)
    seconds = {name: found["seconds"][name] for name in ("native", "source", "warm", "cold")}
    # Of 40 tokens the target reads 4 sinks and 8 tail tokens after a hand-off.
    assert seconds == pytest.approx({"native": 400.0, "source": 40.0, "warm": 120.0, "cold": 160.0}, rel=1e-4)
    assert found["warm_speedup"] == pytest.approx(400 / 120, rel=1e-4)
    assert found["cold_speedup"] == pytest.approx(400 / 160, rel=1e-4)


def test_the_floor_is_what_must_be_read_and_written_at_the_speed_of_a_copy(timed_bench: Bench) -> None:
    # Keys and values of 3 mapped layers of 4 heads, each from 4 slots; 3 layers of 2 heads are read, 28 tokens carried.
    weights, read, written = 2 * 3 * 4 * (4 * 16) * 32, 2 * 3 * 2 * 28 * 16, 2 * 3 * 4 * 28 * 32
    slow = timed_bench.time_length(torch.arange(2, 42)[None], copied=1.0)
    assert (slow["carried"], slow["mapping_flops"]) == (28, 2 * weights * 28)
    assert slow["touched_bytes"] == slow["floor_s"] == 4 * (weights + read + written)
    quick = timed_bench.time_length(torch.arange(2, 42)[None], copied=1e18)
    assert quick["floor_s"] == quick["plain_product_s"] > quick["touched_bytes"] / 1e18


# Inputs of 448 numbers (keys of 8 source layers, values of 6), or of 112 more of the target; 3 heads of 24 are made.
WHOLE = {
    "k-1": [(32, 24)] * 18,
    "k-8": [(256, 72)] * 6,
    "joint": [(560, 432)],
    "basis": [(448, 5), (5, 432 + 40)],
    "one-basis": [(448, 5), (5, 432)],
    "basis-and-branch": [(448, 5), (448, 3), (5, 432), (3, 216)],
}
ONE_LAYER = {
    "k-1": [(32, 24)] * 6,
    "k-8": [(256, 72)] * 2,
    "joint": [(560, 144)],
    "basis": [(448, 5), (5, 144)],
    "one-basis": [(448, 5), (5, 144)],
    "basis-and-branch": [(448, 5), (448, 3), (5, 144), (3, 72)],
}


@pytest.mark.parametrize("name", WHOLE)
def test_plain_products_are_those_of_the_map(name: str) -> None:
    packed = FormMap(make_forms(name, SHAPES["wider-target"])).packed(torch.float32)
    assert product_shapes(packed, range(TARGET_LAYERS)) == WHOLE[name]
    assert product_shapes(packed, range(1, 2)) == ONE_LAYER[name]
