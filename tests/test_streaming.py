"""Mapping while the source goes on: what a stream hands over equals a hand-off of the whole prompt."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvbridge import compat
from kvbridge.assembly import Handoff, hand_off
from kvbridge.errors import CacheError
from kvbridge.forms import SharedBasis
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.streaming import HandoffStream
from kvbridge.variables import Span
from tiny_models import relative_error
from tiny_pair import tiny_pair

TOKENS = 41
PLANS = {
    "usual": HandoffPlan(sinks=4, native_head=0, native_tail=8),
    "deeper-head": HandoffPlan(sinks=4, native_head=1, native_tail=1),
    "recompute": HandoffPlan(sinks=2, native_head=0, native_tail=3, tail_recompute=1),
    "attended": HandoffPlan(sinks=4, native_head=0, native_tail=8, native_attended=0.3),
    "no-sinks": HandoffPlan(sinks=0, native_head=0, native_tail=1),
}
# Up to where the source has read whenever the stream is fed.
STOPS = {"whole": [], "two": [20], "few": [2, 3, 4, 5, 6, 30, 41], "each": list(range(31, 42))}


@cache
def pair() -> ModelPair:
    """Source of 3 layers, 2 KV heads of 16; target of 4 layers, 4 KV heads of 32, hidden size 128."""
    return tiny_pair()


def make_map() -> FormMap:
    """Reads all of the source and the input of the target's layer 0; makes all layers, and the last one's input."""
    inputs = Span("source.keys", 0, 3), Span("source.values", 0, 3), Span("target.normed_residual", 0, 1)
    outputs = Span("target.keys", 0, 4), Span("target.values", 0, 4), Span("target.residual", 3, 4)
    p, q = 2 * 3 * 32 + 128, 2 * 4 * 128 + 128
    return FormMap(
        (SharedBasis(inputs, outputs, torch.randn(p, 9) / p**0.5, torch.randn(9, q) / 3, torch.randn(q), 4, 32),)
    )


def ids(tokens: int = TOKENS, batch: int = 1) -> torch.Tensor:
    return torch.randint(2, len(pair().tokenizer), (batch, tokens))


def streamed(stream: HandoffStream, prompt: torch.Tensor, stops: list[int]) -> Handoff:
    """A hand-off of a prompt that the source reads piece by piece, its cache growing."""
    source = pair().source
    growing, read = compat.empty_cache(source.model), 0
    for stop in stops:
        source.extend(growing, prompt[:, read:stop], read)
        read = stop
        stream.feed(source.cached(growing), prompt[:, :stop])
        assert stream.tokens == stop
    return stream.hand_off(source.cached(source.read(prompt)), prompt)


def same(made: Handoff, expected: Handoff) -> None:
    assert made.split == expected.split
    assert torch.equal(made.attended, expected.attended)
    assert relative_error(made.logits, expected.logits) < 1e-4
    for layer in range(4):
        given, wanted = (compat.layer_tensors(each.cache, layer) for each in (made, expected))
        assert given is not None
        assert wanted is not None
        for part in (0, 1):
            assert relative_error(given[part], wanted[part]) < 1e-4


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_stream_hands_over_what_the_whole_gives(plan: HandoffPlan, stops: list[int]) -> None:
    mapping, prompt, source = make_map(), ids(), pair().source
    expected = hand_off(pair().target, plan, mapping, source.cached(source.read(prompt)), prompt)
    same(streamed(HandoffStream(pair().target, plan, mapping), prompt, stops), expected)


def test_streams_several_prompts_together() -> None:
    mapping, prompt, source, plan = make_map(), ids(batch=3), pair().source, PLANS["usual"]
    expected = hand_off(pair().target, plan, mapping, source.cached(source.read(prompt)), prompt)
    same(streamed(HandoffStream(pair().target, plan, mapping), prompt, [13, 27]), expected)


def test_a_prompt_that_carries_nothing_is_read() -> None:
    mapping, prompt, plan = make_map(), ids(9), PLANS["usual"]
    handoff = streamed(HandoffStream(pair().target, plan, mapping), prompt, [3])
    assert handoff.split.carried == 0
    assert relative_error(handoff.logits, pair().target.prefill(prompt)[1][:, -1]) < 1e-5


def test_maps_each_token_once() -> None:
    mapping, prompt = make_map(), ids()
    counted = []

    class Counting(FormMap):
        def write(self, source, layers, destination, rotary, native=None):
            counted.extend(source.positions.tolist())
            return super().write(source, layers, destination, rotary, native)

    streamed(HandoffStream(pair().target, PLANS["usual"], Counting(mapping.forms)), prompt, [2, 9, 10, 33])
    assert counted == list(range(4, TOKENS))


def test_refuses_a_prompt_that_changed() -> None:
    stream, source, prompt = HandoffStream(pair().target, PLANS["usual"], make_map()), pair().source, ids()
    stream.feed(source.cached(source.read(prompt[:, :20])), prompt[:, :20])
    other = prompt.clone()
    other[0, 3] += 1
    with pytest.raises(CacheError, match="does not begin with the 20 tokens that were mapped already"):
        stream.feed(source.cached(source.read(other)), other)
    with pytest.raises(CacheError, match="the source has read 41 tokens and the prompt has 30"):
        stream.feed(source.cached(source.read(prompt)), prompt[:, :30])
