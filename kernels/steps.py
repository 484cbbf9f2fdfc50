"""The steps of a mapping, under names for torch's profiler and for whoever measures them here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.profiler import record_function

STEPS = ("strip", "product", "rotate", "inject")
_SPENT: ContextVar[dict[str, float] | None] = ContextVar("kvbridge_steps", default=None)


@contextmanager
def measured_steps() -> Iterator[dict[str, float]]:
    """While open, the seconds of each of `STEPS` are added to what it gives; of a CPU, where nothing is queued."""
    spent: dict[str, float] = dict.fromkeys(STEPS, 0.0)
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Mark a block as one of `STEPS`."""
    spent = _SPENT.get()
    start = time.perf_counter()
    with record_function(f"kvbridge::{name}"):
        yield
    if spent is not None:
        spent[name] += time.perf_counter() - start
