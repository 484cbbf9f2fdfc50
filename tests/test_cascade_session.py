"""Conversations of many turns, and caches kept between requests, on a pair of one model with itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbridge.cascade import Always, Cascade, LongPrompt, Never, StateStore
from kvbridge.cascade.memory import Memory
from kvbridge.cascade.prompts import read_prompt
from kvbridge.cascade.store import ExactKey, MappedKey
from kvbridge.errors import CacheError, UsageError
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from tiny_bridge import with_open_gate
from tiny_models import continue_with
from twin_pair import twin_bridge, twin_pair

TURNS = ("amber basil cedar delta", " ember fjord grove heron iris", " juniper")
PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
NEW = 5
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return twin_pair()


def cascade(pair: ModelPair, **given: Any) -> Cascade:
    return Cascade(pair, twin_bridge(pair), **{"plan": PLAN} | given)


def own_answers(pair: ModelPair, turns: tuple[str, ...]) -> list[list[int]]:
    """What the model itself says turn after turn."""
    ids, answers = list[int](), []
    for text in turns:
        ids += pair.tokenizer(text)["input_ids"]
        answers.append(continue_with(pair.target.model, torch.tensor([ids]), None, NEW))
        ids += answers[-1]
    return answers


@pytest.mark.parametrize("policy", [Always(), Never(), LongPrompt(tokens=40)], ids=["target", "source", "both"])
def test_turns_are_the_models_own(pair: ModelPair, policy: Any) -> None:
    session = cascade(pair, policy=policy).session()
    answers = [session.generate(text, max_new_tokens=NEW) for text in TURNS]
    assert [list(answer.tokens) for answer in answers] == own_answers(pair, TURNS)
    if isinstance(policy, LongPrompt):
        assert [answer.route for answer in answers] == ["source", "target", "target"]


def test_a_session_outlives_an_error(pair: ModelPair) -> None:
    class Failing:
        def decide(self, progress: Any) -> bool | None:
            raise RuntimeError("no")

    session = cascade(pair, policy=Failing()).session()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            session.generate(TURNS[0], max_new_tokens=NEW)
    assert session.tokens == []


def test_only_what_is_new_is_read_or_mapped(pair: ModelPair) -> None:
    session = cascade(pair).session()
    answers = [session.generate(text, max_new_tokens=NEW) for text in TURNS]
    lengths = [len(pair.tokenizer(text)["input_ids"]) for text in TURNS]
    reports = [answer.handoff for answer in answers]
    # The target has read all but the last token of its own answer; the source reads that answer with the next prompt.
    for at, (answer, report) in enumerate(zip(answers, reports, strict=True)):
        assert report is not None
        before = sum(lengths[:at]) + at * NEW
        held = before - 1 if at else 0
        assert (report.outcome, report.held, report.native) == ("applied", held, 4 if at else 6)
        assert report.held + report.native + report.carried == before + lengths[at] == answer.prompt_tokens
        assert answer.source_read == lengths[at] + (NEW if at else 0)


def test_an_unfinished_answer_blocks_the_session(pair: ModelPair) -> None:
    session = cascade(pair).session()
    next(iter(session.stream(TURNS[0])))
    with pytest.raises(UsageError, match="the answer before is not finished"):
        session.generate(TURNS[1])


@pytest.fixture
def chat() -> ModelPair:
    pair = twin_pair()
    pair.tokenizer.chat_template, pair.tokenizer.eos_token = CHAT, "</s>"
    return pair


def test_a_chat_goes_on(chat: ModelPair) -> None:
    session = cascade(chat).session()
    for text in ("amber basil cedar delta ember", "fjord grove"):
        answer = session.generate([{"role": "user", "content": text}], max_new_tokens=NEW)
        assert answer.outcome == "applied"
        # `</s>;[assistant]` is read natively, whatever the plan's tail.
        assert answer.handoff is not None
        assert answer.handoff.native >= 13 > PLAN.native_tail
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert answer.handoff is not None
    assert answer.handoff.held > 0
    with pytest.raises(UsageError, match="goes on as it began"):
        session.generate("iris")


def test_a_gate_judges_a_chat_by_its_own_tail(chat: ModelPair) -> None:
    bridge = with_open_gate(twin_bridge(chat), PLAN)
    session = Cascade(chat, bridge, plan=PLAN, gate="require").session()
    for text in ("amber basil cedar delta ember", "fjord grove"):
        answer = session.generate([{"role": "user", "content": text}], max_new_tokens=NEW)
        assert answer.outcome == "applied"
        assert answer.handoff is not None
        assert answer.handoff.native > PLAN.native_tail
        assert [reading.check for reading in answer.handoff.readings] == ["novelty", "tail"]


def test_prompts_of_a_chat(chat: ModelPair) -> None:
    prompt = read_prompt(chat.tokenizer, [{"role": "user", "content": "amber"}])
    assert chat.tokenizer.decode(list(prompt.tokens)) == "[user]amber</s>;[assistant]"
    assert (prompt.text, prompt.scaffold) == ("amber", 1 + len(";[assistant]"))
    with pytest.raises(UsageError, match="role and content"):
        read_prompt(chat.tokenizer, [{"user": "amber"}])


def test_messages_need_a_template(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        cascade(pair).generate([{"role": "user", "content": "amber"}])


def test_kept_states_change_no_answer(pair: ModelPair) -> None:
    plain, kept = cascade(pair), cascade(pair, states=StateStore())
    prompts = [TURNS[0], TURNS[0], TURNS[0] + TURNS[1], "amber" + TURNS[1]]
    expected = [plain.generate(text, max_new_tokens=NEW) for text in prompts]
    found = [kept.generate(text, max_new_tokens=NEW) for text in prompts]
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    # Again the first prompt: the source reads its last token; the sinks are remembered.
    reports = [each.handoff for each in found]
    assert [report.held for report in reports if report is not None] == [0, 2, 2, 2]
    assert [each.source_read for each in found[1:3]] == [1, len(TURNS[1])]


def test_a_conversation_goes_on_from_kept_states(pair: ModelPair) -> None:
    kept = cascade(pair, states=StateStore())
    first = kept.generate(TURNS[0], max_new_tokens=NEW)
    whole = [*pair.tokenizer(TURNS[0])["input_ids"], *first.tokens, *pair.tokenizer(TURNS[1])["input_ids"]]
    again = kept.generate(whole, max_new_tokens=NEW)
    assert again.handoff is not None
    assert again.handoff.held == len(TURNS[0]) + NEW - 1
    assert list(again.tokens) == own_answers(pair, TURNS[:2])[1]


def filled(pair: ModelPair, text: str, *, approximate: bool = False) -> Memory:
    memory = Memory(pair.target)
    memory.read(pair.tokenizer(text)["input_ids"])
    memory.approximate = approximate
    return memory


def mapped_key(**changed: Any) -> MappedKey:
    named = {"target": "t", "dtype": "float32", "source": "s", "revision": None, "bridge": "b/ridge", "plan": PLAN}
    return MappedKey(**named | changed)


def test_mapped_and_exact_caches_are_kept_apart(pair: ModelPair) -> None:
    store, exact = StateStore(), ExactKey.of(pair.target)
    with pytest.raises(CacheError, match="a mapped cache does not belong under ExactKey"):
        store.keep(exact, filled(pair, "amber", approximate=True))
    with pytest.raises(CacheError, match="an exact cache does not belong under MappedKey"):
        store.keep(mapped_key(), filled(pair, "amber"))
    store.keep(mapped_key(), filled(pair, "amber", approximate=True))
    tokens = pair.tokenizer("amber basil")["input_ids"]
    others = [exact, *(mapped_key(**{name: "other"}) for name in ("target", "dtype", "source", "revision", "bridge"))]
    for key in [*others, mapped_key(plan=HandoffPlan())]:
        memory = Memory(pair.target)
        store.resume(key, tokens, memory)
        assert memory.tokens == []
    memory = Memory(pair.target)
    store.resume(mapped_key(), tokens, memory)
    assert (len(memory.tokens), memory.approximate) == (5, True)


def test_exact_states_serve_a_common_beginning_and_mapped_ones_only_whole(pair: ModelPair) -> None:
    store, exact = StateStore(), ExactKey.of(pair.target)
    store.keep(exact, filled(pair, "amber basil"))
    store.keep(mapped_key(), filled(pair, "amber basil", approximate=True))
    held = []
    for key in (exact, mapped_key()):
        memory = Memory(pair.target)
        store.resume(key, pair.tokenizer("amber bay leaf")["input_ids"], memory)
        held.append(len(memory.tokens))
    assert held == [len("amber ba"), 0]
    # What was taken grows on its own.
    memory.read(pair.tokenizer("amber bay leaf")["input_ids"])
    again = Memory(pair.target)
    store.resume(exact, pair.tokenizer("amber basil!")["input_ids"], again)
    expected = filled(pair, "amber basil!").cache.layers[0].keys
    again.read(pair.tokenizer("amber basil!")["input_ids"])
    assert torch.allclose(again.cache.layers[0].keys, expected, atol=1e-5)


def test_the_store_stays_under_its_cap(pair: ModelPair) -> None:
    exact, texts = ExactKey.of(pair.target), ["amber", "basil", "cedar"]
    memories = [filled(pair, text) for text in texts]
    probe = StateStore()
    probe.keep(exact, memories[0])
    store = StateStore(max_bytes=2 * probe.bytes)
    for memory in memories[:2]:
        store.keep(exact, memory)
    # The first is used again, so the second has to go.
    store.resume(exact, pair.tokenizer("amber!")["input_ids"], Memory(pair.target))
    store.keep(exact, memories[2])
    assert (len(store), store.bytes, store.evictions) == (2, 2 * probe.bytes, 1)
    assert [tokens for _, tokens in store.names()] == [
        tuple(pair.tokenizer(t)["input_ids"]) for t in ("amber", "cedar")
    ]
    store.keep(exact, filled(pair, "a much longer text than fits"))
    assert len(store) == 2
    with pytest.raises(UsageError, match="max_bytes=-1"):
        StateStore(max_bytes=-1)
