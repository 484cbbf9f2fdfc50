"""Report sections on prompt length and on turns: a figure and a table each."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from kvbridge.eval.figures import ARM_COLOURS, ARM_NAMES, INK, logarithmic, svg_figure

TURN_NAMES = {
    "carried_on": "carried on (new tokens mapped)",
    "carried_anew": "carried anew (all mapped again)",
    "source": ARM_NAMES["source"],
    "no_context": ARM_NAMES["no_context"],
}
TURN_COLOURS = {
    "carried_on": ARM_COLOURS["mapped"],
    "carried_anew": ARM_COLOURS["injected"],
    "source": ARM_COLOURS["source"],
    "no_context": ARM_COLOURS["no_context"],
}
Curve = list[dict[str, Any]]


def _with_intervals(axes: Axes, places: list[int], curve: Curve, colour: str, name: str) -> None:
    axes.plot(places, [point["mean"] for point in curve], color=colour, marker="o", markersize=4, label=name)
    low, high = zip(*(point["ci95"] for point in curve), strict=True)
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _finish(axes: Axes, places: list[int], label: str) -> None:
    axes.set_yscale("log")
    logarithmic(axes.yaxis)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel("KL to native, nats")
    axes.grid(axis="y", color=INK, alpha=0.12)
    axes.legend(fontsize=9)


def _number(point: dict[str, Any]) -> str:
    return f"{point['mean']:.3f} ({point['ci95'][0]:.3f} … {point['ci95'][1]:.3f})"


def length_section(results: dict[str, Any]) -> dict[str, Any] | None:
    """KL by prompt length, the main length among them; nothing where no other length was scored."""
    by_length = results.get("by_length")
    if not by_length:
        return None
    cost = results["cost"]
    main = {
        "arms": results["arms"],
        "share": cost["target_prefill_flops_share"],
        "equal_cost_tail": cost["equal_cost_tail"],
    }
    found = dict(
        sorted(({int(length): entry for length, entry in by_length.items()} | {cost["prompt_tokens"]: main}).items())
    )
    lengths, shown = list(found), ("mapped", "source", "tail_only")
    with svg_figure("lengths", 7.2, 3.4) as (_, (axes,), made):
        axes.set_xscale("log")
        for arm in shown:
            curve = [entry["arms"][arm]["kl"] for entry in found.values()]
            _with_intervals(axes, lengths, curve, ARM_COLOURS[arm], ARM_NAMES[arm])
        _finish(axes, lengths, "prompt tokens")
    rows = [
        (
            length,
            *(_number(entry["arms"][arm]["kl"]) for arm in shown),
            f"{entry['share']:.1%}",
            entry["equal_cost_tail"],
        )
        for length, entry in found.items()
    ]
    columns = ["prompt tokens", *(f"KL, {ARM_NAMES[arm]}" for arm in shown), "share of prefill", "tail of equal cost"]
    return {"figure": made[0], "columns": columns, "rows": rows}


def turn_section(results: dict[str, Any]) -> dict[str, Any] | None:
    """KL by turn of a conversation; nothing where none were held."""
    turns = results.get("turns")
    if not turns:
        return None
    count = turns["settings"]["count"]
    places = list(range(1, count + 1))
    with svg_figure("turns", 7.2, 3.4) as (_, (axes,), made):
        for arm, name in TURN_NAMES.items():
            _with_intervals(axes, places, turns["arms"][arm]["kl"], TURN_COLOURS[arm], name)
        _finish(axes, places, "hand-off in the conversation")
    rows = [(turn, *(_number(turns["arms"][arm]["kl"][turn - 1]) for arm in TURN_NAMES)) for turn in places]
    columns = ["turn", *(f"KL, {name}" for name in TURN_NAMES.values())]
    return {
        "figure": made[0],
        "columns": columns,
        "rows": rows,
        "settings": turns["settings"],
        "conversations": len(turns["conversations"]),
    }
