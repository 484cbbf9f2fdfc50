"""Finished moments of other documents, to which a calibration adds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments
from kvbridge.calibration.draw import ADDED
from kvbridge.errors import CalibrationError

# The two may differ in how much text they read and how, and in nothing else.
OWN = tuple(
    f"calibration.{name}" for name in ("tokens", "block", "held_out", "seed", "skip", "batch", "precision", "added")
)


def added_moments(folder: str, own: dict[str, Any]) -> CalibrationMoments:
    """The moments in a folder, to which those of a calibration with identity `own` are added.

    Raises:
        CalibrationError: they are missing, or of another pair, text or mapper.
    """
    path = Path(folder).expanduser() / MOMENTS
    moments = CalibrationMoments.load(path)
    known = moments.info["identity"]
    for key in sorted({*own, *known} - {*OWN}):
        if known.get(key) != own.get(key):
            raise CalibrationError(
                f"{path} was collected with {key} = {known.get(key)} and cannot be added to moments with "
                f"{own.get(key)}; calibrate both with the same pair, text and mapper."
            )
    return moments


def identity_with(own: dict[str, Any], added: CalibrationMoments | None) -> dict[str, Any]:
    """The identity of moments together with those that are added."""
    if added is None:
        return own
    known = added.info["identity"]
    return own | {ADDED: [{key: known[key] for key in OWN if key in known}]}
