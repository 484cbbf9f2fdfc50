"""The gate: is a source cache fit to be handed off, and has the hand-off gone well?

before   finite? as long as the prompt? the prompt's own tokens at their positions (layer 0)? near the text of the fit?
after    do mapped and computed keys and values of the tail agree?

All but the last question before have exact answers. That one and the one after have limits
calibrated for one map and plan, and a gate judges no other hand-offs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvbridge.assembly import Handoff
from kvbridge.bridge import Bridge
from kvbridge.cascade.layer0 import LIMITS, layer0_deviation
from kvbridge.cascade.tail import map_tail, tail_discrepancy
from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.forms import Map, same_forms
from kvbridge.kernels import FormMap
from kvbridge.model import KVModel
from kvbridge.novelty import Novelty
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates

# Checks whose failure says that the source's cache is not of this prompt.
BELONGING = ("length", "layer0")


@dataclass(frozen=True, slots=True)
class GateReading:
    """What one check found.

    Attributes:
        check: `finite`, `length`, `layer0`, `novelty` or `tail`.
        score: what was measured; infinite where nothing could be.
        limit: above which the check fails.
        reason: of a failure, one sentence; empty otherwise.
    """

    check: str
    score: float
    limit: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        # Not a number is no pass.
        return self.score <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """JSON values; an infinite score is `None`."""
        score = self.score if math.isfinite(self.score) else None
        return {"check": self.check, "score": score, "limit": self.limit, "passed": self.passed, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Calibrated limits of one map under one plan.

    Attributes:
        novelty: largest mean leverage of a source cache, per coordinate.
        tail: largest mean squared difference of the tail's states, in units of their variance.
    """

    novelty: float
    tail: float

    @classmethod
    def of(cls, bridge: Bridge, plan: HandoffPlan, name: str | None = None) -> GateLimits:
        """The limits that a bridge holds for a map and a plan.

        Raises:
            UsageError: it holds none for them.
        """
        held = cls._stored(bridge, plan, name)
        if held is None:
            raise UsageError(
                f"the bridge has no gate for map {bridge.map_name(name)} under {plan}; run `kvbridge calibrate-gate` "
                "with this plan."
            )
        return cls(float(held["novelty"]), float(held["tail"]))

    @classmethod
    def held(cls, bridge: Bridge, plan: HandoffPlan, name: str | None = None) -> bool:
        """Whether a bridge holds limits for a map and a plan."""
        return cls._stored(bridge, plan, name) is not None

    @staticmethod
    def _stored(bridge: Bridge, plan: HandoffPlan, name: str | None) -> dict[str, Any] | None:
        wanted = bridge.map_name(name)
        matching = (gate for gate in bridge.gates if gate["map"] == wanted and HandoffPlan(**gate["plan"]) == plan)
        return next(matching, None)


