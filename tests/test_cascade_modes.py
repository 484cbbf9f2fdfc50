"""Exact mode and a drafting source in a cascade: the text is what it should be, and so is every cache afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbridge.cascade import Above, Cascade, DraftSchedule, MeanSurprise, StateStore
from kvbridge.cascade import verify as verification
from kvbridge.cascade.config import CascadeConfig
from kvbridge.cascade.sampling import SamplingParams, check_logits
from kvbridge.cascade.store import ExactKey, MappedKey
from kvbridge.errors import CacheError, UsageError
from kvbridge.eval.exactness import own_tokens
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from made_handoffs import committed
from tiny_bridge import random_bridge
from tiny_pair import tiny_pair
from twin_pair import twin_bridge, twin_pair

PROMPTS = ("amber basil cedar delta", "ember fjord grove heron iris", "juniper kestrel larch maple")
PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
NEW = 9
EXACT: dict[str, Any] = {"exact": True, "schedule": DraftSchedule(chunk=8, steps=2), "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """Two models, so that a random map carries nonsense."""
    torch.manual_seed(0)
    return tiny_pair()


@pytest.fixture(scope="module")
def twins() -> ModelPair:
    return twin_pair()


def cascade(pair: ModelPair, **given: Any) -> Cascade:
    torch.manual_seed(1)
    return Cascade(pair, random_bridge(pair), **{"plan": PLAN} | given)


def twin_cascade(pair: ModelPair, **given: Any) -> Cascade:
    return Cascade(pair, given.pop("bridge", twin_bridge(pair)), **{"plan": PLAN} | given)


def ids(pair: ModelPair, text: str) -> list[int]:
    return pair.tokenizer(text)["input_ids"]


def own(pair: ModelPair, prompt: list[int], **sampling: Any) -> list[int]:
    params = SamplingParams(**{"max_new_tokens": NEW} | sampling)
    return own_tokens(pair.target, torch.tensor([prompt]), params, pair.tokenizer)


@pytest.mark.parametrize("speculate", [0, 3])
def test_exact_answers_are_the_targets_own(pair: ModelPair, speculate: int) -> None:
    asked = cascade(pair)
    for prompt in PROMPTS:
        turn = asked.stream(prompt, speculate=speculate, repetition_penalty=1.2, **EXACT)
        events = list(turn)
        result, expected = turn.result, own(pair, ids(pair, prompt), repetition_penalty=1.2)
        assert list(result.tokens) == expected == committed(events)[0]
        assert {"draft", "commit"} <= {event.kind for event in events}
        assert result.handoff is not None
        assert (result.outcome, result.handoff.verified) == ("applied", len(ids(pair, prompt)))
        assert 0 < result.seconds["provisional"] < result.seconds["first_token"]
        assert result.drafts.keys() == ({"mapped", "source"} if speculate else {"mapped"})
        assert result.to_dict()["drafts"]["mapped"]["rate"] == result.drafts["mapped"].rate
    assert asked.metrics.to_dict()["drafts"]["mapped"]["passes"] == len(PROMPTS)


def test_a_good_draft_stays_and_a_bad_one_is_taken_back(pair: ModelPair, twins: ModelPair) -> None:
    good, bad = twin_cascade(twins).generate(PROMPTS[0], **EXACT), cascade(pair).generate(PROMPTS[0], **EXACT)
    assert good.drafts["mapped"].rate == 1
    assert bad.drafts["mapped"].accepted < bad.drafts["mapped"].drafted


def test_who_waits_for_commits_sees_the_text_alone(pair: ModelPair) -> None:
    result = cascade(pair).generate(PROMPTS[1], **EXACT)
    assert result.text == pair.tokenizer.decode(list(result.tokens), skip_special_tokens=True)


def test_turns_after_an_exact_one_go_on_from_the_targets_own_cache(pair: ModelPair) -> None:
    session, conversation, held = cascade(pair).session(), list[int](), 0
    for text in PROMPTS:
        turn = session.stream(text, speculate=2, **EXACT)
        result = turn.finish()
        conversation += ids(pair, text)
        assert list(result.tokens) == own(pair, conversation)
        assert result.handoff is not None
        assert (result.handoff.held, result.handoff.verified) == (held, len(conversation) - held)
        assert not turn.target.approximate
        held = len(conversation) + len(result.tokens) - 1
        conversation += result.tokens
        assert turn.target.tokens == conversation[:held]
        assert turn.source.tokens == conversation[: len(turn.source.tokens)]
    carried = session.stream("maple", max_new_tokens=1)
    report = carried.finish().handoff
    assert report is not None
    assert (report.held, carried.target.approximate) == (held, report.carried > 0)


def test_a_mapped_cache_is_never_taken_for_an_exact_one(pair: ModelPair) -> None:
    session, states = cascade(pair, states=StateStore()).session(), StateStore()
    first = session.generate(PROMPTS[0], max_new_tokens=NEW)
    turn = session.stream(PROMPTS[1], **EXACT)
    result = turn.finish()
    conversation = [*ids(pair, PROMPTS[0]), *first.tokens, *ids(pair, PROMPTS[1])]
    assert list(result.tokens) == own(pair, conversation)
    assert result.handoff is not None
    assert result.handoff.verified == len(conversation)
    states.keep(ExactKey.of(pair.target), turn.target)
    with pytest.raises(CacheError, match="does not belong"):
        states.keep(MappedKey("t", "f", "s", None, "b", PLAN), turn.target)


def test_exact_caches_are_kept_as_exact_ones(pair: ModelPair) -> None:
    states = StateStore()
    asked = cascade(pair, states=states)
    first, again = (asked.generate(PROMPTS[0], **EXACT) for _ in range(2))
    assert first.tokens == again.tokens
    assert again.handoff is not None
    assert again.handoff.verified == 1
    assert not any(isinstance(key, MappedKey) for key, _ in states.names())
    assert ExactKey.of(pair.target) in [key for key, _ in states.names()]


def test_a_map_that_fails_leaves_exact_text(twins: ModelPair) -> None:
    result = twin_cascade(twins, bridge=twin_bridge(twins, bias=float("nan"))).generate(PROMPTS[0], **EXACT)
    assert (result.outcome, list(result.tokens)) == ("fallback_reprefill", own(twins, ids(twins, PROMPTS[0])))
    assert "provisional" not in result.seconds


def test_the_sources_draft_is_no_exact_text(pair: ModelPair) -> None:
    turn = cascade(pair, policy=Above(MeanSurprise(tokens=3), -1.0)).stream(PROMPTS[0], **EXACT)
    assert committed(list(turn))[0] == own(pair, ids(pair, PROMPTS[0]))
    assert (turn.result.drafted, turn.result.kept) == (3, 0)


@pytest.mark.parametrize("draft", ["keep", "restart"])
def test_a_drafting_source_changes_no_text(pair: ModelPair, draft: str) -> None:
    asked = cascade(pair, policy=Above(MeanSurprise(tokens=3), -1.0), draft=draft)
    plain, drafting = asked.session(), asked.session()
    for prompt in PROMPTS[:2]:
        expected = plain.generate(prompt, max_new_tokens=NEW)
        turn = drafting.stream(prompt, max_new_tokens=NEW, speculate=3)
        assert turn.finish().tokens == expected.tokens
        assert turn.result.drafts["source"].passes > 0
        assert turn.result.kept == expected.kept == (3 if draft == "keep" else 0)
        assert turn.result.handoff is not None
        assert expected.handoff is not None
        assert turn.result.handoff.held == expected.handoff.held


def test_a_source_that_is_right_saves_passes(twins: ModelPair) -> None:
    result = twin_cascade(twins).generate(PROMPTS[0], max_new_tokens=NEW, speculate=3)
    assert list(result.tokens) == own(twins, ids(twins, PROMPTS[0]))
    assert (result.drafts["source"].rate, result.drafts["source"].passes) == (1.0, 2)
    alone = Cascade(twins, None).generate(PROMPTS[0], max_new_tokens=NEW, speculate=3)
    assert (alone.tokens, alone.drafts["source"].rate) == (result.tokens, 1.0)


def test_drafts_over_a_cache_that_breaks_are_read_anew(twins: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def breaking(logits: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise CacheError("broken")
        check_logits(logits)

    monkeypatch.setattr(verification, "check_logits", breaking)
    session = twin_cascade(twins).session()
    turn = session.stream(PROMPTS[0], max_new_tokens=NEW, speculate=3)
    result = turn.finish()
    assert result.handoff is not None
    assert (result.outcome, result.handoff.reason, len(calls)) == ("fallback_reprefill", "broken", 2)
    assert list(result.tokens) == own(twins, ids(twins, PROMPTS[0]))
    written = [*ids(twins, PROMPTS[0]), *result.tokens]
    assert turn.source.tokens == written[: len(turn.source.tokens)]
    assert turn.target.tokens == written[:-1]


def test_what_cannot_work_is_refused(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match="speculate=-1"):
        cascade(pair).generate(PROMPTS[0], speculate=-1)
    with pytest.raises(UsageError, match=r"cascade\.gate=maybe: give auto, require or off"):
        CascadeConfig(gate="maybe")
    with pytest.raises(UsageError, match="chunk=0"):
        CascadeConfig(chunk=0)
    mode = CascadeConfig(exact=True, speculate=2, chunk=64).mode()
    assert (mode.exact, mode.speculate, mode.schedule) == (True, 2, DraftSchedule(64))
