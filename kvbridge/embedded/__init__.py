"""The language of the embedded pair, and where its checkpoints and held-out text lie once they are trained and written.

Importing it does no work; `scripts/train_embedded.py` writes all four places.
"""

from pathlib import Path

_HERE = Path(__file__).parent

SOURCE = _HERE / "source"
TARGET = _HERE / "target"
CALIBRATION_TEXT = _HERE / "text" / "calibration.jsonl.gz"
EVALUATION_TEXT = _HERE / "text" / "evaluation.jsonl.gz"

__all__ = ["CALIBRATION_TEXT", "EVALUATION_TEXT", "SOURCE", "TARGET"]
