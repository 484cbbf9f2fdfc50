#!/usr/bin/env python3
"""Score the published ridge under several plans on one pair, all on the same documents, in one pass.

Every row of the tables in docs/real_pair.md (half an hour on two cores) and docs/embedded_pair.md comes from it; a
killed run goes on where it was:

    python scripts/reference_table.py --source DIR --target DIR --moments DIR --corpus FILE --out DIR
    python scripts/reference_table.py --source embedded --dtype float32 --k 2 --moments DIR --corpus embedded --out DIR

`--moments` is the folder of a finished `kvbridge calibrate` with the blocks of `mapper=ridge`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvbridge import HandoffPlan, ModelPair, load_pair
from kvbridge.calibration import MOMENTS, CalibrationMoments, CorpusConfig
from kvbridge.cli.scripts import run_script
from kvbridge.eval import EvalConfig, evaluate
from kvbridge.eval.arms import Arm, injected_arm, mapped_arm, nothing_carried_arm, other_document_arm
from kvbridge.eval.documents import take_documents
from kvbridge.eval.results import summarise_arms
from kvbridge.fingerprint import digest
from kvbridge.flops import ModelCost, prefill_share
from kvbridge.kernels import FormMap
from kvbridge.mappers import Ridge

PUBLISHED = HandoffPlan(sinks=0, native_head=None, native_tail=1)
SINKS = HandoffPlan(sinks=4, native_head=None, native_tail=1)
LAYER_0 = HandoffPlan(sinks=4, native_head=0, native_tail=1)
TAIL_16 = HandoffPlan(sinks=4, native_head=0, native_tail=16)


def build_mappers(k: int) -> dict[str, Ridge]:
    """The published recipe over k source layers, the same with the first positions left out, and all layers."""
    # More than any model has layers: all of them.
    return {"published": Ridge(k=k, first_positions="included"), "k": Ridge(k=k), "all": Ridge(k=1000)}


MAPPED_ROWS: dict[str, tuple[str, HandoffPlan]] = {
    "published ridge, every position fitted and mapped": ("published", PUBLISHED),
    "first four positions left out of the fit but mapped": ("k", PUBLISHED),
    "published ridge, first four tokens exact": ("k", SINKS),
    "… and layer 0 exact": ("k", LAYER_0),
    "… and a native tail of 16": ("k", TAIL_16),
    "all source layers, sinks and layer 0 exact": ("all", LAYER_0),
    "… and a native tail of 16 (all layers)": ("all", TAIL_16),
}
TAIL_ROWS = {
    "no context (one token)": HandoffPlan(sinks=0, native_head=None, native_tail=1),
    "last 16 tokens read natively, nothing carried": HandoffPlan(sinks=0, native_head=None, native_tail=16),
    "last 64 tokens read natively, nothing carried": HandoffPlan(sinks=0, native_head=None, native_tail=64),
}


def build_arms(pair: ModelPair, maps: dict[str, FormMap]) -> dict[str, Arm]:
    """One arm per row of the table."""
    arms: dict[str, Arm] = {"source model alone": lambda context: context.source}
    arms |= {row: nothing_carried_arm(pair, plan) for row, plan in TAIL_ROWS.items()}
    arms |= {row: mapped_arm(pair, maps[name], plan) for row, (name, plan) in MAPPED_ROWS.items()}
    arms["other document, layer 0 exact, tail of 16"] = other_document_arm(pair, maps["k"], TAIL_16)
    arms["injected, layer 0 exact"] = injected_arm(pair, LAYER_0)
    return arms


def table(summary: dict[str, Any], shares: dict[str, float]) -> str:
    """The rows as Markdown, headline metrics first."""
    lines = [
        "| what is carried | gap recovered | KL | KL first token | top-1 | rollout KL | NLL | share of prefill |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, metrics in summary.items():
        gap = metrics["gap_recovered"]
        cells = ["—" if gap["mean"] is None else f"{gap['mean']:.0%} ({gap['ci95'][0]:.0%} … {gap['ci95'][1]:.0%})"]
        for name in ("kl", "kl_first", "top1", "rollout_kl", "nll"):
            value = metrics[name]
            interval = f" ({value['ci95'][0]:.3f} … {value['ci95'][1]:.3f})" if name == "kl" else ""
            cells.append(f"{value['mean']:.3f}{interval}")
        cells.append(f"{shares[row]:.1%}" if row in shares else "")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "moments", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, default=8, help="source layers that one target layer reads")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=448)
    options = parser.parse_args()
    out = Path(options.out)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    moments = CalibrationMoments.load(Path(options.moments) / MOMENTS)
    moments.require_pair(pair)
    calibration = digest(moments.info["identity"])
    sides = pair.source.geometry, pair.target.geometry
    fits = {name: mapper.fit(moments, *sides) for name, mapper in build_mappers(options.k).items()}
    del moments
    maps = {name: FormMap(fit.forms) for name, fit in fits.items()}
    corpus = CorpusConfig(options.corpus).open("eval")
    documents = take_documents(
        corpus, pair.tokenizer, documents=options.documents, tokens=options.tokens, prompt=options.prompt
    )
    config = EvalConfig(documents=options.documents, tokens=options.tokens, prompt=options.prompt, samples=0)
    identity = {"pair": pair.identity(), "corpus": corpus.fingerprint, "calibration": calibration, **vars(options)}
    arms = build_arms(pair, maps)
    records = evaluate(pair, arms, documents, config, partial=out / "documents.jsonl", identity=identity)
    renamed = [{"source" if key == "source model alone" else key: value for key, value in r.items()} for r in records]
    summary = summarise_arms(renamed, config)
    cost = ModelCost.of(pair.target)
    shares = {row: prefill_share(cost, plan, options.prompt, maps[name]) for row, (name, plan) in MAPPED_ROWS.items()}
    shares |= {row: prefill_share(cost, plan, options.prompt, None) for row, plan in TAIL_ROWS.items()}
    evidence = {name: fit.evidence() for name, fit in fits.items()}
    (out / "table.md").write_text(table(summary, shares))
    (out / "table.json").write_text(json.dumps({"arms": summary, "shares": shares, "fits": evidence}, indent=1))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    run_script(main)
