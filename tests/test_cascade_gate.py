"""What a gate lets pass and what it stops, on a pair whose map is exact: both models are one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import compat
from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationMoments, Moments, fit_novelty
from kvbridge.calibration.moments import PARTS
from kvbridge.calibration.rows import cut_rows, read_states
from kvbridge.cascade import APPLIED, FALLBACK, Cascade, Gate, GateLimits, GateReading, Guarded, guarded_hand_off
from kvbridge.cascade.scores import Progress
from kvbridge.cascade.turn import Turn
from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.fingerprint import fingerprint_tokenizer
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form
from kvbridge.model import KVModel
from kvbridge.novelty import Novelty
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_bridge import random_bridge, with_open_gate
from tiny_models import continue_with, tiny_model
from tiny_pair import byte_tokenizer, tiny_pair
from twin_pair import twin_bridge

TOKENS, PLAN = 48, HandoffPlan(sinks=4, native_head=0, native_tail=8)
VOCABULARY = 64


@cache
def model() -> KVModel:
    # Larger weights, so that a token's context changes its states.
    return KVModel.wrap(tiny_model("qwen3", layers=4, vocab_size=VOCABULARY, initializer_range=0.12), name="one")


@cache
def mapping() -> FormMap:
    return FormMap(tuple(identity_form(kind, model().geometry) for kind in KINDS))


def prompt(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randint(2, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


@cache
def states(seed: int = 0) -> ContentStates:
    return model().content(model().read(prompt(seed)))


@cache
def novelty() -> Novelty:
    names = [f"{role}.{kind}" for role in ("source", "target") for kind in KINDS]
    geometry = model().geometry
    own = [(name, name) for name in names[:2]]
    sets = {
        (split, part): Moments.zeros(dict.fromkeys(names, geometry.width), own)
        for split in ("fit", "held_out")
        for part in PARTS
    }
    for seed in range(100, 130):
        read = {k: v for role in ("source", "target") for k, v in read_states(model(), role, prompt(seed)).items()}
        rows = {name: cut_rows(read, name, geometry.layers) for name in names}
        sets["fit", "rest"].add({name: row[4:] for name, row in rows.items()})
    made = fit_novelty(CalibrationMoments(sets), geometry, geometry)
    assert made is not None
    return made


def gate(plan: HandoffPlan = PLAN, *, novel: float = 1.5, tail: float = 1e-6) -> Gate:
    return Gate(model(), model(), plan, mapping(), novelty(), GateLimits(novel, tail))


def guarded_by(judge: Gate, given: ContentStates) -> Guarded:
    return guarded_hand_off(judge, judge.target, judge.plan, judge.mapping, given, prompt())


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        HandoffPlan(sinks=0, native_head=None, native_tail=1),
        HandoffPlan(sinks=4, native_head=2, native_tail=16),
    ],
    ids=["default", "published", "deep head"],
)
def test_an_exact_hand_off_passes(plan: HandoffPlan) -> None:
    guarded = guarded_by(gate(plan), states())
    assert guarded.handoff is not None
    assert guarded.reason == ""
    assert [reading.check for reading in guarded.readings] == ["novelty", "tail"]
    assert guarded.readings[1].score < 1e-8
    plain = hand_off(model(), plan, mapping(), states(), prompt())
    assert torch.equal(guarded.handoff.logits, plain.logits)


def test_a_longer_tail_is_judged_by_as_many_last_tokens_as_the_limits_are_of() -> None:
    bias, last = 0.3, torch.arange(TOKENS - PLAN.native_tail, TOKENS)
    biased = FormMap.of(twin_bridge(one_pair(), bias=bias))
    judge, longer = replace(gate(tail=1e9), mapping=biased), replace(PLAN, native_tail=20)
    guarded = guarded_hand_off(judge, model(), longer, biased, states(), prompt())
    assert guarded.handoff is not None
    errors = []
    for layer in range(1, 4):
        found = compat.layer_tensors(guarded.handoff.cache, layer)
        assert found is not None
        keys, values = (tensor[..., last, :] for tensor in found)
        computed = {"keys": model().rotary.strip(keys[None], last)[0], "values": values}
        for spread, kind in zip(novelty().target_spread[:, layer], KINDS, strict=True):
            mapped = getattr(states(), kind)[layer][..., last, :] + bias
            errors.append(float((computed[kind] - mapped).square().mean() / spread))
    assert guarded.readings[-1].score == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    # All twenty tokens would have told something else.
    every = guarded_hand_off(replace(judge, plan=longer), model(), longer, biased, states(), prompt())
    assert every.readings[-1].score != pytest.approx(guarded.readings[-1].score, rel=1e-2)


def shifted(given: ContentStates) -> ContentStates:
    rotary = model().rotary
    return replace(given, keys=rotary.strip(rotary.apply(given.keys, given.positions + 1), given.positions))


def with_number(value: float) -> Callable[[ContentStates], ContentStates]:
    def spoilt(given: ContentStates) -> ContentStates:
        keys = given.keys.clone()
        keys[-1, 0, 0, 20, 0] = value
        return replace(given, keys=keys)

    return spoilt


def deep(corruption: Callable[[ContentStates], ContentStates]) -> Callable[[ContentStates], ContentStates]:
    """Layer 0 stays as it is."""

    def corrupted(given: ContentStates) -> ContentStates:
        made = corruption(given)
        keys, values = (torch.cat((getattr(given, k)[:1], getattr(made, k)[1:])) for k in KINDS)
        return replace(given, keys=keys, values=values)

    return corrupted


def noisy(given: ContentStates) -> ContentStates:
    return replace(given, values=given.values + given.values.std() * torch.randn_like(given.values))


CORRUPTIONS: dict[str, tuple[Callable[[ContentStates], ContentStates], str]] = {
    "NaN": (with_number(math.nan), "finite"),
    "infinite": (with_number(math.inf), "finite"),
    "one token short": (lambda given: given.span(0, TOKENS - 1), "length"),
    "one token late": (lambda given: replace(given, positions=given.positions + 1), "length"),
    "another prompt": (lambda _: states(1), "layer0"),
    "shifted positions": (shifted, "layer0"),
    "noise": (noisy, "layer0"),
    "noise above layer 0": (deep(noisy), "novelty"),
    "another prompt above layer 0": (deep(lambda _: states(1)), "tail"),
    "shifted positions above layer 0": (deep(shifted), "tail"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_cache_is_stopped(name: str) -> None:
    corruption, check = CORRUPTIONS[name]
    guarded = guarded_by(gate(novel=1.3), corruption(states()))
    assert guarded.handoff is None
    assert (guarded.readings[-1].check, guarded.readings[-1].passed) == (check, False)
    assert guarded.reason == guarded.readings[-1].reason != ""


@pytest.mark.parametrize("value", [math.nan, 3e38], ids=["NaN", "overflow"])
def test_a_map_that_fails_is_no_hand_off(value: float) -> None:
    forms = list(mapping().forms)
    forms[1] = replace(forms[1], bias=torch.full_like(forms[1].tensors()["bias"], value))
    guarded = guarded_by(replace(gate(), mapping=FormMap(tuple(forms))), states())
    assert guarded.handoff is None
    assert guarded.reason != ""


def test_without_the_prompt_only_novelty_is_assessed() -> None:
    assert gate().assess(states(1)).check == "novelty"
    assert gate().assess(states(1), prompt(1)).passed
    assert not gate().assess(states(1), prompt(0)).passed


def test_readings_are_json() -> None:
    nothing = GateReading("tail", math.nan, 1.0)
    assert not nothing.passed
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["score"] is None
    assert GateReading("tail", 1.0, 1.0).to_dict()["passed"] is True


# From a bridge


@cache
def pair() -> ModelPair:
    return tiny_pair()


def bridge() -> Bridge:
    torch.manual_seed(0)
    return random_bridge(pair())


def test_a_bridge_without_a_gate_says_what_to_do() -> None:
    own, plan = bridge(), HandoffPlan()
    mapped = FormMap.of(own)
    with pytest.raises(UsageError, match=r"has no gate for map ridge under .* run `kvbridge calibrate-gate`"):
        Gate.of(pair(), own, mapped, plan)
    limited = replace(own, gates=[{"map": "ridge", "plan": plan.to_dict(), "novelty": 1.5, "tail": 0.5}])
    assert GateLimits.of(limited, plan) == GateLimits(1.5, 0.5)
    with pytest.raises(UsageError, match="has no gate"):
        GateLimits.of(limited, HandoffPlan(native_tail=1))
    with pytest.raises(UsageError, match="has no novelty factor"):
        Gate.of(pair(), limited, mapped, plan)
    whole = replace(limited, novelty=novelty())
    assert Gate.of(pair(), whole, mapped, plan).limits == GateLimits(1.5, 0.5)
    with pytest.raises(PairMismatchError):
        Gate.of(tiny_pair(source="qwen2"), whole, mapped, plan)


# In a cascade


@cache
def one_pair() -> ModelPair:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    return ModelPair(model(), model(), tokenizer, fingerprint_tokenizer(tokenizer))


@cache
def gated_bridge() -> Bridge:
    opened = with_open_gate(twin_bridge(one_pair()), PLAN)
    limits = {"novelty": 1.3, "tail": 1e-6}
    return replace(opened, novelty=novelty(), gates=[gate | limits for gate in opened.gates])


class Spoiling:
    """Spoils the source's cache of the prompt before it hands over."""

    def __init__(self, corruption: Callable[[ContentStates], ContentStates]) -> None:
        self.corruption = corruption
        self.turn: Turn | None = None

    def decide(self, _: Progress) -> bool | None:
        assert self.turn is not None
        made, source = self.corruption(states()), self.turn.source.cache
        for layer in range(len(source.layers)):
            keys = model().rotary.apply(made.keys[layer], made.positions)
            compat.put_layer(source, layer, keys, made.values[layer])
        return True


