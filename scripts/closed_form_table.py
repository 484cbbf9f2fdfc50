#!/usr/bin/env python3
"""Score joint and shared-basis maps under several plans on one pair, all on the same documents, in one pass.

The table of docs/real_pair.md comes from it; a killed run goes on where it was, with more `--documents` too:

    kvbridge fit … mapper=joint out=runs/joint storage=bfloat16
    kvbridge fit … mapper=shared_basis mapper.rank=1600 out=runs/basis storage=int8
    python scripts/closed_form_table.py --source DIR --target DIR --joint runs/joint/bridge --basis runs/basis/bridge \
        --corpus FILE --out DIR
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbridge import Bridge, HandoffPlan, ModelPair, load_pair
from kvbridge.bridge import bridge_bytes
from kvbridge.calibration import CorpusConfig
from kvbridge.calibration.moments import rounded_factors
from kvbridge.eval import EvalConfig, evaluate
from kvbridge.eval.arms import Arm, mapped_arm
from kvbridge.eval.documents import take_documents
from kvbridge.eval.results import summarise_arms
from kvbridge.flops import ModelCost, handoff_flops, prefill_share
from kvbridge.kernels import FormMap

BUDGET = 0.25


def within(cost: ModelCost, plan: HandoffPlan, prompt: int, mapping: FormMap, budget: float) -> HandoffPlan:
    """The plan with as many attended tokens as the budget buys, in steps of half a percent of the carried ones."""
    for steps in range(200, 0, -1):
        fuller = replace(plan, native_attended=steps / 200 - 0.005)
        if prefill_share(cost, fuller, prompt, mapping) <= budget:
            return fuller
    return plan


def build_rows(pair: ModelPair, maps: dict[str, FormMap], prompt: int, tail: int) -> dict[str, tuple[str, HandoffPlan]]:
    """Map and plan of each row."""
    plan = HandoffPlan(sinks=4, native_head=0, native_tail=tail)
    rows = {f"{name}, mapped only": (name, plan) for name in maps}
    cost = ModelCost.of(pair.target)
    for name, mapping in maps.items():
        fuller = within(cost, plan, prompt, mapping, BUDGET)
        rows[f"{name}, {fuller.native_attended:.1%} of the tokens read natively"] = name, fuller
    return rows


def table(summary: dict[str, Any], costs: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown, headline metrics first."""
    lines = [
        "| what is carried | gap recovered | KL | / source's | first token | top-1 | NLL | map | in all | artifact |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, metrics in summary.items():
        gap, kl = metrics["gap_recovered"], metrics["kl"]
        cells = [
            "—" if gap["mean"] is None else f"{gap['mean']:.0%} ({gap['ci95'][0]:.0%} … {gap['ci95'][1]:.0%})",
            f"{kl['mean']:.3f} ({kl['ci95'][0]:.3f} … {kl['ci95'][1]:.3f})",
            f"{kl['mean'] / summary['source']['kl']['mean']:.2f}",
            *(f"{metrics[name]['mean']:.3f}" for name in ("kl_first", "top1", "nll")),
        ]
        if row in costs:
            cells += [f"{costs[row]['map']:.1%}", f"{costs[row]['all']:.1%}", f"{costs[row]['bytes'] / 1e6:.0f} MB"]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "joint", "basis", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--tail", type=int, default=16, help="last tokens of the prompt, read natively")
    return parser.parse_args()


def main() -> None:
    options = parse()
    out = Path(options.out)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    folders = {"joint": options.joint, "shared basis": options.basis}
    bridges = {name: Bridge.from_pretrained(folder, pair=pair) for name, folder in folders.items()}
    maps = {name: FormMap.of(bridge) for name, bridge in bridges.items()}
    rows = build_rows(pair, maps, options.prompt, options.tail)
    corpus = CorpusConfig(options.corpus).open("eval")
    documents = take_documents(
        corpus, pair.tokenizer, documents=options.documents, tokens=options.tokens, prompt=options.prompt
    )
    config = EvalConfig(documents=options.documents, tokens=options.tokens, prompt=options.prompt, rollout=1, samples=0)
    arms: dict[str, Arm] = {"source": lambda context: context.source}
    arms |= {row: mapped_arm(pair, maps[name], plan) for row, (name, plan) in rows.items()}
    identity: dict[str, Any] = {
        "pair": pair.identity(),
        "corpus": corpus.fingerprint,
        "plans": {row: [name, plan.to_dict()] for row, (name, plan) in rows.items()},
    }
    identity |= {name: bridge.fingerprint() for name, bridge in bridges.items()}
    records = evaluate(pair, arms, documents, config, partial=out / "documents.jsonl", identity=identity)
    summary, cost, costs = summarise_arms(records, config), ModelCost.of(pair.target), {}
    for row, (name, plan) in rows.items():
        parts = handoff_flops(cost, plan, options.prompt, maps[name])
        costs[row] = {
            "map": parts["map"] / cost.prefill(options.prompt),
            "all": prefill_share(cost, plan, options.prompt, maps[name]),
            "bytes": bridge_bytes(folders[name]),
        }
    (out / "table.json").write_text(json.dumps({"arms": summary, "costs": costs}, indent=1))
    (out / "table.md").write_text(table(summary, costs))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    # Maps run with factors rounded to bfloat16, as they are stored, where the CPU multiplies that natively.
    with rounded_factors():
        main()
