"""Several maps in one bridge, `kvbridge plan`, and `plan=auto` on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from command_line import Run, left, sentence
from kvbridge.bridge import Bridge
from kvbridge.eval import points
from kvbridge.eval.report import reproduce

SMALL = ("planner.documents=2", "planner.max_share=0.9", "planner.native_attended=[0]")
PAGES = {"plan.html", "plan.md", "plan.svg"}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs two maps leaves them for the others."""
    return tmp_path_factory.mktemp("fitted") / "out"


@pytest.fixture
def bridge(kvbridge: Run, fitted: Path, tmp_path: Path) -> Path:
    """A bridge of two maps in `out`, with the moments that they were fitted on."""
    out = tmp_path / "out"
    if not fitted.exists():
        assert kvbridge("calibrate", "out=out").code == 0
        assert kvbridge("fit", "out=out", "map=wide").code == 0
        assert kvbridge("fit", "out=out", "map=narrow", "mapper.k=1").code == 0
        shutil.copytree(out, fitted)
    else:
        shutil.copytree(fitted, out)
    return out / "bridge"


def test_fits_gather_in_one_bridge(kvbridge: Run, bridge: Path) -> None:
    both = Bridge.from_pretrained(bridge)
    assert {name: each.mapper["k"] for name, each in both.maps.items()} == {"wide": 2, "narrow": 1}
    assert kvbridge("fit", "out=out", "map=narrow", "mapper.k=3").code == 0
    replaced = Bridge.from_pretrained(bridge)
    assert {name: each.mapper["k"] for name, each in replaced.maps.items()} == {"wide": 2, "narrow": 3}
    assert kvbridge("calibrate", "out=more", "calibration.tokens=1024").code == 0
    said = sentence(kvbridge("fit", "out=out", "map=other", "moments=more/calibration"))
    assert said == (
        "out/bridge has the maps narrow, wide of another calibration (calibration.tokens), and one bridge holds maps "
        "of one calibration; give another out=."
    )
    assert "say which one, map=NAME" in sentence(kvbridge("eval", "out=out"))


def test_points_go_with_the_numbers_that_they_measured(kvbridge: Run, bridge: Path) -> None:
    assert kvbridge("plan", "out=out", *SMALL).code == 0
    assert kvbridge("fit", "out=out", "map=narrow", "mapper.k=3").code == 0
    assert {point["map"] for point in Bridge.from_pretrained(bridge).points} == {"wide"}
    assert kvbridge("fit", "out=out", "map=third", "storage=int8").code == 0
    assert Bridge.from_pretrained(bridge).points == []


def test_a_map_with_results_is_not_replaced(kvbridge: Run, bridge: Path) -> None:
    assert kvbridge("eval", "out=out", "map=wide").code == 0
    said = sentence(kvbridge("fit", "out=out", "map=wide"))
    assert said == (
        "out holds the results of an earlier bridge; give another out=, or map=NAME to add one to wide, narrow."
    )
    assert kvbridge("fit", "out=out", "map=third").code == 0
    assert list(Bridge.from_pretrained(bridge).maps) == ["wide", "narrow", "third"]


