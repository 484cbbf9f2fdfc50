"""Several runs side by side: what differs between them, the Pareto front, and which is best for a budget."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.errors import UsageError
from kvbridge.eval.report import load_results
from kvbridge.eval.status import STATUS, deciding, is_alive, read_status

BUDGETS = (0.05, 0.10, 0.25)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep, whatever has become of it.

    Attributes:
        name: its folder, as short as tells it from the others.
        folder: where it lies.
        state: `finished`, `failed`, `running`, `stopped` (a process that is gone) or `missing` (never started).
        settings: those that decide its results, by dotted name; empty for a missing one.
        note: the error of a failed run, or how far an unfinished one is.
        results: of a finished one.
    """

    name: str
    folder: Path
    state: str
    settings: dict[str, Any]
    note: str
    results: dict[str, Any] | None = None

    @property
    def kl(self) -> float:
        """Mean KL of the mapped arm; of finished runs only."""
        return self._finished()["arms"]["mapped"]["kl"]["mean"]

    @property
    def share(self) -> float:
        """Share of the target's prefill FLOPs; of finished runs only."""
        return self._finished()["cost"]["target_prefill_flops_share"]

    def _finished(self) -> dict[str, Any]:
        if self.results is None:
            raise UsageError(f"{self.folder} is {self.state}: it has no results yet.")
        return self.results


def _scored_documents(folder: Path) -> int:
    try:
        return max((folder / "documents.partial.jsonl").read_text(errors="replace").count("\n") - 1, 0)
    except OSError:
        return 0


def _unfinished(name: str, folder: Path, status: dict[str, Any], damage: str) -> Run:
    settings = deciding(status.get("settings") or {})
    if damage:
        return Run(name, folder, "failed", settings, damage)
    if status.get("state") == "failed":
        return Run(name, folder, "failed", settings, str(status.get("error", "")))
    state = "running" if is_alive(status) else "stopped"
    where = f"process {status.get('pid')} on {status.get('host')}, started {status.get('at')}"
    return Run(name, folder, state, settings, f"{where}; {_scored_documents(folder)} documents scored")


def _read(name: str, folder: Path) -> Run:
    status, damage = read_status(folder), ""
    if (folder / "results.json").exists():
        try:
            results = load_results(folder)
            return Run(name, folder, "finished", deciding(results["run"]["settings"]), "", results)
        except UsageError as error:
            damage = str(error)
    elif status.get("state") == "finished":
        damage = "its results.json is gone; delete status.json and run it again."
    return _unfinished(name, folder, status, damage)


def _expected(folder: Path) -> list[Path]:
    """Folders of the jobs that the sweeps in and below a folder were to run."""
    found: list[Path] = []
    for path in sorted(folder.rglob("sweep.json")):
        try:
            found += [path.parent / str(job) for job in json.loads(path.read_text())["jobs"]]
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            continue
    return found


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs in and below folders, in the order of sweeps and else of names, with those that are missing.

    Raises:
        UsageError: a folder does not exist.
    """
    places: dict[Path, str] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; give the out= folders of runs or sweeps.")
        marked = (path.parent for mark in ("results.json", STATUS) for path in folder.rglob(mark))
        seen = {path for path in marked if not any(part.startswith(".") for part in path.relative_to(folder).parts)}
        expected = _expected(folder)
        for path in [*expected, *sorted(seen - set(expected))]:
            inside = path.relative_to(folder).as_posix()
            name = str(folder) if inside == "." else inside if len(folders) == 1 else f"{folder}/{inside}"
            places.setdefault(path, name)
    return [
        _read(name, folder)
        if (folder / "results.json").exists() or (folder / STATUS).exists()
        else Run(name, folder, "missing", {}, "not started, or nothing was written")
        for folder, name in places.items()
    ]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Names of the settings that are not the same in all runs, in the order of the configuration."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    return [name for name in names if len({json.dumps(own[name]) for own in known if name in own}) > 1]


def best_under(runs: Sequence[Run], budget: float) -> Run | None:
    """The finished run of lowest KL whose hand-off costs at most `budget` of the target's prefill FLOPs."""
    affordable = [run for run in runs if run.results is not None and run.share <= budget]
    return min(affordable, key=lambda run: run.kl, default=None)


def series(runs: Sequence[Run], name: str, differing: Sequence[str]) -> list[list[Run]]:
    """Groups of finished runs in which the setting `name` alone varies, largest first."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.results is not None:
            others = [run.settings.get(other) for other in differing if other != name]
            groups[json.dumps(others)].append(run)
    varied = [group for group in groups.values() if len({json.dumps(run.settings.get(name)) for run in group}) > 1]
    return sorted(varied, key=len, reverse=True)
