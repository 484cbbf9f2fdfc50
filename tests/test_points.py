"""Measured points: which maps and plans are tried, what they score, and that the bridge keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.errors import ArtifactError, PlanError, UsageError
from kvbridge.eval import EvalConfig, points
from kvbridge.eval.candidates import Candidate, PlannerConfig, candidates
from kvbridge.eval.plan_report import plan_context, write_plan_report
from kvbridge.eval.points import measure_points, score_candidates
from kvbridge.eval.suite import Task
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.forms import SharedBasis
from kvbridge.kernels import FormMap
from kvbridge.layout import BridgeMap
from kvbridge.metrics import fidelity
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.variables import Span
from tiny_bridge import random_bridge
from tiny_pair import tiny_pair, write_corpus

GRID = PlannerConfig(documents=2, max_share=0.9, native_attended=[0.0])


def boundary_map(pair: ModelPair, head: int = 1, rank: int = 8) -> BridgeMap:
    """A map that reads native layers up to `head` and makes the residual stream before the last layer."""
    target = pair.target.geometry
    inputs = (Span("source.keys", 0, pair.source.geometry.layers), Span("target.keys", 0, head + 1))
    outputs = (
        *(Span(f"target.{kind}", head + 1, target.layers) for kind in ("keys", "values")),
        Span("target.residual", target.layers - 1, target.layers),
    )
    geometries = {"source": pair.source.geometry, "target": target}
    p = sum(span.width(geometries[span.role]) for span in inputs)
    q = sum(span.width(target) for span in outputs)
    form = SharedBasis(
        inputs,
        outputs,
        torch.randn(p, rank) / 8,
        torch.randn(rank, q) / 8,
        torch.zeros(q),
        target.kv_heads,
        target.head_dim,
    )
    return BridgeMap((form,), {"name": "basis", "rank": rank})


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def bridge(pair: ModelPair) -> Bridge:
    torch.manual_seed(0)
    return random_bridge(pair).with_map("basis", boundary_map(pair))


@pytest.fixture
def task(pair: ModelPair, tmp_path: Path) -> Task:
    corpus = write_corpus(tmp_path / "text.jsonl", documents=4, seed=1)
    config = EvalConfig(corpus=str(corpus), documents=2, tokens=72, prompt=64, rollout=2, resamples=100)
    return Task.of(pair, HandoffPlan(sinks=2), config, tmp_path / "out")


def tried(task: Task, bridge: Bridge, config: PlannerConfig = GRID) -> list[Candidate]:
    return candidates(
        bridge, ModelCost.of(task.pair.target), task.first_documents(2, "planner.documents"), config, task.plan.sinks
    )


def test_tries_every_map_under_the_plans_that_it_can_follow(task: Task, bridge: Bridge) -> None:
    found = tried(task, bridge)
    plans = {name: [each.plan for each in found if each.map == name] for name in bridge.maps}
    assert plans["ridge"] == [HandoffPlan(2, 0, tail) for tail in (1, 16)]
    assert plans["basis"] == [
        HandoffPlan(2, 1, tail, tail_recompute=recompute) for recompute in (0, 1) for tail in (1, 16)
    ]
    cost = ModelCost.of(task.pair.target)
    for each in found:
        assert each.share == prefill_share(cost, each.plan, 64, FormMap.of(bridge, each.map))


def test_attended_tokens_cost_and_are_tried(task: Task, bridge: Bridge) -> None:
    found = tried(task, bridge.with_map("basis", boundary_map(task.pair)), replace(GRID, native_attended=[0.0, 0.2]))
    ridge = [each for each in found if each.map == "ridge"]
    assert [each.plan.native_attended for each in ridge] == [0.0, 0.2, 0.0, 0.2]
    assert ridge[1].share > ridge[0].share
    (record, _) = score_candidates(task, bridge, ridge, task.first_documents(2, "planner.documents"))
    assert len({scores["kl"] for scores in record["candidates"]}) == 4


def test_heads_are_as_asked_for_and_dear_plans_left_out(task: Task, bridge: Bridge) -> None:
    found = tried(task, bridge, replace(GRID, native_head=[0, 2]))
    assert {(each.map, each.plan.native_head) for each in found} == {("ridge", 0), ("ridge", 2), ("basis", 2)}
    shares = sorted(each.share for each in tried(task, bridge))
    few = tried(task, bridge, replace(GRID, max_share=shares[2]))
    assert sorted(each.share for each in few) == shares[:3]
    said = rf"no map and plan costs planner\.max_share=1% .* the cheapest, map \w+, costs {shares[0]:.0%}\."
    with pytest.raises(PlanError, match=said):
        tried(task, bridge, replace(GRID, max_share=0.01))


def test_a_map_that_costs_what_it_saves_is_not_tried(task: Task, bridge: Bridge) -> None:
    dear = boundary_map(task.pair, rank=4000)
    both = tried(task, bridge.with_map("basis", dear))
    assert {each.map for each in both} == {"ridge"}
    alone = replace(bridge, maps={"dear": dear})
    with pytest.raises(
        PlanError, match=r"^map dear costs \d+% of the target's own prefill of 64 tokens and saves \d+%"
    ):
        tried(task, alone)


def test_scores_are_those_of_a_hand_off(task: Task, bridge: Bridge) -> None:
    found = tried(task, bridge)
    documents = task.first_documents(2, "planner.documents")
    records = score_candidates(task, bridge, found, documents)
    assert [record["id"] for record in records] == ["d0", "d1"]
    target, source = task.pair.target, task.pair.source
    for record, document in zip(records, documents, strict=True):
        assert record["native"]["kl"] == pytest.approx(0, abs=1e-9)
        states = source.content(source.read(document.prompt))
        whole = torch.cat((document.prompt, document.gold), dim=1)
        native = target.model(whole).logits[0, 63:-1]
        for each, scores in zip(found, record["candidates"], strict=True):
            handoff = hand_off(target, each.plan, FormMap.of(bridge, each.map), states, document.prompt)
            following = target.extend(handoff.cache, document.gold[:, :-1], handoff.next_position)[0]
            expected = fidelity(native, torch.cat((handoff.logits, following)), document.gold[0])
            assert scores["kl"] == pytest.approx(expected.kl.mean().item(), rel=1e-3)
            assert scores["kl_first"] == pytest.approx(expected.kl[0].item(), rel=1e-3)
            assert scores["nll"] == pytest.approx(expected.nll.mean().item(), rel=1e-3)


def test_points_say_under_what_conditions_they_were_measured(task: Task, bridge: Bridge) -> None:
    found = measure_points(task, bridge, GRID)
    assert len(found) == 6
    for point in found:
        assert point["text"] == task.corpus.fingerprint
        shared = {name: point[name] for name in ("documents", "prompt", "tokens", "format", "join", "dtype")}
        assert shared == {
            "documents": 2, "prompt": 64, "tokens": 72, "format": "raw", "join": False, "dtype": "float32",
        }  # fmt: skip
        assert point["kl"]["n"] == 2
        assert point["kl"]["ci95"][0] <= point["kl"]["mean"] <= point["kl"]["ci95"][1]
        assert point["source_kl"] > 0
    assert len({point["kl"]["mean"] for point in found}) == 6


def test_only_what_is_missing_is_measured(task: Task, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(GRID, native_tail=[16])
    known = replace(bridge, points=measure_points(task, bridge, few))
    (task.folder / "points.partial.jsonl").unlink()
    scored: list[int] = []
    score = points.score_candidates

    def counting(task: Task, bridge: Bridge, tried: Any, documents: Any) -> Any:
        scored.append(len(tried))
        return score(task, bridge, tried, documents)

    monkeypatch.setattr(points, "score_candidates", counting)
    more = measure_points(task, known, GRID)
    assert scored == [3]
    assert more[:3] == known.points
    assert measure_points(task, replace(bridge, points=more), few) == more
    assert scored == [3]
    (task.folder / "points.partial.jsonl").unlink()
    other = replace(task, config=replace(task.config, tokens=70))
    assert len(measure_points(other, replace(bridge, points=more), few)) == 3


def test_a_killed_measurement_goes_on(task: Task, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_points(task, bridge, GRID)
    partial = task.folder / "points.partial.jsonl"
    lines = partial.read_text().splitlines(keepends=True)
    partial.write_text("".join(lines[:2]) + lines[2][:40])
    scored: list[str] = []
    score = points._score_document

    def counting(*given: Any) -> Any:
        scored.append(given[-1].name)
        return score(*given)

    monkeypatch.setattr(points, "_score_document", counting)
    assert measure_points(task, bridge, GRID) == whole
    assert scored == ["d1"]
    with pytest.raises(UsageError, match=r"other settings \(candidates\)"):
        measure_points(task, bridge, replace(GRID, native_tail=[8]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"documents": -1}, r"^planner\.documents=-1: "),
        ({"max_share": 0.0}, r"^planner\.max_share=0, "),
        ({"dearest": 0.0}, r"planner\.dearest=0: "),
        ({"native_tail": []}, r"^planner\.native_tail=\[\]: give"),
        ({"budgets": [1.5]}, r"^planner\.budgets=\[1\.5\]: "),
    ],
    ids=str,
)
def test_refuses_settings_that_cannot_work(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PlannerConfig(**given)


# In the bridge


def test_a_bridge_keeps_its_points_and_its_weights(task: Task, bridge: Bridge, tmp_path: Path) -> None:
    folder = tmp_path / "bridge"
    bridge.save_pretrained(folder, dtype=torch.bfloat16)
    stored = Bridge.from_pretrained(folder)
    (folder / "README.md").write_text("mine")
    weights = (folder / "model.safetensors").read_bytes()
    found = measure_points(task, stored, GRID)
    replace(stored, points=found).save_points(folder)
    loaded = Bridge.from_pretrained(folder)
    assert loaded.points == json.loads(json.dumps(found))
    assert loaded.fingerprint() == stored.fingerprint()
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    replaced = loaded.with_map("ridge", random_bridge(task.pair).map())
    assert {point["map"] for point in replaced.points} == {"basis"}
    with pytest.raises(ArtifactError, match="holds another bridge than the one that was measured"):
        replaced.save_points(folder)


def test_pages_show_front_choices_and_the_small_model(task: Task, bridge: Bridge, tmp_path: Path) -> None:
    found = measure_points(task, bridge, GRID)
    shares = sorted(point["share"] for point in found)
    context = plan_context(replace(bridge, points=found), [shares[0] / 2, shares[-1]])
    assert context["choices"][0].startswith("No point stays within ")
    best = min(found, key=lambda point: point["kl"]["mean"])
    assert f"map {best['map']}, " in context["choices"][1]
    assert f"KL {best['kl']['mean']:.3f}" in context["choices"][1]
    front = [row["point"].kl for row in context["rows"] if row["front"]]
    assert front == sorted(front, reverse=True)
    page, twin, figure = (path.read_text() for path in write_plan_report(tmp_path, context))
    for text in (page, twin):
        assert context["choices"][1].partition(", ")[2].partition(":")[0] in text
        assert f"the small model alone has KL {found[0]['source_kl']:.3f}" in text
    assert "small model alone" in figure
    assert "currentColor" in page
    assert "currentColor" not in figure
    assert len(context["choices"]) == 2
    wider = replace(bridge, points=found).with_map("other", bridge.maps["ridge"])
    assert plan_context(wider, [])["choices"] == [
        "No point of map other: not measured, or dearer than planner.max_share under every plan that was tried."
    ]