def answer(policy: Spoiling, **given: Any) -> tuple[Cascade, Turn]:
    cascade = Cascade(one_pair(), gated_bridge(), plan=PLAN, policy=policy, **given)
    policy.turn = cascade.stream(prompt()[0].tolist(), max_new_tokens=5)
    policy.turn.finish()
    return cascade, policy.turn


SAME_LENGTH = [name for name in CORRUPTIONS if not name.startswith("one token")]


@pytest.mark.parametrize("name", SAME_LENGTH)
def test_a_cascade_answers_a_corrupted_cache_with_the_targets_own_text(name: str) -> None:
    corruption, check = CORRUPTIONS[name]
    cascade, turn = answer(Spoiling(corruption))
    result = turn.result
    report = result.handoff
    assert report is not None
    assert (result.outcome, report.reason != "") == (FALLBACK, True)
    # What is not finite is found when the cache is stripped, before the gate.
    assert report.check == ("" if check == "finite" else check)
    stopped = {} if check == "finite" else {check: 1}
    assert cascade.metrics.to_dict()["gate"] == {"judged": len(stopped), "stopped": stopped}
    assert list(cascade.metrics.to_dict()["reasons"]) == [report.reason]
    assert list(result.tokens) == continue_with(model().model, prompt(), None, 5)
    # Nobody goes on from what is known to be broken or another prompt's.
    assert (turn.source.tokens == []) == (check in ("finite", "layer0"))


