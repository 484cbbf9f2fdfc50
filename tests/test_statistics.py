"""Bootstrap intervals over documents: reproducible, and they cover what they promise."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbridge.eval.statistics import gap_interval, mean_interval, resample

DOCUMENTS = 40


def nlls(chance: np.random.Generator, documents: int, gap: float, recovered: float) -> tuple[list[float], ...]:
    """NLL per document of source, arm and native: documents differ far more than models do, as real text has it."""
    difficulty = chance.normal(1.5, 0.6, documents)
    noise = chance.normal(0, 0.1, (3, documents))
    offsets = np.array([gap, gap * (1 - recovered), 0.0])[:, None]
    source, arm, native = difficulty + offsets + noise
    return source.tolist(), arm.tolist(), native.tolist()


def test_draws_are_with_replacement_and_seeded() -> None:
    draws = resample(7, 500, seed=3)
    assert draws.shape == (500, 7)
    assert set(draws.flatten().tolist()) == set(range(7))
    assert any(len(set(row)) < 7 for row in draws.tolist())
    assert (draws == resample(7, 500, seed=3)).all()
    assert (draws != resample(7, 500, seed=4)).any()


def test_mean_interval_by_hand() -> None:
    draws = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    found = mean_interval([1.0, 3.0], draws)
    low, high = np.percentile([1.0, 2.0, 2.0, 3.0], (2.5, 97.5))
    assert found == {"mean": 2.0, "ci95": [low, high], "n": 2}
    assert json.loads(json.dumps(found)) == found


def test_equal_documents_leave_no_interval() -> None:
    assert mean_interval([2.0] * 5, resample(5, 100, 0)) == {"mean": 2.0, "ci95": [2.0, 2.0], "n": 5}


def test_intervals_are_reproducible() -> None:
    source, arm, native = nlls(np.random.default_rng(0), DOCUMENTS, 0.3, 0.5)
    first, again = (gap_interval(source, arm, native, resample(DOCUMENTS, 300, seed=1)) for _ in range(2))
    assert first == again
    assert first != gap_interval(source, arm, native, resample(DOCUMENTS, 300, seed=2))


def test_the_mean_interval_covers_the_true_mean() -> None:
    """400 samples of 40 documents: 95 % nominal, a little less for a percentile interval of a skewed sample."""
    chance, draws = np.random.default_rng(0), resample(DOCUMENTS, 400, seed=0)
    samples = chance.gamma(2.0, 1.0, (400, DOCUMENTS))
    intervals = [mean_interval(values.tolist(), draws)["ci95"] for values in samples]
    covered = np.mean([low <= 2.0 <= high for low, high in intervals])
    assert 0.90 <= covered <= 0.97


def test_the_gap_interval_covers_the_true_ratio() -> None:
    chance, draws = np.random.default_rng(1), resample(DOCUMENTS, 400, seed=0)
    found = [gap_interval(*nlls(chance, DOCUMENTS, gap=0.3, recovered=0.4), draws) for _ in range(300)]
    covered = np.mean([at["ci95"][0] <= 0.4 <= at["ci95"][1] for at in found])
    assert 0.90 <= covered <= 0.98
    assert np.mean([at["mean"] for at in found]) == pytest.approx(0.4, abs=0.02)


def test_documents_are_resampled_together() -> None:
    """Each document is as hard for all three, so resampling them apart would widen the interval manyfold."""
    source, arm, native = nlls(np.random.default_rng(2), DOCUMENTS, gap=0.3, recovered=0.5)
    low, high = gap_interval(source, arm, native, resample(DOCUMENTS, 500, seed=0))["ci95"]
    assert high - low < 0.5


def test_the_gap_is_a_ratio_of_means() -> None:
    """The mean of ratios would be (0.5 + 0.95) / 2; the first document's gap is a tenth of the second's."""
    source, arm, native = [1.1, 2.0], [1.05, 1.05], [1.0, 1.0]
    found = gap_interval(source, arm, native, resample(2, 200, seed=0))
    assert found["mean"] == pytest.approx((1.55 - 1.05) / (1.55 - 1.0))
    assert found["n"] == 2


def test_source_and_native_recover_nothing_and_everything() -> None:
    source, _, native = nlls(np.random.default_rng(3), DOCUMENTS, gap=0.3, recovered=0.5)
    draws = resample(DOCUMENTS, 200, seed=0)
    assert gap_interval(source, source, native, draws) == {"mean": 0.0, "ci95": [0.0, 0.0], "n": DOCUMENTS}
    assert gap_interval(source, native, native, draws) == {"mean": 1.0, "ci95": [1.0, 1.0], "n": DOCUMENTS}


NOISE = "the source's NLL is within noise of the target's"


@pytest.mark.parametrize(
    ("gap", "reason"),
    [(0.0, NOISE), (0.02, NOISE), (-0.3, "the source is better than the target")],
    ids=["none", "within-noise", "source-better"],
)
def test_without_a_clear_gap_there_is_no_share_but_a_reason(gap: float, reason: str) -> None:
    source, arm, native = nlls(np.random.default_rng(4), DOCUMENTS, gap, recovered=0.5)
    found = gap_interval(source, arm, native, resample(DOCUMENTS, 500, seed=0))
    assert found == {
        "mean": None,
        "ci95": None,
        "n": DOCUMENTS,
        "reason": f"{reason} on these documents",
    }


def test_a_clear_gap_is_found_as_one() -> None:
    source, arm, native = nlls(np.random.default_rng(4), DOCUMENTS, gap=0.2, recovered=0.5)
    assert gap_interval(source, arm, native, resample(DOCUMENTS, 500, seed=0))["mean"] is not None
