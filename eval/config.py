"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.calibration import CorpusConfig
from kvbridge.errors import UsageError
from kvbridge.eval.probes import ProbesConfig
from kvbridge.eval.retention import RetentionConfig
from kvbridge.eval.turns import TurnsConfig

FORMATS = ("raw", "chat")


@dataclass
class EvalConfig(CorpusConfig):
    """Which documents are scored, how far, and what is measured besides.

    Attributes:
        documents: the first so many documents that are long enough, in file order.
        tokens: tokens of each document.
        prompt: how many of them are handed off; the rest is scored.
        format: `raw` documents, or a `chat` in which the target's template asks to go on with the document.
        join: continue a document that is too short with those that follow it in the corpus.
        rollout: greedy tokens of the target that every arm is forced through.
        samples: documents whose greedy continuations are kept per arm.
        resamples: bootstrap resamples of documents.
        seed: of the bootstrap.
        lengths: further prompt lengths at which the same map is scored, with equally many tokens after them.
        probes: questions about the context.
        turns: conversations of several hand-offs.
        retention: benchmark tasks.
    """

    documents: int = 40
    tokens: int = 512
    prompt: int = 448
    format: str = "raw"
    join: bool = False
    rollout: int = 32
    samples: int = 3
    resamples: int = 2000
    seed: int = 0
    lengths: list[int] = field(default_factory=list)
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"eval.format={self.format}: expected one of {', '.join(FORMATS)}.")
        if len(set(self.lengths)) < len(self.lengths) or min(self.lengths, default=2) < 2:
            given = ",".join(map(str, self.lengths))
            raise UsageError(f"eval.lengths=[{given}]: expected prompt lengths of 2 tokens or more, each once.")
        if self.seed < 0:
            raise UsageError(f"eval.seed={self.seed}: expected 0 or more.")
        if self.rollout < 1 or self.samples < 0 or not 100 <= self.resamples <= 100_000:
            raise UsageError(
                f"eval.rollout={self.rollout}, eval.samples={self.samples}, eval.resamples={self.resamples}: "
                "expected at least 1, at least 0, and 100 to 100,000."
            )
