"""Figures over several runs: what KL costs, and how it answers to each setting."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from kvbridge.eval.figures import ARM_COLOURS, INK, logarithmic, svg_figure
from kvbridge.eval.sweep import Run, series
from kvbridge.planner import pareto

# Beyond these a figure is no longer read.
MOST_SETTINGS = 8
MOST_LINES = 6
COLOURS = ("#2f81f7", "#d98a1f", "#2da36f", "#8b6fd6", "#d1495b", "#7d8590")
# From this ratio of largest to smallest on, a logarithmic axis tells more.
WIDE = 8


def spread(axes: Axes, axis: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values are of very different sizes."""
    if min(values) > 0 and max(values) / min(values) >= WIDE:
        getattr(axes, f"set_{axis}scale")("log")
        logarithmic(getattr(axes, f"{axis}axis"))


def interval(run: Run) -> tuple[float, float]:
    """How far the interval of a finished run's KL reaches below and above the mean."""
    found: Any = run.results
    low, high = found["arms"]["mapped"]["kl"]["ci95"]
    return max(run.kl - low, 0.0), max(high - run.kl, 0.0)


def pareto_figure(runs: Sequence[Run], numbers: Sequence[int]) -> str:
    """KL against share of prefill FLOPs: a numbered point per finished run, the front as steps."""
    points = [(run.share, run.kl) for run in runs]
    front = [points[at] for at in pareto(points)]
    with svg_figure("pareto", 7.2, 4.2) as (_, (axes,), made):
        axes.step(*zip(*((100 * share, kl) for share, kl in front), strict=True), where="post", color=INK, alpha=0.4)
        for (share, kl), number in zip(points, numbers, strict=True):
            best = (share, kl) in front
            axes.scatter([100 * share], [kl], s=36, color=ARM_COLOURS["mapped" if best else "no_context"])
            axes.annotate(str(number), (100 * share, kl), xytext=(4, 4), textcoords="offset points", fontsize=9)
        spread(axes, "x", [share for share, _ in points])
        spread(axes, "y", [kl for _, kl in points])
        axes.set_xlabel("% of the target's prefill FLOPs")
        axes.set_ylabel("KL to native, nats")
        axes.grid(color=INK, alpha=0.12)
    return made[0]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def setting_text(value: Any) -> str:
    """A value as it can stand in a figure."""
    text = "null" if value is None else str(value)
    # matplotlib would read a pair of dollars as mathematics.
    return (text if len(text) <= 24 else f"…{text[-23:]}").replace("$", r"\$")


def _label(group: Sequence[Run], name: str, differing: Sequence[str]) -> str:
    others = (f"{other.rpartition('.')[2]}={setting_text(group[0].settings.get(other))}" for other in differing)
    return ", ".join(text for other, text in zip(differing, others, strict=True) if other != name)


def _places(values: Sequence[Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Where each value (as JSON) goes on the axis, and what to call it there if its place is not its size.

    Numbers go where they are. Among other values null comes first, then numbers by size, then the rest as they come.
    """
    known = {json.dumps(value): value for value in values}
    if all(map(_number, values)):
        return {key: float(value) for key, value in known.items()}, {}
    order = sorted(known, key=lambda key: (known[key] is not None, known[key] if _number(known[key]) else math.inf))
    return {key: float(at) for at, key in enumerate(order)}, {key: setting_text(known[key]) for key in order}


def sensitivity_figure(runs: Sequence[Run], name: str, differing: Sequence[str]) -> str | None:
    """KL with its intervals against one setting, a line per group of runs that share all others."""
    groups = series(runs, name, differing)[:MOST_LINES]
    if not groups:
        return None
    places, labels = _places([run.settings.get(name) for group in groups for run in group])
    with svg_figure(f"sensitivity-{name}", 7.2, 3.2) as (_, (axes,), made):
        for group, colour in zip(groups, COLOURS, strict=False):
            ordered = sorted(group, key=lambda run: places[json.dumps(run.settings.get(name))])
            axes.errorbar(
                [places[json.dumps(run.settings.get(name))] for run in ordered],
                [run.kl for run in ordered],
                yerr=list(zip(*(interval(run) for run in ordered), strict=True)),
                color=colour, marker="o", markersize=4, linewidth=0 if labels else 1.4, elinewidth=0.8,
                label=_label(group, name, differing),
            )  # fmt: skip
        if labels:
            axes.set_xticks(range(len(labels)), list(labels.values()))
        else:
            spread(axes, "x", list(places.values()))
        axes.set_xlabel(name)
        axes.set_ylabel("KL to native, nats")
        axes.grid(axis="y", color=INK, alpha=0.12)
        if len(groups) > 1:
            axes.legend(fontsize=8)
    return made[0]


def sensitivity_figures(runs: Sequence[Run], differing: Sequence[str]) -> dict[str, str]:
    """A figure for each setting that varies alone in some of the runs."""
    drawn = ((name, sensitivity_figure(runs, name, differing)) for name in differing[:MOST_SETTINGS])
    return {name: figure for name, figure in drawn if figure is not None}
