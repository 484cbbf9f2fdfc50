"""Several hand-offs in one conversation: does the target drift from turn to turn?

tokens   [ prompt 1 | gold 1 | prompt 2 | gold 2 | … ]   every turn brings `prompt` new tokens and an answer of `gold`

carried anew    each hand-off maps everything that the source has read so far; nothing is kept of the turn before
no context      sinks, tail and answer of the turn alone, nothing carried and nothing kept
carried on      the target keeps its cache: mapped pieces, and the tails and answers that it read itself over them; each
                hand-off maps the new tokens only
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.assembly import assemble, hand_off
from kvbridge.errors import UsageError
from kvbridge.eval.documents import Document
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.statistics import mean_interval, resample
from kvbridge.forms import Map
from kvbridge.metrics import fidelity
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

ARMS = ("carried_on", "carried_anew", "source", "no_context")
METRICS = ("kl", "top1", "nll")


@dataclass
class TurnsConfig:
    """Conversations of several hand-offs, cut from documents.

    Attributes:
        count: hand-offs per conversation; 0 leaves this measurement out.
        documents: how many conversations.
        prompt: new tokens before each hand-off.
        gold: tokens after it, read as the answer.
    """

    count: int = 0
    documents: int = 16
    prompt: int = 192
    gold: int = 64

    def __post_init__(self) -> None:
        if self.count < 0 or self.count == 1 or self.documents < 1 or self.prompt < 1 or self.gold < 1:
            raise UsageError(
                f"eval.turns.count={self.count}, documents={self.documents}, prompt={self.prompt}, gold={self.gold}: "
                "expected a count of 0 or at least 2, and at least 1 of everything else."
            )

    @property
    def tokens(self) -> int:
        """Tokens of one conversation."""
        return self.count * (self.prompt + self.gold)


class _Reader:
    """A model that reads a conversation piece by piece into one cache."""

    def __init__(self, model: KVModel) -> None:
        self.model = model
        self.cache: DynamicCache = compat.empty_cache(model.model)
        self.read = 0

    def take(self, ids: Int[Tensor, "1 T"]) -> Float[Tensor, "T V"]:
        """Logits that follow each of the next tokens."""
        logits = self.model.extend(self.cache, ids, self.read)
        self.read += ids.shape[1]
        return logits[0]


def _turn(
    pair: ModelPair, mapping: Map, plan: HandoffPlan, ids: Int[Tensor, "1 T"], readers: dict[str, _Reader], gold: int
) -> dict[str, dict[str, float]]:
    """Read one turn with all arms; `ids` is the conversation up to and with its answer."""
    stop = ids.shape[1] - gold
    prompt, answer = ids[:, :stop], ids[:, stop:]
    first = {name: readers[name].take(prompt[:, readers[name].read :])[-1:] for name in ("native", "source")}
    states = pair.source.content(readers["source"].cache)
    held = readers["carried_on"]
    handoffs = {
        "carried_anew": hand_off(pair.target, plan, mapping, states, prompt),
        "carried_on": hand_off(pair.target, plan, mapping, states, prompt, held=held.cache if held.read else None),
        "no_context": assemble(pair.target, plan, prompt, None),
    }
    for name, handoff in handoffs.items():
        first[name] = handoff.logits
        readers[name].cache, readers[name].read = handoff.cache, stop
    logits = {name: torch.cat((before, readers[name].take(answer)[:-1])) for name, before in first.items()}
    scored = {name: fidelity(logits["native"], logits[name], answer[0]) for name in ARMS}
    return {name: {metric: getattr(one, metric).mean().item() for metric in METRICS} for name, one in scored.items()}


def _conversation(
    pair: ModelPair, mapping: Map, plan: HandoffPlan, document: Document, config: TurnsConfig
) -> Iterator[dict[str, dict[str, float]]]:
    ids = torch.cat((document.prompt, document.gold), dim=1).to(pair.target.device)
    readers = {name: _Reader(pair.target) for name in ("native", "carried_on", "carried_anew", "no_context")}
    readers["source"] = _Reader(pair.source)
    for turn in range(1, config.count + 1):
        yield _turn(pair, mapping, plan, ids[:, : turn * (config.prompt + config.gold)], readers, config.gold)


def evaluate_turns(
    pair: ModelPair,
    mapping: Map,
    plan: HandoffPlan,
    documents: list[Document],
    config: TurnsConfig,
    *,
    partial: Path,
    identity: dict[str, Any],
) -> list[dict[str, Any]]:
    """Score every turn of every conversation.

    Args:
        pair: source and target.
        mapping: the map under test.
        plan: of each hand-off.
        documents: of `config.tokens` tokens each, prompt and gold together.
        config: how they are cut.
        partial: file that holds finished conversations while the evaluation runs.
        identity: JSON values that decide whether `partial` may be resumed.

    Returns:
        One record per conversation: its id, and per turn arm → metric.

    Raises:
        UsageError: `partial` belongs to other settings.
    """

    def make(done: int) -> Iterator[dict[str, Any]]:
        for document in documents[done:]:
            yield {"id": document.name, "turns": list(_conversation(pair, mapping, plan, document, config))}

    store = PartialResults(partial, identity)
    return store.finish(len(documents), make, unit="conversation", desc="turns")


def summarise_turns(records: list[dict[str, Any]], config: TurnsConfig, resamples: int, seed: int) -> dict[str, Any]:
    """Means and intervals over conversations: arm → metric → one entry per turn."""
    draws = resample(len(records), resamples, seed)
    return {
        "settings": {"count": config.count, "prompt": config.prompt, "gold": config.gold},
        "arms": {
            arm: {
                metric: [
                    mean_interval([record["turns"][turn][arm][metric] for record in records], draws)
                    for turn in range(config.count)
                ]
                for metric in METRICS
            }
            for arm in ARMS
        },
        "conversations": records,
    }