def test_a_cascade_applies_a_clean_cache_and_shows_its_gate() -> None:
    cascade, turn = answer(Spoiling(lambda given: given))
    result = turn.result
    assert result.outcome == APPLIED
    assert result.handoff is not None
    assert [reading.check for reading in result.handoff.readings] == ["novelty", "tail"]
    assert all(reading.passed for reading in result.handoff.readings)
    assert "gate" in result.handoff.seconds
    assert cascade.describe()["gate"] == {"novelty": 1.3, "tail": 1e-6}
    assert cascade.metrics.to_dict()["gate"] == {"judged": 1, "stopped": {}}


def test_without_its_gate_a_cascade_hands_off_what_is_finite() -> None:
    cascade, turn = answer(Spoiling(CORRUPTIONS["another prompt"][0]), gate=None)
    assert (turn.result.outcome, cascade.gate, cascade.describe()["gate"]) == (APPLIED, None, None)


def test_a_cascade_takes_the_gate_of_its_map_and_plan() -> None:
    own, other = gated_bridge(), HandoffPlan(native_tail=1)
    assert isinstance(Cascade(one_pair(), own, plan=PLAN).gate, Gate)
    assert Cascade(one_pair(), own, plan=other).gate is None
    assert Cascade(one_pair(), None).gate is None
    with pytest.raises(UsageError, match=r"no gate for map identity under .*native_tail=1"):
        Cascade(one_pair(), own, plan=other, gate="require")
    with pytest.raises(UsageError, match="gate='require' and no bridge"):
        Cascade(one_pair(), None, gate="require")
    with pytest.raises(UsageError, match="gate='off': give auto, require"):
        Cascade(one_pair(), own, gate="off")


def test_a_gate_judges_no_other_plan_map_or_pair() -> None:
    own, biased = gated_bridge(), FormMap.of(twin_bridge(one_pair(), bias=0.3))
    mine = gate()
    cascade = Cascade(one_pair(), own, plan=PLAN, gate=mine)
    assert isinstance(cascade.gate, Gate)
    # The cascade's own map, so that no hand-off compares two maps number by number.
    assert cascade.gate.limits == mine.limits
    assert cascade.gate.mapping is cascade.mapping is not mine.mapping
    for plan in (HandoffPlan(native_tail=1), replace(PLAN, native_tail=32), replace(PLAN, sinks=0)):
        with pytest.raises(UsageError, match=r"^the gate has limits for .*native_tail=8"):
            Cascade(one_pair(), own, plan=plan, gate=mine)
    with pytest.raises(UsageError, match="limits for another map than hands off here"):
        Cascade(one_pair(), own, plan=PLAN, gate=replace(mine, mapping=biased))
    stranger = replace(mine, target=replace(model(), fingerprint="0" * 16))
    with pytest.raises(PairMismatchError, match=r"^the gate is of one .* and this pair is one "):
        Cascade(one_pair(), own, plan=PLAN, gate=stranger)
    with pytest.raises(UsageError, match=r"^the map that is executed is not identity of this bridge"):
        Gate.of(one_pair(), own, biased, PLAN)
    for plan, used in ((HandoffPlan(native_tail=1), mapping()), (PLAN, biased)):
        with pytest.raises(UsageError, match=r"^the gate has limits for"):
            guarded_hand_off(mine, model(), plan, used, states(), prompt())
