"""Settings of `kvbridge cascade`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.cascade.exact import DraftSchedule
from kvbridge.cascade.modes import Mode
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.errors import UsageError


@dataclass
class CascadeConfig:
    """Which prompts are answered, how, and when the target takes over.

    Attributes:
        prompts: a file: `.jsonl` with `prompt` or `messages`, and `task` if wanted, on each line; any other has one
            prompt a line.
        policy: `always`, `never`, `first_token_entropy`, `first_token_margin`, `mean_surprise`, or a file that
            `kvbridge calibrate-policy` wrote.
        threshold: of a measure of doubt, above which the target takes over.
        tokens: that are drafted before `mean_surprise` is known.
        draft: `keep` lets the target go on from the source's draft, `restart` drops it.
        gate: `auto` has the bridge's gate judge hand-offs where it holds limits for map and plan, `require` refuses a
            bridge without them, `off` checks only whether numbers are finite.
        exact: text on a carried cache is provisional, and answers of the target are what it would have written alone.
        chunk: prompt tokens that the target reads natively at a time in exact mode.
        steps: tokens that are drafted before each chunk in exact mode.
        speculate: tokens that the source drafts per round for the target; 0 lets the target write alone.
        store_bytes: memory for caches kept between prompts; 0 keeps none.
        max_new_tokens: of an answer, at most.
        temperature: 0 is greedy.
        top_p: only the likeliest tokens that together reach this probability.
        top_k: only so many of the likeliest tokens; 0 for all.
        repetition_penalty: of earlier tokens; 1 is none.
        stop: strings before which an answer ends.
        seed: of the first prompt's draws; each further prompt has the next one.
    """

    prompts: str | None = None
    policy: str = "always"
    threshold: float | None = None
    tokens: int = 8
    draft: str = "keep"
    gate: str = "auto"
    exact: bool = False
    chunk: int = 128
    steps: int = 2
    speculate: int = 0
    store_bytes: int = 0
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft not in ("keep", "restart"):
            raise UsageError(f"cascade.draft={self.draft}: give keep or restart.")
        if self.gate not in ("auto", "require", "off"):
            raise UsageError(f"cascade.gate={self.gate}: give auto, require or off.")
        if self.tokens < 1 or self.store_bytes < 0:
            raise UsageError(
                f"cascade.tokens={self.tokens}, cascade.store_bytes={self.store_bytes}: expected at least 1 token and "
                "0 bytes."
            )
        self.params()
        self.mode()

    def mode(self) -> Mode:
        """How the target writes.

        Raises:
            UsageError: a value is out of range.
        """
        return Mode(self.exact, self.speculate, DraftSchedule(self.chunk, self.steps))

    def params(self) -> SamplingParams:
        """What is asked of every answer.

        Raises:
            UsageError: a value is out of range.
        """
        return SamplingParams(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.repetition_penalty,
            tuple(self.stop),
            self.seed,
        )
