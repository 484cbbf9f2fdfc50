"""Fidelity by prompt length: does a map that was fitted on blocks of one length hold at others?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbridge.eval.arms import equal_cost_tail, standard_arms
from kvbridge.eval.config import EvalConfig
from kvbridge.eval.documents import Document
from kvbridge.eval.fidelity import METRICS, evaluate
from kvbridge.eval.results import summarise_arms
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

ARMS = ("mapped", "source", "tail_only")


def _slim(record: dict[str, Any]) -> dict[str, Any]:
    """A document's record without its curves and times."""
    return {"id": record["id"]} | {
        arm: {metric: record[arm][metric] for metric in METRICS} for arm in ("native", *ARMS)
    }


def evaluate_lengths(
    pair: ModelPair,
    mapping: FormMap,
    plan: HandoffPlan,
    documents: dict[int, list[Document]],
    config: EvalConfig,
    *,
    folder: Path,
    identity: dict[str, Any],
) -> dict[str, Any]:
    """Score the map, the source alone and a native tail of equal cost at several prompt lengths.

    Args:
        pair: source and target.
        mapping: the map under test.
        plan: its hand-off plan; a tail covers the scaffolding of a chat.
        documents: by prompt length.
        config: rollout length and bootstrap.
        folder: for files that hold finished documents while this runs.
        identity: JSON values that decide whether those may be resumed.

    Returns:
        By prompt length (as text): `arms` as in the main results, `share` of prefill FLOPs, `equal_cost_tail`, and
        the metrics of each document.

    Raises:
        UsageError: a partial file belongs to other settings.
    """
    found: dict[str, Any] = {}
    for length, taken in sorted(documents.items()):
        reading = taken[0].plan(plan)
        arms = standard_arms(pair, mapping, reading, length)
        records = evaluate(
            pair,
            {name: arms[name] for name in ARMS},
            taken,
            replace(config, samples=0),
            partial=folder / f"length-{length}.partial.jsonl",
            identity=identity | {"prompt": length},
        )
        found[str(length)] = {
            "arms": summarise_arms(records, config),
            "share": prefill_share(ModelCost.of(pair.target), reading, length, mapping),
            "equal_cost_tail": equal_cost_tail(pair, mapping, reading, length).native_tail,
            "documents": [_slim(record) for record in records],
        }
    return found
