#!/usr/bin/env python3
"""Compare a cascade that carries with one that reads again, and with either model alone, on tasks of the embedded pair.

The table of docs/cascade.md comes from it; a killed run goes on where it was, with the same options:

    kvbridge run mapper=joint out=runs/joint
    python scripts/cascade_table.py --bridge runs/joint/bridge --task towns --count 2000 --rate 0.5 --out runs/cascade
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge import Bridge, HandoffPlan, load_pair
from kvbridge.cascade import Cascade, FirstTokenEntropy, SamplingParams
from kvbridge.cli.scripts import run_script
from kvbridge.eval.answer_tasks import EMBEDDED_TASKS, embedded_tasks
from kvbridge.eval.escalation import Doubt, EscalationConfig, answered, at_threshold, choose_threshold, measure_tasks
from kvbridge.eval.statistics import mcnemar, mean_interval, resample

RESAMPLES = 4000


def arms_of(records: list[dict[str, Any]], threshold: float) -> dict[str, dict[str, np.ndarray]]:
    """What each row of the table gives, one number per task."""
    never, always = np.inf, -np.inf
    alone = at_threshold(records, always, "read")
    # The target alone waits for no source.
    alone["first_token"] = alone["first_token"] - np.array([record["read"]["source"] for record in records])
    return {
        "source only": at_threshold(records, never),
        "target only": alone,
        "cascade, prompt read again": at_threshold(records, threshold, "read"),
        "cascade, cache carried": at_threshold(records, threshold, "carried"),
        "always handed over, prompt read again": at_threshold(records, always, "read"),
        "always handed over, cache carried": at_threshold(records, always, "carried"),
    }


def table(rows: dict[str, dict[str, np.ndarray]], seed: int) -> str:
    """The rows as Markdown, with 95 % intervals by resampling tasks."""
    draws = resample(len(rows["source only"]["right"]), RESAMPLES, seed)
    lines = [
        "| | target answers | right | target MFLOPs | median TTFT |",
        "|---|---|---|---|---|",
    ]
    for name, columns in rows.items():
        right = mean_interval(columns["right"].tolist(), draws)
        low, high = right["ci95"]
        lines.append(
            f"| {name} | {columns['escalated'].mean():.0%} | {right['mean']:.1%} ({low:.1%} … {high:.1%}) | "
            f"{columns['flops'].mean() / 1e6:.0f} | {np.median(columns['first_token']) * 1e3:.1f} ms |"
        )
    return "\n".join(lines) + "\n"


def paired(rows: dict[str, dict[str, np.ndarray]], carried: str, read: str, seed: int) -> str:
    """Carried against read again on the same tasks, in a sentence."""
    draws = resample(len(rows[carried]["right"]), RESAMPLES, seed)
    difference = mean_interval((rows[carried]["right"] - rows[read]["right"]).tolist(), draws)
    low, high = difference["ci95"]
    test = mcnemar(rows[carried]["right"], rows[read]["right"])
    taken = rows[carried]["escalated"] == 1
    ratio = np.median(rows[carried]["first_token"][taken]) / np.median(rows[read]["first_token"][taken])
    return (
        f"{carried} − {read}: {difference['mean'] * 100:+.1f} points ({low * 100:+.1f} … {high * 100:+.1f}), McNemar "
        f"p = {test['p']:.2g}; of the tasks handed over, median TTFT × {ratio:.2f}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bridge", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--task", default="towns", choices=tuple(EMBEDDED_TASKS))
    parser.add_argument("--count", type=int, default=2000, help="half of them choose the threshold")
    parser.add_argument(
        "--filler", type=int, default=400, help="about how many tokens of story come before the question"
    )
    parser.add_argument("--rate", type=float, default=0.5, help="share of answers that the target is to give, at most")
    parser.add_argument("--attended", type=float, default=0.0, help="plan.native_attended")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    out = Path(options.out)
    pair = load_pair("embedded", dtype=options.dtype)
    bridge = Bridge.from_pretrained(options.bridge, pair=pair)
    doubt = Doubt(FirstTokenEntropy())
    plan = HandoffPlan(native_attended=options.attended)
    arms = {
        "source": Cascade(pair, bridge, plan=plan, policy=doubt),
        "carried": Cascade(pair, bridge, plan=plan),
        "read": Cascade(pair, None),
    }
    tasks = embedded_tasks(options.task, options.count, filler=options.filler, seed=options.seed)
    params = SamplingParams(max_new_tokens=8, stop=(".",))
    measured = measure_tasks(arms, doubt, tasks, params, out / f"{options.task}.jsonl")
    records = answered(measured)
    # The threshold comes from every other task, and the table from the rest.
    chosen, checked = records[::2], records[1::2]
    threshold = choose_threshold(chosen, EscalationConfig(rate=options.rate), "carried")
    rows = arms_of(checked, threshold)
    text = (
        table(rows, options.seed)
        + "\n"
        + "\n".join(
            paired(rows, f"{way}, cache carried", f"{way}, prompt read again", options.seed)
            for way in ("cascade", "always handed over")
        )
    )
    (out / f"{options.task}.md").write_text(text)
    outcomes = [record["carried"]["outcome"] for record in records]
    print(
        text,
        json.dumps({name: outcomes.count(name) for name in sorted(set(outcomes))}),
        f"threshold {threshold:.4g}, {len(measured) - len(records)} tasks left out",
    )


if __name__ == "__main__":
    run_script(main)
