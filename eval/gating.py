"""Calibration of a gate: its limits for one map and plan, from hand-offs whose KL to the target's own reading is known.

documents  [ first quarter: scale | …………………………… the others: test …………………………… ]

The scale of both scores comes from documents whose KL is not used, so that the thresholds, a fixed ladder of steps on
that scale, are fixed before the others are looked at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvbridge import __version__
from kvbridge.assembly import Handoff, hand_off
from kvbridge.bridge import Bridge
from kvbridge.cascade.gate import Gate, GateLimits, require_novelty
from kvbridge.errors import UsageError
from kvbridge.eval.arms import Reading, read_prompt, strip_prompt
from kvbridge.eval.bounds import can_certify, certify, needed
from kvbridge.eval.documents import Document
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.points import conditions
from kvbridge.eval.suite import Task
from kvbridge.kernels import FormMap
from kvbridge.metrics import fidelity
from kvbridge.model import KVModel

# Steps of the ladder, in robust standard deviations of the logarithm of a score.
LADDER = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
SCALED = 0.25
# Scores of very even text would otherwise make every other text a stranger.
LEAST_SPREAD = 0.02
FEWEST = 8


@dataclass
class GateConfig:
    """What a gate has to promise, and on how much text that is tested.

    Attributes:
        documents: documents of `eval.corpus` that are handed off.
        kl_limit: mean KL to native over the gold continuation, in nats, above which a hand-off is bad.
        share: the share of bad ones among applied hand-offs that the gate promises to stay below.
        confidence: with which it promises that.
        applied: the share of hand-offs that should pass; of the certified limits the tightest is taken that lets as
            many pass.
    """

    documents: int = 80
    kl_limit: float = 1.0
    share: float = 0.1
    confidence: float = 0.95
    applied: float = 0.97

    def __post_init__(self) -> None:
        if not self.kl_limit > 0:
            raise UsageError(f"gate.kl_limit={self.kl_limit:g}: expected a KL above 0.")
        for name in ("share", "confidence", "applied"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"gate.{name}={getattr(self, name):g}: expected a share between 0 and 1.")
        if self.documents < 2 * FEWEST:
            raise UsageError(f"gate.documents={self.documents}: expected {2 * FEWEST} or more.")

    def require_possible(self) -> None:
        """Refuse a promise that so many documents cannot certify, however good their hand-offs are.

        Raises:
            UsageError: naming how many documents could.
        """
        tested = self.documents - for_scale(self.documents)
        if can_certify(tested, self.share, self.confidence):
            return
        enough = needed(0, self.share, self.confidence)
        raise UsageError(
            f"gate.documents={self.documents} leaves {tested} hand-offs for the test, and to promise "
            f"gate.share={self.share:g} at gate.confidence={self.confidence:g} takes {enough} of them even if none is "
            f"bad; give gate.documents={enough + max(FEWEST, math.ceil(enough * SCALED / (1 - SCALED)))} or more, a "
            "higher share or a lower confidence."
        )


def for_scale(documents: int) -> int:
    """How many of the documents, the first of them, give the scale of both scores."""
    return max(FEWEST, math.ceil(SCALED * documents))


@dataclass(frozen=True, slots=True)
class Scored:
    """One hand-off: what the gate can see of it, and how good it was."""

    novelty: float
    tail: float
    kl: float


def handed_off_kl(target: KVModel, handoff: Handoff, native: Float[Tensor, "G V"], document: Document) -> float:
    """Mean KL to native over the gold continuation, in nats.

    Args:
        target: the model that goes on.
        handoff: of the document's prompt; its cache stays as it is.
        native: the target's own logits over the gold continuation.
        document: prompt and gold continuation.
    """
    gold = document.gold.to(target.device)
    carried = Reading(target, handoff.cache, handoff.logits, handoff.next_position)
    return fidelity(native, carried.force(gold), gold[0]).kl.mean().item()


def score_document(gate: Gate, document: Document) -> Scored:
    """Hand off a document, whatever the gate's limits say."""
    native, source = read_prompt(gate.target, document.prompt), read_prompt(gate.source, document.prompt)
    states, prompt = strip_prompt(source), document.prompt.to(gate.target.device)
    handoff = hand_off(gate.target, gate.plan, gate.mapping, states, prompt)
    before, after = gate.assess(states, prompt), gate.check(handoff, gate.map_tail(handoff, states, prompt))
    for reading in (before, after):
        if not math.isfinite(reading.score) or reading.check not in ("novelty", "tail"):
            raise UsageError(f"document {document.name} cannot be handed off at all: {reading.reason}")
    kl = handed_off_kl(gate.target, handoff, native.force(document.gold), document)
    return Scored(before.score, after.score, kl)


