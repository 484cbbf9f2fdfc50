"""Bridges and gate reports as a person wants to read them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbridge.bridge import Bridge
from kvbridge.forms import Form, ResidualBranch, SharedBasis, needed_native_head
from kvbridge.layout import BridgeMap
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair

BARS = " ▁▂▃▄▅▆▇█"


def _bar(value: float) -> str:
    return BARS[round(min(max(value, 0.0), 1.0) * (len(BARS) - 1))]


def _runs(layers: list[int]) -> str:
    """Layer numbers with consecutive ones joined: `0–3, 7`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _summary(bridge: Bridge, location: str) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows: dict[str, Any] = {"bridge": location}
    for role in ("source", "target"):
        geometry = bridge.pair[role]["geometry"]
        rows[role] = (
            f"{bridge.pair[role]['name']}  ({geometry['layers']} layers, {geometry['kv_heads']} KV heads × "
            f"{geometry['head_dim']}, RoPE {geometry['rope_kind']}, fingerprint {bridge.identity[role]})"
        )
    rows["calibration"] = f"{bridge.calibration.get('rows', 0):,} rows"
    if bridge.novelty is not None:
        directions = bridge.novelty.variances.shape[1]
        size = bridge.novelty.bytes() / 1e3
        rows["novelty"] = f"{directions} directions each of keys and values, {size:,.0f} KB"
    for name, each in bridge.maps.items():
        rows |= _map_rows(name, each, bridge.pair["target"]["geometry"]["layers"])
    for name, value in rows.items():
        # A plain string would be read as markup, and a folder may have brackets in its name.
        table.add_row(name, Text(str(value)))
    return table


def _form(form: Form) -> str:
    return f"{form.name} ({form.describe()})" if isinstance(form, ResidualBranch | SharedBasis) else form.name


def _map_rows(name: str, each: BridgeMap, layers: int) -> dict[str, str]:
    """What a map is made of, by the names of table rows."""
    made = ", ".join(f"{_form(form)} → {', '.join(map(str, form.outputs))}" for form in each.forms)
    native, per_feature = needed_native_head(each.forms), each.evidence.get("rows_per_feature")
    first = 0 if native is None else native + 1
    # A map that makes a residual stream is for plans that recompute the layers after it.
    streams = [span.start for form in each.forms for span in form.outputs if span.states == "residual"]
    layers = max(streams, default=layers)
    few = " (fewer than 10: do not trust it)" if per_feature and per_feature < 10 else ""
    return {
        f"map {name}": each.method(),
        "  forms": made,
        "  size": f"{each.parameters() / 1e6:.2f} M numbers, "
        f"{each.flops_per_token(range(first, layers)) / 1e6:.2f} MFLOP per token",
        "  native head": "not needed" if native is None else f"{native} or more",
        "  rows per feature": f"{per_feature:.0f}{few}" if per_feature else "not known",
        "  penalties": _penalties(each.evidence.get("penalties", {})) or "—",
    }


def _penalties(chosen: dict[str, dict[str, float]]) -> str:
    """Which penalties were chosen for how many outputs, the commonest first."""
    texts = Counter(", ".join(f"{name} {value:g}" for name, value in each.items()) for each in chosen.values())
    return "; ".join(f"{text}: {count}" for text, count in texts.most_common())


def _layers(each: BridgeMap) -> Table:
    table = Table("target layer", "reads source layers", "R² keys", "", "R² values", "")
    r2, selected = each.evidence.get("r2", {}), each.evidence.get("selected_layers", {}).get("keys", [])
    for layer in range(max(len(selected), *(len(grid) for grid in r2.values()), 0)):
        cells = []
        for kind in ("keys", "values"):
            heads = r2[kind][layer] if kind in r2 else []
            mean = sum(heads) / len(heads) if heads else 0.0
            cells += [f"{mean:.3f}", _bar(mean)] if heads else ["—", ""]
        table.add_row(str(layer), _runs(selected[layer] if selected else []), *cells)
    return table


def _points(points: list[dict[str, Any]]) -> Table:
    """What maps under plans were measured to cost and to reach, the cheapest first."""
    table = Table("map", "plan", "share of prefill", "KL", "documents")
    for point in sorted(points, key=lambda point: point["share"]):
        plan = ", ".join(f"{name}={'null' if value is None else value}" for name, value in point["plan"].items())
        measured = [f"{point['share']:.1%}", f"{point['kl']['mean']:.4f}", str(point["documents"])]
        table.add_row(Text(point["map"]), Text(plan), *measured)
    return table


