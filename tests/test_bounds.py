"""Bounds on a share are exact, and stay so although the threshold is chosen on the same hand-offs."""

from __future__ import annotations

import random

import pytest
from scipy.stats import beta, binom

from kvbridge.eval.bounds import Certified, binomial_tail, can_certify, certify, needed, upper_bound


@pytest.mark.parametrize(("bad", "count"), [(0, 1), (0, 29), (3, 40), (7, 160), (40, 40), (0, 0), (700, 9000)])
def test_agrees_with_scipy(bad: int, count: int) -> None:
    assert binomial_tail(bad, count, 0.1) == pytest.approx(binom.cdf(bad, count, 0.1), rel=1e-9)
    expected = beta.ppf(0.95, bad + 1, count - bad) if bad < count else 1.0
    assert upper_bound(bad, count, 0.95) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_as_many_as_needed_are_enough_and_one_fewer_is_not(bad: int) -> None:
    count = needed(bad, 0.1, 0.95)
    assert upper_bound(bad, count, 0.95) <= 0.1 < upper_bound(bad, count - 1, 0.95)
    assert needed(0, 0.1, 0.95) == 29


def test_a_very_small_share_is_counted_at_once() -> None:
    # (1 − 1e-9)ⁿ ≤ 0.05
    assert needed(0, 1e-9, 0.95) == pytest.approx(2.9957e9, rel=1e-4)
    assert can_certify(29, 0.1, 0.95)
    assert not can_certify(28, 0.1, 0.95)


def test_stops_at_the_first_threshold_that_fails() -> None:
    scores = [1.0] * 30 + [2.0] * 30 + [3.0] * 600
    bad = [False] * 30 + [True] * 30 + [False] * 600
    passed, last = certify(scores, bad, (1.0, 2.0, 3.0), 0.1, 0.95)
    assert passed == [Certified(1.0, 30, 0)]
    assert last == Certified(2.0, 60, 30)
    assert certify(scores, bad, (0.5, 1.0), 0.1, 0.95) == ([], Certified(0.5, 0, 0))
    assert [each.threshold for each in certify(scores, bad, (3.0, 1.0), 0.1, 0.95)[0]] == [3.0, 1.0]


@pytest.mark.parametrize("rising", [False, True], ids=["at the limit everywhere", "above it from the middle on"])
def test_errs_as_rarely_as_it_says(rising: bool) -> None:
    """The share of bad ones is α (or more) at every threshold that counts as an error."""
    drawn, share, wrong, trials = random.Random(0), 0.2, 0, 2000
    for _ in range(trials):
        scores = [drawn.random() for _ in range(80)]
        risks = [(0.0 if score < 0.5 else 0.4 / 0.7) if rising else share for score in scores]
        bad = [drawn.random() < risk for risk in risks]
        # Up to .77 the share of bad ones is .27 · .5714 / .77 = .2.
        passed, _ = certify(scores, bad, (0.4, 0.5, 0.6, 0.771, 0.9), share, 0.9)
        wrong += any(each.threshold > 0.77 or not rising for each in passed)
    assert 0 < wrong / trials < 0.115
