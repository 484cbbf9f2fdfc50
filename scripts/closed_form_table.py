#!/usr/bin/env python3
"""Score joint and shared-basis maps under several plans on one pair, all on the same documents, in one pass.

The table of docs/real_pair.md comes from it; a killed run goes on where it was, with more `--documents` too:

    kvbridge fit … mapper=joint out=runs/joint storage=bfloat16
    kvbridge fit … mapper=shared_basis mapper.rank=1190 out=runs/basis storage=int8
    python scripts/closed_form_table.py --source DIR --target DIR --map joint=runs/joint/bridge \
        --map basis=runs/basis/bridge --corpus FILE --out DIR

Of a bridge with several maps say which: `--map joint=runs/both/bridge:joint`; the size given is that of all of them.

Each map is scored with everything between sinks and tail mapped, with the cache of another document instead, and with
as many attended tokens read natively as `--budget` buys, if it buys any. `faster` says how many times as long the large
model's own prefill takes as the hand-off, the source having read: the median over documents, each timed beside its
prefill.

Several processes share the documents with `--part 0/2` and `--part 1/2`; the run without it then makes the
table of what they left. In a part the other document is the one before in that part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kvbridge import Bridge, HandoffPlan, ModelPair, load_pair
from kvbridge.bridge import bridge_bytes
from kvbridge.calibration import CorpusConfig
from kvbridge.calibration.moments import rounded_factors
from kvbridge.cli.scripts import run_script
from kvbridge.errors import UsageError
from kvbridge.eval import EvalConfig, evaluate
from kvbridge.eval.arms import Arm, mapped_arm, other_document_arm
from kvbridge.eval.documents import Document, take_documents
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.results import summarise_arms
from kvbridge.flops import ModelCost, handoff_flops, prefill_share
from kvbridge.kernels import FormMap

OTHER = "another document's cache"


def named_maps(given: list[str]) -> dict[str, tuple[str, str | None]]:
    """Bridge and map by the names of the table, from texts `NAME=FOLDER` and `NAME=FOLDER:MAP`."""
    found: dict[str, tuple[str, str | None]] = {}
    for text in given:
        name, _, place = text.partition("=")
        if not (name and place) or name in found:
            raise UsageError(f"--map {text}: expected NAME=FOLDER or NAME=FOLDER:MAP, and another NAME for every map.")
        folder, colon, chosen = place.rpartition(":")
        found[name] = (folder, chosen) if colon and not Path(place).exists() else (place, None)
    return found


def chosen_map(bridge: Bridge, name: str, place: tuple[str, str | None]) -> str:
    """The name that a map of the table has in its bridge."""
    folder, chosen = place
    if chosen is None and len(bridge.maps) > 1:
        raise UsageError(f"--map {name}={folder}: say which map, as in {name}={folder}:{'|'.join(bridge.maps)}.")
    return bridge.map_name(chosen)


def parse_part(text: str) -> tuple[int, int]:
    """The numbers of `i/n`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"--part {text}: expected i/n with 0 ≤ i < n, such as 0/2.")
    return int(match[1]), int(match[2])


def within(cost: ModelCost, plan: HandoffPlan, prompt: int, mapping: FormMap, budget: float) -> HandoffPlan:
    """The plan with as many attended tokens as the budget buys, in steps of half a percent of the carried ones."""
    for steps in range(200, 0, -1):
        fuller = replace(plan, native_attended=steps / 200 - 0.005)
        if prefill_share(cost, fuller, prompt, mapping) <= budget:
            return fuller
    return plan


def build_rows(
    pair: ModelPair, maps: dict[str, FormMap], prompt: int, tail: int, budget: float
) -> dict[str, tuple[str, HandoffPlan]]:
    """Map and plan of each row."""
    rows, cost = {}, ModelCost.of(pair.target)
    for name, mapping in maps.items():
        plan = HandoffPlan(sinks=4, native_head=mapping.needs_native_head() or 0, native_tail=tail)
        fuller = within(cost, plan, prompt, mapping, budget)
        rows |= {f"{name}, mapped only": (name, plan), f"{name}, {OTHER}": (name, plan)}
        if not fuller.native_attended:
            print(f"{name}: a budget of {budget:.1%} buys no attended tokens; there is no row with them")
            continue
        rows[f"{name}, {fuller.native_attended:.1%} of the tokens read natively"] = name, fuller
    return rows


def build_arms(pair: ModelPair, maps: dict[str, FormMap], rows: dict[str, tuple[str, HandoffPlan]]) -> dict[str, Arm]:
    """One arm for each row, and the small model alone."""
    arms: dict[str, Arm] = {"source": lambda context: context.source}
    for row, (name, plan) in rows.items():
        make = other_document_arm if row.endswith(OTHER) else mapped_arm
        arms[row] = make(pair, maps[name], plan)
    return arms


