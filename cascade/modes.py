"""How the target writes its answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.cascade.exact import DraftSchedule
from kvbridge.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mode:
    """How the target writes an answer that it was given.

    Attributes:
        exact: what it writes on a carried cache is provisional, and committed is what it would have written alone.
        speculate: tokens that the source drafts per round once the target has begun; 0 lets the target write alone.
        schedule: of exact mode.

    Raises:
        UsageError: `speculate` is below 0.
    """

    exact: bool = False
    speculate: int = 0
    schedule: DraftSchedule = field(default_factory=DraftSchedule)

    def __post_init__(self) -> None:
        if self.speculate < 0:
            raise UsageError(f"speculate={self.speculate}: give 0 (the target writes alone) or more tokens per round.")
