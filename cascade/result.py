"""What an answer says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvbridge.cascade.events import Finish
from kvbridge.cascade.outcome import Outcome, Route


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
        check: of the gate that was made last; empty without a gate.
        error_estimate: its score, in its own unit.
        error_limit: the score above which the gate refuses.
    """

    outcome: Outcome
    reason: str = ""
    carried: int = 0
    native: int = 0
    held: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    check: str = ""
    error_estimate: float | None = None
    error_limit: float | None = None


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
            logits), `first_token` (of what was kept) and `total`.
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

    @property
    def outcome(self) -> Outcome | None:
        """Of the hand-off, where there was one."""
        return self.handoff.outcome if self.handoff is not None else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the outcome at the top."""
        return asdict(self) | {"outcome": self.outcome}
