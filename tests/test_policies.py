"""Rules of escalation, put together, and the measures of doubt that they look at."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from kvbridge.cascade import (
    Above,
    AllOf,
    Always,
    AnyOf,
    Custom,
    FirstTokenEntropy,
    FirstTokenMargin,
    LongPrompt,
    MeanSurprise,
    Never,
    OfTask,
    Progress,
)
from kvbridge.errors import UsageError


def progress(probabilities: tuple[float, ...] = (0.5, 0.25, 0.25), **given: object) -> Progress:
    return Progress(**{"prompt_tokens": 10, "first": torch.tensor(probabilities).log()} | given)


def saying(answer: bool | None) -> Custom:
    return Custom(lambda _: answer)


@pytest.mark.parametrize(
    ("measure", "given", "expected"),
    [
        (FirstTokenEntropy(), progress(), 1.5 * math.log(2)),
        (FirstTokenEntropy(), progress((1.0, 0.0)), 0.0),
        (FirstTokenMargin(), progress(), 0.75),
        (FirstTokenMargin(), progress((0.0, 1.0)), 0.0),
        (MeanSurprise(tokens=2), progress(log_probabilities=[-1.0]), None),
        (MeanSurprise(tokens=2), progress(log_probabilities=[-1.0], finished=True), 1.0),
        (MeanSurprise(tokens=2), progress(log_probabilities=[-1.0, -3.0, -9.0]), 2.0),
    ],
    ids=str,
)
def test_doubt(measure: FirstTokenEntropy, given: Progress, expected: float | None) -> None:
    assert measure.score(given) == (None if expected is None else pytest.approx(expected, abs=1e-6))


def test_a_threshold_decides() -> None:
    assert [Above(FirstTokenMargin(), at).decide(progress()) for at in (0.7, 0.75, 0.8)] == [True, False, False]
    assert Above(MeanSurprise(tokens=2), 0.0).decide(progress()) is None
    with pytest.raises(UsageError, match="threshold=nan"):
        Above(FirstTokenMargin(), math.nan)
    with pytest.raises(UsageError, match=r"MeanSurprise\(tokens=0\)"):
        MeanSurprise(tokens=0)


def test_rules_of_length_and_task() -> None:
    assert [LongPrompt(tokens).decide(progress()) for tokens in (10, 11)] == [True, False]
    sums = OfTask(frozenset({"sums"}))
    assert [sums.decide(progress(task=task)) for task in ("sums", "letters", None)] == [True, False, False]


@pytest.mark.parametrize(("a", "b"), list(product((True, False, None), repeat=2)))
def test_rules_are_put_together(a: bool | None, b: bool | None) -> None:
    """As in logic of three values: what cannot be told matters only where it decides."""
    told = [value for value in (a, b) if value is not None]
    either = True if True in told else None if None in (a, b) else False
    both = False if False in told else None if None in (a, b) else True
    assert (saying(a) | saying(b)).decide(progress()) is either
    assert (saying(a) & saying(b)).decide(progress()) is both


def test_what_is_put_together_is_a_rule() -> None:
    assert (Never() | Always() & LongPrompt(1)) == AnyOf((Never(), AllOf((Always(), LongPrompt(1)))))
    assert (Never() | (Always() & LongPrompt(1))).decide(progress()) is True