def score_documents(task: Task, bridge: Bridge, name: str, documents: Sequence[Document]) -> list[Scored]:
    """Hand off documents; resumable.

    Raises:
        UsageError: the bridge has no novelty factor, or records of other settings lie in the task's folder.
    """
    plan, pair = documents[0].plan(task.plan), task.pair
    mapping = FormMap.of(bridge, name, device=pair.target.device)
    mapping.require_plan(plan, pair.target.geometry.layers)
    unlimited = GateLimits(math.inf, math.inf)
    gate = Gate(pair.source, pair.target, plan, mapping, require_novelty(bridge, pair), unlimited)
    identity = {
        "pair": pair.identity(),
        "bridge": bridge.fingerprint(),
        "map": name,
        "plan": plan.to_dict(),
        # A first part of the same documents may go on with more of them.
        "conditions": conditions(task, documents) | {"documents": None},
        "kvbridge": __version__,
    }

    def make(done: int) -> Iterator[dict[str, Any]]:
        for document in documents[done:]:
            scored = score_document(gate, document)
            yield {"id": document.name, "novelty": scored.novelty, "tail": scored.tail, "kl": scored.kl}

    partial = PartialResults(task.folder / "gate.partial.jsonl", identity)
    records = partial.finish(len(documents), make, unit="doc", desc="gate")
    return [Scored(record["novelty"], record["tail"], record["kl"]) for record in records[: len(documents)]]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a score lies and how far it spreads, on a logarithmic scale."""

    centre: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        logs = [math.log(max(value, 1e-12)) for value in values]
        centre = statistics.median(logs)
        deviation = 1.4826 * statistics.median(abs(value - centre) for value in logs)
        return cls(centre, max(deviation, LEAST_SPREAD))

    def steps(self, value: float) -> float:
        return (math.log(max(value, 1e-12)) - self.centre) / self.spread

    def value(self, steps: float) -> float:
        return math.exp(self.centre + steps * self.spread)


def calibrate_gate(scored: Sequence[Scored], config: GateConfig) -> dict[str, Any]:
    """The limits that keep the promise, and the counts that prove it.

    Args:
        scored: hand-offs of text like that to come, in random order.
        config: the promise.

    Returns:
        `novelty` and `tail` limits, the promise, and how many hand-offs of the test were `applied` and `bad`.

    Raises:
        UsageError: no limits can be certified on so few hand-offs, or on ones as bad as these.
    """
    first = for_scale(len(scored))
    scales = {name: _Scale.of([getattr(each, name) for each in scored[:first]]) for name in ("novelty", "tail")}
    tested = scored[first:]
    steps = [max(scale.steps(getattr(each, name)) for name, scale in scales.items()) for each in tested]
    bad = [each.kl > config.kl_limit for each in tested]
    certified, last = certify(steps, bad, LADDER, config.share, config.confidence)
    if not certified:
        enough = needed(last.bad, config.share, config.confidence)
        raise UsageError(
            f"of {len(tested)} hand-offs {last.applied} pass the tightest limits, {last.bad} of them with a KL above "
            f"gate.kl_limit={config.kl_limit:g}; to promise gate.share={config.share:g} at confidence "
            f"{config.confidence:g} at least {enough} would have to pass with as many bad ones. "
            "Give more gate.documents, or a higher gate.kl_limit or gate.share."
        )
    open_enough = [each for each in certified if each.applied >= config.applied * len(tested)]
    chosen = open_enough[0] if open_enough else certified[-1]
    return {name: scale.value(chosen.threshold) for name, scale in scales.items()} | {
        "kl_limit": config.kl_limit,
        "share": config.share,
        "confidence": config.confidence,
        "documents": len(tested),
        "applied": chosen.applied,
        "bad": chosen.bad,
    }
