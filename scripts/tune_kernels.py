"""Finds the shapes of programs that are fastest on the card at hand, and writes the table that the kernels read.

    python scripts/tune_kernels.py --write kernels/triton/tuned.json    # some minutes; commit the file, build the wheel

For every pair and map of `kernel_shapes.py` it times the whole mapping with each candidate, one launch being all that
changes, and keeps the fastest of those whose error is small. What the table does not name follows the rule in
`kernels/triton/config.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from gpu_checks import milliseconds
from kernel_cases import LARGEST_ERROR, Prepared
from kernel_shapes import MAPS, PAIRS

from kvbridge.kernels.triton import config

TOKENS, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3, 4)
ROWS = (64, 512, 2048)


def candidates() -> list[dict[str, int]]:
    """Every combination of rows, warps and stages."""
    return [
        {"tokens": tokens, "warps": warps, "stages": stages}
        for tokens, warps, stages in itertools.product(TOKENS, WARPS, STAGES)
    ]


def tuned_keys(prepared: Prepared, rows: int, capability: tuple[int, int]) -> set[str]:
    """What the launches of a map look up: the tiles of `z` where it has any, and those of the entries."""
    program = prepared.program
    halves = {config.power_of_two(max(8, program.half))} | ({program.reduce_half} if len(program.reduces) else set())
    return {config.tuning_key(rows, half, program.depth, program.stored, capability) for half in halves}


def tune(prepared: Prepared, rows: int, table: dict[str, dict[str, int]]) -> None:
    """Add to the table what is fastest for each launch of one map that is not in it."""
    capability = torch.cuda.get_device_capability()
    call = prepared.call(rows)
    for key in sorted(tuned_keys(prepared, rows, capability) - table.keys()):
        times: list[tuple[float, dict[str, int]]] = []
        for candidate in candidates():
            config.tuned().update(table | {key: candidate})
            try:
                if prepared.error(tokens=33) < LARGEST_ERROR:
                    times.append((milliseconds(call, repeats=7), candidate))
            except Exception as refused:  # a shape that does not fit the card's shared memory or registers
                print(f"{key} {candidate}: {type(refused).__name__}", flush=True)
        if times:
            best = min(times, key=lambda timed: timed[0])
            table[key] = best[1]
            print(f"{key}: {best[1]} {best[0]:.3f} ms", flush=True)
        config.tuned().pop(key, None)
        config.tuned().update(table)


def main(options: argparse.Namespace) -> dict[str, Any]:
    table: dict[str, dict[str, int]] = {}
    config.tuned().clear()
    for pair, name in itertools.product(options.pairs, MAPS):
        prepared = Prepared.make(name, PAIRS[pair], torch.device("cuda"), torch.bfloat16)
        for rows in ROWS:
            tune(prepared, rows, table)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", default=["0.5B-1.5B", "0.6B-1.7B"], choices=PAIRS)
    options = parser.parse_args()
    options.write.write_text(json.dumps(main(options), indent=1, sort_keys=True) + "\n")
