"""Shapes of one program, chosen by a plain function of sizes, dtype and architecture, or from what a tuning run found.

`scripts/tune_kernels.py` measures candidates on a card and writes `tuned.json` beside this file; what it does not name
follows the rule.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

TUNED = Path(__file__).with_name("tuned.json")
WIDEST = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program makes: `tokens` rows of `2 · half` columns, `depth` inputs at a time.

    Attributes:
        tokens: a power of two.
        half: a power of two.
        depth: inputs in one step of a product; 0 for none.
        warps: threads in 32s.
        stages: steps whose loads are under way at once.
    """

    tokens: int
    half: int
    depth: int
    warps: int
    stages: int


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << max(0, number - 1).bit_length()


def choose_gather(widest: int) -> Tile:
    """A tile of the gather, whose widest segment has `widest` coordinates: about 4,096 numbers in one step."""
    half = min(WIDEST, power_of_two((widest + 1) // 2))
    return Tile(tokens=max(1, min(64, 2048 // half)), half=half, depth=0, warps=4, stages=1)


def choose_depth(lengths: set[int], dtype: torch.dtype) -> int:
    """Inputs in one step: as many as divide every run of inputs, or, where fewer than 16 do, a masked 32."""
    most = 32 if dtype == torch.float32 else 64
    fits = [depth for depth in (64, 32, 16) if depth <= most and all(length % depth == 0 for length in lengths)]
    return fits[0] if fits else 32


def choose_reduce_half(rank: int) -> int:
    """Half the columns of a tile of `z`: narrow where a basis is, so that there are tiles enough to fill a card."""
    return 64 if rank >= 512 else min(32, max(8, power_of_two((rank + 1) // 2)))


@functools.cache
def tuned() -> dict[str, dict[str, int]]:
    """What a tuning run found: tokens, warps and stages by `tuning_key`; empty where no table is installed."""
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def tuning_key(rows: int, half: int, depth: int, stored: torch.dtype, capability: tuple[int, int]) -> str:
    """What a tuned entry is found by; row counts in the same power of two share one."""
    kind = str(stored).removeprefix("torch.")
    return f"sm_{capability[0]}{capability[1]}/{kind}/{power_of_two(rows)}x{2 * half}x{depth}"


def choose_product(
    rows: int, half: int, depth: int, stored: torch.dtype, product: torch.dtype, capability: tuple[int, int]
) -> Tile:
    """A tile of `reduce` or `expand`.

    Args:
        rows: of the workspace.
        half: half the columns of a tile, a power of two.
        depth: as `choose_depth` says.
        stored: dtype of the weights.
        product: dtype of the workspace.
        capability: of the device, `(9, 0)` for sm_90.
    """
    found = tuned().get(tuning_key(rows, half, depth, stored, capability))
    if found is not None:
        return Tile(found["tokens"], half, depth, found["warps"], found["stages"])
    most = 64 if product == torch.float32 or stored == torch.int8 or capability < (9, 0) else 128
    tokens = max(16, min(most, WIDEST * 64 // half, power_of_two(rows)))
    warps = 8 if tokens * half >= 64 * 64 else 4
    return Tile(tokens, half, depth, warps, stages=2 if product == torch.float32 else 3)
