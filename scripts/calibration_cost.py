#!/usr/bin/env python3
"""What collecting moments costs beside the two bare forward passes that it cannot do without, in one run.

    python scripts/calibration_cost.py --source DIR --target DIR --corpus FILE --tokens 16384 --block 512

Every batch is read bare, then with rotation removed and rows laid out, and then summed, so that whatever else the
machine does slows all three alike. Products are made once enough rows wait, as in `kvbridge calibrate`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from kvbridge import load_pair
from kvbridge.calibration import CorpusConfig
from kvbridge.calibration.config import PRECISIONS
from kvbridge.calibration.draw import Draw
from kvbridge.calibration.moments import Moments
from kvbridge.calibration.products import plain_blocks
from kvbridge.calibration.rows import cut_rows, layer_counts, read_states, residual_layers, variables_of, widths_of
from kvbridge.cli.scripts import run_script
from kvbridge.mappers import Joint


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="embedded")
    parser.add_argument("--target", help="left out for --source embedded, which is both models")
    parser.add_argument("--corpus", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    pair = load_pair(options.source, options.target, dtype=options.dtype)
    geometries = pair.source.geometry, pair.target.geometry
    layers = layer_counts(*geometries)
    blocks = plain_blocks(Joint().blocks(), layers)
    names = variables_of(blocks)
    streams = residual_layers(names, layers)
    corpus = CorpusConfig(options.corpus).open("calibration")
    drawn = Draw(options.tokens, options.block, held_out=0.0, seed=0).blocks(corpus, pair.tokenizer)
    moments = Moments.zeros(widths_of(names, *geometries), blocks, layers)
    seconds: Counter[str] = Counter()
    for start in range(0, len(drawn), options.batch):
        input_ids = drawn.batch(list(range(start, min(start + options.batch, len(drawn)))))
        began = time.perf_counter()
        pair.source.read(input_ids)
        pair.target.read(input_ids)
        bare = time.perf_counter()
        read = read_states(pair.source, "source", input_ids) | read_states(pair.target, "target", input_ids, streams)
        laid = time.perf_counter()
        moments.hold(
            {name: cut_rows(read, name, layers[name.partition("[")[0]]) for name in moments.mean},
            PRECISIONS[options.precision],
        )
        seconds.update(bare=bare - began, read=laid - bare, summed=time.perf_counter() - laid)
    began = time.perf_counter()
    moments.settle(PRECISIONS[options.precision])
    seconds["summed"] += time.perf_counter() - began
    bare, rows = seconds["bare"], moments.rows
    for name, took in (
        ("two bare forward passes", bare),
        ("rotation off, rows laid out", seconds["read"] - bare),
        ("sums and products", seconds["summed"]),
        ("collection", seconds["read"] + seconds["summed"]),
    ):
        print(f"{name:28}{1000 * took / rows:7.2f} ms a token {took / bare:6.2f}")


if __name__ == "__main__":
    run_script(main)
