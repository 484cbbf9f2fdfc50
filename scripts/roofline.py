"""Prints the table of docs/roofline.md: operations and bytes of maps, and the least time that a card could take.

Everything is computed from shapes and two rates that the card's data sheet promises; nothing is measured.

    python scripts/roofline.py --tokens 2048 --tflops 989 --tbytes 4.8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kernel_shapes import MAPS, PAIRS, work


def table(tokens: int, tflops: float, tbytes: float) -> Iterator[str]:
    """Lines of a markdown table.

    Args:
        tokens: mapped at once.
        tflops: bf16 products, 10¹² operations a second.
        tbytes: memory, 10¹² bytes a second.
    """
    yield "| pair | map | GFLOPs | share of prefill | MB moved | FLOPs per byte | floor (ms) | bound by |"
    yield "|---|---|---|---|---|---|---|---|"
    for pair in PAIRS.values():
        names = " → ".join((pair[0].name, pair[1].name.rsplit(" ", 1)[-1]))
        for name in MAPS:
            found = work(name, pair, tokens)
            products, memory = found.flops / tflops / 1e9, found.bytes_moved / tbytes / 1e9
            yield (
                f"| {names} | {name} | {found.flops / 1e9:,.0f} | {found.share:.1%} | {found.bytes_moved / 1e6:,.0f} "
                f"| {found.flops / found.bytes_moved:,.0f} | {max(products, memory):.2f} "
                f"| {'products' if products > memory else 'memory'} |"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tflops", type=float, default=989.0, help="dense bf16 products of the card, 10^12 a second")
    parser.add_argument("--tbytes", type=float, default=4.8, help="its memory bandwidth, 10^12 bytes a second")
    options = parser.parse_args()
    print("\n".join(table(options.tokens, options.tflops, options.tbytes)))
