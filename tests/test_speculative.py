"""The source drafts for the target: the same text in fewer passes of the target, and caches that follow it."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kvbridge.cascade.events import Event
from kvbridge.cascade.reader import Reader, decode_events
from kvbridge.cascade.sampling import SamplingParams, draw
from kvbridge.cascade.speculative import SourceDrafter, speculative_events
from kvbridge.cascade.verify import Draft, Tally, verify
from kvbridge.cascade.writing import Writing
from kvbridge.errors import CacheError, UsageError
from kvbridge.eval.exactness import own_tokens
from kvbridge.pair import ModelPair
from made_handoffs import committed, noisy_handoff
from tiny_models import kv_model, random_ids, relative_error
from tiny_pair import byte_tokenizer, tiny_pair


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def _finish(events: Generator[Event, None, Tally]) -> tuple[list[int], Tally]:
    """Committed tokens and the tally."""
    seen, tallies = list[Event](), list[Tally]()

    def watched() -> Iterator[Event]:
        tallies.append((yield from events))

    seen += watched()
    return committed(seen)[0], tallies[0]


def _alone(pair: ModelPair, prompt: Tensor, params: SamplingParams) -> list[int]:
    """What the target writes over the same mapped cache without a source."""
    torch.manual_seed(0)
    handoff = noisy_handoff(pair.target, prompt, 0.7)
    writing = Writing(pair.target, prompt, params, pair.tokenizer)
    list(writing.commit([writing.choose(handoff.logits[0])]))
    list(decode_events(Reader.after(pair.target, handoff, writing.prompt), writing))
    return writing.committed


@pytest.mark.parametrize(("length", "penalty"), [(1, 1.0), (3, 1.3), (50, 1.0)])
def test_greedy_text_is_that_of_the_target_over_the_same_cache(pair: ModelPair, length: int, penalty: float) -> None:
    params = SamplingParams(max_new_tokens=12, repetition_penalty=penalty)
    for seed in range(2):
        prompt = random_ids(20, seed=seed)
        expected = _alone(pair, prompt, params)
        for source in (pair.source, pair.target):
            torch.manual_seed(0)
            handoff = noisy_handoff(pair.target, prompt, 0.7)
            drafter = SourceDrafter(source, source.read(prompt), length)
            written, tally = _finish(
                speculative_events(pair.target, handoff, prompt, params, drafter, tokenizer=pair.tokenizer)
            )
            assert written == expected
            assert tally.drafted >= tally.accepted
            assert tally.passes + tally.accepted >= len(written) - 1


def test_a_source_that_is_right_saves_passes(pair: ModelPair) -> None:
    prompt, params = random_ids(20, seed=1), SamplingParams(max_new_tokens=21)
    handoff = noisy_handoff(pair.target, prompt, 0.0)
    drafter = SourceDrafter(pair.target, pair.target.read(prompt), 4)
    written, tally = _finish(
        speculative_events(pair.target, handoff, prompt, params, drafter, tokenizer=pair.tokenizer)
    )
    assert (len(written), tally.rate, tally.passes) == (21, 1.0, 4)
    assert Tally().rate is None


def test_caches_hold_the_text_and_nothing_else(pair: ModelPair) -> None:
    prompt, params = random_ids(20, seed=2), SamplingParams(max_new_tokens=17, temperature=1.5, seed=5)
    handoff = noisy_handoff(pair.target, prompt, 0.0)
    drafter = SourceDrafter(pair.source, pair.source.read(prompt), 4)
    written, tally = _finish(
        speculative_events(pair.target, handoff, prompt, params, drafter, tokenizer=pair.tokenizer)
    )
    assert 0 < tally.accepted < tally.drafted
    text = torch.tensor([prompt[0].tolist() + written[:-1]])
    for model, cache, held in (
        (pair.target, handoff.cache, text.shape[1]),
        (pair.source, drafter.reader.cache, drafter.reader.position),
    ):
        assert held > 20
        for mine, theirs in zip(cache.layers, model.read(text[:, :held]).layers, strict=True):
            assert relative_error(mine.keys, theirs.keys) < 1e-5


def _verified_first(p: Tensor, q: Tensor, runs: int) -> tuple[list[int], list[int]]:
    """First tokens after verification and as drafted, with distributions that do not depend on a text."""
    target = kv_model()
    first, drafted = list[int](), list[int]()
    writing = Writing(target, torch.tensor([[5]]), SamplingParams(temperature=1.0), byte_tokenizer())
    for _ in range(runs):
        draft = Draft()
        drafted.append(draft.add(q.log(), writing))
        first.append(verify(p.log().expand(2, -1), draft, writing)[0])
    return first, drafted


def test_verified_tokens_have_the_verifiers_distribution_and_drafted_ones_do_not() -> None:
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    runs = 1500
    first, drafted = (torch.bincount(torch.tensor(t), minlength=4) for t in _verified_first(p, q, runs))
    expected = p.double() / p.double().sum() * runs
    assert chisquare(first, expected).pvalue > 1e-3
    assert chisquare(drafted, expected).pvalue < 1e-9
    # A rejected token replaced by a draw from p itself, instead of the residual, would not pass.
    generator = SamplingParams().generator()
    replaced = torch.zeros(4)
    for _ in range(runs):
        token = draw(q, generator)
        kept = float(torch.rand((), generator=generator)) * q[token] < p[token]
        replaced[token if kept else draw(p, generator)] += 1
    assert chisquare(replaced, expected).pvalue < 1e-9


def test_tokens_that_the_verifier_rules_out_are_never_kept() -> None:
    p, q = torch.tensor([0.0, 0.5, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    first, drafted = _verified_first(p, q, 50)
    assert set(drafted) == {0}
    assert set(first) == {1, 2}


@pytest.mark.parametrize("size", [40, 300])
def test_the_source_may_know_other_tokens_than_the_target(size: int) -> None:
    target = kv_model(seed=2)
    source = kv_model(seed=2, vocab_size=size) if size > 128 else kv_model(vocab_size=size)
    params = SamplingParams(max_new_tokens=12, repetition_penalty=1.2)
    prompt, tokenizer = random_ids(20) % 37, byte_tokenizer()
    expected = own_tokens(target, prompt, params, tokenizer)
    drafter = SourceDrafter(source, source.read(prompt))
    handoff = noisy_handoff(target, prompt, 0.0)
    written, tally = _finish(speculative_events(target, handoff, prompt, params, drafter, tokenizer=tokenizer))
    assert written == expected
    assert max(expected) >= 40
    assert tally.drafted > 0 or size == 40


def test_a_source_whose_cache_is_broken_drafts_nothing(pair: ModelPair) -> None:
    prompt, params = random_ids(20), SamplingParams(max_new_tokens=8)
    cache = pair.source.read(prompt)
    cache.layers[0].values.fill_(float("nan"))
    handoff = noisy_handoff(pair.target, prompt, 0.0)
    events = speculative_events(
        pair.target, handoff, prompt, params, SourceDrafter(pair.source, cache), tokenizer=pair.tokenizer
    )
    written, tally = _finish(events)
    assert written == own_tokens(pair.target, prompt, params, pair.tokenizer)
    assert tally.drafted == 0


def test_what_does_not_fit_is_refused(pair: ModelPair) -> None:
    prompt = random_ids(20)
    handoff, cache = noisy_handoff(pair.target, prompt, 0.0), pair.source.read(prompt[:, :-1])
    with pytest.raises(UsageError, match="length 0"):
        SourceDrafter(pair.source, cache, 0)
    events = speculative_events(
        pair.target, handoff, prompt, SamplingParams(), SourceDrafter(pair.source, cache), tokenizer=pair.tokenizer
    )
    with pytest.raises(CacheError, match="covers 19 tokens"):
        next(events)
