"""A small and a large model that answer together: the small one reads, and hands over where it is not sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvbridge.bridge import Bridge
from kvbridge.cascade.carry import Carrier
from kvbridge.cascade.gate import Gate
from kvbridge.cascade.guard import Judge
from kvbridge.cascade.metrics import Metrics
from kvbridge.cascade.policies import Always, Policy
from kvbridge.cascade.prompts import Given
from kvbridge.cascade.result import Result
from kvbridge.cascade.session import Session, read_asked
from kvbridge.cascade.store import StateStore
from kvbridge.cascade.turn import Parts, Turn
from kvbridge.errors import UsageError
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan


class Cascade:
    """Answers prompts with a pair.

    Args:
        pair: source and target.
        bridge: carries the source's cache; without one the target reads every prompt that it is given itself.
        plan: of a hand-off.
        map: name of the map in the bridge; may be left out where it has one alone.
        policy: when the target takes over; always by default.
        draft: what becomes of the source's draft then: `keep` lets the target go on from it, `restart` drops it.
        gate: judges every hand-off: `auto` (the default) is the bridge's own where it holds limits for map and plan,
            `require` refuses a bridge without them, `None` checks only whether numbers are finite; or a gate, which
            must be of this pair, map and plan.
        states: keeps caches between requests; none by default.

    Attributes:
        plan: of a hand-off.
        mapping: the map as it is executed; `None` without a bridge.
        gate: what judges hand-offs; `None` where nothing does.
        metrics: counts answers by route and hand-offs by outcome.

    Raises:
        PairMismatchError: the bridge or the gate was made for another pair.
        UsageError: the bridge has no such map, or no gate where it is required, or the gate is of another map or plan,
            or `draft` is neither.
        CacheError, PlanError: plan and map do not fit.
    """

    def __init__(
        self,
        pair: ModelPair,
        bridge: Bridge | None,
        *,
        plan: HandoffPlan | None = None,
        map: str | None = None,
        policy: Policy | None = None,
        draft: str = "keep",
        gate: Judge | str | None = "auto",
        states: StateStore | None = None,
    ) -> None:
        if draft not in ("keep", "restart"):
            raise UsageError(f"draft={draft!r}: give keep or restart.")
        carrier = Carrier(pair, bridge, map, plan or HandoffPlan(), gate, states)
        self.pair, self.metrics = pair, Metrics()
        self.plan, self.mapping, self.gate = carrier.plan, carrier.mapping, carrier.judge
        self._parts = Parts(carrier, policy or Always(), draft, self.metrics)

    def generate(self, prompt: Given, *, task: str | None = None, **asked: Any) -> Result:
        """Answer one prompt.

        Args:
            prompt: text, chat messages or token ids.
            task: what the prompt is, for policies that ask.
            asked: fields of `SamplingParams`, such as `max_new_tokens=64`, `temperature=0.7`, `stop=("\\n",)`, and of
                `Mode`: with `exact=True` what the target writes is its own text, token for token (greedy) or in
                distribution; with `speculate=4` the source drafts so many tokens a round for it.

        Raises:
            UsageError: the prompt is empty or too long, or a setting cannot work.
            CacheError: no model gives usable logits.
        """
        return self.stream(prompt, task=task, **asked).finish()

    def generate_batch(self, prompts: Sequence[Given], *, task: str | None = None, **asked: Any) -> list[Result]:
        """Answer several prompts, one after the other; the seed of each is one higher than that of the one before.

        Raises:
            UsageError, CacheError: as `generate`.
        """
        if isinstance(prompts, str):
            raise UsageError("generate_batch takes several prompts and was given one text; give a list of them.")
        seed = read_asked(asked)[0].seed
        return [self.generate(prompt, task=task, **asked | {"seed": seed + at}) for at, prompt in enumerate(prompts)]

    def stream(self, prompt: Given, *, task: str | None = None, **asked: Any) -> Turn:
        """The events of one answer as it is made; `result` is there once all of them were taken.

        Raises:
            UsageError, CacheError: as `generate`.
        """
        return self.session().stream(prompt, task=task, **asked)

    def describe(self) -> dict[str, Any]:
        """What decides its answers, beside the pair and the parameters of an answer, as JSON values."""
        carrier = self._parts.carrier
        bridge = carrier.bridge.fingerprint() if carrier.bridge is not None else None
        judge = carrier.judge
        return {
            "bridge": bridge,
            "map": carrier.name,
            "plan": self.plan.to_dict(),
            "policy": type(self._parts.policy).__name__,
            "draft": self._parts.draft,
            "gate": asdict(judge.limits) if isinstance(judge, Gate) else judge and type(judge).__name__,
        }

    def session(self) -> Session:
        """Begin a conversation of many turns."""
        return Session(self._parts)
