"""Jobs of a command: where each works, and what becomes of its errors, in any launcher's processes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbridge.disk import write_whole
from kvbridge.errors import KVBridgeError, UsageError

SWEEP_FLAGS = ("-m", "--multirun")
# Commands that leave results, and so a status.
RUNS = ("run", "eval")
# A file name holds 255 bytes.
LONGEST_NAME = 120
PLUGINS = {"joblib": "joblib", "submitit_slurm": "submitit", "submitit_local": "submitit", "ray": "ray"}


def one_line(error: BaseException) -> str:
    """Any error that a user can act on, in one sentence."""
    if isinstance(error, KVBridgeError):
        return " ".join(str(error).split())
    # A missing configuration is both.
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    launcher = re.search(r"Could not find 'hydra/launcher/(\w+)'", str(error))
    if launcher and launcher[1] in PLUGINS:
        plugin = f"hydra-{PLUGINS[launcher[1]]}-launcher"
        return f"launcher={PLUGINS[launcher[1]]} needs a plug-in: pip install {plugin}, or leave it out."
    if "Could not find" in lines[0] and len(lines) > 2:
        found = [line for line in lines[2:] if not line.startswith(("Config search path", "provider="))]
        return f"{lines[0]}; available: {', '.join(found)}."
    if lines[0].startswith("Ambiguous value"):
        return f"{lines[0].split(':')[0]}: give -m for a sweep, or key=[value1,value2] for a list."
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return f"{type(error).__name__}: {lines[0]}"
    cause = str(error.__cause__).strip().splitlines() if error.__cause__ else lines[1:]
    return f"{lines[0].rstrip('.:')}: {cause[0]}" if cause else lines[0]


def safe_name(name: str) -> str:
    """A name as one path component; what had to be changed or cut is told apart by a digest."""
    safe = re.sub(r"[^\w.,=+~-]", "_", name, flags=re.ASCII)[:LONGEST_NAME]
    return safe if safe == name else f"{safe}-{sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the jobs of one sweep share; it travels to other processes and machines.

    Attributes:
        overrides: those of the command.
        folder: of the sweep, on a file system that all jobs see.
        token: tells this start of the sweep from others in the same folder.
    """

    overrides: tuple[str, ...]
    folder: str
    token: str

    @classmethod
    def of(cls, overrides: list[str]) -> tuple[Sweep | None, list[str]]:
        """The sweep that a command's overrides ask for, if any, and the overrides that Hydra needs for it.

        `out` becomes the same text for all jobs (the time in it is now), and `hydra.sweep.dir` the folder of the sweep:
        `out` itself, or what stands before the first setting in it.
        """
        if not any(given in SWEEP_FLAGS for given in overrides):
            return None, overrides
        plain = [given for given in overrides if "=" in given and not given.startswith("-")]
        parsed = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(plain)}
        out, added = parsed.get("out"), []
        if out is not None and out.is_sweep_override():
            folder = "."
        else:
            text = _default_out() if out is None else str(out.value())
            stamped = re.sub(r"\$\{now:([^}]*)\}", lambda match: f"{datetime.now():{match[1]}}", text)
            before, setting, _ = stamped.partition("${")
            folder = before.rpartition("/")[0] if setting else before
            added.append(f"out={_quoted(stamped)}")
        if "hydra.sweep.dir" in parsed:
            folder = str(parsed["hydra.sweep.dir"].value())
        folder = str(Path(folder or ".").expanduser())
        added.append(f"hydra.sweep.dir={_quoted(folder)}")
        return cls(tuple(plain), folder, uuid.uuid4().hex[:12]), [*overrides, *added]

    @property
    def notes(self) -> Path:
        return Path(self.folder) / f".failures-{self.token}"

    def note(self, job: int, sentence: str) -> None:
        """Leave the sentence of a failed job for the process that started the sweep."""
        self.notes.mkdir(parents=True, exist_ok=True)
        (self.notes / f"{job:06d}").write_text(sentence)

    def failures(self) -> list[str]:
        """The sentences of all failed jobs, in order; afterwards they are gone."""
        sentences = [path.read_text() for path in sorted(self.notes.glob("*"))]
        shutil.rmtree(self.notes, ignore_errors=True)
        return sentences

    def varied(self) -> dict[str, list[str]]:
        """What is swept and over which values, by the key of the override; of a glob the values are not known."""
        params = HydraConfig.get().sweeper.get("params") or {}
        given = [*(f"{key}={value}" for key, value in params.items()), *self.overrides]
        # Of two overrides of one key the later one counts, as in Hydra's own sweeper.
        last = {override.get_key_element(): override for override in OverridesParser.create().parse_overrides(given)}
        return {key: _values(override) for key, override in last.items() if override.is_sweep_override()}


