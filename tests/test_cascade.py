"""A cascade on a pair of one model with itself, so that every carried answer has an exact reference."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvbridge.assembly import Handoff
from kvbridge.cascade import Above, Always, Cascade, FirstTokenEntropy, GateReading, LongPrompt, MeanSurprise, Never
from kvbridge.cascade.events import Event
from kvbridge.cascade.memory import Memory
from kvbridge.errors import CacheError, PairMismatchError, UsageError
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_bridge import random_bridge
from tiny_models import continue_with
from tiny_pair import tiny_pair
from twin_pair import twin_bridge, twin_pair

PROMPT = "amber basil cedar delta ember"
PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
NEW = 6


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return twin_pair()


@pytest.fixture(scope="module")
def native(pair: ModelPair) -> list[int]:
    """The model's own greedy answer to the prompt."""
    return continue_with(pair.target.model, torch.tensor([tokens_of(pair, PROMPT)]), None, NEW)


def tokens_of(pair: ModelPair, text: str) -> list[int]:
    return pair.tokenizer(text)["input_ids"]


def cascade(pair: ModelPair, **given: Any) -> Cascade:
    return Cascade(pair, given.pop("bridge", twin_bridge(pair)), **{"plan": PLAN} | given)


def shown(events: Iterable[Event]) -> tuple[list[int], list[int]]:
    """Tokens that one who shows drafts ends with, and those of one who waits for commits."""
    every, certain = list[int](), list[int]()
    for event in events:
        if event.kind == "retract":
            assert tuple(every[event.start :]) == event.tokens
            del every[event.start :]
        elif event.kind == "draft":
            assert event.start == len(every)
            every += event.tokens
        else:
            assert event.start == len(certain)
            certain += event.tokens
            every = list(certain)
    return every, certain


def test_a_carried_answer_is_the_models_own(pair: ModelPair, native: list[int]) -> None:
    result = cascade(pair).generate(PROMPT, max_new_tokens=NEW)
    assert (result.route, result.outcome, result.finish) == ("target", "applied", "length")
    assert list(result.tokens) == native
    assert result.text == pair.tokenizer.decode(native)
    report = result.handoff
    assert report is not None
    length = len(tokens_of(pair, PROMPT))
    assert (report.carried, report.native, report.held) == (length - 6, 6, 0)
    assert {"map", "forward", "strip"} <= report.seconds.keys()
    assert 0 < result.seconds["source"] < result.seconds["handed_over"] < result.seconds["first_token"]
    assert result.seconds["first_token"] < result.seconds["total"]
    assert result.to_dict()["outcome"] == "applied"


def test_the_source_answers_alone(pair: ModelPair, native: list[int]) -> None:
    asked = cascade(pair, policy=Never())
    result = asked.generate(PROMPT, max_new_tokens=NEW)
    assert (result.route, result.outcome, result.handoff) == ("source", None, None)
    assert (list(result.tokens), result.kept) == (native, NEW)
    # The last token is written and not read.
    assert result.source_read == len(tokens_of(pair, PROMPT)) + NEW - 1
    assert asked.metrics.to_dict()["answers"] == {"source": 1, "target": 0}


def test_what_is_given_can_be_text_or_tokens(pair: ModelPair, native: list[int]) -> None:
    asked = cascade(pair)
    assert list(asked.generate(tokens_of(pair, PROMPT), max_new_tokens=NEW).tokens) == native
    batch = asked.generate_batch([PROMPT, PROMPT + " fjord"], max_new_tokens=NEW)
    assert list(batch[0].tokens) == native
    assert batch[1].tokens == asked.generate(PROMPT + " fjord", max_new_tokens=NEW).tokens


