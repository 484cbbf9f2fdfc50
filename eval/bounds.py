"""Exact bounds on a share from a count, and a threshold chosen so that its bound stays exact.

A threshold is certified if its own hand-offs refute "the share of bad ones is α or more" at level δ by the binomial
test. Thresholds are tested in an order fixed beforehand, up to the first that is not certified; then with probability
1 − δ the bound holds for all certified ones at once (fixed-sequence testing; Angelopoulos, Bates, Candès, Jordan, Lei
2021), so that which of them is taken may depend on the same data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def binomial_tail(bad: int, count: int, share: float) -> float:
    """Probability of `bad` or fewer among `count` where each is bad with probability `share`."""
    # In logarithms: of a few thousand hand-offs neither the ways to choose nor the powers are floats.
    ways = (math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(bad + 1))
    odds = (i * math.log(share) + (count - i) * math.log1p(-share) for i in range(bad + 1))
    return math.fsum(map(math.exp, map(float.__add__, ways, odds)))


def can_certify(count: int, share: float, confidence: float) -> bool:
    """Whether so many hand-offs can certify `share` at all, which they do if none of them is bad."""
    return binomial_tail(0, count, share) <= 1 - confidence


def upper_bound(bad: int, count: int, confidence: float) -> float:
    """The share that is not exceeded at this confidence, one-sided (Clopper and Pearson 1934); 1 for no trials."""
    if bad >= count:
        return 1.0
    low, high = bad / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_tail(bad, count, middle) > 1 - confidence else (low, middle)
    return high


def needed(bad: int, share: float, confidence: float) -> int:
    """Fewest hand-offs that certify `share` where so many of them are bad."""
    fewer, enough = bad, bad + 1
    while binomial_tail(bad, enough, share) > 1 - confidence:
        fewer, enough = enough, 2 * enough
    while enough - fewer > 1:
        middle = (fewer + enough) // 2
        fewer, enough = (middle, enough) if binomial_tail(bad, middle, share) > 1 - confidence else (fewer, middle)
    return enough


@dataclass(frozen=True, slots=True)
class Certified:
    """A threshold that passed its test.

    Attributes:
        threshold: a score up to which hand-offs are applied.
        applied: hand-offs of the test with such a score.
        bad: bad ones among them.
    """

    threshold: float
    applied: int
    bad: int


def certify(
    scores: Sequence[float], bad: Sequence[bool], thresholds: Sequence[float], share: float, confidence: float
) -> tuple[list[Certified], Certified]:
    """Test thresholds in the given order, up to the first that fails.

    Args:
        scores: of the hand-offs.
        bad: whether each is.
        thresholds: fixed before the hand-offs were looked at.
        share: α, the share of bad ones among the applied that is allowed.
        confidence: 1 − δ.

    Returns:
        Those certified, and the one tested last.
    """
    passed: list[Certified] = []
    last = Certified(-math.inf, 0, 0)
    for threshold in thresholds:
        within = [flag for score, flag in zip(scores, bad, strict=True) if score <= threshold]
        last = Certified(threshold, len(within), sum(within))
        if binomial_tail(last.bad, last.applied, share) > 1 - confidence:
            break
        passed.append(last)
    return passed, last
