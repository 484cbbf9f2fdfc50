"""What a residual branch gains with its rank: KL of each kind and loss, beside the frozen map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvbridge.eval.figures import INK, svg_figure
from kvbridge.eval.sweep import Run
from kvbridge.eval.sweep_figures import COLOURS, MOST_LINES, interval, setting_text, spread

KIND, LOSS, RANK = (f"mapper.residual.{name}" for name in ("kind", "loss", "rank"))


def rank_lines(runs: Sequence[Run], differing: Sequence[str]) -> dict[str, list[Run]]:
    """Finished runs that differ in the rank of their branch alone, each line by what it is, in the order of ranks."""
    others = [name for name in differing if name not in (KIND, LOSS, RANK)]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.results is not None and run.settings.get(KIND, "none") != "none":
            words = [str(run.settings[KIND]), str(run.settings[LOSS]), *_words(run, others)]
            groups[", ".join(words)].append(run)
    lines = {label: sorted(group, key=lambda run: run.settings[RANK]) for label, group in groups.items()}
    return {label: line for label, line in lines.items() if line[0].settings[RANK] < line[-1].settings[RANK]}


def _words(run: Run, others: Sequence[str]) -> list[str]:
    return [f"{name.rpartition('.')[2]}={setting_text(run.settings[name])}" for name in others if name in run.settings]


def rank_figure(runs: Sequence[Run], differing: Sequence[str]) -> str | None:
    """KL with its intervals against the rank, a horizontal line for each frozen map; `None` where no rank varies."""
    lines = dict([*rank_lines(runs, differing).items()][:MOST_LINES])
    if not lines:
        return None
    plan_settings = [name for name in differing if not name.startswith("mapper.residual.")]
    frozen = [run for run in runs if run.results is not None and run.settings.get(KIND) == "none"]
    with svg_figure("rank", 7.2, 3.6) as (_, (axes,), made):
        for (label, line), colour in zip(lines.items(), COLOURS, strict=False):
            ranks, kls = [run.settings[RANK] for run in line], [run.kl for run in line]
            bars = list(zip(*(interval(run) for run in line), strict=True))
            axes.errorbar(
                ranks,
                kls,
                yerr=bars,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.4,
                elinewidth=0.8,
                label=label,
            )
        for run in frozen[:MOST_LINES]:
            label = ", ".join(["frozen map", *_words(run, plan_settings)])
            axes.axhline(run.kl, color=INK, alpha=0.6, linewidth=1.2, linestyle="--", label=label)
        spread(axes, "x", [float(run.settings[RANK]) for line in lines.values() for run in line])
        axes.set_xlabel("rank of the residual branch")
        axes.set_ylabel("KL to native, nats")
        axes.grid(axis="y", color=INK, alpha=0.12)
        axes.legend(fontsize=8)
    return made[0]
