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
    # A resample in which the source is not worse at all (at most one in forty) has no ratio and is left out.
    kept = resampled[:, resampled[0] > resampled[2]]
    low, high = np.percentile(gap_recovered(kept[0], kept[1], kept[2]), (2.5, 97.5))
    mean = gap_recovered(*by_document.mean(axis=1))
    return {"mean": float(mean), "ci95": [float(low), float(high)], "n": len(source)}


# Right and wrong answers of several arms to the same questions.


def share_interval(
    base: np.ndarray, arm: np.ndarray, native: np.ndarray, draws: np.ndarray, name: str
) -> dict[str, Any]:
    """`(arm − base) / (native − base)` as a ratio of mean scores, with its 95 % interval.

    Questions are resampled together for all three. `mean` is `None`, with a reason, where native is not clearly better
    than the base. A resample in which it is not better at all (at most one in forty) has no ratio and is left out.

    Args:
        base: score per question of what counts as 0: chance for retention, the source for the gap recovered.
        arm: score per question of the arm.
        native: score per question of what counts as 1.
        draws: indices from `resample`.
        name: of the base, for the reason.
    """
    low, high = np.percentile((native - base)[draws].mean(axis=1), (2.5, 97.5))
    if low <= 0:
        reason = f"the target is {'worse than' if high < 0 else 'within noise of'} {name} on these questions"
        return {"mean": None, "ci95": None, "n": len(arm), "reason": reason}
    drawn = [(values - base)[draws].mean(axis=1) for values in (arm, native)]
    better = drawn[1] > 0
    ends = np.percentile(drawn[0][better] / drawn[1][better], (2.5, 97.5))
    mean = (arm - base).mean() / (native - base).mean()
    return {"mean": float(mean), "ci95": [float(end) for end in ends], "n": len(arm)}


def mcnemar(arm: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Exact two-sided McNemar test of two arms' answers (1 right, 0 wrong) to the same questions.

    Only questions that exactly one of them answers rightly count: under equality each arm wins such a question as
    often as the other.

    Returns:
        How many only the arm and only the other one answers rightly, and `p`.
    """
    # Half a second that only this test needs.
    from scipy.stats import binomtest

    gained, lost = int(((arm == 1) & (other == 0)).sum()), int(((arm == 0) & (other == 1)).sum())
    p = float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
    return {"only_arm": gained, "only_other": lost, "p": p}
