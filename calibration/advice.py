"""Which settings make a calibration and its fit fit into memory, where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvbridge.calibration.sizes import CalibrationSizes, FitShape, calibration_sizes
from kvbridge.errors import UsageError

# Fewer make a joint fit worth little.
ROWS_PER_FEATURE = 10
SKETCHES = (1024, 512, 256, 128, 64, 32)
# Of all memory, for the sums of one pass: rows and products want some beside them, and more passes read the disk again.
SUMMED = 0.2


def advice(sizes: CalibrationSizes, memory_gb: float | int, fit_bytes: Callable[[FitShape], int] | None) -> str | None:
    """What to change where some stages take more memory than there is; `None` where none does.

    Args:
        sizes: as they are planned.
        memory_gb: how much there is, in 10⁹ bytes.
        fit_bytes: of the mapper, as for `calibration_sizes`.
    """
    over = [stage for stage, peak in sizes.peaks.items() if peak > memory_gb * 1e9]
    if not over:
        return None
    said = f"{' and '.join(over)} {'take' if len(over) > 1 else 'takes'} more than planner.memory_gb={memory_gb:g}"
    if any(stage.startswith("stage") for stage in over):
        return f"{said}: a model alone does; read it in more memory, with another pair.device."
    found = [each for each in _others(sizes, memory_gb, fit_bytes) if each.fits(memory_gb)]
    if not found:
        return f"{said}, and no sketch helps; give more memory, or another mapper."
    best = next((each for each in found if each.rows_per_feature >= ROWS_PER_FEATURE), found[-1])
    sketch, summed = best.settings.sketch, best.settings.memory_gb
    parts = ["calibration.stage=true", f"calibration.memory_gb={summed:g}"]
    parts += [] if sketch is None else [f"calibration.sketch={sketch}"]
    stages = ", ".join(f"{stage} {peak / 1e9:.3g} GB" for stage, peak in best.peaks.items())
    return f"{said}; with {' '.join(parts)} all stages fit: {stages}."


def _others(
    sizes: CalibrationSizes, memory_gb: float | int, fit_bytes: Callable[[FitShape], int] | None
) -> list[CalibrationSizes]:
    """Sizes in passes with the sketch that is planned, and with ever smaller ones."""
    planned, found = sizes.settings.sketch, []
    smaller = [sketch for sketch in SKETCHES if planned is None or sketch < planned]
    for sketch in (planned, *smaller):
        settings = replace(sizes.settings, sketch=sketch, memory_gb=round(SUMMED * memory_gb, 3))
        try:
            found.append(calibration_sizes(sizes.source, sizes.target, settings, fit_bytes))
        except UsageError:
            # The products with one layer alone take more than that.
            continue
    return found
