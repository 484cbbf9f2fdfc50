"""The `kvbridge` command. Nothing heavy is imported before a command is known."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

USAGE = """\
usage: kvbridge COMMAND [OVERRIDE …]

Carry a small model's KV cache into a larger one through learned maps.

commands
  run         calibrate, fit and evaluate; writes OUT/bridge, OUT/results.json and a report
  calibrate   stream text through both models into OUT/calibration
  fit         fit a map on finished moments; writes OUT/bridge
  eval        score a finished bridge; writes OUT/results.json and a report
  report      make report.html and report.md of a finished run: kvbridge report DIR
  lm-eval     lm-eval's own command line with the model `kvbridge`: kvbridge lm-eval --model kvbridge …
  inspect     print what a bridge is made of
  doctor      check that a pair is supported and that a hand-off is exact

Every setting is a Hydra override, such as mapper.k=8 or plan.native_tail=16; `kvbridge COMMAND --help` lists them,
`-m` sweeps them. Example:

  kvbridge run pair=local pair.source=DIR pair.target=DIR calibration.corpus=FILE eval.corpus=FILE out=DIR
"""

COMMANDS = ("run", "calibrate", "fit", "eval", "inspect", "doctor")
# Commands that take folders instead of overrides.
FOLDER_COMMANDS = ("report",)
# Commands whose arguments are another program's.
PASSED_ON = ("lm-eval",)
SWEEP = ("-m", "--multirun")
# Hydra's own options that make sense here; it would answer any other with half a screen.
FLAGS = (*SWEEP, "-h", "--help", "--hydra-help", "-c", "--cfg", "--resolve", "-p", "--package", "-i", "--info")


def _task(command: str, failures: list[str]) -> Callable[[Any], None]:
    """What Hydra runs for each job: a user's errors are collected, so that one job does not sink others."""
    from omegaconf.errors import OmegaConfBaseException

    from kvbridge.cli import commands
    from kvbridge.errors import KVBridgeError, UsageError

    run = getattr(commands, f"{command}_command")
    used: set[str] = set()

    def task(config: Any) -> None:
        try:
            if config.out in used:
                raise UsageError(
                    f"out={config.out} holds an earlier job of this sweep; give each its own, such as "
                    "out='runs/k-${mapper.k}'."
                )
            used.add(config.out)
            run(config)
        except BrokenPipeError:
            raise
        except (KVBridgeError, OmegaConfBaseException, OSError) as error:
            failures.append(_one_line(error))

    return task


def _one_line(error: BaseException) -> str:
    """Any error that a user can act on, in one sentence."""
    from hydra.errors import HydraException

    from kvbridge.errors import KVBridgeError

    if isinstance(error, KVBridgeError):
        return " ".join(str(error).split())
    # A missing configuration is both.
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "Could not find" in lines[0] and len(lines) > 2:
        found = [line for line in lines[2:] if not line.startswith(("Config search path", "provider="))]
        return f"{lines[0]}; available: {', '.join(found)}."
    if lines[0].startswith("Ambiguous value"):
        return f"{lines[0].split(':')[0]}: give -m for a sweep, or key=[value1,value2] for a list."
    cause = str(error.__cause__).strip().splitlines() if error.__cause__ else lines[1:]
    return f"{lines[0].rstrip('.:')}: {cause[0]}" if cause else lines[0]


def _hydra(command: str, overrides: list[str]) -> None:
    """Compose the configuration and run the command, once or as a sweep; fail if any job failed."""
    import hydra

    from kvbridge.cli.settings import register

    for given in overrides:
        if given.startswith("-") and given.split("=")[0] not in FLAGS:
            _fail(f"{given} is no option; settings are given as mapper.k=8, and -m sweeps them.")
    register()
    # Hydra's parser takes overrides on one side of an option only.
    sys.argv = [f"kvbridge {command}", *sorted(overrides, key=lambda given: given not in SWEEP)]
    # Without this Hydra prints a summary of the traceback and exits with 1 itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    failures: list[str] = []
    hydra.main(version_base="1.3", config_path="pkg://kvbridge.configs", config_name="config")(
        _task(command, failures)
    )()
    if failures:
        _fail("\nkvbridge: error: ".join(failures))


def _report(folders: list[str]) -> None:
    """Write the reports of finished runs."""
    from pathlib import Path

    from kvbridge.errors import KVBridgeError
    from kvbridge.eval.report import write_report

    if not folders or folders[0].startswith("-"):
        _fail("kvbridge report takes the out= folders of finished runs: kvbridge report DIR …")
    for folder in folders:
        try:
            page, _ = write_report(Path(folder).expanduser())
        except KVBridgeError as error:
            _fail(str(error))
        print(page)


def _lm_eval(arguments: list[str]) -> None:
    """Make the model known to lm-eval and run its command line."""
    from kvbridge.errors import KVBridgeError
    from kvbridge.eval.retention import require_lm_eval

    try:
        require_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        import kvbridge.eval.harness  # noqa: F401  registers the model

        sys.argv = ["lm-eval", *arguments]
        cli_evaluate()
    except KVBridgeError as error:
        _fail(_one_line(error))


def main() -> None:
    """Entry point: exit code 0 on success, 2 for bad usage with one sentence on stderr."""
    command, *overrides = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
        return
    if command == "--version":
        from importlib.metadata import version

        print(f"kvbridge {version('kvbridge')}")
        return
    if command in FOLDER_COMMANDS:
        _report(overrides)
        return
    if command in PASSED_ON:
        _lm_eval(overrides)
        return
    if command not in COMMANDS:
        _fail(f"{command!r} is no command; expected one of {', '.join((*COMMANDS, *FOLDER_COMMANDS, *PASSED_ON))}.")
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        _hydra(command, overrides)
    except KeyboardInterrupt:
        print("kvbridge: stopped; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not complain about it once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (HydraException, OmegaConfBaseException, OSError) as error:
        _fail(_one_line(error))


def _fail(sentence: str) -> NoReturn:
    print(f"kvbridge: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)
