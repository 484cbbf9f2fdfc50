"""This process among those that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

# Processes finish their shares hours apart when one of them was resumed.
BARRIER_TIMEOUT = timedelta(days=7)


def process_state() -> PartialState:
    """Index, count and device of this process; one process on the machine's accelerator where nothing was launched.

    accelerate keeps the first state that is made, so every room asks for it here: without `cpu=True` it would take
    several processes on a CPU for one.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=BARRIER_TIMEOUT)