def test_a_seed_decides_what_is_drawn(pair: ModelPair) -> None:
    asked = cascade(pair)
    drawn = [asked.generate(PROMPT, max_new_tokens=NEW, temperature=1.5, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    batch = asked.generate_batch([PROMPT, PROMPT], max_new_tokens=NEW, temperature=1.5, seed=1)
    assert [each.tokens for each in batch] == [drawn[0], drawn[2]]


def test_a_stop_string_ends_the_text_before_it(pair: ModelPair) -> None:
    whole = cascade(pair).generate(PROMPT, max_new_tokens=NEW).text
    stop = whole[2:4]
    result = cascade(pair).generate(PROMPT, max_new_tokens=NEW, stop=stop)
    assert (result.text, result.finish) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize("draft", ["keep", "restart"])
def test_a_draft_is_kept_or_dropped(pair: ModelPair, native: list[int], draft: Any) -> None:
    turn = cascade(pair, policy=Above(MeanSurprise(tokens=3), 0.0), draft=draft).stream(PROMPT, max_new_tokens=NEW)
    events = list(turn)
    every, certain = shown(events)
    assert every == certain == native == list(turn.result.tokens)
    assert [event.kind for event in events[:4]] == ["draft"] * 3 + ["commit" if draft == "keep" else "retract"]
    assert (turn.result.drafted, turn.result.kept) == (3, 3 if draft == "keep" else 0)
    assert turn.result.text == "".join(event.text for event in events if event.kind == "commit")
    assert (turn.result.outcome, events[-1].finish) == ("applied", "length")


def test_a_draft_that_the_policy_accepts_is_the_answer(pair: ModelPair, native: list[int]) -> None:
    turn = cascade(pair, policy=Above(MeanSurprise(tokens=3), 1e9)).stream(PROMPT, max_new_tokens=NEW)
    every, certain = shown(turn)
    assert every == certain == native
    assert (turn.result.route, turn.result.drafted, turn.result.kept) == ("source", 3, NEW)


def test_a_policy_that_never_tells_leaves_the_answer_to_the_source(pair: ModelPair, native: list[int]) -> None:
    class Undecided:
        def decide(self, progress: Any) -> bool | None:
            return None

    result = cascade(pair, policy=Undecided()).generate(PROMPT, max_new_tokens=NEW)
    assert (result.route, list(result.tokens), result.drafted) == ("source", native, NEW)


def test_a_finished_draft_is_not_gone_on_from(pair: ModelPair, native: list[int]) -> None:
    result = cascade(pair, policy=Above(MeanSurprise(tokens=99), 0.0)).generate(PROMPT, max_new_tokens=NEW)
    assert (result.route, list(result.tokens)) == ("target", native)
    assert (result.drafted, result.kept) == (NEW, 0)


def test_nothing_is_tried_without_a_bridge(pair: ModelPair, native: list[int]) -> None:
    result = Cascade(pair, None).generate(PROMPT, max_new_tokens=NEW)
    assert list(result.tokens) == native
    assert result.handoff is not None
    assert (result.outcome, result.handoff.reason) == ("unsupported", "the cascade has no bridge")
    assert "prefill" in result.handoff.seconds


def test_a_short_prompt_is_read(pair: ModelPair) -> None:
    asked = cascade(pair)
    result = asked.generate("amber", max_new_tokens=NEW)
    assert result.handoff is not None
    assert (result.outcome, result.handoff.carried, result.handoff.native) == ("unsupported", 0, 5)
    assert result.handoff.reason == "5 tokens leave nothing to carry between sinks and tail"
    assert asked.metrics.to_dict()["reasons"] == {result.handoff.reason: 1}


def test_a_prompt_beyond_the_source_is_read(native: list[int]) -> None:
    pair = twin_pair()
    short = replace(pair.source.geometry, max_positions=16)
    pair = replace(pair, source=replace(pair.source, geometry=short))
    result = cascade(pair, bridge=None).generate(PROMPT, max_new_tokens=NEW)
    assert (result.source_read, list(result.tokens)) == (0, native)


@pytest.mark.parametrize("bias", [float("inf"), float("nan"), 3e38])
def test_an_unusable_map_falls_back_to_the_targets_own_answer(pair: ModelPair, native: list[int], bias: float) -> None:
    asked = cascade(pair, bridge=twin_bridge(pair, bias=bias))
    result = asked.generate(PROMPT, max_new_tokens=NEW)
    assert (result.outcome, list(result.tokens)) == ("fallback_reprefill", native)
    assert result.handoff is not None
    assert "NaN" in result.handoff.reason
    assert asked.metrics.to_dict()["handoffs"] == {"applied": 0, "fallback_reprefill": 1, "unsupported": 0}


def test_a_broken_source_falls_back(native: list[int]) -> None:
    pair = twin_pair()
    with torch.no_grad():
        pair.source.model.get_input_embeddings().weight.fill_(float("nan"))
    result = cascade(pair, policy=Never()).generate(PROMPT, max_new_tokens=NEW)
    assert (result.outcome, list(result.tokens)) == ("fallback_reprefill", native)
    assert result.handoff is not None
    assert result.handoff.reason.startswith("the source failed: the logits hold NaN")


def test_a_broken_target_is_an_error_and_no_text() -> None:
    pair = twin_pair()
    with torch.no_grad():
        pair.target.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(CacheError, match="NaN"):
        cascade(pair).generate(PROMPT, max_new_tokens=NEW)


def test_logits_that_break_later_are_read_anew(
    pair: ModelPair, native: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Memory.read

    def broken(memory: Memory, tokens: Any) -> Any:
        if memory.approximate and len(tokens) == len(tokens_of(pair, PROMPT)) + 3:
            raise CacheError("broken")
        return read(memory, tokens)

    monkeypatch.setattr(Memory, "read", broken)
    result = cascade(pair).generate(PROMPT, max_new_tokens=NEW)
    assert result.handoff is not None
    assert (result.outcome, result.handoff.reason) == ("fallback_reprefill", "broken")
    assert list(result.tokens) == native


def test_a_bridge_of_another_pair_is_refused(pair: ModelPair) -> None:
    with pytest.raises(PairMismatchError, match="another pair"):
        Cascade(pair, random_bridge(tiny_pair()))


def test_a_pair_that_differs_in_shape_answers() -> None:
    pair = tiny_pair()
    result = Cascade(pair, random_bridge(pair), plan=PLAN).generate(PROMPT, max_new_tokens=2)
    assert (result.outcome, len(result.tokens)) == ("applied", 2)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 999}, "made for up to 512 tokens"),
        ({"beams": 2}, "beams is no setting; expected max_new_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(pair: ModelPair, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cascade(pair).generate(PROMPT, **sampling)


def test_other_misuse_is_refused(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        cascade(pair).generate("")
    with pytest.raises(UsageError, match="draft='drop': give keep or restart"):
        cascade(pair, draft="drop")
    with pytest.raises(UsageError, match="not finished; take all of its events"):
        _ = cascade(pair).stream(PROMPT).result


def test_a_stream_that_was_left_goes_on_where_it_was(pair: ModelPair, native: list[int]) -> None:
    whole = cascade(pair, policy=Never()).generate(PROMPT, max_new_tokens=NEW)
    model = cascade(pair, policy=Never())
    turn = model.stream(PROMPT, max_new_tokens=NEW)
    for event in turn:
        if event.kind == "commit":
            break
    assert turn.finish().text == whole.text
    assert list(turn) == []
    assert list(turn.result.tokens) == native
    assert model.metrics.to_dict()["answers"]["source"] == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 99_999], r"token id 99999 is none of the pair's \d+; give ids of its tokenizer"),
        ([5, -1], "token id -1 is none of the pair's"),
    ],
    ids=["beyond", "negative"],
)
def test_prompts_that_are_none_are_refused(pair: ModelPair, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cascade(pair).session().stream(prompt)


def test_a_batch_is_a_list(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match="takes several prompts and was given one text"):
        cascade(pair).generate_batch("ab")


def said(check: str, score: float) -> GateReading:
    return GateReading(check, score, 1.0, "" if score <= 1 else "too far")


@dataclass(frozen=True)
class FixedGate:
    """Says what it was told to say."""

    before: float
    after: float

    def assess(self, source_states: ContentStates, input_ids: torch.Tensor) -> GateReading:
        assert source_states.tokens == input_ids.shape[1]
        return said("novelty", self.before)

    def map_tail(self, handoff: Handoff, source_states: ContentStates, input_ids: torch.Tensor) -> ContentStates | None:
        return source_states.span(handoff.split.carried_stop, input_ids.shape[1])

    def check(self, handoff: Handoff, mapped_tail: ContentStates | None) -> GateReading:
        assert mapped_tail is not None
        assert mapped_tail.tokens == PLAN.native_tail
        return said("tail", self.after)


@pytest.mark.parametrize(
    ("gate", "outcome", "last"),
    [
        (FixedGate(0.5, 0.25), "applied", ("tail", 0.25, 1.0)),
        (FixedGate(2.0, 0.25), "fallback_reprefill", ("novelty", 2.0, 1.0)),
        (FixedGate(0.5, 3.0), "fallback_reprefill", ("tail", 3.0, 1.0)),
        (FixedGate(0.5, float("nan")), "fallback_reprefill", ("tail", pytest.approx(float("nan"), nan_ok=True), 1.0)),
    ],
)
def test_a_gate_judges_before_and_after(
    pair: ModelPair, native: list[int], gate: FixedGate, outcome: str, last: Any
) -> None:
    asked = cascade(pair, gate=gate)
    result = asked.generate(PROMPT, max_new_tokens=NEW)
    report = result.handoff
    assert report is not None
    assert asked.describe()["gate"] == "FixedGate"
    stopped = {} if outcome == "applied" else {last[0]: 1}
    assert asked.metrics.to_dict()["gate"] == {"judged": 1, "stopped": stopped}
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["handoff"]["readings"][-1]["check"] == last[0]
    assert (report.outcome, list(result.tokens)) == (outcome, native)
    assert (report.check, report.error_estimate, report.error_limit) == last
    assert report.reason == ("" if outcome == "applied" else "too far")


def test_rules_see_the_prompt(pair: ModelPair) -> None:
    seen = list[Any]()

    class Watch:
        def decide(self, progress: Any) -> bool | None:
            seen.append(progress)
            return True

    cascade(pair, policy=Watch()).generate(PROMPT, task="sums", max_new_tokens=1)
    (progress,) = seen
    assert (progress.text, progress.task, progress.tokens) == (PROMPT, "sums", [])
    assert progress.prompt_tokens == len(tokens_of(pair, PROMPT))


def test_policies_work_in_a_cascade(pair: ModelPair) -> None:
    long = LongPrompt(tokens=len(tokens_of(pair, PROMPT)))
    asked = cascade(pair, policy=Always() & long & Above(FirstTokenEntropy(), 0.0))
    assert [asked.generate(text, max_new_tokens=1).route for text in (PROMPT, PROMPT[1:])] == ["target", "source"]
