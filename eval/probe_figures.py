"""Figures of the probes: where in the context each arm still finds its facts."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbridge.eval.figures import ARM_NAMES, svg_figure

CHANCE = 0.25


def accuracy_by_place(probes: dict[str, Any]) -> str:
    """Forced-choice accuracy over length and depth, one panel an arm, all on one colour scale."""
    places = probes["places"]
    lengths, depths = (sorted({place[name] for place in places}) for name in ("length", "depth"))
    arms = list(probes["arms"])
    with svg_figure("probes", 7.2, 1.6 + 0.56 * len(depths), columns=3, rows=2) as (drawn, panels, made):
        image = None
        for at, (panel, arm) in enumerate(zip(panels, arms, strict=True)):
            shares = {(p["length"], p["depth"]): p["arms"][arm]["choice"]["mean"] for p in places}
            grid = [[shares[length, depth] for length in lengths] for depth in depths]
            image = panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
            for (row, column), share in np.ndenumerate(grid):
                ink = "white" if share < 0.6 else "black"
                panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=ink, fontsize=8)
            panel.set_title(ARM_NAMES[arm], fontsize=10)
            panel.set_xticks(range(len(lengths)), [str(length) for length in lengths] if at >= 3 else [])
            panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths] if at % 3 == 0 else [])
        for panel in panels[3:]:
            panel.set_xlabel("prompt tokens")
        for panel in panels[::3]:
            panel.set_ylabel("depth of the fact")
        if image is not None:
            bar = drawn.colorbar(image, ax=panels, label="answers chosen rightly")
            bar.set_ticks([0, CHANCE, 0.5, 0.75, 1], labels=["0 %", "25 %, chance", "50 %", "75 %", "100 %"])
            bar.ax.axhline(CHANCE, color="white")
    return made[0]