def _gate(gate: dict[str, Any]) -> str:
    return (
        f"gate of map {gate['map']}: novelty up to {gate['novelty']:.3f}, tail discrepancy up to {gate['tail']:.3f}; "
        f"at confidence {gate['confidence']:g} at most {gate['share']:.0%} of applied hand-offs have a KL above "
        f"{gate['kl_limit']:g} ({gate['bad']} of {gate['applied']} tested)"
    )


def print_bridge(bridge: Bridge, location: str) -> None:
    """Print a bridge: pair, method, size, evidence, and what each target layer reads."""
    console = Console()
    console.print(_summary(bridge, location))
    for name, each in bridge.maps.items():
        console.print(f"map {name}", markup=False)
        console.print(_layers(each))
    if bridge.points:
        console.print(_points(bridge.points))
    for gate in bridge.gates:
        console.print(_gate(gate), markup=False)
    console.print("R² is on calibration text that the fit did not see, averaged over heads.")


def print_support(pair: ModelPair) -> None:
    """Print what can be done with a pair."""
    from kvbridge.mappers.identity import same_shape

    source, target = pair.source.geometry, pair.target.geometry
    same, console = same_shape(source, target), Console()
    console.print(f"tokenizer: one for both (fingerprint {pair.tokenizer_fingerprint})")
    console.print(f"prompts: up to {pair.max_positions:,} tokens")
    console.print(
        f"plans: native head 0 … {target.layers - 2} or none, any number of sinks and tail tokens, tail recompute"
    )
    console.print(f"raw source cache as an arm: {'yes' if same else 'no, the two caches differ in shape'}")


def print_gate(role: str, model: KVModel, report: Any) -> None:
    """Print what a model supports and how the gate went."""
    console = Console(soft_wrap=True)
    verdict = "passed" if report.passed else "FAILED"
    console.print(f"{role}: {model.geometry.describe()}; {str(model.dtype).removeprefix('torch.')} on {model.device}")
    console.print(f"  gate {verdict}: injected KL {report.injected:.1e} nats, limit {report.limit:.0e}")
    for name, value in report.controls.items():
        weak = "" if report.clearly_fails(name) else " (too weak to prove it)"
        console.print(f"  control, {name}: {value:.1e}{weak}")


def print_results(results: dict[str, Any]) -> None:
    """The arms table, headline metrics first, and what else was measured."""
    columns = {"gap_recovered": "gap recovered", "kl": "KL", "kl_first": "KL first", "top1": "top-1",
               "rollout_kl": "rollout KL", "nll": "NLL"}  # fmt: skip
    table = Table("arm", *columns.values())
    for name, metrics in results["arms"].items():
        cells = []
        for metric in columns:
            value = metrics.get(metric, {}).get("mean")
            cells.append(
                "—"
                if value is None
                else f"{value:.1%}"
                if metric == "gap_recovered"
                else f"{round(value, 4) + 0.0:.4f}"
            )
        table.add_row(name.replace("_", " "), *cells)
    console = Console(width=120)
    console.print(table)
    share = results["cost"]["target_prefill_flops_share"]
    console.print(
        f"{len(results['documents'])} documents; the hand-off costs {share:.1%} of the target's prefill FLOPs."
    )
    if results.get("probes"):
        shares = ", ".join(
            f"{arm.replace('_', ' ')} {scores['choice']['mean']:.0%}"
            for arm, scores in results["probes"]["arms"].items()
        )
        console.print(f"{len(results['probes']['records'])} questions about the context, forced choice: {shares}.")
    if results.get("retention"):
        console.print(_benchmarks(results["retention"]))


def _benchmarks(retention: dict[str, Any]) -> Table:
    """Scores of the benchmark tasks, the source's always beside the others."""
    table = Table("task", "questions", "chance", "source", "mapped", "native", "gap recovered", "retention", "carried")
    for name, task in retention.items():
        scores = [f"{task['scores'][arm]['mean']:.1%}" for arm in ("source", "mapped", "native")]
        means = [task[share]["mean"] for share in ("gap_recovered", "retention")]
        shares = ["—" if mean is None else f"{mean:.1%}" for mean in means]
        table.add_row(name, str(task["n"]), f"{task['chance']:.1%}", *scores, *shares, f"{task['carried_share']:.0%}")
    return table
