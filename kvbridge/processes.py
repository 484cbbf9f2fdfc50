"""This process among those that `accelerate launch` or `torchrun` started, and among others on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce
from filelock import FileLock, Timeout
from torch import Tensor

from kvbridge.errors import UsageError
from kvbridge.fingerprint import digest

# Processes finish their shares hours apart when one of them was resumed.
BARRIER_TIMEOUT = timedelta(days=7)


def process_state() -> PartialState:
    """Index, count and device of this process; one process on the machine's accelerator where nothing was launched.

    accelerate keeps the first state that is made, so every room asks for it here: without `cpu=True` it would take
    several processes on a CPU for one.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=BARRIER_TIMEOUT)


def summed(tensor: Tensor) -> Tensor:
    """A tensor on this process's device, summed over all processes."""
    if process_state().num_processes == 1:
        return tensor
    total: Any = reduce(tensor, "sum")
    return total


def agreed(text: str) -> str:
    """The main process's text, on all of them."""
    process_state()
    (given,) = broadcast_object_list([text])
    return given


@contextmanager
def alone(folder: Path, main: bool) -> Iterator[None]:
    """Keep other processes of this machine out of a run's folder; one that only contributes (`main` false) may enter.

    Args:
        folder: of the run, or one file that it makes.
        main: whether this process is to hold it.

    Raises:
        UsageError: a process is at work in it.
    """
    if not main:
        yield
        return
    # Outside the folder, which may not exist yet and must not be made for a run that is refused.
    lock = FileLock(Path(tempfile.gettempdir()) / f"kvbridge-{digest(str(folder.resolve()))}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"another process is at work in {folder}; wait for it, or give another out=.") from error
    try:
        yield
    finally:
        lock.release()
