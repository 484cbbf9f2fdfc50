"""The embedded pair: paths of its two checkpoints and of its held-out text. Importing it does no work."""

from pathlib import Path

_HERE = Path(__file__).parent

SOURCE = _HERE / "source"
TARGET = _HERE / "target"
CALIBRATION_TEXT = _HERE / "text" / "calibration.jsonl.gz"
EVALUATION_TEXT = _HERE / "text" / "evaluation.jsonl.gz"

__all__ = ["CALIBRATION_TEXT", "EVALUATION_TEXT", "SOURCE", "TARGET"]
