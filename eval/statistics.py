"""Intervals by resampling documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbridge.metrics import gap_recovered


def resample(count: int, resamples: int, seed: int) -> np.ndarray:
    """Indices `[resamples, count]` of documents drawn with replacement."""
    return np.random.default_rng(seed).integers(count, size=(resamples, count))


def mean_interval(values: list[float], draws: np.ndarray) -> dict[str, Any]:
    """Mean over documents with its 95 % percentile interval."""
    array = np.asarray(values)
    low, high = np.percentile(array[draws].mean(axis=1), (2.5, 97.5))
    return {"mean": float(array.mean()), "ci95": [float(low), float(high)], "n": len(values)}


def gap_interval(source: list[float], arm: list[float], native: list[float], draws: np.ndarray) -> dict[str, Any]:
    """Gap recovered as a ratio of mean NLLs with its interval.

    `mean` is `None`, with a reason, where the source is not clearly worse than the target on these documents.
    """
    by_document = np.stack([np.asarray(source), np.asarray(arm), np.asarray(native)])
    resampled = by_document[:, draws].mean(axis=2)
    gap_low, gap_high = np.percentile(resampled[0] - resampled[2], (2.5, 97.5))
    if gap_low <= 0:
        noise, better = "the source's NLL is within noise of the target's", "the source is better than the target"
        reason = f"{better if gap_high < 0 else noise} on these documents"
        return {"mean": None, "ci95": None, "n": len(source), "reason": reason}
    low, high = np.percentile(gap_recovered(resampled[0], resampled[1], resampled[2]), (2.5, 97.5))
    mean = gap_recovered(*by_document.mean(axis=1))
    return {"mean": float(mean), "ci95": [float(low), float(high)], "n": len(source)}
