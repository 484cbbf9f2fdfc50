"""Score every arm on every document; resumable, one line of results per finished document."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.cascade.text import end_tokens
from kvbridge.errors import UsageError
from kvbridge.eval.arms import Arm, Context, Reading, read_context, read_prompt, strip_prompt
from kvbridge.eval.config import EvalConfig
from kvbridge.eval.documents import Document
from kvbridge.eval.partial import PartialResults
from kvbridge.metrics import Fidelity, fidelity
from kvbridge.pair import ModelPair

METRICS = ("kl", "kl_first", "top1", "rollout_kl", "nll", "acceptance")
# What tables call them, in the order of headlines.
METRIC_NAMES = {
    "gap_recovered": "gap recovered",
    "kl": "KL",
    "kl_first": "KL, first token",
    "top1": "top-1 agreement",
    "rollout_kl": "rollout KL",
    "nll": "NLL",
    "acceptance": "acceptance",
}


def rollout_length(tokens: Int[Tensor, "1 T"], ends: Set[int]) -> int:
    """Positions of a greedy rollout that count: up to and with the first end-of-sequence token."""
    listed = tokens[0].tolist()
    return next((at + 1 for at, token in enumerate(listed) if token in ends), len(listed))


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the target itself does after one document."""

    gold: Int[Tensor, "1 G"]
    gold_logits: Float[Tensor, "G V"]
    rollout: Int[Tensor, "1 R"]
    rollout_logits: Float[Tensor, "R V"]

    @classmethod
    def of(cls, native: Reading, document: Document, rollout: int, ends: Set[int], vocabulary: int) -> _Reference:
        tokens, logits = native.generate(rollout, vocabulary)
        length = rollout_length(tokens, ends)
        gold = document.gold.to(native.model.device)
        return cls(gold, native.force(gold)[:, :vocabulary], tokens[:, :length], logits[:length, :vocabulary])

    def score(self, reading: Reading) -> dict[str, Any]:
        """Metrics of one arm on this document."""
        forced = fidelity(self.gold_logits, reading.force(self.gold).to(self.gold.device), self.gold[0])
        rolled = fidelity(self.rollout_logits, reading.force(self.rollout).to(self.gold.device), self.rollout[0])
        return summarise(forced) | {
            "rollout_kl": rolled.kl.mean().item(),
            "kl_by_position": [round(value, 6) for value in forced.kl.tolist()],
            "rollout_kl_by_position": [round(value, 6) for value in rolled.kl.tolist()],
        }


def summarise(forced: Fidelity) -> dict[str, float]:
    """Means over the gold positions, and what the first of them shows."""
    return {
        "kl": forced.kl.mean().item(),
        "kl_first": forced.kl[0].item(),
        "top1": forced.top1.mean().item(),
        "nll": forced.nll.mean().item(),
        "acceptance": forced.acceptance.mean().item(),
    }


def _contexts(pair: ModelPair, documents: list[Document], skip: int) -> Iterator[Context]:
    """Readings that the arms share, document by document; the other document is the one before, cyclically."""
    before = documents[skip - 1]
    other = strip_prompt(read_prompt(pair.source, before.prompt))
    for document in documents[skip:]:
        context = read_context(pair, document, before.prompt, other)
        yield context
        before, other = document, context.source_states


def _seconds(context: Context, readings: dict[str, Reading]) -> dict[str, float]:
    """Times of one document: native and source prefill, and the steps of the mapped hand-off."""
    seconds = {"native_prefill": context.native.seconds["prefill"], "source_prefill": context.source.seconds["prefill"]}
    if "mapped" in readings:
        seconds |= {"strip": context.source.seconds["strip"], **readings["mapped"].seconds}
    return seconds


def evaluate(
    pair: ModelPair,
    arms: dict[str, Arm],
    documents: list[Document],
    config: EvalConfig,
    *,
    partial: Path,
    identity: dict[str, Any],
) -> list[dict[str, Any]]:
    """Score arms on documents.

    Args:
        pair: source and target.
        arms: by name; native is always scored against itself besides.
        documents: at least two, all with prompts of one length.
        config: rollout length and samples.
        partial: file that holds finished documents while the evaluation runs.
        identity: JSON values that decide whether `partial` may be resumed.

    Returns:
        One record per document: id, metrics per arm, times by step, for every arm the time to its first logits (where
        states are carried, from the source's on), and greedy continuations of the first ones.

    Raises:
        UsageError: `partial` belongs to other settings, or there is only one document.
    """
    if len(documents) < 2:
        raise UsageError("eval.documents=1: the other-document arm needs at least two documents.")
    lengths = sorted({document.prompt.shape[1] for document in documents})
    if len(lengths) > 1:
        raise UsageError(
            f"prompts of {' and '.join(map(str, lengths))} tokens; all documents must be handed off at one length."
        )
    ends = end_tokens(pair.target.model, pair.tokenizer)

    def make(done: int) -> Iterator[dict[str, Any]]:
        contexts = _contexts(pair, documents, done) if done < len(documents) else ()
        for number, context in enumerate(contexts, start=done):
            # Entries that only the longer of two padded vocabularies has are no tokens: every arm goes without them.
            vocabulary = min(context.native.logits.shape[-1], context.source.logits.shape[-1])
            reference = _Reference.of(context.native, context.document, config.rollout, ends, vocabulary)
            readings = {"native": context.native} | {name: arm(context) for name, arm in arms.items()}
            record: dict[str, Any] = {"id": context.document.name}
            record |= {name: reference.score(reading) for name, reading in readings.items()}
            record["seconds"] = _seconds(context, readings)
            record["ready_seconds"] = {name: sum(reading.seconds.values()) for name, reading in readings.items()}
            if number < config.samples:
                record["sample"] = _sample(pair, context, readings, reference, config.rollout, vocabulary)
            yield record

    return PartialResults(partial, identity).finish(len(documents), make, unit="doc", desc="evaluate")


def _sample(
    pair: ModelPair,
    context: Context,
    readings: dict[str, Reading],
    reference: _Reference,
    length: int,
    vocabulary: int,
) -> dict[str, Any]:
    """End of the prompt, gold text, and each arm's greedy continuation."""

    def text(tokens: Tensor) -> str:
        return str(pair.tokenizer.decode(tokens[0].tolist()))

    continuations = {
        name: text(reference.rollout if name == "native" else reading.generate(length, vocabulary)[0])
        for name, reading in readings.items()
    }
    return {
        "prompt_end": text(context.document.prompt[:, -64:]),
        "gold": text(context.document.gold[:, :length]),
        "continuations": continuations,
    }
