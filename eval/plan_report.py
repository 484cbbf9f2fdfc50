"""What a bridge's measured points say: a table, the Pareto front, and the best point for each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbridge.bridge import Bridge
from kvbridge.eval.figures import INK, logarithmic, standalone, svg_figure
from kvbridge.eval.report import metric_cell, render
from kvbridge.eval.sweep_figures import COLOURS
from kvbridge.eval.verdict import percent
from kvbridge.planner import Point, best_within, pareto

COLUMNS = ("#", "map", "plan", "prefill FLOPs", "KL", "KL, first token", "gap recovered")
# From this ratio of largest to smallest on, a logarithmic axis tells more.
WIDE = 5


def _row(number: int, point: Point, on_front: bool) -> dict[str, Any]:
    cells = [
        metric_cell(name, point.measured.get(name, {"mean": None})) for name in ("kl", "kl_first", "gap_recovered")
    ]
    texts = [f"{number}{'*' if on_front else ''}", point.map, point.text, percent(point.share, 1)]
    shown = [mean for mean, _ in cells]
    shown[0] += f" ({cells[0][1]})"
    return {"number": number, "point": point, "front": on_front, "cells": cells, "texts": [*texts, *shown]}


def _choice(points: Sequence[Point], budget: float) -> str:
    best = best_within(points, budget)
    if best is None:
        return f"No point stays within {percent(budget, 1)} of the target's prefill."
    return (
        f"Within {percent(budget, 1)} of the target's prefill, number {points.index(best) + 1} is best: map "
        f"{best.map}, {best.text}, KL {best.kl:.3f} at {percent(best.share, 1)}."
    )


def _unmeasured(bridge: Bridge, points: Sequence[Point]) -> list[str]:
    """A sentence on the maps that have no point, where there are any."""
    missing = [name for name in bridge.maps if name not in {point.map for point in points}]
    if not missing:
        return []
    which = f"maps {', '.join(missing)}" if len(missing) > 1 else f"map {missing[0]}"
    return [f"No point of {which}: not measured, or dearer than planner.max_share under every plan that was tried."]


def _caption(points: Sequence[Point]) -> str:
    measured = points[0].measured
    source = measured.get("source_kl")
    alone = "" if source is None else f"; the small model alone has KL {source:.3f}"
    return (
        f"* on the front of KL and cost; {measured['documents']} documents of text {measured['text']}, "
        f"{measured['prompt']} prompt tokens, {measured['dtype']}{alone}."
    )


def front_figure(points: Sequence[Point]) -> str:
    """KL against share of prefill FLOPs: a colour per map, the front as numbered steps, the small model as a line."""
    maps = list(dict.fromkeys(point.map for point in points))
    front = pareto([(point.share, point.kl) for point in points])
    source = points[0].measured.get("source_kl")
    with svg_figure("plan", 7.2, 4.2) as (_, (axes,), made):
        steps = [(100 * points[at].share, points[at].kl) for at in front]
        axes.step(*zip(*steps, strict=True), where="post", color=INK, alpha=0.4, linewidth=1.2)
        for at, name in enumerate(maps):
            own = [(100 * point.share, point.kl) for point in points if point.map == name]
            colour = COLOURS[at % len(COLOURS)]
            axes.scatter(*zip(*own, strict=True), s=26, color=colour, alpha=0.85, linewidths=0, label=name, zorder=3)
        for at in front:
            place = 100 * points[at].share, points[at].kl
            axes.annotate(str(at + 1), place, xytext=(4, 5), textcoords="offset points", fontsize=9)
        if source is not None:
            axes.axhline(source, color=INK, alpha=0.5, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate("small model alone", (1, source), xycoords=("axes fraction", "data"), xytext=(0, 3),
                          textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
        values = [*(point.kl for point in points), *([source] if source else [])]
        if min(values) > 0 and max(values) / min(values) >= WIDE:
            axes.set_yscale("log")
            logarithmic(axes.yaxis)
        axes.set_xlim(left=0)
        axes.set_xlabel("% of the target's prefill FLOPs")
        axes.set_ylabel("KL to native, nats")
        axes.grid(color=INK, alpha=0.12)
        axes.legend(fontsize=9)
    return made[0]


def plan_context(bridge: Bridge, budgets: Sequence[float]) -> dict[str, Any]:
    """Everything that the table and the pages show; the bridge has points.

    Args:
        bridge: with its points.
        budgets: shares of prefill FLOPs for which the best point is named.
    """
    points = sorted(map(Point.of, bridge.points), key=lambda point: (point.share, point.kl))
    front = set(pareto([(point.share, point.kl) for point in points]))
    return {
        "source": bridge.pair["source"]["name"],
        "target": bridge.pair["target"]["name"],
        "columns": COLUMNS,
        "rows": [_row(at + 1, point, at in front) for at, point in enumerate(points)],
        "choices": [*(_choice(points, budget) for budget in budgets), *_unmeasured(bridge, points)],
        "caption": _caption(points),
        "figure": front_figure(points),
    }


def write_plan_report(folder: Path, context: dict[str, Any]) -> list[Path]:
    """Write `plan.html`, its Markdown twin `plan.md` and the figure `plan.svg` into a folder; returns their paths."""
    figure = folder / "plan.svg"
    figure.write_text(standalone(context["figure"]))
    return [*render(folder, ("plan.html", "plan.md"), context), figure]