def test_plan_measures_once_and_shows(kvbridge: Run, bridge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (bridge / "model.safetensors").read_bytes()
    ran = kvbridge("plan", "out=out", *SMALL, "planner.budgets=[0.1,0.3]")
    assert (ran.code, ran.errors) == (0, [])
    measured = Bridge.from_pretrained(bridge).points
    assert [(point["map"], point["plan"]["native_tail"]) for point in measured] == [
        ("wide", 1), ("wide", 16), ("narrow", 1), ("narrow", 16),
    ]  # fmt: skip
    assert (bridge / "model.safetensors").read_bytes() == before
    assert re.search(r"^No point stays within 10\.0 % of the target's prefill\.$", ran.out, re.MULTILINE)
    assert re.search(r"^Within 30\.0 % of the target's prefill, number \d is best: map \w+, 4 sinks, ", ran.out, re.M)
    assert left(bridge.parent) >= PAGES
    assert not [name for name in left(bridge.parent) if "partial" in name]
    monkeypatch.setattr(points, "score_candidates", None)
    again = kvbridge("plan", "out=out", *SMALL, "planner.budgets=[0.1,0.3]")
    assert again.out == ran.out
    shown = kvbridge("plan", f"bridge={bridge}", "out=shown", "planner.documents=0", "plan=auto", "plan.budget=0.35")
    assert (shown.code, shown.errors) == (0, [])
    assert "Within 35.0 % of the target's prefill, number " in shown.out
    assert left(bridge.parents[1] / "shown") == PAGES


def test_eval_takes_the_plan_that_the_points_say(kvbridge: Run, bridge: Path, tmp_path: Path) -> None:
    auto = ("plan=auto", "plan.budget=0.3", f"bridge={bridge}", "out=scored")
    assert sentence(kvbridge("eval", *auto)) == (
        "the bridge has no measured points, so no plan can be chosen; measure some with `kvbridge plan`."
    )
    assert kvbridge("plan", "out=out", *SMALL).code == 0
    assert "the cheapest, map narrow with 4 sinks, native head 0, native tail 1, costs" in sentence(
        kvbridge("eval", *auto, "plan.budget=0.01")
    )
    ran = kvbridge("eval", *auto)
    assert (ran.code, ran.errors) == (0, [])
    results = json.loads((tmp_path / "scored" / "results.json").read_text())
    planning = results["run"]["planning"]
    assert (planning["budget"], planning["documents"]) == (0.3, 2)
    assert (results["map"], results["plan"]) == (planning["map"], planning["plan"])
    assert results["cost"]["target_prefill_flops_share"] == planning["share"] <= 0.3
    known = Bridge.from_pretrained(bridge).points
    best = min((point for point in known if point["share"] <= 0.3), key=lambda point: point["kl"]["mean"])
    assert planning["kl"] == best["kl"]
    assert f"plan: map {best['map']}, " in ran.out
    assert "(chosen within 30.0 % of prefill from measured points)" in (tmp_path / "scored/report.html").read_text()
    assert kvbridge("eval", *auto).out == "scored: done already\n"
    narrow = kvbridge("eval", *auto[:3], "out=narrow", "map=narrow")
    assert "plan: map narrow, " in narrow.out
    both = Bridge.from_pretrained(bridge)
    dataclasses.replace(both, points=[point for point in known if point["map"] == "wide"]).save_points(bridge)
    assert sentence(kvbridge("eval", *auto[:3], "out=bare", "map=narrow")) == (
        "the bridge has no measured points of map narrow (it has some of wide), so no plan can be chosen; measure some "
        "with `kvbridge plan`, or leave out map=."
    )


def test_a_run_measures_and_chooses(kvbridge: Run, tmp_path: Path) -> None:
    given = ("plan=auto", "plan.budget=0.5", *SMALL, "out=out")
    ran = kvbridge("run", *given)
    assert (ran.code, ran.errors) == (0, [])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    planning: dict[str, Any] = results["run"]["planning"]
    assert planning["map"] == results["map"] == "ridge"
    assert results["plan"] == planning["plan"]
    assert {"calibrate", "fit", "plan", "documents"} == set(results["run"]["seconds"])
    assert len(Bridge.from_pretrained(tmp_path / "out/bridge").points) == 2
    assert not [name for name in left(tmp_path) if "partial" in name]
    assert kvbridge("run", *given).out == "out: done already\n"
    words = [word for word in shlex.split(reproduce(results)) if "=" in word]
    assert {"plan=auto", "plan.budget=0.5", "plan.sinks=4", "planner.documents=2"} <= set(words)
    OverridesParser.create().parse_overrides(words)


def test_a_map_that_costs_what_it_saves_is_refused_before_anything_is_read(kvbridge: Run, tmp_path: Path) -> None:
    said = sentence(kvbridge("run", "planner.dearest=0.1", "out=out"))
    assert re.match(
        r"^the map of mapper=ridge costs \d+% of the target's own prefill of 80 tokens and saves \d+%", said
    )
    given = ("mapper.residual.kind=gelu", "mapper.residual.rank=20000")
    said = sentence(kvbridge("run", *given, "out=out"))
    assert said.startswith("the map of mapper=ridge with its residual branch costs ")
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("planner.documents=-1",), r"^planner\.documents=-1: expected 0 or more\.$"),
        (("plan=auto", "plan.budget=2"), r"^plan\.budget=2: expected a share"),
        (("plan=auto", "plan.native_tail=1"), r"^Could not override 'plan\.native_tail'"),
        (("moments=/nope",), r"^moments=/nope is not read by this command"),
        (("out=empty",), r"^empty/bridge: no bridge there; give bridge=DIR"),
        (("planner.documents=0",), r"^the bridge has no measured points; give planner\.documents=20"),
        ((), r"has 6 documents of 96 tokens or more; planner\.documents=20\. Ask for fewer"),
        (
            ("planner.documents=2", "planner.max_share=0.01"),
            r"^no map and plan costs planner\.max_share=1% .* the cheapest, map narrow,",
        ),
    ],
    ids=str,
)
def test_plan_refuses(given: tuple[str, ...], said: str, kvbridge: Run, bridge: Path) -> None:
    before = left(bridge.parent)
    out = [] if any(each.startswith("out=") for each in given) else ["out=out"]
    found = sentence(kvbridge("plan", *given, *out))
    assert re.search(said, found), found
    assert left(bridge.parent) == before


# Sizes


@pytest.mark.parametrize("flag", ["--sizes", "planner.sizes=true"])
def test_sizes_need_no_model(flag: str, kvbridge: Run, tmp_path: Path) -> None:
    named = ("pair.source=qwen3-8b", "pair.target=qwen3-32b", "mapper=shared_basis", "mapper.rank=512")
    ran = kvbridge("plan", *named, "eval.prompt=4096", "eval.tokens=4160", flag, without=("mapper.k",))
    assert (ran.code, ran.errors) == (0, [])
    for line in (
        "qwen3-8b → qwen3-32b, 2,048 tokens",
        "shared basis of rank 512",
        "prefill of 4,096",
        "inputs of the map",
        "peak memory: fit",
        "sum and fit take more than planner.memory_gb=80; with calibration.stage=true calibration.memory_gb=16",
    ):
        assert line in ran.out
    assert left(tmp_path) == set()


def test_sizes_of_the_embedded_pair(kvbridge: Run) -> None:
    ran = kvbridge("plan", "--sizes", "pair=embedded", without=("pair.source", "pair.target"))
    assert (ran.code, ran.errors) == (0, [])
    assert "embedded source → embedded target, 2,048 tokens" in ran.out


def test_sizes_of_an_unknown_model_say_which_are_known(kvbridge: Run) -> None:
    said = sentence(kvbridge("plan", "--sizes", "pair.source=qwen9"))
    assert "qwen9 is neither a folder with config.json nor one of qwen3-0.6b" in said