@dataclass(frozen=True, slots=True)
class Gate:
    """Checks before and after a hand-off.

    Attributes:
        source: whose cache is handed off.
        target: the model that goes on.
        plan: what it computes natively.
        mapping: from source to target content states.
        novelty: factor of the bridge.
        limits: calibrated for mapping and plan.
    """

    source: KVModel
    target: KVModel
    plan: HandoffPlan
    mapping: Map
    novelty: Novelty
    limits: GateLimits

    @classmethod
    def of(cls, pair: ModelPair, bridge: Bridge, mapping: Map, plan: HandoffPlan, name: str | None = None) -> Gate:
        """The gate of a bridge's map under a plan.

        Args:
            pair: source and target.
            bridge: with a novelty factor and limits.
            mapping: the map as it is executed.
            plan: what the target computes natively.
            name: of the map in the bridge.

        Raises:
            PairMismatchError: the bridge is of another pair.
            UsageError: the bridge has no novelty factor, or no limits for the map and plan, or `mapping` is another.
        """
        bridge.require_pair(pair)
        limits = GateLimits.of(bridge, plan, name)
        if not _is_map(mapping, FormMap.of(bridge, name)):
            raise UsageError(
                f"the map that is executed is not {bridge.map_name(name)} of this bridge, for which its limits were "
                "calibrated; give FormMap.of(bridge, name)."
            )
        return cls(pair.source, pair.target, plan, mapping, require_novelty(bridge, pair), limits)

    def require_pair(self, pair: ModelPair) -> None:
        """Refuse to judge hand-offs of another pair.

        Raises:
            PairMismatchError: naming both.
        """
        mine, theirs = (self.source, self.target), (pair.source, pair.target)
        if [model.fingerprint for model in mine] != [model.fingerprint for model in theirs]:
            names = [" → ".join(f"{model.name} {model.fingerprint}" for model in each) for each in (mine, theirs)]
            raise PairMismatchError(f"the gate is of {names[0]} and this pair is {names[1]}; make it for this pair.")

    def require(self, plan: HandoffPlan, mapping: Map) -> None:
        """Refuse to judge what the limits were not calibrated for; a longer tail is judged by its last tokens.

        Args:
            plan: of the hand-offs.
            mapping: that makes them.

        Raises:
            UsageError: naming both plans, or the map.
        """
        if replace(plan, native_tail=min(plan.native_tail, self.plan.native_tail)) != self.plan:
            raise UsageError(
                f"the gate has limits for hand-offs under {self.plan} and not under {plan}; give the gate of this "
                "plan, which `kvbridge calibrate-gate` makes."
            )
        if not _is_map(mapping, self.mapping):
            raise UsageError("the gate has limits for another map than hands off here; give the gate of this map.")

    def assess(self, source_states: ContentStates, input_ids: Int[Tensor, "B T"] | None = None) -> GateReading:
        """Before a hand-off: the first check that fails, or the novelty that passed.

        Args:
            source_states: of the whole prompt, all layers.
            input_ids: the prompt; without it nothing says whether the cache is the prompt's own.

        Raises:
            CacheError: the states are of another model.
        """
        if not (torch.isfinite(source_states.keys).all() and torch.isfinite(source_states.values).all()):
            return GateReading("finite", math.inf, 0.0, "the source states hold NaN or infinite numbers.")
        if input_ids is not None:
            reading = self._identify(source_states, input_ids)
            if not reading.passed:
                return reading
        score, limit = self.novelty.score(source_states), self.limits.novelty
        reason = f"novelty {score:.2f} is above the limit of {limit:.2f}: the text is unlike that of the fit."
        return GateReading("novelty", score, limit, "" if score <= limit else reason)

    def _identify(self, states: ContentStates, input_ids: Int[Tensor, "B T"]) -> GateReading:
        expected, given = tuple(input_ids.shape), (states.keys.shape[1], states.tokens)
        if given != expected or states.positions.tolist() != list(range(expected[1])):
            reason = (
                f"the source states cover (prompts, tokens) = {given} from position {int(states.positions[0])} on; "
                f"expected {expected} from position 0 on."
            )
            return GateReading("length", math.inf, 0.0, reason)
        score, limit = layer0_deviation(self.source, states, input_ids), LIMITS[self.source.dtype]
        reason = f"the source's layer-0 states differ by {score:.1%} from those of the prompt's own tokens."
        return GateReading("layer0", score, limit, "" if score <= limit else reason)

    def map_tail(
        self, handoff: Handoff, source_states: ContentStates, input_ids: Int[Tensor, "B T"]
    ) -> ContentStates | None:
        """What the map makes of as many last tokens as the limits were calibrated with, for `check`.

        `None` where nothing was carried.
        """
        if not handoff.split.carried:
            return None
        return map_tail(self.target, self.plan, self.mapping, source_states, input_ids, handoff)

    def check(self, handoff: Handoff, mapped_tail: ContentStates | None) -> GateReading:
        """After a hand-off, before anything else is read: do mapped and computed states of the tail agree?

        Args:
            handoff: what the target was given.
            mapped_tail: from `map_tail`; `None` where nothing was carried, which passes.
        """
        limit = self.limits.tail
        if not torch.isfinite(handoff.logits).all():
            return GateReading("finite", math.inf, 0.0, "the target's logits after the hand-off are not finite.")
        if mapped_tail is None:
            return GateReading("tail", 0.0, limit)
        layers = self.plan.mapped_layers(self.target.geometry.layers)
        errors = tail_discrepancy(self.target, layers, self.novelty.target_spread, handoff, mapped_tail)
        score = float(errors.mean())
        reason = (
            f"tail discrepancy {score:.3f} is above the limit of {limit:.3f}: the mapped cache does not fit the text."
        )
        return GateReading("tail", score, limit, "" if score <= limit else reason)


def _is_map(one: Map, other: Map) -> bool:
    return one is other or (
        isinstance(one, FormMap) and isinstance(other, FormMap) and same_forms(one.forms, other.forms)
    )


def require_novelty(bridge: Bridge, pair: ModelPair) -> Novelty:
    """The novelty factor of a bridge, where the source's caches lie.

    Raises:
        UsageError: it has none.
    """
    if bridge.novelty is None:
        raise UsageError(
            "the bridge has no novelty factor: its moments lack the source's own products (a calibration sketch, or a "
            "fit by an earlier kvbridge); fit it again."
        )
    return bridge.novelty.to(pair.source.device)