def _values(override: Override) -> list[str]:
    try:
        return list(override.sweep_string_iterator())
    except HydraException:
        return []


def _default_out() -> str:
    from importlib.resources import files

    root: Any = OmegaConf.to_container(OmegaConf.create((files("kvbridge.configs") / "config.yaml").read_text()))
    return root["out"]


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _names(varied: dict[str, list[str]]) -> Iterator[str]:
    """Names of all jobs of a sweep."""
    for values in itertools.product(*varied.values()):
        yield safe_name(",".join(f"{key}={value}" for key, value in zip(varied, values, strict=True)))


def _expect(folder: Path, names: list[str]) -> None:
    """Remember in `sweep.json` which jobs a sweep's folder is to hold, so that a report knows what is missing."""
    path = folder / "sweep.json"
    try:
        known = [str(job) for job in json.loads(path.read_text())["jobs"]] if path.exists() else []
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        # What can be lost is only that a report calls jobs of earlier commands missing.
        known = []
    jobs = list(dict.fromkeys([*known, *names]))
    if jobs != known:
        write_whole(path, json.dumps({"jobs": jobs}, indent=1) + "\n")


def place(config: DictConfig, sweep: Sweep, command: str) -> None:
    """Give a job of a sweep its own folder, and the moments that it shares with the others.

    An `out` that is swept or depends on a setting is the job's as it is; else it is the sweep's, and the job works in a
    folder of it that is named after the overrides that vary.
    """
    varied = sweep.varied()
    raw: Any = OmegaConf.to_container(config, resolve=False)
    if "out" not in varied and "${" not in str(raw["out"]) and varied:
        given = dict(override.split("=", 1) for override in HydraConfig.get().overrides.task if "=" in override)
        name = safe_name(",".join(f"{key}={given[key]}" for key in varied))
        if command in RUNS:
            _expect(Path(sweep.folder), list(_names(varied)))
        config.out = str(Path(config.out) / name)
    if command != "eval" and not config.moments and not config.moments_store:
        config.moments_store = str(Path(sweep.folder) / "calibration")


def _refuse_unswept() -> None:
    params = HydraConfig.get().sweeper.get("params")
    if params:
        raise UsageError(f"this experiment sweeps {', '.join(params)}: give -m.")


@dataclass(frozen=True, slots=True)
class Job:
    """What Hydra runs, once or for each job of a sweep; picklable, for launchers with processes of their own.

    Attributes:
        command: name of the command.
        sweep: what it is a job of; `None` for a single one.
        failures: the sentence of a single one that failed. Raised, Hydra would print more than that.
    """

    command: str
    sweep: Sweep | None
    failures: list[str] = field(default_factory=list)

    def __call__(self, config: DictConfig) -> None:
        from kvbridge.cli import commands

        run = getattr(commands, f"{self.command.replace('-', '_')}_command")
        try:
            if self.sweep is None:
                _refuse_unswept()
            else:
                place(config, self.sweep, self.command)
            run(config)
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.sweep is not None:
                self._fail(self.sweep, config, error)
            elif isinstance(error, KVBridgeError | OmegaConfBaseException | OSError):
                self.failures.append(one_line(error))
            else:
                raise

    def _fail(self, sweep: Sweep, config: DictConfig, error: Exception) -> None:
        """Note the error of a job, so that it sinks neither the others nor the exit code."""
        from kvbridge.eval.status import record_failure

        sentence = one_line(error)
        try:
            settings: Any = OmegaConf.to_container(config, resolve=True)
            out = Path(settings["out"]).expanduser()
            if self.command in RUNS and settings["out"]:
                record_failure(out, settings, error, sentence)
            sentence = f"{out}: {sentence}"
        except (OmegaConfBaseException, OSError):
            sentence = f"{','.join(HydraConfig.get().overrides.task)}: {sentence}"
        sweep.note(HydraConfig.get().job.num, sentence)
