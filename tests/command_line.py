"""Running commands in this process or one of their own, on settings that make every command work on a tiny pair."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(sysconfig.get_path("scripts")) / "kvbridge"
PROGRESS = re.compile(
    r"^(calibrate|evaluate|plan|gate|probe|turns|stage|sum|sketch)( \d+/\d+| source| target)?: +\d+%\|"
)
SIZES = {
    "pair.dtype": "float32",
    "pair.device": "cpu",
    "calibration.tokens": 2048,
    "calibration.block": 64,
    "eval.documents": 3,
    "eval.tokens": 96,
    "eval.prompt": 80,
    "eval.rollout": 4,
    "eval.samples": 2,
    "eval.resamples": 100,
    "mapper.k": 2,
}


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, standard output, and standard error without progress bars."""

    code: int
    out: str
    errors: list[str]

    @classmethod
    def of(cls, code: Any, out: str, err: str) -> Ran:
        lines = re.split(r"[\r\n]+", err)
        return cls(code or 0, out, [line for line in lines if line.strip() and not PROGRESS.search(line)])


Run = Callable[..., Ran]


def as_overrides(settings: dict[str, Any]) -> list[str]:
    return ["pair=local", *(f"{name}={value}" for name, value in settings.items() if value is not None)]


def in_process_of_its_own(*arguments: str, folder: Path) -> Ran:
    done = subprocess.run([SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return Ran.of(done.returncode, done.stdout, done.stderr)


def left(folder: Path) -> set[str]:
    """Files that were written, by their place in the folder."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def sentence(ran: Ran) -> str:
    """The one sentence of a refusal."""
    assert ran.code == 2
    assert [line[:17] for line in ran.errors] == ["kvbridge: error: "], ran.errors
    return ran.errors[0].removeprefix("kvbridge: error: ")
