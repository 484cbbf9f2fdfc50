"""Points for the planner: candidates scored in one pass over the planning documents.

Of each document the target's own reading, the source's reading and the native logits are made once; every candidate
then maps, hands off and is forced through the same gold continuation. There is no greedy rollout and no control arm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from kvbridge import __version__
from kvbridge.assembly import hand_off
from kvbridge.bridge import Bridge
from kvbridge.eval.arms import Reading, read_prompt, strip_prompt
from kvbridge.eval.candidates import Candidate, PlannerConfig, candidates
from kvbridge.eval.documents import Document
from kvbridge.eval.fidelity import summarise
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.statistics import gap_interval, mean_interval, resample
from kvbridge.eval.suite import Task
from kvbridge.flops import ModelCost
from kvbridge.kernels import FormMap
from kvbridge.metrics import fidelity
from kvbridge.pair import ModelPair
from kvbridge.planner import Point

METRICS = ("kl", "kl_first", "top1", "nll")


def conditions(task: Task, documents: Sequence[Document]) -> dict[str, Any]:
    """What the points of these documents have in common; only points of the same conditions are compared."""
    config = task.config
    return {
        "text": task.corpus.fingerprint,
        "documents": len(documents),
        "prompt": config.prompt,
        "tokens": config.tokens,
        "format": config.format,
        "join": config.join,
        "dtype": str(task.pair.target.dtype).removeprefix("torch."),
    }


def _comparable(stored: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> list[dict[str, Any]]:
    return [point for point in stored if all(point.get(name) == value for name, value in wanted.items())]


def _scores(reading: Reading, gold: Int[Tensor, "1 G"], native: Float[Tensor, "G V"]) -> dict[str, float]:
    logits = reading.force(gold)[:, : native.shape[-1]].to(native.device)
    return summarise(fidelity(native, logits, gold[0].to(native.device)))


def _score_document(
    pair: ModelPair, maps: dict[str, FormMap], tried: Sequence[Candidate], document: Document
) -> dict[str, Any]:
    native, source = (read_prompt(model, document.prompt) for model in (pair.target, pair.source))
    states, prompt = strip_prompt(source), document.prompt.to(pair.target.device)
    vocabulary = min(native.logits.shape[-1], source.logits.shape[-1])
    reference = native.force(document.gold)[:, :vocabulary]
    scores = functools.partial(_scores, gold=document.gold, native=reference)
    found = []
    for each in tried:
        carried = hand_off(pair.target, each.plan, maps[each.map], states, prompt)
        found.append(scores(Reading(pair.target, carried.cache, carried.logits, carried.next_position)))
    return {"id": document.name, "native": scores(native), "source": scores(source), "candidates": found}


def score_candidates(
    task: Task, bridge: Bridge, tried: Sequence[Candidate], documents: Sequence[Document]
) -> list[dict[str, Any]]:
    """Score candidates on documents, all of them on one before the next; resumable.

    Returns:
        One record per document: id, and scores of `native`, `source` and each of the `candidates`.

    Raises:
        UsageError: records of other settings lie in the task's folder.
    """
    names, device = dict.fromkeys(each.map for each in tried), task.pair.target.device
    maps = {name: FormMap.of(bridge, name, device=device) for name in names}
    identity = {
        "pair": task.pair.identity(),
        "device": str(task.pair.target.device),
        "bridge": bridge.fingerprint(),
        "candidates": [{"map": each.map, "plan": each.plan.to_dict()} for each in tried],
        "conditions": conditions(task, documents),
        "text_field": task.config.text_field,
        "kvbridge": __version__,
    }

    def make(done: int) -> Iterator[dict[str, Any]]:
        for document in documents[done:]:
            yield _score_document(task.pair, maps, tried, document)

    partial = PartialResults(task.folder / "points.partial.jsonl", identity)
    return partial.finish(len(documents), make, unit="doc", desc="plan")


def summarise_points(
    records: Sequence[dict[str, Any]],
    tried: Sequence[Candidate],
    shared: dict[str, Any],
    resamples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Points as a bridge stores them: means over documents with their intervals, and the conditions they share."""
    draws = resample(len(records), resamples, seed)
    source, native = ([record[arm]["nll"] for record in records] for arm in ("source", "native"))
    source_kl = sum(record["source"]["kl"] for record in records) / len(records)
    points = []
    for at, each in enumerate(tried):
        scores = [record["candidates"][at] for record in records]
        metrics = {name: mean_interval([one[name] for one in scores], draws) for name in METRICS}
        gap = gap_interval(source, [one["nll"] for one in scores], native, draws)
        described = {"map": each.map, "plan": each.plan.to_dict(), "share": each.share}
        points.append(described | metrics | {"source_kl": source_kl, "gap_recovered": gap} | shared)
    return points


def measure_points(task: Task, bridge: Bridge, config: PlannerConfig) -> list[dict[str, Any]]:
    """The points of a bridge, with those that it lacks measured now.

    Args:
        task: pair, text and lengths; the sinks of its plan are those of all points.
        bridge: whose maps are measured; points that were measured under other conditions are left out.
        config: the grid, and how many documents.

    Raises:
        PlanError: no map and plan is worth measuring.
        UsageError, CorpusError: settings or text that cannot work.
    """
    documents = task.first_documents(config.documents, "planner.documents")
    tried = candidates(bridge, ModelCost.of(task.pair.target), documents, config, task.plan.sinks)
    shared = conditions(task, documents)
    known = _comparable(bridge.points, shared)
    measured = {(point["map"], Point.of(point).plan) for point in known}
    missing = [each for each in tried if (each.map, each.plan) not in measured]
    if not missing:
        return known
    records = score_candidates(task, bridge, missing, documents)
    return known + summarise_points(records, missing, shared, task.config.resamples, task.config.seed)
