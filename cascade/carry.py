"""The hand-off of a conversation, and what happens where it cannot be trusted: the target reads the prompt itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.assembly import Handoff, hand_off, timed
from kvbridge.bridge import Bridge
from kvbridge.cascade.memory import Memory, check_logits
from kvbridge.cascade.outcome import APPLIED, FALLBACK, UNSUPPORTED, Outcome
from kvbridge.cascade.result import HandoffReport
from kvbridge.cascade.store import MappedKey, StateStore
from kvbridge.errors import CacheError
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates


@runtime_checkable
class GateReading(Protocol):
    """What a gate says of a hand-off.

    Attributes:
        check: which of its checks this is.
        score: the error that it found, in the unit of the check.
        limit: the score above which it refuses.
        reason: why it refuses.
        passed: whether the hand-off may be used.
    """

    @property
    def check(self) -> str: ...

    @property
    def score(self) -> float: ...

    @property
    def limit(self) -> float: ...

    @property
    def reason(self) -> str: ...

    @property
    def passed(self) -> bool: ...


@runtime_checkable
class Gate(Protocol):
    """Judges hand-offs."""

    def assess(self, source_states: ContentStates, input_ids: Int[Tensor, "B T"]) -> GateReading:
        """Before a hand-off, from the source's states of the whole conversation."""
        ...

    def map_tail(
        self, handoff: Handoff, source_states: ContentStates, input_ids: Int[Tensor, "B T"]
    ) -> ContentStates | None:
        """What the map makes of the tokens that the target read itself."""
        ...

    def check(self, handoff: Handoff, mapped_tail: ContentStates | None) -> GateReading:
        """After a hand-off, before anything is read after it."""
        ...


@dataclass(frozen=True, slots=True)
class Carried:
    """The target, ready to go on.

    Attributes:
        logits: of the last token.
        report: how it came by its cache.
    """

    logits: Float[Tensor, "V"]
    report: HandoffReport


class _Refused(Exception):
    """A hand-off that must not be used, and what the gate said."""

    def __init__(self, reason: str, reading: GateReading | None = None) -> None:
        super().__init__(reason)
        self.reading = reading


@dataclass(slots=True)
class Carrier:
    """Hands conversations to the target of one pair.

    Attributes:
        pair: source and target.
        bridge: whose map is used; without one the target always reads for itself.
        name: of the map in the bridge.
        plan: what the target computes natively.
        gate: judges every hand-off; none by default.
        states: keeps caches between requests; none by default.

    Raises:
        PairMismatchError: the bridge was made for another pair.
        UsageError: the bridge has no map of that name, or several and none is named.
        CacheError, PlanError: plan and map do not fit.
    """

    pair: ModelPair
    bridge: Bridge | None
    name: str | None = None
    plan: HandoffPlan = field(default_factory=HandoffPlan)
    gate: Gate | None = None
    states: StateStore | None = None
    mapping: FormMap | None = field(init=False, default=None)
    key: MappedKey | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.bridge is None:
            return
        self.bridge.require_pair(self.pair)
        self.name = self.bridge.map_name(self.name)
        source, target = self.pair.source, self.pair.target
        self.mapping = FormMap.of(self.bridge, self.name, device=target.device)
        self.mapping.require_plan(self.plan, target.geometry.layers)
        self.key = MappedKey(
            target.fingerprint,
            str(target.dtype),
            source.fingerprint,
            source.revision,
            f"{self.bridge.fingerprint()}/{self.name}",
            self.plan,
        )

    def carry(self, source: Memory, target: Memory, tokens: Sequence[int], tail: int = 1) -> Carried:
        """Give a conversation to the target.

        Args:
            source: what the source holds of it; it reads the rest.
            target: what the target holds of it.
            tokens: the conversation.
            tail: last tokens that the target must read itself, even where the plan has fewer.

        Raises:
            CacheError: even the target's own reading gives no usable logits.
        """
        plan = replace(self.plan, native_tail=max(self.plan.native_tail, tail))
        if self.states is not None and self.key is not None:
            self.states.resume(self.key, tokens, target)
            self.states.resume_sinks(tokens, target, plan.sinks)
        why_not = self._why_not(plan, target, tokens)
        if self.mapping is None or why_not:
            return self.reread(target, tokens, UNSUPPORTED, why_not)
        try:
            return self._hand_off(self.mapping, plan, source, target, tokens)
        except _Refused as refused:
            carried = self.reread(target, tokens, FALLBACK, str(refused))
            return Carried(carried.logits, _with_reading(carried.report, refused.reading))
        except CacheError as error:
            return self.reread(target, tokens, FALLBACK, str(error))

    def _why_not(self, plan: HandoffPlan, target: Memory, tokens: Sequence[int]) -> str:
        """Why there is nothing to try; empty where there is."""
        if self.mapping is None:
            return "the cascade has no bridge"
        longest = self.pair.source.geometry.max_positions
        if len(tokens) > longest:
            return f"the conversation has {len(tokens)} tokens and the source was made for up to {longest}"
        held = target.align(tokens)
        if not plan.split(len(tokens), held).carried and not target.approximate:
            return f"{len(tokens)} tokens leave nothing to carry between sinks and tail"
        return ""

    def _hand_off(
        self, mapping: FormMap, plan: HandoffPlan, source: Memory, target: Memory, tokens: Sequence[int]
    ) -> Carried:
        model, held = target.model, target.align(tokens)
        seconds, reading = dict[str, float](), None
        source.hold(tokens)
        with timed(seconds, "strip", model.device):
            states = self.pair.source.content(source.cache)
        input_ids = torch.tensor([list(tokens)], device=model.device)
        if self.gate is not None:
            with timed(seconds, "gate", model.device):
                _require(self.gate.assess(states, input_ids))
        handoff = hand_off(model, plan, mapping, states, input_ids, held=target.cache if held else None)
        check_logits(handoff.logits[0])
        if self.gate is not None:
            with timed(seconds, "gate", model.device):
                reading = self.gate.check(handoff, self.gate.map_tail(handoff, states, input_ids))
            _require(reading)
        report = _applied(handoff, held, seconds)
        target.adopt(tokens, handoff.cache, approximate=target.approximate or handoff.split.carried > 0)
        target.read_tokens += report.native
        if self.states is not None and not held:
            self.states.keep_sinks(target, plan.sinks)
        return Carried(handoff.logits[0], _with_reading(report, reading))

    def reread(self, target: Memory, tokens: Sequence[int], outcome: Outcome, reason: str) -> Carried:
        """Let the target read for itself what it does not hold exactly."""
        if target.approximate:
            target.reset()
        held, seconds = target.align(tokens), dict[str, float]()
        with timed(seconds, "prefill", target.model.device):
            logits = target.read(tokens)
        return Carried(logits, HandoffReport(outcome, reason, 0, len(tokens) - held, held, seconds))


def _applied(handoff: Handoff, held: int, seconds: dict[str, float]) -> HandoffReport:
    split, attended = handoff.split, len(handoff.attended)
    return HandoffReport(
        APPLIED,
        carried=split.carried - attended,
        native=split.native + attended,
        held=held,
        seconds=handoff.seconds | seconds,
    )


def _require(reading: GateReading) -> None:
    if not reading.passed:
        raise _Refused(reading.reason, reading)


def _with_reading(report: HandoffReport, reading: GateReading | None) -> HandoffReport:
    if reading is None:
        return report
    return replace(report, check=reading.check, error_estimate=reading.score, error_limit=reading.limit)
