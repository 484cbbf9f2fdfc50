"""Nested settings by dotted name, as they are given on the command line."""

from __future__ import annotations

from typing import Any


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def trains_branch(settings: dict[str, Any]) -> bool:
    """Whether a run trains a residual branch, on the calibration's text, even where its moments are reused."""
    return settings.get("mapper", {}).get("residual", {}).get("kind", "none") != "none"
