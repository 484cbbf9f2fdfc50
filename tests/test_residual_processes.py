"""A training shared by two processes: the weights of one alone, every document read once, files written once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tiny_residual import CONFIG, Fitted, trainer

pytestmark = pytest.mark.timeout(300)  # imports torch anew, in processes of its own

SHARED = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvbridge.mappers.residual.progress import Checkpoint
from kvbridge.mappers.residual.readings import ReadingStore
from kvbridge.mappers.residual.trainer import Trainer
from kvbridge.processes import process_state
from tiny_residual import fit_tiny, trainer

map_folder, out, killed_at = Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
index = process_state().process_index
noted = {}

def count(kind, name):
    inner = getattr(kind, name)

    def counted(self, *args):
        noted[name] = noted.get(name, 0) + 1
        return inner(self, *args)

    setattr(kind, name, counted)

fitted = fit_tiny(map_folder)
for kind, name in ((ReadingStore, "_read"), (Checkpoint, "save"), (Trainer, "_loss"), (Trainer, "_step")):
    count(kind, name)
step = Trainer._step

def killed(self, stage):
    if self._done() == killed_at:
        os._exit(9)
    return step(self, stage)

Trainer._step = killed
trainer(fitted, out, checkpoint_seconds=1e-6).run()
(out / f"noted{index}.json").write_text(json.dumps(noted))
"""


def launch(fitted: Fitted, out: Path, killed_at: int = -1) -> subprocess.CompletedProcess[str]:
    """Train in two processes, which end before one step where `killed_at` is its number."""
    script = out.parent / "shared.py"
    script.write_text(SHARED)
    here, folder = str(Path(__file__).parent), str(fitted.store.folder.parent)
    environment = os.environ | {"HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE), "OMP_NUM_THREADS": "1"}
    # On a CPU `accelerate launch` starts several processes only through mpirun.
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    return subprocess.run(
        [sys.executable, *started, here, folder, str(out), str(killed_at)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_two_processes_train_what_one_does(fitted: Fitted, tmp_path: Path) -> None:
    alone = trainer(fitted, tmp_path / "alone", checkpoint_seconds=1e-6)
    alone.run()
    out = tmp_path / "shared"
    stopped = launch(fitted, out, killed_at=3)
    assert stopped.returncode != 0
    done = launch(fitted, out)
    assert done.returncode == 0, done.stderr
    noted: list[dict[str, Any]] = [json.loads((out / f"noted{index}.json").read_text()) for index in range(2)]
    assert [each["_step"] for each in noted] == [1, 1], "the second start went on from the first one's third step"
    # One batch of the step, and at its end one of the two dev documents: dev batches are of two.
    assert sorted(each["_loss"] for each in noted) == [1, 2]
    assert ["save" in each for each in noted] == [True, False]
    shared = trainer(fitted, out, checkpoint_seconds=1e-6)
    assert shared._done() == CONFIG.steps
    looks = zip(shared.checkpoint.progress.curve, alone.checkpoint.progress.curve, strict=True)
    for one, other in looks:
        assert one["dev_kl"] == pytest.approx(other["dev_kl"], rel=1e-4)
    for name, value in alone.mapping.module.named_parameters():
        torch.testing.assert_close(shared.checkpoint.best[name], value, atol=1e-5, rtol=1e-3, msg=name)