def table(summary: dict[str, Any], costs: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown, headline metrics first."""
    lines = [
        "| what is carried | gap recovered | KL | / source's | first token | top-1 | rollout KL | NLL | map | in all "
        "| faster | artifact |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, metrics in summary.items():
        gap, kl = metrics["gap_recovered"], metrics["kl"]
        cells = [
            "—" if gap["mean"] is None else f"{gap['mean']:.0%} ({gap['ci95'][0]:.0%} … {gap['ci95'][1]:.0%})",
            f"{kl['mean']:.3f} ({kl['ci95'][0]:.3f} … {kl['ci95'][1]:.3f})",
            f"{kl['mean'] / summary['source']['kl']['mean']:.2f}",
            *(f"{metrics[name]['mean']:.3f}" for name in ("kl_first", "top1", "rollout_kl", "nll")),
        ]
        if row in costs:
            cost = costs[row]
            cells += [
                f"{cost['map']:.1%}",
                f"{cost['all']:.1%}",
                f"{cost['faster']:.1f} ×",
                f"{cost['bytes'] / 1e6:.0f} MB",
            ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def gather(out: Path, documents: list[Document], identity: dict[str, Any]) -> Path:
    """The file of all documents, begun with what parts have left."""
    whole = PartialResults(out / "documents.jsonl", identity)
    if not whole.path.exists():
        parts = sorted(out.glob("documents-*-of-*.jsonl"))
        found = {record["id"]: record for part in parts for record in PartialResults(part, identity).load()}
        for document in itertools.takewhile(lambda document: document.name in found, documents):
            whole.append(found[document.name])
    return whole.path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "corpus", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--map", action="append", required=True, help="NAME=FOLDER[:MAP]; repeat it")
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--tail", type=int, default=16, help="last tokens of the prompt, read natively")
    parser.add_argument(
        "--rollout", type=int, default=32, help="greedy tokens of the target that arms are forced through"
    )
    parser.add_argument("--budget", type=float, default=0.25, help="share of prefill FLOPs for attended tokens and all")
    parser.add_argument(
        "--without", action="append", default=[], help="leave out rows with this in their name; repeat it"
    )
    parser.add_argument("--part", help="i/n: score every n-th document from the i-th on, and make no table yet")
    return parser.parse_args()


def main() -> None:
    options = parse()
    out, part = Path(options.out), parse_part(options.part) if options.part else None
    places = named_maps(options.map)
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    bridges = {name: Bridge.from_pretrained(folder, pair=pair) for name, (folder, _) in places.items()}
    chosen = {name: chosen_map(bridge, name, places[name]) for name, bridge in bridges.items()}
    maps = {name: FormMap.of(bridge, chosen[name]) for name, bridge in bridges.items()}
    every = build_rows(pair, maps, options.prompt, options.tail, options.budget)
    rows = {name: row for name, row in every.items() if not any(text in name for text in options.without)}
    corpus = CorpusConfig(options.corpus).open("eval")
    documents = take_documents(
        corpus, pair.tokenizer, documents=options.documents, tokens=options.tokens, prompt=options.prompt
    )
    lengths = {name: getattr(options, name) for name in ("documents", "tokens", "prompt", "rollout")}
    config = EvalConfig(**lengths, samples=0)
    arms = build_arms(pair, maps, rows)
    identity: dict[str, Any] = {
        "pair": pair.identity(),
        "corpus": corpus.fingerprint,
        "rollout": options.rollout,
        "timed": True,
        "plans": {row: [name, plan.to_dict()] for row, (name, plan) in rows.items()},
    }
    identity |= {name: bridge.fingerprint() for name, bridge in bridges.items()}
    identity |= {f"{name}, map": chosen[name] for name, bridge in bridges.items() if len(bridge.maps) > 1}
    if part:
        at, parts = part
        partial = out / f"documents-{at}-of-{parts}.jsonl"
        evaluate(pair, arms, documents[at::parts], config, partial=partial, identity=identity)
        return
    partial = gather(out, documents, identity)
    records = evaluate(pair, arms, documents, config, partial=partial, identity=identity)
    summary, cost, costs = summarise_arms(records, config), ModelCost.of(pair.target), {}
    for row, (name, plan) in rows.items():
        parts = handoff_flops(cost, plan, options.prompt, maps[name])
        costs[row] = {
            "map": parts["map"] / cost.prefill(options.prompt),
            "all": prefill_share(cost, plan, options.prompt, maps[name]),
            "faster": median(ready["native"] / ready[row] for ready in (record["ready_seconds"] for record in records)),
            "bytes": bridge_bytes(places[name][0]),
        }
    (out / "table.json").write_text(json.dumps({"arms": summary, "costs": costs}, indent=1))
    (out / "table.md").write_text(table(summary, costs))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    # Maps run with factors rounded to bfloat16, as they are stored, where the CPU multiplies that natively.
    with rounded_factors():
        run_script(main)
