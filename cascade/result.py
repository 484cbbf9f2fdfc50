"""What an answer says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvbridge.cascade.events import Finish
from kvbridge.cascade.gate import GateReading
from kvbridge.cascade.outcome import Outcome, Route
from kvbridge.cascade.verify import Tally


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """How the target came by its cache.

    Attributes:
        outcome: whether it was carried.
        reason: why it was not; empty where it was.
        carried: tokens whose keys and values were mapped in this hand-off.
        native: tokens that the target read itself.
        held: tokens that the target held before.
        seconds: per step of a hand-off (`head`, `map`, `forward`, …), and `prefill` of a fallback.
        readings: of the gate, in the order of its checks; empty without a gate.
        verified: prompt tokens that the target read for itself besides, in exact mode.
    """

    outcome: Outcome
    reason: str = ""
    carried: int = 0
    native: int = 0
    held: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    readings: tuple[GateReading, ...] = ()
    verified: int = 0

    @property
    def check(self) -> str:
        """The gate's last check; empty without a gate."""
        return self.readings[-1].check if self.readings else ""

    @property
    def error_estimate(self) -> float | None:
        """Score of the last check, in its own unit."""
        return self.readings[-1].score if self.readings else None

    @property
    def error_limit(self) -> float | None:
        """The score above which the last check refuses."""
        return self.readings[-1].limit if self.readings else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return named | {"readings": [reading.to_dict() for reading in self.readings]}


@dataclass(frozen=True, slots=True)
class Result:
    """One answer.

    Attributes:
        text: of the answer.
        tokens: of the answer, an end token included.
        route: the model that ended it.
        finish: `stop` at an end token or a stop string, `length` at `max_new_tokens`.
        handoff: how the target came by its cache; `None` where the source answered alone.
        prompt_tokens: of the whole conversation before the answer.
        drafted: tokens that the source wrote, kept or not.
        kept: those among `tokens` that the source wrote.
        source_read: tokens that the source read for this answer, its own included.
        seconds: from the call on: `source` (its reading of the prompt), `handed_over` (when the target had its
            logits), `provisional` (first draft shown, where there was one), `first_token` (committed) and `total`.
        drafts: what the target verified: `mapped`, its own over the carried cache in exact mode, and `source`, the
            source's where it drafts for the target.
    """

    text: str
    tokens: tuple[int, ...]
    route: Route
    finish: Finish
    handoff: HandoffReport | None
    prompt_tokens: int
    drafted: int
    kept: int
    source_read: int
    seconds: dict[str, float]
    drafts: dict[str, Tally] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome | None:
        """Of the hand-off, where there was one."""
        return self.handoff.outcome if self.handoff is not None else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the outcome at the top and the share of each draft that was accepted."""
        handoff = self.handoff.to_dict() if self.handoff is not None else None
        drafts = {name: asdict(tally) | {"rate": tally.rate} for name, tally in self.drafts.items()}
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return named | {"handoff": handoff, "drafts": drafts, "outcome": self.outcome}
