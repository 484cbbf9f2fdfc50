"""Settings of `kvbridge cascade`."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        if self.tokens < 1 or self.store_bytes < 0:
            raise UsageError(
                f"cascade.tokens={self.tokens}, cascade.store_bytes={self.store_bytes}: expected at least 1 token and "
                "0 bytes."
            )
        self.params()

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
