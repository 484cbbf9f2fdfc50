"""Commands that read the folders of finished runs instead of composing settings."""

from __future__ import annotations

import json
from pathlib import Path

from kvbridge.errors import UsageError


def _folders(command: str, arguments: list[str], flags: tuple[str, ...] = ()) -> list[Path]:
    unknown = [given for given in arguments if given.startswith("-") and given not in flags]
    if unknown:
        raise UsageError(f"{unknown[0]} is no option of kvbridge {command}; see kvbridge --help.")
    return [Path(given).expanduser() for given in arguments if given not in flags]


def report_command(arguments: list[str]) -> None:
    """Write the report of one run, or one of several.

    Raises:
        UsageError: no folder is given, or one holds no run.
    """
    from kvbridge.eval.report import write_report
    from kvbridge.eval.sweep import find_runs
    from kvbridge.eval.sweep_report import write_sweep_report

    folders = _folders("report", arguments)
    if not folders:
        raise UsageError("kvbridge report takes the out= folders of finished runs: kvbridge report DIR …")
    runs = find_runs(folders)
    if len(folders) == 1 and (not runs or [run.folder for run in runs] == folders):
        page, _ = write_report(folders[0])
    else:
        page, _ = write_sweep_report(folders[0], runs)
    print(page)


def compare_command(arguments: list[str]) -> None:
    """Print which of two runs is better.

    Raises:
        UsageError: there are not two finished runs that scored some of the same documents.
    """
    from kvbridge.eval.compare import compare_runs, print_comparison
    from kvbridge.eval.report import load_results

    folders = _folders("compare", arguments, ("--json",))
    if len(folders) != 2:
        raise UsageError("kvbridge compare takes the out= folders of two finished runs: kvbridge compare A B [--json].")
    a, b = ((str(folder), load_results(folder)) for folder in folders)
    comparison = compare_runs(a, b)
    if "--json" in arguments:
        print(json.dumps(comparison.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_comparison(comparison)
