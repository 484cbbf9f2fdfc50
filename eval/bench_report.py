"""What a benchmark says: a table per prompt length, where the time goes, and a figure of times to the first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbridge.eval.figures import INK, standalone, svg_figure
from kvbridge.eval.report import render
from kvbridge.eval.results import write_results
from kvbridge.eval.verdict import percent
from kvbridge.kernels.steps import STEPS as MAPPING_STEPS

COLUMNS = (
    "prompt", "native prefill", "source prefill", "warm TTFT", "cold TTFT", "warm", "cold", "mapped tokens/s",
    "of a plain product", "of the floor", "KL", "KL, first token",
)  # fmt: skip
STEP_COLUMNS = ("prompt", "native head", "strip", "products", "rotate", "inject", "between", "recompute and scouts",
                "sinks and tail")  # fmt: skip
PARTS = {
    "source prefill": "#d98a1f",
    "native head": "#8b6fd6",
    "map": "#2f81f7",
    "sinks and tail": "#2da36f",
    "native prefill": "#7d8590",
}


def _milliseconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms"


def _row(length: str, found: dict[str, Any], quality: dict[str, Any]) -> list[str]:
    seconds = found["seconds"]
    return [
        length,
        *(_milliseconds(seconds[name]) for name in ("native", "source", "warm", "cold")),
        *(f"{found[f'{kind}_speedup']:.2f}×" for kind in ("warm", "cold")),
        f"{found['mapping_tokens_per_s']:,.0f}",
        *(percent(found[name], 0) for name in ("share_of_plain_product", "share_of_floor")),
        *(f"{quality[name]['mean']:.3f}" for name in ("kl", "kl_first")),
    ]


def _step_row(length: str, found: dict[str, Any]) -> list[str]:
    """Milliseconds of each step; on an accelerator the mapping is one."""
    seconds = found["seconds"]
    split = [seconds[f"map_{part}"] for part in MAPPING_STEPS if f"map_{part}" in seconds]
    parts = [_milliseconds(spent) for spent in (*split, max(0.0, seconds["map"] - sum(split)))]
    parts = ["not split"] * (len(MAPPING_STEPS) + 1 - len(parts)) + parts
    more = seconds["recompute"] + seconds["scout"]
    return [length, _milliseconds(seconds["head"]), *parts, _milliseconds(more), _milliseconds(seconds["forward"])]


def times_figure(results: dict[str, Any]) -> str:
    """Times to the first token per prompt length: native, cold and warm as stacked bars."""
    lengths = list(results["lengths"])
    with svg_figure("bench", 7.2, 0.6 + 1.1 * len(lengths)) as (_, (axes,), made):
        names, shown = [], set[str]()
        for at, length in enumerate(lengths):
            seconds = results["lengths"][length]["seconds"]
            mapped = {
                "native head": seconds["head"],
                "map": seconds["map"] + seconds["inject"],
                "sinks and tail": seconds["forward"] + seconds["recompute"] + seconds["scout"],
            }
            bars = {
                "native": {"native prefill": seconds["native"]},
                "cold": {"source prefill": seconds["source"], **mapped},
                "warm": mapped,
            }
            for row, (kind, parts) in enumerate(bars.items()):
                left = 0.0
                for name, value in parts.items():
                    label = None if name in shown else name
                    axes.barh(4 * at + row, 1000 * value, left=left, color=PARTS[name], label=label)
                    shown.add(name)
                    left += 1000 * value
                names.append((4 * at + row, f"{length} tokens, {kind}"))
        axes.set_yticks(*zip(*names, strict=True))
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds to the first logits")
        axes.grid(axis="x", color=INK, alpha=0.12)
        axes.legend(ncols=3, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    return made[0]


def bench_context(results: dict[str, Any]) -> dict[str, Any]:
    """Everything that the tables and the page show."""
    run, quality, gate = results["run"], results["quality"], results["gate"]
    rounds = len(next(iter(results["lengths"].values()))["rounds"])
    return {
        "source": results["pair"]["source"]["name"],
        "target": results["pair"]["target"]["name"],
        "columns": COLUMNS,
        "rows": [_row(length, found, quality) for length, found in results["lengths"].items()],
        "step_columns": STEP_COLUMNS,
        "step_rows": [_step_row(length, found) for length, found in results["lengths"].items()],
        "caption": (
            f"Map {results['map']}, {percent(quality['share'], 1)} of prefill FLOPs at {quality['prompt']} tokens; "
            f"KL on {quality['documents']} documents of text {quality['text']}, the small model alone "
            f"{quality['source_kl']:.3f}. Medians of {rounds} rounds, {run['device_name']}, "
            f"{run['threads']} threads, caches in {run['dtype']}, products in {results['product_dtype']}."
        ),
        "gate": f"Gate: what the map writes differs from the fp32 reference by {gate['relative_error']:.1e} "
        f"in the worst layer (limit {gate['limit']:.0e}).",
        "memory": (
            f"Peak memory of the process {results['peak_memory_bytes'] / 2**20:,.0f} MiB, of which the map's packed "
            f"weights {results['weight_bytes'] / 2**20:,.0f} MiB; a copy moves "
            f"{results['copy_bytes_per_s'] / 1e9:.1f} GB/s."
        ),
    }


def write_bench(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write `bench.json`, its table `bench.md` and the figure `bench.svg` into a folder; returns their paths."""
    data, figure = folder / "bench.json", folder / "bench.svg"
    write_results(data, results)
    figure.write_text(standalone(times_figure(results)))
    return [data, *render(folder, ("bench.md",), bench_context(results)), figure]
