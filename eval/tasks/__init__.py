"""Tasks for lm-eval that need no download; `FOLDER` is what its `--include_path` takes."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Folder of the tasks' YAML files; each is named as its task."""
