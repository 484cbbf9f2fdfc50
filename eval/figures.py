"""Figures of a report as inline SVG that follows the page's colours, light or dark."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# Stands for the page's text colour; replaced by `currentColor` in the SVG.
INK = "#010203"
# Of a figure on its own.
PAGE_INK, PAGE = "#24292f", "#ffffff"
ARM_COLOURS = {
    "mapped": "#2f81f7",
    "source": "#d98a1f",
    "tail_only": "#8b6fd6",
    "other_document": "#d1495b",
    "no_context": "#7d8590",
    "raw_source": "#b5651d",
    "injected": "#2da36f",
}
ARM_NAMES = {
    "native": "native (large model)",
    "injected": "injected",
    "mapped": "mapped",
    "source": "source (small model)",
    "tail_only": "native tail only",
    "other_document": "other document",
    "no_context": "no context",
    "raw_source": "raw source cache",
}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def standalone(figure: str) -> str:
    """A figure as a file of its own: without a page whose text colour it could follow, it brings one."""
    opening, rest = figure.replace("currentColor", PAGE_INK).split(">", 1)
    return f'{opening} style="background: {PAGE}">{rest}'


@contextmanager
def svg_figure(
    name: str, width: float, height: float, columns: int = 1, rows: int = 1
) -> Iterator[tuple[Figure, list[Axes], list[str]]]:
    """A figure and its axes, row by row; the SVG text is appended to the list on leaving."""
    made: list[str] = []
    style: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(drawn)
        yield drawn, list(drawn.subplots(rows, columns, squeeze=False).flat), made
        buffer = io.StringIO()
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    made.append(text[text.index("<svg") :].replace(INK, "currentColor"))


def logarithmic(axis: Axis) -> None:
    """Plain decimals at 1, 2 and 5 of every decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def kl_by_position(results: dict[str, Any]) -> str:
    """Mean KL after the hand-off, token by token, on a logarithmic axis."""
    with svg_figure("kl", 7.2, 3.6) as (_, (axes,), made):
        for arm, colour in ARM_COLOURS.items():
            curve = results["by_position"].get(arm, {}).get("kl")
            if curve and arm != "injected":
                width = 2.2 if arm == "mapped" else 1.2
                axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=width, label=ARM_NAMES[arm])
        axes.set_yscale("log")
        logarithmic(axes.yaxis)
        axes.set_xlabel("token after the hand-off")
        axes.set_ylabel("KL to native, nats")
        axes.grid(axis="y", color=INK, alpha=0.12)
        axes.legend(ncols=2, fontsize=9)
    return made[0]


def r2_heat_map(results: dict[str, Any]) -> str | None:
    """Held-out R² of every target layer and head, keys and values side by side."""
    grids = {kind: results["reconstruction"].get(f"r2_{kind}") for kind in ("keys", "values")}
    if not all(grids.values()):
        return None
    layers, heads = len(grids["keys"] or []), max(len(row) for grid in grids.values() for row in grid or [])
    with svg_figure("r2", 5.4, 0.6 + 0.17 * max(layers, 8), columns=2) as (drawn, axes, made):
        image = None
        for panel, (kind, grid) in zip(axes, grids.items(), strict=True):
            # A layer that no form of the map makes has no row of heads.
            filled = [row or [math.nan] * heads for row in grid or []]
            image = panel.imshow(filled, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
            panel.set_title(kind, fontsize=10)
            panel.set_xlabel("KV head")
            panel.set_xticks(range(heads))
        axes[0].set_ylabel("target layer")
        if image is not None:
            drawn.colorbar(image, ax=axes, label="held-out R²")
    return made[0]


def selected_layers(results: dict[str, Any]) -> str | None:
    """Which source layers each target layer reads."""
    chosen = results["selected_layers"].get("keys")
    if not chosen or not any(chosen):
        return None
    source_layers = results["pair"]["source"]["geometry"]["layers"]
    with svg_figure("layers", 5.4, 0.9 + 0.15 * max(len(chosen), 8)) as (_, (axes,), made):
        points = [(source, target) for target, sources in enumerate(chosen) for source in sources]
        axes.scatter(*zip(*points, strict=True), s=16, color=ARM_COLOURS["mapped"])
        axes.set_xlim(-0.7, source_layers - 0.3)
        axes.set_ylim(len(chosen) - 0.3, -0.7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("source layer")
        axes.set_ylabel("target layer")
        axes.grid(color=INK, alpha=0.1)
    return made[0]


def kl_by_document(results: dict[str, Any]) -> str:
    """KL of every document in every arm: one dot a document, a bar at the mean."""
    arms = [arm for arm in ARM_COLOURS if arm in results["arms"] and arm != "injected"]
    with svg_figure("documents", 7.2, 0.9 + 0.42 * len(arms)) as (_, (axes,), made):
        for row, arm in enumerate(arms):
            values = [max(document[arm]["kl"], 1e-5) for document in results["documents"]]
            axes.scatter(values, [row] * len(values), s=14, alpha=0.45, color=ARM_COLOURS[arm], linewidths=0)
            axes.plot([results["arms"][arm]["kl"]["mean"]] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=2)
        axes.set_yticks(range(len(arms)), [ARM_NAMES[arm] for arm in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_xscale("log")
        logarithmic(axes.xaxis)
        axes.set_xlabel("KL to native per document, nats")
        axes.grid(axis="x", color=INK, alpha=0.12)
    return made[0]


def cost_bars(results: dict[str, Any]) -> str:
    """Where the hand-off's FLOPs go, as shares of the target's prefill."""
    parts = results["cost"]["flops_share_by_part"]
    # A part that the plan leaves out needs no place in the legend.
    parts = {name: share for name, share in parts.items() if share}
    colours = {
        "sinks": "#7d8590",
        "head": "#8b6fd6",
        "map": "#2f81f7",
        "recompute": "#c98a1b",
        "scout": "#c2557a",
        "attended": "#d9b01f",
        "tail": "#2da36f",
    }
    with svg_figure("cost", 7.2, 1.5) as (_, (axes,), made):
        left = 0.0
        for name, share in parts.items():
            axes.barh(
                0, 100 * share, left=left, color=colours.get(name, "#d98a1f"), label=f"{name} {100 * share:.1f} %"
            )
            left += 100 * share
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("% of the target's prefill FLOPs")
        axes.set_xlim(0, max(10.0, 1.15 * left))
        axes.legend(ncols=5, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    return made[0]
