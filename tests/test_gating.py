"""Limits of a gate from hand-offs whose quality is known, and `kvbridge calibrate-gate`."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, sentence
from kvbridge.bridge import Bridge
from kvbridge.errors import UsageError
from kvbridge.eval.gating import GateConfig, Scored, calibrate_gate
from tiny_pair import write_corpus


def hand_offs(count: int, bad: int = 0, seed: int = 0) -> list[Scored]:
    """Scores around (1, .1); the last `bad` ones of a KL above the limit."""
    drawn = random.Random(seed)
    made = [Scored(drawn.lognormvariate(0, 0.05), drawn.lognormvariate(-2.3, 0.3), 0.2) for _ in range(count)]
    return made[: count - bad] + [Scored(each.novelty, each.tail, 2.0) for each in made[count - bad :]]


def test_limits_let_most_pass_and_stand_where_the_scores_end() -> None:
    scored = hand_offs(120)
    limits = calibrate_gate(scored, GateConfig())
    passing = [each for each in scored[30:] if each.novelty <= limits["novelty"] and each.tail <= limits["tail"]]
    assert (limits["applied"], limits["bad"], limits["documents"]) == (len(passing), 0, 90)
    assert len(passing) >= 0.97 * 90
    assert 1.05 < limits["novelty"] < 1.4
    assert 0.15 < limits["tail"] < 0.5


def test_a_score_that_tells_bad_ones_is_used() -> None:
    fine, bad = hand_offs(120), [Scored(1.0, 0.5, 3.0)] * 60
    limits = calibrate_gate(fine + bad, GateConfig())
    assert limits["tail"] < 0.5
    assert limits["bad"] == 0


def test_the_scale_does_not_see_how_good_the_first_ones_were() -> None:
    scored = hand_offs(120)
    spoilt = [Scored(each.novelty, each.tail, 9.0) for each in scored[:30]] + scored[30:]
    assert calibrate_gate(spoilt, GateConfig()) == calibrate_gate(scored, GateConfig())


@pytest.mark.parametrize(
    ("scored", "said"),
    [
        (hand_offs(20), r"^of 12 hand-offs \d+ pass the tightest limits, 0 of them .* at least 29 would have to pass"),
        (hand_offs(120, bad=60), r"pass the tightest limits, \d+ of them with a KL above gate\.kl_limit=1"),
    ],
    ids=["too few", "too bad"],
)
def test_says_what_is_missing(scored: list[Scored], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        calibrate_gate(scored, GateConfig())


@pytest.mark.parametrize(
    "given", [{"kl_limit": 0.0}, {"share": 0.0}, {"confidence": 1.0}, {"applied": 2.0}, {"documents": 15}]
)
def test_refuses_a_promise_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        GateConfig(**given)


@pytest.mark.parametrize(("share", "confidence"), [(0.1, 0.95), (0.05, 0.95), (0.5, 0.5), (0.01, 0.99)])
def test_a_promise_is_possible_from_so_many_documents_on(share: float, confidence: float) -> None:
    asked = GateConfig(documents=16, share=share, confidence=confidence)
    if share == 0.5:
        asked.require_possible()
        return
    with pytest.raises(UsageError) as refused:
        asked.require_possible()
    found = re.search(r"gate\.documents=(\d+) or more", str(refused.value))
    assert found is not None
    enough = int(found[1])
    replace(asked, documents=enough).require_possible()
    with pytest.raises(UsageError, match=r"takes .* even if none is bad"):
        replace(asked, documents=enough - 1).require_possible()
    # What is said to be enough certifies perfect hand-offs, and one document fewer does not.
    perfect = [Scored(1.0, 0.1, 0.0)] * enough
    assert calibrate_gate(perfect, asked)["bad"] == 0
    with pytest.raises(UsageError, match="pass the tightest limits"):
        calibrate_gate(perfect[1:], asked)


def test_an_impossible_promise_is_refused_before_anything_is_loaded(kvbridge: Run, tmp_path: Path) -> None:
    (tmp_path / "out/bridge").mkdir(parents=True)
    given = ("out=out", "gate.documents=18", "gate.confidence=0.99999")
    said = sentence(kvbridge("calibrate-gate", *given, "pair.source=nowhere"))
    assert "gate.documents=18 leaves 10 hand-offs for the test" in said
    assert "takes 110 of them even if none is bad; give gate.documents=147 or more" in said


@pytest.mark.usefixtures("own_dataset_cache")
def test_the_command_stores_a_gate_in_the_bridge(kvbridge: Run, tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "gate.jsonl", documents=18, seed=2)
    for command in ("calibrate", "fit"):
        assert kvbridge(command, "out=out").code == 0
    bridge = Bridge.from_pretrained(tmp_path / "out/bridge")
    assert bridge.novelty is not None
    given = ("out=out", f"eval.corpus={text}", "gate.documents=18")
    ran = kvbridge("calibrate-gate", *given, "gate.share=0.5")
    assert ran.code == 0, ran.errors
    assert "bounds the share of bad ones by 0.5 at confidence 0.95" in ran.out
    assert not (tmp_path / "out/gate.partial.jsonl").exists()
    again = Bridge.from_pretrained(tmp_path / "out/bridge")
    (gate,) = again.gates
    assert (gate["map"], gate["plan"]["native_tail"], gate["documents"]) == ("ridge", 16, 10)
    assert again.fingerprint() == bridge.fingerprint()
    shown = kvbridge("inspect", "out=out").out
    assert "directions each of keys and values, " in shown
    assert f"gate of map ridge: novelty up to {gate['novelty']:.3f}" in " ".join(shown.split())
    assert kvbridge("calibrate-gate", *given, "gate.share=0.5", "plan.native_tail=1").code == 0
    stored = json.loads((tmp_path / "out/bridge/config.json").read_text())["gates"]
    assert [each["plan"]["native_tail"] for each in stored] == [16, 1]
