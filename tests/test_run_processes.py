"""`kvbridge run` in two processes: the figures of one alone, and one set of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import SCRIPT, Run, as_overrides, left

pytestmark = pytest.mark.timeout(300)  # imports torch anew, in processes of its own


def test_two_processes_leave_the_run_of_one(kvbridge: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    asked = [*as_overrides(settings), "out=shared"]
    # On a CPU `accelerate launch` starts several processes only through mpirun.
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), "run"]
    shared = subprocess.run(
        [sys.executable, *started, *asked],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout.count("report: ") == 1
    assert kvbridge("run", "out=alone").code == 0
    assert left(tmp_path / "shared") == left(tmp_path / "alone")
    assert json.loads((tmp_path / "shared/status.json").read_text())["state"] == "finished"
    found, expected = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("shared", "alone"))
    assert found["calibration"]["rows"] == expected["calibration"]["rows"]
    for name, metrics in expected["arms"].items():
        for metric in ("kl", "nll"):
            assert found["arms"][name][metric]["mean"] == pytest.approx(metrics[metric]["mean"], rel=1e-3), name
