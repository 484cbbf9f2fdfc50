#!/usr/bin/env python3
"""Train residual branches of every kind, rank and loss on one map of the embedded pair, and score them all in one pass.

The table and the figure of docs/residual_training.md come from it; a killed run goes on where it was:

    kvbridge calibrate out=runs/joint mapper=joint
    kvbridge fit out=runs/joint mapper=joint
    python scripts/residual_table.py --bridge runs/joint/bridge --moments runs/joint/calibration --out runs/residual
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kvbridge import Bridge, HandoffPlan, ModelPair, load_pair
from kvbridge.calibration import CalibrationMoments, CorpusConfig, load_of_bridge
from kvbridge.cli.scripts import run_script
from kvbridge.eval import EvalConfig, evaluate
from kvbridge.eval.arms import Arm, mapped_arm
from kvbridge.eval.documents import take_documents
from kvbridge.eval.figures import standalone, svg_figure
from kvbridge.eval.results import summarise_arms
from kvbridge.flops import ModelCost, handoff_flops
from kvbridge.forms import Form
from kvbridge.kernels import FormMap
from kvbridge.mappers.residual import prepare_training, training_text
from kvbridge.mappers.residual_config import KINDS_OF_BRANCH, ResidualConfig

FROZEN, COLOURS = "frozen map", {"mse": "#7d8590", "attention": "#d98a1f", "kl": "#2f81f7"}
DASHES = {"linear": ":", "quadratic": "--", "gelu": "-"}


def variants(base: ResidualConfig, ranks: list[int], compared: int) -> Iterator[tuple[str, ResidualConfig]]:
    """Every kind, loss and rank; then, at one rank, other text, other inputs and a first stage."""
    for rank in ranks:
        for loss in COLOURS:
            for kind in KINDS_OF_BRANCH:
                yield f"{kind}, rank {rank}, {loss}", replace(base, kind=kind, rank=rank, loss=loss)
    one = replace(base, kind="gelu", rank=compared)
    yield f"gelu, rank {compared}, kl, text of the moments", replace(one, fresh=False)
    yield f"gelu, rank {compared}, kl, inputs whitened along 512 directions", replace(one, directions=512)
    yield f"gelu, rank {compared}, attention, then kl", replace(one, attention_steps=base.steps // 2)
    yield f"gelu, rank {compared}, kl, then on policy", replace(one, on_policy_steps=base.steps // 2)
    yield f"gelu, rank {compared}, kl, then the map unfrozen", replace(one, unfreeze_steps=base.steps // 2)


def branches(
    options: argparse.Namespace,
    pair: ModelPair,
    forms: tuple[Form, ...],
    moments: CalibrationMoments,
    plan: HandoffPlan,
) -> dict[str, tuple[tuple[Form, ...], list[dict[str, Any]]]]:
    """Every variant's map with its branch, and its curve."""
    corpus = CorpusConfig(options.calibration)
    base = ResidualConfig(
        kind="gelu", steps=options.steps, batch=4, accumulate=1, documents=options.documents,
        learning_rate=options.learning_rate, patience=options.steps, keep_readings=True,
    )  # fmt: skip
    found = {}
    for name, config in variants(base, options.ranks, options.compared):
        text = training_text(moments, corpus, config, pair.tokenizer)
        trainer = prepare_training(pair, forms, moments, text, config, Path(options.out) / "training", plan)
        kl = trainer.run()
        found[name] = trainer.mapping.trained(), trainer.checkpoint.progress.curve
        print(f"{name}: KL {found[name][1][0]['dev_kl']:.4f} → {kl:.4f} on dev documents", flush=True)
    return found


def table(rows: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| map | gap recovered | KL | first token | top-1 | map's share of prefill |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        gap, kl = row["gap_recovered"], row["kl"]
        cells = [
            "—" if gap["mean"] is None else f"{gap['mean']:.0%} ({gap['ci95'][0]:.0%} … {gap['ci95'][1]:.0%})",
            f"{kl['mean']:.4f} ({kl['ci95'][0]:.4f} … {kl['ci95'][1]:.4f})",
            *(f"{row[metric]['mean']:.3f}" for metric in ("kl_first", "top1")),
            "—" if row["share"] is None else f"{row['share']:.1%}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(axes: Axes, rows: dict[str, Any], ranks: list[int]) -> None:
    """KL against rank: a colour for each loss, a dash for each kind."""
    for loss, colour in COLOURS.items():
        for kind, dash in DASHES.items():
            points = [rows[f"{kind}, rank {rank}, {loss}"]["kl"]["mean"] for rank in ranks]
            axes.plot(ranks, points, dash, color=colour, marker="o", markersize=3, label=f"{kind}, {loss}")
    axes.axhline(rows[FROZEN]["kl"]["mean"], color="#d1495b", linewidth=1, label=FROZEN)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank of the branch")
    axes.set_ylabel("KL to native, nats")
    axes.legend(fontsize=8, ncols=2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bridge", "moments", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--calibration", default="embedded", help="the text that the moments were drawn from")
    parser.add_argument("--map", help="name of the map, where the bridge has several")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--compared", type=int, default=64, help="rank at which text and inputs are compared")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--documents", type=int, default=200, help="training documents")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--scored", type=int, default=160, help="evaluation documents")
    return parser.parse_args()


def main() -> None:
    options = parse()
    out, plan = Path(options.out), HandoffPlan()
    bridge = Bridge.from_pretrained(options.bridge)
    forms = bridge.map(options.map).forms
    moments = load_of_bridge(Path(options.moments), bridge, options.bridge)
    pair = load_pair("embedded", dtype="float32")
    bridge.require_pair(pair)
    trained = branches(options, pair, forms, moments, plan)
    maps = {FROZEN: FormMap(forms)} | {name: FormMap(adapted) for name, (adapted, _) in trained.items()}
    corpus, config = CorpusConfig("embedded").open("eval"), EvalConfig(rollout=1, samples=0)
    documents = take_documents(
        corpus, pair.tokenizer, documents=options.scored, tokens=config.tokens, prompt=config.prompt
    )
    arms: dict[str, Arm] = {"source": lambda context: context.source}
    arms |= {name: mapped_arm(pair, mapping, plan) for name, mapping in maps.items()}
    identity = {
        "bridge": bridge.fingerprint(),
        "corpus": corpus.fingerprint,
        "arms": list(arms),
        "steps": options.steps,
    }
    records = evaluate(pair, arms, documents, config, partial=out / "documents.jsonl", identity=identity)
    cost, rows = ModelCost.of(pair.target), summarise_arms(records, config)
    for name in rows:
        mapped = name in maps
        share = (
            handoff_flops(cost, plan, config.prompt, maps[name])["map"] / cost.prefill(config.prompt)
            if mapped
            else None
        )
        rows[name]["share"] = share
    curves = {name: curve for name, (_, curve) in trained.items()}
    (out / "table.json").write_text(json.dumps({"rows": rows, "curves": curves}, indent=1) + "\n")
    (out / "table.md").write_text(table(rows))
    with svg_figure("residual", 7.2, 4.2) as (_, (axes,), made):
        draw(axes, rows, options.ranks)
    (out / "rank_curve.svg").write_text(standalone(made[0]))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    run_script(main)
