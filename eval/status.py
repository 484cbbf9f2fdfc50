"""What has become of a run: `status.json` in its folder, and whether a finished one is the one that is asked for."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbridge import __version__
from kvbridge.disk import write_whole
from kvbridge.dotted import flatten, trains_branch
from kvbridge.errors import KVBridgeError, UsageError
from kvbridge.eval.report import load_results, write_report

STATUS = "status.json"
# Settings that change neither what is computed nor its outcome.
INDIFFERENT = (
    *("out", "moments_store", "logger", "experiment", "bench", "gate"),
    *(f"mapper.residual.{name}" for name in ("checkpoint_seconds", "keep_readings")),
    *(f"calibration.{name}" for name in ("checkpoint_seconds", "shard", "keep_staged", "memory_gb")),
    "planner.memory_gb",
)


def write_status(folder: Path, state: str, settings: dict[str, Any], **more: Any) -> None:
    """Write `status.json`, all of it or nothing; `state` is `running`, `finished` or `failed`."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "at": datetime.now(UTC).isoformat(timespec="seconds")}
    write_whole(folder / STATUS, json.dumps({"state": state} | who | more | {"settings": settings}, indent=1) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """What `write_status` left; empty where there is nothing readable."""
    try:
        status = json.loads((folder / STATUS).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    whole = isinstance(status, dict) and {"state", "pid", "host", "at"} <= status.keys()
    return status if whole and isinstance(status.get("settings"), dict) else {}


def is_alive(status: dict[str, Any]) -> bool:
    """Whether the process that wrote `running` may still be at it; of another host that cannot be told from here."""
    if status.get("state") != "running":
        return False
    if status.get("host") != socket.gethostname():
        return True
    try:
        process = int(status["pid"])
        # Other numbers than those of processes mean groups of them, or all.
        if process > 0:
            os.kill(process, 0)
        return process > 0
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError, KeyError, ValueError, TypeError):
        return False


def describe_failure(error: BaseException, sentence: str) -> dict[str, str]:
    """The `error` of a status, and the traceback of one that nobody foresaw."""
    if isinstance(error, KVBridgeError | OSError):
        return {"error": sentence}
    return {"error": sentence, "traceback": "".join(traceback.format_exception(error))}


@contextmanager
def recorded(folder: Path, settings: dict[str, Any], main: bool) -> Iterator[None]:
    """Keep `status.json` of a run: `running` on entering, then `finished` or `failed`.

    A kill leaves `running` with a process that is gone, which reports call stopped. What is refused before anything
    was written leaves nothing. With `main` false (a process that only contributes) nothing is written.
    """
    if not main:
        yield
        return
    write_status(folder, "running", settings)
    try:
        yield
    except Exception as error:
        if isinstance(error, KVBridgeError) and [path.name for path in folder.iterdir()] == [STATUS]:
            (folder / STATUS).unlink()
            folder.rmdir()
            raise
        sentence = str(error) if isinstance(error, KVBridgeError) else f"{type(error).__name__}: {error}"
        write_status(folder, "failed", settings, **describe_failure(error, " ".join(sentence.split())))
        raise
    write_status(folder, "finished", settings)


def record_failure(folder: Path, settings: dict[str, Any], error: BaseException, sentence: str) -> None:
    """Write `failed` for a job that never got as far as `recorded`; results and a process at work are left alone."""
    status = read_status(folder)
    if not (folder / "results.json").exists() and (not is_alive(status) or status["pid"] == os.getpid()):
        write_status(folder, "failed", settings, **describe_failure(error, sentence))


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, by dotted name, that a run read and that decide its results."""
    unread = INDIFFERENT
    if settings.get("bridge"):
        unread += ("moments", "mapper.", "calibration.")
    elif settings.get("moments") and not trains_branch(settings):
        unread += ("calibration.",)
    if "budget" not in settings.get("plan", {}):
        unread += ("planner.",)
    if settings.get("map") is None:
        unread += ("map",)
    flat = flatten(settings)
    return {
        name: value
        for name, value in flat.items()
        if not any(name == group or name.startswith(f"{group.rstrip('.')}.") for group in unread)
    }


def _shown(settings: dict[str, Any], name: str) -> str:
    return "unset" if name not in settings else "null" if settings[name] is None else str(settings[name])


def is_finished(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether `folder` holds the finished results of these settings; a missing report or status is made up for.

    The text of corpora is not read for this: results of a file that has changed since count as finished.

    Raises:
        UsageError: the folder holds results of other settings or of another kvbridge.
    """
    if not (folder / "results.json").exists():
        return False
    try:
        run = load_results(folder)["run"]
    except UsageError as error:
        raise UsageError(
            f"{folder} holds results that cannot be read; delete its results.json, or give another out= ({error})"
        ) from error
    stored, wanted = deciding(run["settings"]), deciding(json.loads(json.dumps(settings)))
    stored["kvbridge"], wanted["kvbridge"] = run["versions"]["kvbridge"], __version__
    differing = [name for name in {**wanted, **stored} if _shown(stored, name) != _shown(wanted, name)]
    if differing:
        listed = ", ".join(f"{name}={_shown(stored, name)} (now {_shown(wanted, name)})" for name in differing)
        raise UsageError(f"{folder} holds finished results with {listed}; give another out=, or delete them.")
    if not (folder / "report.html").exists():
        write_report(folder)
    if read_status(folder).get("state") != "finished":
        write_status(folder, "finished", settings)
    return True
