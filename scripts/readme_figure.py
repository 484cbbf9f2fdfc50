#!/usr/bin/env python3
"""Draw a figure of the docs from a finished run: KL of every document, or accuracy over length and depth.

python scripts/readme_figure.py documents runs/first docs/first_run.svg
python scripts/readme_figure.py memory runs/first docs/first_memory.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbridge.cli.scripts import run_script
from kvbridge.eval.figures import kl_by_document, standalone
from kvbridge.eval.probe_figures import accuracy_by_place
from kvbridge.eval.report import load_results

FIGURES = {"documents": kl_by_document, "memory": lambda results: accuracy_by_place(results["probes"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("run", type=Path)
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    options.image.write_text(standalone(FIGURES[options.figure](load_results(options.run))))
    print(options.image)


if __name__ == "__main__":
    run_script(main)
