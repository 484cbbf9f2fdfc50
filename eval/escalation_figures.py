"""Cost against quality of every threshold of doubt, as SVG and as a table."""

from __future__ import annotations

from typing import Any

from kvbridge.eval.figures import standalone, svg_figure

NAMES = {"source_alone": "source alone", "checked": "chosen threshold", "target_always": "target always"}


def escalation_figure(evidence: dict[str, Any]) -> str:
    """Accuracy over the target's mean operations per answer, all thresholds, the chosen one marked."""
    points = evidence["curve"]
    with svg_figure("escalation", 5.2, 3.2) as (_, (axes,), made):
        axes.plot([p["flops"] / 1e9 for p in points], [p["right"] for p in points], color="#2f81f7", linewidth=1.5)
        for (name, label), marker in zip(NAMES.items(), "oDs", strict=True):
            at = evidence[name]
            low, high = at["right"]["ci95"]
            mean = at["right"]["mean"]
            axes.errorbar(
                at["flops"]["mean"] / 1e9,
                mean,
                yerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]],
                marker=marker,
                linestyle="none",
                label=label,
            )
        axes.set_xlabel("target GFLOPs per answer")
        axes.set_ylabel("right answers")
        axes.legend()
    return standalone(made[0])


def escalation_table(evidence: dict[str, Any]) -> str:
    """The same in Markdown: source alone, the chosen threshold, the target always; and the tasks that were left out."""
    rows = ["| | target answers | right | target GFLOPs per answer |", "|---|---|---|---|"]
    for name, label in NAMES.items():
        at = evidence[name]
        low, high = at["right"]["ci95"]
        rows.append(
            f"| {label} | {at['escalated']['mean']:.1%} | {at['right']['mean']:.1%} ({low:.1%} … {high:.1%}) | "
            f"{at['flops']['mean'] / 1e9:.3f} |"
        )
    left_out = evidence["left_out"]
    if left_out:
        listed = "; ".join(f"task {each['task']}: {each['reason']}" for each in left_out)
        rows += ["", f"Left out, because the source has no answer to them: {len(left_out)} ({listed})."]
    return "\n".join(rows) + "\n"
