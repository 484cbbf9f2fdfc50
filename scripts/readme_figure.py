#!/usr/bin/env python3
"""Draw the README's figure, KL of every document in every arm, from a finished run.

python scripts/readme_figure.py runs/first docs/first_run.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbridge.eval.figures import kl_by_document
from kvbridge.eval.report import load_results

# An image on its own page has no text colour to follow, so it brings a page of its own.
INK, PAPER = "#24292f", "#ffffff"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    drawn = kl_by_document(load_results(options.run)).replace("currentColor", INK)
    opening, rest = drawn.split(">", 1)
    options.image.write_text(f'{opening} style="background: {PAPER}">{rest}')
    print(options.image)


if __name__ == "__main__":
    main()
