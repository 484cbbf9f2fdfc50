"""The hand-off of a conversation, and what happens where it cannot be trusted: the target reads the prompt itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.assembly import Handoff, timed
from kvbridge.bridge import Bridge
from kvbridge.cascade.gate import BELONGING, Gate, GateLimits
from kvbridge.cascade.guard import Guarded, Judge, guarded_hand_off
from kvbridge.cascade.memory import Memory, shared_cache
from kvbridge.cascade.outcome import APPLIED, FALLBACK, UNSUPPORTED
from kvbridge.cascade.result import HandoffReport
from kvbridge.cascade.store import ExactKey, MappedKey, StateStore
from kvbridge.errors import CacheError, UsageError
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class Carried:
    """The target, ready to go on.

    Attributes:
        logits: of the last token.
        report: how it came by its cache.
    """

    logits: Float[Tensor, "V"]
    report: HandoffReport


@dataclass(slots=True)
class Carrier:
    """Hands conversations to the target of one pair.

    Attributes:
        pair: source and target.
        bridge: whose map is used; without one the target always reads for itself.
        name: of the map in the bridge.
        plan: what the target computes natively.
        gate: judges every hand-off. `auto` takes the bridge's own where it has limits for map and plan, `require`
            refuses to work without it, `None` makes no checks but whether numbers are finite.
        states: keeps caches between requests; none by default.

    Raises:
        PairMismatchError: the bridge was made for another pair.
        UsageError: the bridge has no map of that name, or several and none is named; or no gate, where it is required;
            or the gate that was given is of another plan or map.
        CacheError, PlanError: plan and map do not fit.
    """

    pair: ModelPair
    bridge: Bridge | None
    name: str | None = None
    plan: HandoffPlan = field(default_factory=HandoffPlan)
    gate: Judge | str | None = "auto"
    states: StateStore | None = None
    mapping: FormMap | None = field(init=False, default=None)
    key: MappedKey | None = field(init=False, default=None)
    judge: Judge | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.bridge is not None:
            self._use(self.bridge)
        self.judge = self._judge()

    def _use(self, bridge: Bridge) -> None:
        bridge.require_pair(self.pair)
        self.name = bridge.map_name(self.name)
        source, target = self.pair.source, self.pair.target
        self.mapping = FormMap.of(bridge, self.name, device=target.device)
        self.mapping.require_plan(self.plan, target.geometry.layers)
        self.key = MappedKey(
            target.fingerprint,
            str(target.dtype),
            source.fingerprint,
            source.revision,
            f"{bridge.fingerprint()}/{self.name}",
            self.plan,
        )

    def _judge(self) -> Judge | None:
        """What judges hand-offs."""
        if not isinstance(self.gate, str):
            if isinstance(self.gate, Gate) and self.mapping is not None:
                self._require_own(self.gate, self.mapping)
                # Found equal here, the numbers are not compared again before every hand-off.
                return replace(self.gate, mapping=self.mapping)
            return self.gate
        if self.gate not in ("auto", "require"):
            raise UsageError(f"gate={self.gate!r}: give auto, require, a gate, or None for no checks.")
        if self.bridge is None or self.mapping is None:
            if self.gate == "require":
                raise UsageError("gate='require' and no bridge: give a bridge that holds a gate, or gate='auto'.")
            return None
        if self.gate == "auto" and not GateLimits.held(self.bridge, self.plan, self.name):
            return None
        return Gate.of(self.pair, self.bridge, self.mapping, self.plan, self.name)

    def _require_own(self, gate: Gate, mapping: FormMap) -> None:
        gate.require_pair(self.pair)
        gate.require(self.plan, mapping)
        if gate.plan != self.plan:
            raise UsageError(
                f"the gate has limits for native_tail={gate.plan.native_tail} and the cascade reads "
                f"{self.plan.native_tail} tokens natively; give both one plan."
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
        handoff, report = self.offer(source, target, tokens, tail)
        if handoff is None:
            return self.reread(target, tokens, report)
        approximate = target.approximate or handoff.split.carried > 0
        target.adopt(tokens, handoff.cache, approximate=approximate, origin=target.origin)
        target.read_tokens += report.native
        if self.states is not None and not report.held:
            self.states.keep_sinks(target, self.plan.sinks)
        return Carried(handoff.logits[0], report)

    def offer(
        self, source: Memory, target: Memory, tokens: Sequence[int], tail: int = 1
    ) -> tuple[Handoff | None, HandoffReport]:
        """A hand-off that the gate lets pass, which `target` does not take yet; or none, and why.

        A refusal drops the stored caches that it may be the fault of, and what the memories hold of them.

        Args: as `carry`.
        """
        plan = replace(self.plan, native_tail=max(self.plan.native_tail, tail))
        if self.states is not None and self.key is not None:
            self.states.resume(self.key, tokens, target)
            self.states.resume_sinks(tokens, target, plan.sinks)
        handoff, report = self._try(plan, source, target, tokens)
        # A stored cache may be at fault, for novelty the source's alone; what the models read themselves decides.
        unfamiliar = any(each.check == "novelty" and not each.passed for each in report.readings)
        suspects = [source] if unfamiliar else [source, target]
        if report.outcome == FALLBACK and self.refuse(*suspects):
            handoff, again = self._try(plan, source, target, tokens)
            report = replace(again, readings=report.readings + again.readings)
        return handoff, report

    def _try(
        self, plan: HandoffPlan, source: Memory, target: Memory, tokens: Sequence[int]
    ) -> tuple[Handoff | None, HandoffReport]:
        why_not = self._why_not(plan, target, tokens)
        if self.mapping is None or why_not:
            return None, HandoffReport(UNSUPPORTED, why_not)
        held, seconds = target.align(tokens), dict[str, float]()
        guarded = self._guarded(self.mapping, plan, source, target, tokens, seconds)
        readings, seconds = tuple(guarded.readings), seconds | guarded.seconds
        if guarded.handoff is None:
            return None, HandoffReport(FALLBACK, guarded.reason, seconds=seconds, readings=readings)
        return guarded.handoff, _applied(guarded.handoff, HandoffReport(APPLIED, "", 0, 0, held, seconds, readings))

    def native(self, target: Memory, tokens: Sequence[int]) -> Memory:
        """What the target holds exactly of a conversation, in a memory that grows on its own."""
        native = Memory(target.model)
        if not target.approximate:
            shared = shared_cache(target.model, target.cache)
            native.adopt(target.tokens, shared, approximate=False, origin=target.origin)
        if self.states is not None:
            self.states.resume(ExactKey.of(target.model), tokens, native)
        native.align(tokens)
        return native

    def read(self, memory: Memory, tokens: Sequence[int]) -> Float[Tensor, "V"]:
        """The logits that follow `tokens`; where a stored cache gives none, they are read from the first on.

        Raises:
            CacheError: the model's own reading gives no usable logits.
        """
        try:
            return memory.read(tokens)
        except CacheError:
            if not self.refuse(memory):
                raise
            return memory.read(tokens)

    def refuse(self, *memories: Memory) -> bool:
        """Drop the stored caches that some memories go on from, and what these hold; whether there were any."""
        return self.states is not None and sum(map(self.states.refuse, memories)) > 0

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

    def _guarded(
        self,
        mapping: FormMap,
        plan: HandoffPlan,
        source: Memory,
        target: Memory,
        tokens: Sequence[int],
        seconds: dict[str, float],
    ) -> Guarded:
        """Hand off behind the gate; a source cache that is broken or of another text is dropped.

        One that goes on from a stored cache is left to `refuse`, which drops both.
        """
        model = target.model
        try:
            source.hold(tokens)
            with timed(seconds, "strip", model.device):
                states = self.pair.source.content(source.cache)
        except CacheError as error:
            if source.origin is None:
                source.reset()
            return Guarded(reason=str(error))
        input_ids = torch.tensor([list(tokens)], device=model.device)
        held = target.cache if target.tokens else None
        guarded = guarded_hand_off(self.judge, model, plan, mapping, states, input_ids, held=held)
        foreign = guarded.handoff is None and any(each.check in BELONGING for each in guarded.readings)
        if foreign and source.origin is None:
            source.reset()
        return guarded

    def reread(self, target: Memory, tokens: Sequence[int], why: HandoffReport) -> Carried:
        """Let the target read for itself what it does not hold exactly.

        Args:
            target: what it holds of the conversation.
            tokens: the conversation.
            why: outcome and reason, and what was tried.

        Raises:
            CacheError: even the target's own reading gives no usable logits.
        """
        if target.approximate:
            target.reset()
        if self.states is not None:
            self.states.resume(ExactKey.of(target.model), tokens, target)
        held, origin, seconds = target.align(tokens), target.origin, dict[str, float]()
        with timed(seconds, "prefill", target.model.device):
            logits = self.read(target, tokens)
        held = held if target.origin == origin else 0
        return Carried(logits, replace(why, native=len(tokens) - held, held=held, seconds=why.seconds | seconds))


def _applied(handoff: Handoff, report: HandoffReport) -> HandoffReport:
    split, attended = handoff.split, len(handoff.attended)
    return replace(
        report,
        carried=split.carried - attended,
        native=split.native + attended,
        seconds=handoff.seconds | report.seconds,
    )
