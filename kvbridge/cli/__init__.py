"""The `kvbridge` command. Nothing heavy is imported before a command is known."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

USAGE = """\
usage: kvbridge COMMAND [OVERRIDE …]

Carry a small model's KV cache into a larger one through learned maps.

commands
  run         calibrate, fit and evaluate; writes OUT/bridge, OUT/results.json and a report
  calibrate   stream text through both models into OUT/calibration
  fit         fit a map on finished moments; writes OUT/bridge
  eval        score a finished bridge; writes OUT/results.json and a report
  plan        measure a bridge's maps under many plans, and say which is best for which budget
              (--sizes: how large a calibration and its map will be, before any model is loaded)
  calibrate-gate  measure on which hand-offs a bridge can be trusted, and store the limits in it
  bench       time a bridge's hand-off beside the prefill that it replaces; writes OUT/bench
  cascade     answer prompts with both models, the large one going on from the small one's cache
  calibrate-policy  find the doubt at which the large model should take over
  report      make the report of a finished run, or one of a sweep and several runs: kvbridge report DIR …
  compare     say which of two runs is better, document by document: kvbridge compare A B [--json]
  lm-eval     lm-eval's own command line with the model `kvbridge`: kvbridge lm-eval --model kvbridge …
  inspect     print what a bridge is made of
  doctor      check that a pair is supported and that a hand-off is exact

Every setting is a Hydra override, such as mapper.k=8 or plan.native_tail=16; `kvbridge COMMAND --help` lists them,
`-m` sweeps them. Example:

  kvbridge run pair=local pair.source=DIR pair.target=DIR calibration.corpus=FILE eval.corpus=FILE out=DIR
"""

COMMANDS = (
    "run",
    "calibrate",
    "fit",
    "eval",
    "plan",
    "calibrate-gate",
    "bench",
    "cascade",
    "calibrate-policy",
    "inspect",
    "doctor",
)
# Commands that take folders instead of overrides.
FOLDER_COMMANDS = ("report", "compare")
# Commands whose arguments are another program's.
PASSED_ON = ("lm-eval",)
# Hydra's own options that make sense here; it would answer any other with half a screen.
FLAGS = (
    "-m",
    "--multirun",
    "-h",
    "--help",
    "--hydra-help",
    "-c",
    "--cfg",
    "--resolve",
    "-p",
    "--package",
    "-i",
    "--info",
)


def _hydra(command: str, overrides: list[str]) -> None:
    """Compose the configuration and run the command, once or as a sweep; fail if any job failed."""
    import hydra

    from kvbridge.cli.jobs import SWEEP_FLAGS, Job, Sweep, one_line
    from kvbridge.cli.settings import register

    if command == "plan":
        overrides = ["planner.sizes=true" if given == "--sizes" else given for given in overrides]
    for given in overrides:
        if given.startswith("-") and given.split("=")[0] not in FLAGS:
            _fail(f"{given} is no option; settings are given as mapper.k=8, and -m sweeps them.")
    register()
    sweep, overrides = Sweep.of(overrides)
    # Hydra's parser takes overrides on one side of an option only.
    sys.argv = [f"kvbridge {command}", *sorted(overrides, key=lambda given: given not in SWEEP_FLAGS)]
    # Without this Hydra prints a summary of the traceback and exits with 1 itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    run = hydra.main(version_base="1.3", config_path="pkg://kvbridge.configs", config_name="config")
    job = Job(command, sweep)
    failures = job.failures
    try:
        run(job)()
    except Exception as error:
        # A launcher stops with errors of its own when a worker is killed; what the other jobs said must not be lost.
        if sweep is None or isinstance(error, BrokenPipeError):
            raise
        failures.append(one_line(error))
    finally:
        failures = [*(sweep.failures() if sweep else []), *failures]
    if failures:
        _fail("\nkvbridge: error: ".join(failures))


def _lm_eval(arguments: list[str]) -> None:
    """Make the model known to lm-eval and run its command line."""
    from kvbridge.eval.retention import require_lm_eval

    require_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    import kvbridge.eval.harness  # noqa: F401  registers the model

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


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
    if command not in (*COMMANDS, *FOLDER_COMMANDS, *PASSED_ON):
        _fail(f"{command!r} is no command; expected one of {', '.join((*COMMANDS, *FOLDER_COMMANDS, *PASSED_ON))}.")
    try:
        if command in FOLDER_COMMANDS:
            from kvbridge.cli import folders

            getattr(folders, f"{command}_command")(overrides)
        elif command in PASSED_ON:
            _lm_eval(overrides)
        else:
            _hydra(command, overrides)
    except KeyboardInterrupt:
        print("kvbridge: stopped; the same command goes on where it was.", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not complain about it once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from kvbridge.cli.jobs import one_line
        from kvbridge.errors import KVBridgeError

        if not isinstance(error, KVBridgeError | HydraException | OmegaConfBaseException | OSError):
            raise
        _fail(one_line(error))


def _fail(sentence: str) -> NoReturn:
    print(f"kvbridge: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)
