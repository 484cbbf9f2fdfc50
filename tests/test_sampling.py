"""From logits to tokens: agrees with transformers' own processors, and draws what the distribution says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvbridge.cascade.events import Event
from kvbridge.cascade.sampling import SamplingParams, draw, process_logits
from kvbridge.errors import UsageError


def _transformers(logits: Tensor, params: SamplingParams, previous: Tensor) -> Tensor:
    """What `generate` makes of the same logits, in the order in which it applies its processors."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    return chain(previous[None], logits[None].float().clone())[0].softmax(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 0.5, "repetition_penalty": 1.4},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.6, "repetition_penalty": 0.8},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
    ids=str,
)
def test_distributions_are_those_of_transformers(given: dict[str, Any], dtype: torch.dtype) -> None:
    params = SamplingParams(**given)
    for _ in range(20):
        logits, previous = (4 * torch.randn(50)).to(dtype), torch.randint(50, (12,))
        mine, theirs = process_logits(logits, params, previous), _transformers(logits, params, previous)
        assert torch.equal(mine, theirs)
        assert mine.dtype == torch.float32


def test_greedy_is_one_token_after_the_penalty() -> None:
    logits, previous = torch.tensor([1.0, 3.0, 2.9, -1.0]), torch.tensor([1])
    assert process_logits(logits, SamplingParams(), previous).tolist() == [0, 1, 0, 0]
    assert process_logits(logits, SamplingParams(repetition_penalty=2.0), previous).tolist() == [0, 0, 1, 0]


def test_draws_follow_the_weights_and_never_take_a_weight_of_zero() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    generator = SamplingParams(seed=7).generator()
    counts = torch.bincount(torch.tensor([draw(weights, generator) for _ in range(4000)]), minlength=6)
    assert counts[weights == 0].sum() == 0
    expected = weights[weights > 0] / weights.sum() * 4000
    assert chisquare(counts[weights > 0], expected).pvalue > 1e-3
    # The same counts are not those of equal weights.
    assert chisquare(counts[weights > 0]).pvalue < 1e-6


def test_the_same_seed_gives_the_same_draws() -> None:
    weights, params = torch.rand(40), SamplingParams(seed=3)
    first, second, other = (
        [draw(weights, generator) for _ in range(20)]
        for generator in (params.generator(), params.generator(), SamplingParams(seed=4).generator())
    )
    assert first == second != other


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
        {"seed": -1},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        SamplingParams(**given)


def test_events_say_what_they_are() -> None:
    event = Event("commit", 2, (5, 6), "ab", finish="stop")
    assert (event.kind, event.start, event.tokens, event.text, event.finish) == ("commit", 2, (5, 6), "ab", "stop")
    with pytest.raises(UsageError, match="only a commit"):
        Event("draft", 0, (5,), "a", finish="length")
