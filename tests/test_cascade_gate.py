"""What a gate lets pass and what it stops, on a pair whose map is exact: both models are one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationMoments, Moments, fit_novelty
from kvbridge.calibration.moments import PARTS
from kvbridge.calibration.rows import cut_rows, read_states
from kvbridge.cascade import APPLIED, FALLBACK, UNSUPPORTED, Gate, GateLimits, GateReading, guarded_hand_off
from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form
from kvbridge.model import KVModel
from kvbridge.novelty import Novelty
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_bridge import random_bridge
from tiny_models import tiny_model
from tiny_pair import tiny_pair

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
    guarded = guarded_hand_off(gate(plan), states(), prompt())
    assert (guarded.outcome, guarded.reason) == (APPLIED, "")
    assert [reading.check for reading in guarded.readings] == ["novelty", "tail"]
    assert guarded.readings[1].score < 1e-8
    plain = hand_off(model(), plan, mapping(), states(), prompt())
    assert torch.equal(guarded.handoff.logits, plain.logits)


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
def test_a_corrupted_cache_is_stopped_and_the_target_reads_for_itself(name: str) -> None:
    corruption, check = CORRUPTIONS[name]
    guarded = guarded_hand_off(gate(novel=1.3), corruption(states()), prompt())
    assert guarded.outcome == FALLBACK
    assert (guarded.readings[-1].check, guarded.readings[-1].passed) == (check, False)
    assert guarded.reason == guarded.readings[-1].reason != ""
    native, logits = model().prefill(prompt())
    assert torch.equal(guarded.handoff.logits, logits[:, -1])
    assert guarded.handoff.cache.get_seq_length() == native.get_seq_length() == guarded.handoff.next_position
    assert guarded.handoff.split.carried == 0


@pytest.mark.parametrize("value", [math.nan, 3e38], ids=["NaN", "overflow"])
def test_a_map_that_fails_is_no_answer(value: float) -> None:
    forms = list(mapping().forms)
    forms[1] = replace(forms[1], bias=torch.full_like(forms[1].tensors()["bias"], value))
    spoilt = replace(gate(), mapping=FormMap(tuple(forms)))
    guarded = guarded_hand_off(spoilt, states(), prompt())
    assert guarded.outcome == FALLBACK
    assert torch.equal(guarded.handoff.logits, model().prefill(prompt())[1][:, -1])


def test_a_prompt_too_short_to_carry_anything_is_no_hand_off() -> None:
    short = prompt(tokens=10)
    guarded = guarded_hand_off(gate(), model().content(model().read(short)), short)
    assert (guarded.outcome, guarded.reason) == (UNSUPPORTED, "the prompt is too short to carry anything.")


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
