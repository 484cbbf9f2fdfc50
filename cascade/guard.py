"""A hand-off behind its gate: every check is made here, and what fails one is never given to the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from kvbridge.assembly import Handoff, hand_off, timed
from kvbridge.cascade.gate import Gate, GateReading
from kvbridge.cascade.sampling import check_logits
from kvbridge.errors import CacheError
from kvbridge.forms import Map
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates


@runtime_checkable
class Judge(Protocol):
    """Judges hand-offs; `Gate` is one."""

    def assess(self, source_states: ContentStates, input_ids: Int[Tensor, "B T"]) -> GateReading:
        """Before a hand-off, from the source's states of the whole prompt."""
        ...

    def map_tail(
        self, handoff: Handoff, source_states: ContentStates, input_ids: Int[Tensor, "B T"]
    ) -> ContentStates | None:
        """What the map makes of the tokens that the target read itself."""
        ...

    def check(self, handoff: Handoff, mapped_tail: ContentStates | None) -> GateReading:
        """After a hand-off, before anything is read after it."""
        ...


@dataclass(slots=True)
class Guarded:
    """A hand-off that passed, or why there is none.

    Attributes:
        handoff: what the target goes on from; `None` where it has to read the prompt itself.
        reason: why, one sentence; empty where the hand-off passed.
        readings: of the checks that were made, in order.
        seconds: that the checks took, as `gate`.
    """

    handoff: Handoff | None = None
    reason: str = ""
    readings: list[GateReading] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, reading: GateReading) -> bool:
        """Note what a check found; whether it passed."""
        self.readings.append(reading)
        self.reason = "" if reading.passed else reading.reason
        return reading.passed


def guarded_hand_off(
    judge: Judge | None,
    target: KVModel,
    plan: HandoffPlan,
    mapping: Map,
    source_states: ContentStates,
    input_ids: Int[Tensor, "B T"],
    *,
    held: Cache | None = None,
) -> Guarded:
    """Hand off if every check passes.

    Args:
        judge: makes the checks, a `Gate` of this plan and map; without one only what is not finite is refused.
        target: the model that goes on.
        plan: what it computes natively.
        mapping: from source to target content states.
        source_states: of the whole prompt.
        input_ids: the prompt.
        held: what the target's cache holds for the first tokens.

    Raises:
        PlanError: the prompt is empty, all of it is held, or the plan leaves no layer to map.
        UsageError: the gate's limits are of another plan or map.
    """
    if isinstance(judge, Gate):
        judge.require(plan, mapping)
    guarded = Guarded()
    try:
        if judge is not None:
            with timed(guarded.seconds, "gate", target.device):
                passed = guarded.note(judge.assess(source_states, input_ids))
            if not passed:
                return guarded
        handoff = hand_off(target, plan, mapping, source_states, input_ids, held=held)
        check_logits(handoff.logits[0])
        if judge is not None:
            with timed(guarded.seconds, "gate", target.device):
                passed = guarded.note(judge.check(handoff, judge.map_tail(handoff, source_states, input_ids)))
            if not passed:
                return guarded
        guarded.handoff = handoff
    except CacheError as error:
        guarded.reason = str(error)
    return guarded
