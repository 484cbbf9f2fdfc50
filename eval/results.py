"""One `results.json` per run: everything a report or a later comparison needs.

schema              version of this layout
run                 versions, seeds, git revision, device, dtype, wall times, settings, fingerprint of the text, and
                    planning (null, or budget, choice, and the fingerprint of the points that it was made from)
pair                both models: name, revision, fingerprint, geometry; the tokenizer's fingerprint
map                 name of the map in the bridge
mapper, plan        method and hyper-parameters; what was computed natively
calibration         what the map was fitted on
arms                arm → metric → {mean, ci95, n}; `gap_recovered` may have mean null and a reason
documents           one record per document: id, arm → metrics, seconds
by_position         arm → mean KL at each gold position and at each rollout position
reconstruction      held-out R² per target layer and head: r2_keys, r2_values; rows_per_feature of the fit
selected_layers     kind → source layers that each target layer reads
samples             prompt end, gold text and greedy continuation per arm of the first documents
cost                shares of prefill FLOPs, times to first token, memory, artifact size
by_length           null, or prompt length → arms as above, share of prefill FLOPs, equal_cost_tail, documents
probes              null where none were asked; else settings, records (task, length, depth, arm → choice and generated,
                    0 or 1), arm → accuracy pooled, paired differences, and accuracies by task, length, place and cell
turns               null, or settings, arm → metric → one {mean, ci95, n} per turn, and the conversations
retention           null, or per benchmark task: n, chance, scores per arm, gap_recovered, retention, mcnemar, shares of
                    contexts carried and truncated, questions and each arm's answers to them
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvbridge.bridge import Bridge
from kvbridge.disk import write_whole
from kvbridge.eval.arms import equal_cost_tail
from kvbridge.eval.config import EvalConfig
from kvbridge.eval.fidelity import METRICS
from kvbridge.eval.statistics import gap_interval, mean_interval, resample
from kvbridge.flops import ModelCost, handoff_flops
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

SCHEMA = 1
PACKAGES = ("kvbridge", "torch", "transformers", "accelerate", "safetensors", "datasets", "numpy")


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def describe_run(pair: ModelPair, settings: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """What is needed to repeat a run: versions, seeds, revision, machine, settings and wall times."""
    packages = (*PACKAGES, "lm_eval") if settings["eval"]["retention"]["tasks"] else PACKAGES
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "git": _git_revision(),
        "device": str(pair.target.device),
        "device_name": torch.cuda.get_device_name() if pair.target.device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "settings": settings,
        "seeds": {"calibration": settings["calibration"]["seed"], "eval": settings["eval"]["seed"]},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def summarise_arms(records: list[dict[str, Any]], config: EvalConfig) -> dict[str, Any]:
    """Means and intervals of every metric of every arm, over documents."""
    draws = resample(len(records), config.resamples, config.seed)
    names = [name for name, value in records[0].items() if isinstance(value, dict) and "kl" in value]
    nll = {name: [record[name]["nll"] for record in records] for name in names}
    summary: dict[str, Any] = {}
    for name in names:
        summary[name] = {
            metric: mean_interval([record[name][metric] for record in records], draws) for metric in METRICS
        }
        if "source" in nll:
            summary[name]["gap_recovered"] = gap_interval(nll["source"], nll[name], nll["native"], draws)
    return summary


def _mean_by_position(rows: list[list[float]]) -> list[float]:
    longest = max(map(len, rows))
    columns = [[row[at] for row in rows if at < len(row)] for at in range(longest)]
    return [round(sum(column) / len(column), 6) for column in columns]


def by_position(records: list[dict[str, Any]], arms: list[str]) -> dict[str, Any]:
    """Mean KL over documents at each position after the hand-off."""
    return {
        name: {
            "kl": _mean_by_position([record[name]["kl_by_position"] for record in records]),
            "rollout_kl": _mean_by_position([record[name]["rollout_kl_by_position"] for record in records]),
        }
        for name in arms
    }


def measure_cost(
    pair: ModelPair, mapping: FormMap, plan: HandoffPlan, prompt_length: int, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the hand-off costs: counted operations, and medians of the times measured on the documents."""
    cost = ModelCost.of(pair.target)
    native = cost.prefill(prompt_length)
    parts = handoff_flops(cost, plan, prompt_length, mapping)
    steps = [record["seconds"] for record in records]
    mapping_steps = ("strip", "map", "inject")
    warm = [sum(value for name, value in step.items() if not name.endswith("prefill")) for step in steps]
    carried = plan.split(prompt_length).carried
    spent = median(sum(step.get(name, 0.0) for name in mapping_steps) for step in steps)
    return {
        "target_prefill_flops_share": sum(parts.values()) / native,
        "flops_share_by_part": {name: value / native for name, value in parts.items()},
        "equal_cost_tail": equal_cost_tail(pair, mapping, plan, prompt_length).native_tail,
        "warm_ttft_s": median(warm),
        "cold_ttft_s": median(w + step["source_prefill"] for w, step in zip(warm, steps, strict=True)),
        "native_ttft_s": median(step["native_prefill"] for step in steps),
        "source_ttft_s": median(step["source_prefill"] for step in steps),
        "seconds_by_step": {name: median(step.get(name, 0.0) for step in steps) for name in steps[0]},
        "mapping_tokens_per_s": carried / spent if spent else None,
        "prompt_tokens": prompt_length,
        "peak_memory_bytes": peak_memory(pair),
    }


def peak_memory(pair: ModelPair) -> int:
    """Peak memory of this process so far, in bytes: on the GPU where the target lies there, resident otherwise."""
    if pair.target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(pair.target.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_results(
    pair: ModelPair,
    bridge: Bridge,
    mapping: FormMap,
    plan: HandoffPlan,
    config: EvalConfig,
    measured: dict[str, Any],
    run: dict[str, Any],
    name: str | None = None,
) -> dict[str, Any]:
    """Assemble `results.json` from what `suite.measure` gave: the records of the documents, and the other parts.

    Args:
        pair: source and target.
        bridge: whose map was scored.
        mapping: that map.
        plan: what the target computed natively.
        config: what was asked for.
        measured: from `suite.measure`.
        run: from `describe_run`.
        name: of the map; may be left out where the bridge has one alone.
    """
    records = measured["documents"]
    arms = summarise_arms(records, config)
    chosen = bridge.map(name)
    evidence = chosen.evidence
    samples = [{"id": record["id"], **record["sample"]} for record in records if "sample" in record]
    return {
        "schema": SCHEMA,
        "run": run,
        "pair": pair.describe(),
        "map": bridge.map_name(name),
        "mapper": chosen.mapper,
        "plan": plan.to_dict(),
        "calibration": bridge.calibration,
        "arms": arms,
        "documents": [{key: value for key, value in record.items() if key != "sample"} for record in records],
        "by_position": by_position(records, list(arms)),
        "reconstruction": {f"r2_{kind}": grid for kind, grid in evidence.get("r2", {}).items()}
        | {"rows_per_feature": evidence.get("rows_per_feature")},
        "selected_layers": evidence.get("selected_layers", {}),
        "samples": samples,
        "cost": measure_cost(pair, mapping, plan, config.prompt, records),
    } | {name: value for name, value in measured.items() if name != "documents"}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, all of it or nothing."""
    write_whole(path, json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
