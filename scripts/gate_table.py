#!/usr/bin/env python3
"""Calibrate a gate on half of the documents and test it on the other half, on clean and on corrupted source caches.

The tables of docs/gate.md come from it; a killed run goes on where it was:

    python scripts/gate_table.py --source embedded --dtype float32 --bridge DIR --corpus embedded --out DIR
    python scripts/gate_table.py --source DIR --target DIR --bridge DIR --corpus FILE --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from kvbridge import Bridge, HandoffPlan, load_pair
from kvbridge.assembly import hand_off
from kvbridge.cascade import APPLIED, FALLBACK, Gate, GateLimits, guarded_hand_off
from kvbridge.cascade.gate import require_novelty
from kvbridge.cli.scripts import run_script
from kvbridge.errors import CacheError
from kvbridge.eval import EvalConfig
from kvbridge.eval.arms import read_prompt, strip_prompt
from kvbridge.eval.bounds import upper_bound
from kvbridge.eval.documents import Document
from kvbridge.eval.gating import GateConfig, Scored, calibrate_gate, handed_off_kl, score_documents
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.suite import Task
from kvbridge.kernels import FormMap
from kvbridge.states import ContentStates

CLEAN = "clean"
# States of the prompt, states of another document of the same length, random numbers, and the gate.
Corruption = Callable[[ContentStates, ContentStates, torch.Generator, Gate], ContentStates]


def noise(
    strength: float, states: ContentStates, _: ContentStates, generator: torch.Generator, gate: Gate
) -> ContentStates:
    """Gaussian noise of so many times the spread of each coordinate."""
    layers, heads, dim = states.keys.shape[0], states.keys.shape[2], states.keys.shape[4]
    spread = strength * gate.novelty.spread.reshape(2, layers, 1, heads, 1, dim).to(states.keys)
    drawn = torch.randn((2, *states.keys.shape), generator=generator).to(states.keys)
    keys, values = torch.stack((states.keys, states.values)) + spread * drawn
    return replace(states, keys=keys, values=values)


def another_document(states: ContentStates, other: ContentStates, *_: Any) -> ContentStates:
    return replace(states, keys=other.keys, values=other.values)


def shifted(states: ContentStates, _: ContentStates, __: torch.Generator, gate: Gate) -> ContentStates:
    """Keys that were cached one position further than they are said to be."""
    rotary = gate.source.rotary
    return replace(states, keys=rotary.strip(rotary.apply(states.keys, states.positions + 1), states.positions))


def not_a_number(states: ContentStates, *_: Any) -> ContentStates:
    keys = states.keys.clone()
    keys[-1, 0, 0, states.tokens // 2, 0] = float("nan")
    return replace(states, keys=keys)


def truncated(states: ContentStates, *_: Any) -> ContentStates:
    return states.span(0, states.tokens - 1)


def above_layer_0(corruption: Corruption) -> Corruption:
    """The same, but with layer 0 as it should be, so that only the calibrated checks can see it."""

    def corrupted(states: ContentStates, *rest: Any) -> ContentStates:
        made = corruption(states, *rest)
        keys, values = (torch.cat((own[:1], bad[1:])) for own, bad in zip(_kinds(states), _kinds(made), strict=True))
        return replace(states, keys=keys, values=values)

    return corrupted


def _kinds(states: ContentStates) -> tuple[torch.Tensor, torch.Tensor]:
    return states.keys, states.values


ALL_LAYERS: dict[str, Corruption] = {
    **{f"noise, {strength:g} of the spread": partial(noise, strength) for strength in (0.1, 0.3, 1.0)},
    "another document": another_document,
    "positions shifted by one": shifted,
    "one NaN": not_a_number,
    "one token short": truncated,
}
DEEP = ("noise, 0.1 of the spread", "noise, 0.3 of the spread", "noise, 1 of the spread")
DEEP += ("another document", "positions shifted by one")
CORRUPTIONS: dict[str, Corruption] = {CLEAN: lambda states, *_: states, **ALL_LAYERS} | {
    f"{name}, layer 0 intact": above_layer_0(ALL_LAYERS[name]) for name in DEEP
}


def try_document(gate: Gate, document: Document, other: Document, seed: int) -> dict[str, Any]:
    """Outcome of every corruption, and what its KL would have been without a gate."""
    prompt = document.prompt.to(gate.target.device)
    native = read_prompt(gate.target, document.prompt).force(document.gold)
    states, others = (strip_prompt(read_prompt(gate.source, each.prompt)) for each in (document, other))
    found: dict[str, Any] = {"id": document.name}
    for name, corruption in CORRUPTIONS.items():
        given = corruption(states, others, torch.Generator().manual_seed(seed), gate)
        guarded = guarded_hand_off(gate, gate.target, gate.plan, gate.mapping, given, prompt)
        check = guarded.readings[-1].check if guarded.reason and guarded.readings else ""
        scores = {reading.check: reading.to_dict()["score"] for reading in guarded.readings}
        outcome = FALLBACK if guarded.handoff is None else APPLIED
        found[name] = {"outcome": outcome, "check": check, "reason": guarded.reason, "scores": scores}
        try:
            handoff = guarded.handoff or hand_off(gate.target, gate.plan, gate.mapping, given, prompt)
            found[name]["kl"] = handed_off_kl(gate.target, handoff, native, document)
        except CacheError:
            found[name]["kl"] = None
    return found


def table(records: list[dict[str, Any]], kl_limit: float) -> str:
    """One row per corruption as Markdown."""
    checks = ("finite", "length", "layer0", "novelty", "tail")
    lines = [
        "| source cache | applied | bad without a gate | bad and applied | stopped by: " + " | ".join(checks) + " |",
        "|---|---|---|---|" + "---|" * len(checks),
    ]
    for name in CORRUPTIONS:
        tried = [record[name] for record in records]
        applied = [each for each in tried if each["outcome"] == APPLIED]
        bad = [sum(each["kl"] is not None and each["kl"] > kl_limit for each in group) for group in (tried, applied)]
        ungated = "an error" if all(each["kl"] is None for each in tried) else bad[0]
        stopped = [sum(each["check"] == check for each in tried) or "" for check in checks]
        lines.append(
            f"| {name} | {len(applied)} of {len(tried)} | {ungated} | {bad[1]} | {' | '.join(map(str, stopped))} |"
        )
    return "\n".join(lines) + "\n"


def verdict(records: list[dict[str, Any]], limits: dict[str, Any]) -> str:
    """The promise and what came of it, with exact one-sided 95 % bounds."""
    clean = [record[CLEAN] for record in records]
    applied = [each for each in clean if each["outcome"] == APPLIED]
    bad = sum(each["kl"] > limits["kl_limit"] for each in applied)
    corrupted = [record[name] for record in records for name in ALL_LAYERS]
    caught = sum(each["outcome"] == FALLBACK for each in corrupted)
    return (
        f"limits: novelty {limits['novelty']:.3f}, tail {limits['tail']:.3f}; calibrated on {limits['documents']} "
        f"hand-offs beside those that gave the scale, {limits['applied']} applied, {limits['bad']} bad\n"
        f"promised: at most {limits['share']:.0%} of applied hand-offs with a KL above {limits['kl_limit']:g}, "
        f"at confidence {limits['confidence']:.0%}\n"
        f"found: {bad} of {len(applied)} applied ({bad / max(len(applied), 1):.1%}; at most "
        f"{upper_bound(bad, len(applied), 0.95):.1%})\n"
        f"clean hand-offs applied: {len(applied)} of {len(clean)} ({len(applied) / len(clean):.1%})\n"
        f"corrupted in all layers, caught: {caught} of {len(corrupted)} ({caught / len(corrupted):.1%})\n"
    )


def ranks(scored: list[Scored]) -> str:
    """How well each score orders hand-offs of uncorrupted caches by their KL."""
    kl = [each.kl for each in scored]
    found = {name: spearmanr([getattr(each, name) for each in scored], kl).statistic for name in ("novelty", "tail")}
    shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    return f"rank correlation with KL over the {len(scored)} calibration hand-offs: {shown}\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "bridge", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--map", help="name of the map, where the bridge has several")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=160, help="every other one calibrates")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--tail", type=int, default=16, help="last tokens of the prompt, read natively")
    parser.add_argument("--join", action="store_true", help="continue short documents with those that follow")
    defaults = GateConfig()
    for name in ("kl_limit", "share", "confidence", "applied"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    return parser.parse_args()


def main() -> None:
    options = parse()
    out = Path(options.out)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    bridge = Bridge.from_pretrained(options.bridge, pair=pair)
    name = bridge.map_name(options.map)
    mapping = FormMap.of(bridge, name)
    plan = HandoffPlan(sinks=4, native_head=mapping.needs_native_head() or 0, native_tail=options.tail)
    config = EvalConfig(corpus=options.corpus, tokens=options.tokens, prompt=options.prompt, join=options.join)
    task = Task.of(pair, plan, config, out)
    documents = task.documents(options.prompt, options.tokens, options.documents)
    half, other = documents[0::2], documents[1::2]
    promise = GateConfig(len(half), options.kl_limit, options.share, options.confidence, options.applied)
    scored = score_documents(task, bridge, name, half)
    limits = calibrate_gate(scored, promise)
    held = GateLimits(limits["novelty"], limits["tail"])
    gate = Gate(pair.source, pair.target, plan, mapping, require_novelty(bridge, pair), held)
    identity = {"pair": pair.identity(), "bridge": bridge.fingerprint(), "map": name, "plan": plan.to_dict()}
    # Another promise that leads to the same limits goes on with the same records.
    identity |= {"corpus": task.corpus.fingerprint, "novelty": held.novelty, "tail": held.tail}

    def make(done: int) -> Iterator[dict[str, Any]]:
        for at in range(done, len(other)):
            yield try_document(gate, other[at], half[at], at)

    records = PartialResults(out / "table.partial.jsonl", identity).finish(len(other), make, unit="doc", desc="check")
    (out / "table.json").write_text(json.dumps({"limits": limits, "records": records}, indent=1))
    (out / "table.md").write_text(verdict(records, limits) + ranks(scored) + "\n" + table(records, limits["kl_limit"]))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    run_script(main)
