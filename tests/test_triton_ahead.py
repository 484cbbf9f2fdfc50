"""What the compilers make of the Triton kernels: no spills, 128-bit accesses, tensor cores. No card is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("triton_ahead.py")
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
QUICK = ["gather", "reduce", "expand"]
REST = [
    "gather-interleaved",
    "gather-fp32",
    "reduce-quadratic",
    "reduce-int8",
    "reduce-fp32",
    "expand-interleaved",
    "expand-branch",
    "expand-int8",
    "expand-fp32",
]


def compiled(capability: int, names: list[str], cache: Path) -> dict[str, dict[str, Any]]:
    """Compile in a process of its own, which has no interpreter and an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(SCRIPT), str(capability), *names]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check(capability: int, found: dict[str, dict[str, Any]]) -> None:
    for name, made in found.items():
        assert made["spilled"] == 0, (name, made)
        assert made["wide_loads"] >= 2, (name, made)
        assert made["wide_stores"] >= 1, (name, made)
        uses = [] if name.startswith("gather") or name.endswith("fp32") else [TENSOR_CORES[capability]]
        assert made["tensor_cores"] == uses, (name, made)


def test_compiles_cleanly_for_sm_90(tmp_path: Path) -> None:
    check(90, compiled(90, QUICK, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("capability", TENSOR_CORES)
def test_every_kernel_compiles_cleanly(capability: int, tmp_path: Path) -> None:
    check(capability, compiled(capability, [*QUICK, *REST], tmp_path))


def test_the_checks_bite(tmp_path: Path) -> None:
    good = {"registers": 90, "spilled": 0, "wide_loads": 4, "wide_stores": 1, "tensor_cores": ["mma.sync"]}
    check(80, {"expand": good})
    for bad in ({"spilled": 8}, {"wide_loads": 0}, {"wide_stores": 0}, {"tensor_cores": []}):
        with pytest.raises(AssertionError):
            check(80, {"expand": good | bad})
