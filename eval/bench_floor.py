"""What a mapping cannot be faster than, measured on the machine: its bare products, and copying what it must touch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from kvbridge.kernels.packed import PackedMap, Projected

COPIED_BYTES = 2**28


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of some work, after one run that does not count."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def product_shapes(packed: PackedMap, layers: range) -> list[tuple[int, int]]:
    """Inner and outer width of the products that a map makes for the target `layers`.

    What reads the same rows counts as one wide product, as if nothing stood between its layers.
    """
    shared: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    alone: list[tuple[int, int]] = []
    for (states, layer), pieces in packed.pieces.items():
        wanted = layer == layers.stop if states == "residual" else layer in layers
        for term in (term for piece in pieces if wanted for term in piece.terms):
            inner, outer = term.weight.shape
            if term.slots is None:
                shared[term.rows] = [inner, shared[term.rows][1] + outer]
            else:
                alone.append((inner, outer))
    made = [row.weight.shape for row in packed.rows if isinstance(row, Projected)]
    return [*((inner, outer) for inner, outer in made), *((inner, outer) for inner, outer in shared.values()), *alone]


def plain_product_seconds(packed: PackedMap, layers: range, tokens: int, device: torch.device, repeats: int) -> float:
    """Time of plain matrix products of the same operations and shapes as a mapping's, and of nothing else."""
    total = 0.0
    for inner, outer in product_shapes(packed, layers):
        rows = torch.rand(tokens, inner, device=device).to(packed.dtype)
        weight = torch.rand(inner, outer, device=device).to(packed.dtype)
        total += _seconds(lambda x=rows, w=weight: x @ w, device, repeats)
    return total


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes per second of a large copy, read and written both counted."""
    given = torch.ones(COPIED_BYTES // 4, device=device)
    made = torch.empty_like(given)
    return 2 * COPIED_BYTES / _seconds(lambda: made.copy_(given), device, repeats)


def weight_bytes(packed: PackedMap, layers: range) -> int:
    """Bytes of the weights that a map reads for the target `layers`."""
    numbers = sum(inner * outer for inner, outer in product_shapes(packed, layers))
    return numbers * torch.empty(0, dtype=packed.dtype).element_size()


def touched_bytes(packed: PackedMap, layers: range, source: list[Tensor], destination: Tensor) -> int:
    """Bytes that a mapping must at least read and write: weights, the source's cache, the target's cache."""
    caches = [*source, destination]
    return weight_bytes(packed, layers) + sum(tensor.numel() * tensor.element_size() for tensor in caches)
