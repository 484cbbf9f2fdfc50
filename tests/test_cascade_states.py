"""Kept caches that are broken or of another text: refused once, dropped, and the prompt is read instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbridge import compat
from kvbridge.cascade import APPLIED, FALLBACK, Cascade, GateReading, Never, StateStore
from kvbridge.cascade.memory import Memory
from kvbridge.cascade.store import ExactKey, Key, MappedKey
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from tiny_bridge import with_open_gate
from tiny_models import continue_with
from twin_pair import twin_bridge, twin_pair

BEGINNING = "amber basil cedar delta"
PROMPT = BEGINNING + " ember fjord"
PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
NEW = 4


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """One model with itself, that does not find its twin's caches."""
    pair = twin_pair()
    return replace(pair, source=replace(pair.source, fingerprint="0123456789abcdef"))


def ids(pair: ModelPair, text: str) -> list[int]:
    return pair.tokenizer(text)["input_ids"]


def own(pair: ModelPair) -> list[int]:
    return continue_with(pair.target.model, torch.tensor([ids(pair, PROMPT)]), None, NEW)


def keep_spoilt(store: StateStore, key: Key, model: KVModel, tokens: list[int], *, nan: bool = True) -> None:
    """Keep a cache under `tokens` that holds NaN, or is of the same tokens in reverse order."""
    memory = Memory(model)
    memory.read(tokens if nan else tokens[::-1])
    if nan:
        found = compat.layer_tensors(memory.cache, 1)
        assert found is not None
        found[0][..., 3, :] = torch.nan
    memory.tokens, memory.approximate = list(tokens), isinstance(key, MappedKey)
    store.keep(key, memory)


def cascade(pair: ModelPair, store: StateStore, **given: Any) -> Cascade:
    return Cascade(pair, with_open_gate(twin_bridge(pair), PLAN), **{"plan": PLAN, "states": store} | given)


def test_a_source_that_goes_on_from_a_broken_cache_reads_the_prompt(pair: ModelPair) -> None:
    store = StateStore()
    keep_spoilt(store, ExactKey.of(pair.source), pair.source, ids(pair, BEGINNING))
    asked = cascade(pair, store, policy=Never())
    results = [asked.generate(PROMPT, max_new_tokens=NEW) for _ in range(2)]
    assert [(each.route, list(each.tokens)) for each in results] == [("source", own(pair))] * 2
    assert (store.refused, store.hits) == (1, 2)
    assert (ExactKey.of(pair.source), tuple(ids(pair, BEGINNING))) not in store.names()


def test_a_source_cache_of_another_text_is_replaced(pair: ModelPair) -> None:
    store = StateStore()
    keep_spoilt(store, ExactKey.of(pair.source), pair.source, ids(pair, BEGINNING), nan=False)
    asked = cascade(pair, store)
    for checks in (["layer0", "novelty", "tail"], ["novelty", "tail"]):
        result = asked.generate(PROMPT, max_new_tokens=NEW)
        assert (result.outcome, list(result.tokens)) == (APPLIED, own(pair))
        assert result.handoff is not None
        assert [reading.check for reading in result.handoff.readings] == checks
        assert store.refused == 1
    assert asked.metrics.to_dict()["gate"] == {"judged": 2, "stopped": {}}


def test_a_broken_mapped_cache_is_mapped_anew(pair: ModelPair) -> None:
    store = StateStore()
    asked = cascade(pair, store)
    asked.generate(BEGINNING, max_new_tokens=1)
    (key,) = {key for key, _ in store.names() if isinstance(key, MappedKey)}
    keep_spoilt(store, key, pair.target, ids(pair, BEGINNING))
    result = asked.generate(PROMPT, max_new_tokens=NEW)
    assert (result.outcome, list(result.tokens)) == (APPLIED, own(pair))
    assert result.handoff is not None
    assert (result.handoff.held, (key, tuple(ids(pair, BEGINNING))) in store.names()) == (0, False)


def test_a_target_that_goes_on_from_a_broken_cache_reads_the_prompt(pair: ModelPair) -> None:
    store = StateStore()
    keep_spoilt(store, ExactKey.of(pair.target), pair.target, ids(pair, BEGINNING))
    result = Cascade(pair, None, states=store).generate(PROMPT, max_new_tokens=NEW)
    assert list(result.tokens) == own(pair)
    assert result.handoff is not None
    assert (result.handoff.held, result.handoff.native) == (0, len(ids(pair, PROMPT)))
    assert store.refused == 1


def test_exact_mode_outlives_a_broken_cache(pair: ModelPair) -> None:
    store = StateStore()
    keep_spoilt(store, ExactKey.of(pair.target), pair.target, ids(pair, BEGINNING))
    asked = cascade(pair, store)
    results = [asked.generate(PROMPT, max_new_tokens=NEW, exact=True) for _ in range(2)]
    assert [list(each.tokens) for each in results] == [own(pair)] * 2
    assert [each.outcome for each in results] == [FALLBACK, APPLIED]
    assert store.refused == 1


class Refusing:
    """A judge that lets nothing pass."""

    def assess(self, *_: Any) -> GateReading:
        return GateReading("novelty", 2.0, 1.0, "unlike the fit.")

    def map_tail(self, *_: Any) -> None:
        return None

    def check(self, *_: Any) -> GateReading:
        raise AssertionError("nothing was handed off")


def test_a_refusal_is_checked_against_what_is_read_anew(pair: ModelPair) -> None:
    store = StateStore()
    asked = cascade(pair, store, gate=Refusing())
    for readings, refused in ((1, 0), (2, 1)):
        result = asked.generate(PROMPT, max_new_tokens=NEW)
        assert (result.outcome, list(result.tokens)) == (FALLBACK, own(pair))
        assert result.handoff is not None
        assert (len(result.handoff.readings), store.refused) == (readings, refused)
    assert store.counts()["refused"] == 1
    assert (ExactKey.of(pair.source), tuple(ids(pair, PROMPT))) in store.names()
