"""One page over several runs, `sweep.html` and its Markdown twin, from what the runs left on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbridge.errors import UsageError
from kvbridge.eval.fidelity import METRIC_NAMES
from kvbridge.eval.rank_figure import RANK, rank_figure
from kvbridge.eval.report import metric_cell, render
from kvbridge.eval.sweep import BUDGETS, Run, best_under, differing_settings
from kvbridge.eval.sweep_figures import pareto_figure, sensitivity_figures
from kvbridge.eval.verdict import percent
from kvbridge.planner import pareto

COLUMNS = {name: METRIC_NAMES[name] for name in ("gap_recovered", "kl", "kl_first", "top1", "rollout_kl")}


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Settings by their last word, where that says which one is meant."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last, strict=True)}


def _row(number: int, run: Run, differing: Sequence[str], on_front: bool) -> dict[str, Any]:
    arm = run.results["arms"]["mapped"] if run.results else {}
    cells = [metric_cell(metric, arm.get(metric, {"mean": None})) for metric in COLUMNS]
    return {
        "number": number,
        "run": run,
        "front": on_front,
        "settings": [_shown(run, name) for name in differing],
        "cells": cells,
        "share": percent(run.share, 1) if run.results else "—",
    }


def _shown(run: Run, name: str) -> str:
    if name not in run.settings:
        return "—"
    value = run.settings[name]
    return "null" if value is None else str(value)


def _budgets(finished: Sequence[Run], numbers: dict[str, int]) -> list[dict[str, Any]]:
    found = []
    for budget in BUDGETS:
        run = best_under(finished, budget)
        found.append({"budget": percent(budget), "run": run, "number": numbers[str(run.folder)] if run else None})
    return found


def sweep_context(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the templates show."""
    differing = differing_settings(runs)
    numbers = {str(run.folder): number for number, run in enumerate(runs, 1)}
    finished = [run for run in runs if run.results is not None]
    front = {str(finished[at].folder) for at in pareto([(run.share, run.kl) for run in finished])}
    states = {state: sum(run.state == state for run in runs) for state in dict.fromkeys(run.state for run in runs)}
    targets = {run.results["pair"]["target"]["fingerprint"] for run in finished if run.results}
    documents = {tuple(one["id"] for one in run.results["documents"]) for run in finished if run.results}
    names, rank = short_names(differing), rank_figure(finished, differing)
    return {
        "rows": [_row(numbers[str(run.folder)], run, differing, str(run.folder) in front) for run in runs],
        "settings": [names[name] for name in differing],
        "columns": list(COLUMNS.values()),
        "summary": ", ".join(f"{count} {state}" for state, count in states.items()),
        "unfinished": [(numbers[str(run.folder)], run) for run in runs if run.results is None],
        "budgets": _budgets(finished, numbers) if finished else [],
        "one_target": len(targets) <= 1,
        "same_documents": len(documents) <= 1,
        "figures": {
            "pareto": pareto_figure(finished, [numbers[str(run.folder)] for run in finished]) if finished else None,
            "rank": rank,
            "sensitivity": sensitivity_figures(finished, [name for name in differing if not rank or name != RANK]),
        },
    }


def write_sweep_report(folder: Path, runs: Sequence[Run]) -> tuple[Path, Path]:
    """Write `sweep.html` and `sweep.md` into a folder.

    Returns:
        Their paths.

    Raises:
        UsageError: there are no runs.
    """
    if not runs:
        raise UsageError(f"{folder} holds no runs; give the out= folders of runs or sweeps.")
    page, twin = render(folder, ("sweep.html", "sweep.md"), sweep_context(runs))
    return page, twin
