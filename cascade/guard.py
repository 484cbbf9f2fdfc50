"""A hand-off behind its gate: applied, or read by the target itself, and never anything without saying which."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor
from transformers import Cache

from kvbridge.assembly import Handoff, hand_off, timed
from kvbridge.cascade.gate import Gate, GateReading
from kvbridge.cascade.outcome import APPLIED, FALLBACK, UNSUPPORTED, Outcome
from kvbridge.errors import CacheError
from kvbridge.model import KVModel
from kvbridge.plan import Split
from kvbridge.states import ContentStates


@dataclass(frozen=True, slots=True)
class Guarded:
    """A target that can go on, and how it came by its cache.

    Attributes:
        handoff: cache and logits; exact unless the outcome is `applied`.
        outcome: what became of the hand-off.
        readings: of the checks that were made, in order.
        reason: why the target read the prompt itself, one sentence; empty where the hand-off was applied.
    """

    handoff: Handoff
    outcome: Outcome
    readings: tuple[GateReading, ...]
    reason: str = ""


def reread(target: KVModel, input_ids: Int[Tensor, "B T"]) -> Handoff:
    """The target's own reading of the prompt, in the shape of a hand-off that carries nothing."""
    seconds: dict[str, float] = {}
    with timed(seconds, "prefill", target.device):
        cache, logits = target.prefill(input_ids)
    length = input_ids.shape[1]
    return Handoff(cache, logits[:, -1], Split(0, 0, length), length, seconds)


def guarded_hand_off(
    gate: Gate, source_states: ContentStates, input_ids: Int[Tensor, "B T"], *, held: Cache | None = None
) -> Guarded:
    """Hand off if every check passes; else let the target read the prompt.

    Args:
        gate: with the pair, map and plan.
        source_states: of the whole prompt.
        input_ids: the prompt.
        held: what the target's cache holds for the first tokens; a fallback reads them again.

    Raises:
        PlanError: the prompt is empty, all of it is held, or the plan leaves no layer to map.
    """
    target, readings = gate.target, []
    try:
        readings.append(gate.assess(source_states, input_ids))
        if readings[-1].passed:
            handoff = hand_off(target, gate.plan, gate.mapping, source_states, input_ids, held=held)
            readings.append(gate.check(handoff, gate.map_tail(handoff, source_states, input_ids)))
            if readings[-1].passed:
                carried = handoff.split.carried > 0
                reason = "" if carried else "the prompt is too short to carry anything."
                return Guarded(handoff, APPLIED if carried else UNSUPPORTED, tuple(readings), reason)
        reason = readings[-1].reason
    except CacheError as error:
        reason = str(error)
    return Guarded(reread(target, input_ids), FALLBACK, tuple(readings), reason)
