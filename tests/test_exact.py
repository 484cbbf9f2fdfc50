"""Exact mode: whatever is drafted, the text is the target's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kvbridge.cascade.exact import DraftSchedule, exact_events, generate_exact
from kvbridge.cascade.sampling import SamplingParams, process_logits
from kvbridge.cascade.speculative import SourceDrafter
from kvbridge.errors import CacheError, UsageError
from kvbridge.eval.exactness import first_difference, own_tokens
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair, load_pair
from made_handoffs import committed, noisy_handoff
from tiny_models import kv_model, random_ids, relative_error, tiny_model
from tiny_pair import byte_tokenizer, tiny_pair

TOKENIZER = byte_tokenizer()
SCHEDULE = DraftSchedule(chunk=5, steps=2)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.mark.parametrize(("architecture", "penalty"), [("llama", 1.0), ("gpt_neox", 1.0), ("qwen3", 1.3)])
def test_greedy_text_is_the_targets_own(architecture: str, penalty: float) -> None:
    target, params = kv_model(architecture), SamplingParams(max_new_tokens=14, repetition_penalty=penalty)
    accepted = set[int]()
    for seed, noise in itertools.product(range(3), (0.0, 0.7, 8.0)):
        prompt = random_ids(12 + seed, seed=seed)
        handoff = noisy_handoff(target, prompt, noise)
        schedule = DraftSchedule(chunk=3 + 4 * seed, steps=1 + seed)
        written = generate_exact(target, handoff, prompt, params, tokenizer=TOKENIZER, schedule=schedule)
        assert written.tokens == own_tokens(target, prompt, params, TOKENIZER)
        tally = written.ending.mapped
        assert tally.accepted == tally.drafted or noise
        accepted.add(tally.drafted - tally.accepted)
    assert len(accepted) > 2, "the noise does not vary how much is accepted"


def test_a_draft_shows_at_once_and_a_wrong_one_is_taken_back(pair: ModelPair) -> None:
    params, kinds = SamplingParams(max_new_tokens=24), set[str]()
    for seed in range(6):
        prompt = torch.randint(2, 250, (1, 20), generator=torch.Generator().manual_seed(seed))
        handoff = noisy_handoff(pair.target, prompt, 1.0)
        events = list(exact_events(pair.target, handoff, prompt, params, tokenizer=TOKENIZER, schedule=SCHEDULE))
        own = own_tokens(pair.target, prompt, params, TOKENIZER)
        assert events[0].kind == "draft"
        # Bytes of random tokens are seldom whole characters.
        assert committed(events) == (own, TOKENIZER.decode(own, skip_special_tokens=True))
        assert sum(event.kind == "draft" for event in events) == 8
        kinds |= {event.kind for event in events}
    assert kinds == {"draft", "commit", "retract"}


def test_the_first_draft_comes_before_the_prompt_is_read(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(20)
    handoff = noisy_handoff(pair.target, prompt, 0.0)
    events = exact_events(pair.target, handoff, prompt, SamplingParams(), tokenizer=TOKENIZER, schedule=SCHEDULE)
    with monkeypatch.context() as patch:
        patch.setattr("kvbridge.compat.run", None)
        assert next(events).tokens == (int(handoff.logits.argmax()),)
    assert next(events).kind == "draft"
    events.close()


def test_a_stop_string_or_an_end_token_ends_the_text(pair: ModelPair) -> None:
    prompt, params = random_ids(20, seed=3), SamplingParams(max_new_tokens=24)
    own = own_tokens(pair.target, prompt, params, TOKENIZER)
    printable = next(at for at, token in enumerate(own) if at > 2 and TOKENIZER.decode([token]).isascii())
    stop = TOKENIZER.decode([own[printable]])
    stopping = SamplingParams(max_new_tokens=24, stop=(stop,))
    expected = own_tokens(pair.target, prompt, stopping, TOKENIZER)
    for noise in (0.0, 1.0):
        handoff = noisy_handoff(pair.target, prompt, noise)
        written = generate_exact(pair.target, handoff, prompt, stopping, tokenizer=TOKENIZER, schedule=SCHEDULE)
        assert written.tokens == expected
        assert (written.text + stop, written.finish) == (TOKENIZER.decode(expected), "stop")
    ended = tiny_model("qwen3", seed=2, vocab_size=len(TOKENIZER), layers=4, kv_heads=4, head_dim=32)
    ended.generation_config.eos_token_id = own[3]
    target = KVModel.wrap(ended)
    handoff = noisy_handoff(target, prompt, 0.0)
    written = generate_exact(target, handoff, prompt, params, tokenizer=TOKENIZER, schedule=SCHEDULE)
    assert (written.tokens, written.finish) == (own[: own.index(own[3]) + 1], "stop")


def test_the_mapped_cache_is_left_and_the_native_one_is_exact(pair: ModelPair) -> None:
    prompt = random_ids(20, seed=4)
    handoff = noisy_handoff(pair.target, prompt, 1.0)
    before = [layer.keys.clone() for layer in handoff.cache.layers]
    written = generate_exact(pair.target, handoff, prompt, SamplingParams(max_new_tokens=9), tokenizer=TOKENIZER)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, handoff.cache.layers, strict=True))
    text = torch.tensor([prompt[0].tolist() + written.tokens[:-1]])
    expected = pair.target.read(text)
    native = written.ending.native
    assert native.position == text.shape[1]
    for mine, theirs in zip(native.cache.layers, expected.layers, strict=True):
        assert relative_error(mine.keys, theirs.keys) < 1e-5


def test_the_source_may_draft_what_follows(pair: ModelPair) -> None:
    prompt, params = random_ids(20, seed=5), SamplingParams(max_new_tokens=30)
    handoff = noisy_handoff(pair.target, prompt, 1.0)
    # The target drafting for itself is a source that is always right.
    for source, right in ((pair.source, False), (pair.target, True)):
        drafter = SourceDrafter(source, source.read(prompt), 3)
        written = generate_exact(
            pair.target, handoff, prompt, params, tokenizer=TOKENIZER, schedule=SCHEDULE, drafter=drafter
        )
        assert written.tokens == own_tokens(pair.target, prompt, params, TOKENIZER)
        assert (written.ending.source.rate == 1) == right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_of_the_embedded_pair_differs_at_near_ties_only(dtype: str) -> None:
    pair, params = load_pair("embedded", dtype=dtype), SamplingParams(max_new_tokens=12)
    for seed in range(3):
        prompt = torch.randint(10, 400, (1, 40), generator=torch.Generator().manual_seed(seed))
        handoff = noisy_handoff(pair.target, prompt, 0.5)
        written = generate_exact(
            pair.target, handoff, prompt, params, tokenizer=pair.tokenizer, schedule=DraftSchedule(16)
        )
        own = own_tokens(pair.target, prompt, params, pair.tokenizer)
        difference = first_difference(pair.target, prompt, written.tokens, own)
        assert difference is None or (difference.near_tie and dtype == "bfloat16")


def test_a_wrong_token_is_no_near_tie(pair: ModelPair) -> None:
    prompt = random_ids(20)
    own = own_tokens(pair.target, prompt, SamplingParams(max_new_tokens=6), pair.tokenizer)
    assert first_difference(pair.target, prompt, own, own) is None
    assert first_difference(pair.target, prompt, own[:4], own) is None
    wrong = first_difference(pair.target, prompt, [*own[:3], (own[3] + 1) % 250], own)
    assert wrong is not None
    assert (wrong.at, wrong.near_tie) == (3, False)
    assert wrong.gap > 100 * wrong.noise > 0
    with pytest.raises(UsageError, match="only greedy"):
        own_tokens(pair.target, prompt, SamplingParams(temperature=1.0), pair.tokenizer)


def _joint_distribution(target: KVModel, prompt: Tensor, params: SamplingParams) -> Tensor:
    """Exact probabilities `[V, V]` of the first two tokens, from the target's own prefills."""
    first = process_logits(target.prefill(prompt)[1][0, -1], params, prompt[0])
    rows = []
    for token in range(len(first)):
        text = torch.cat((prompt, torch.tensor([[token]])), dim=1)
        rows.append(first[token] * process_logits(target.prefill(text)[1][0, -1], params, text[0]))
    return torch.stack(rows)


def _fit(tokens: list[tuple[int, ...]], expected: Tensor) -> float:
    """p-value of a chi-square test of pairs of tokens; cells of fewer than five expected are one."""
    counts = torch.zeros_like(expected)
    for pair in tokens:
        counts[pair] += 1
    expected = expected.double() * len(tokens)
    rare = expected < 5
    cells = [torch.cat((table[~rare], table[rare].sum()[None])).double() for table in (counts, expected)]
    kept = cells[1] > 0
    assert cells[0][~kept].sum() == 0
    return float(chisquare(cells[0][kept], cells[1][kept] / cells[1].sum() * len(tokens)).pvalue)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(2, 1.0), SamplingParams(2, temperature=0.8, top_p=0.9, top_k=7, repetition_penalty=1.2)],
    ids=["plain", "shaped"],
)
def test_sampled_text_has_the_targets_distribution(params: SamplingParams) -> None:
    model = tiny_model(vocab_size=8, layers=2)
    # No token ends a text early.
    model.generation_config.eos_token_id = 8
    target = KVModel.wrap(model)
    prompt, generator = torch.tensor([[3, 1, 4, 1, 5]]), torch.Generator().manual_seed(0)
    handoff, schedule = noisy_handoff(target, prompt, 4.0), DraftSchedule(chunk=8, steps=2)
    written, drafted = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for _ in range(500):
        events = list(
            exact_events(target, handoff, prompt, params, tokenizer=TOKENIZER, schedule=schedule, generator=generator)
        )
        written.append(tuple(token for event in events if event.kind == "commit" for token in event.tokens))
        drafted.append(tuple(token for event in events if event.kind == "draft" for token in event.tokens))
    expected = _joint_distribution(target, prompt, params)
    assert _fit(written, expected) > 1e-3
    # Accepting every draft would not pass.
    assert _fit(drafted, expected) < 1e-9


def test_what_does_not_fit_is_refused(pair: ModelPair) -> None:
    prompt = random_ids(20)
    handoff = noisy_handoff(pair.target, prompt, 0.0)
    for given, params, error, words in (
        (prompt[:, :-1], SamplingParams(), CacheError, "covers 20 tokens"),
        (prompt.repeat(2, 1), SamplingParams(), UsageError, "one prompt"),
        (prompt, SamplingParams(max_new_tokens=4000), UsageError, "max_new_tokens=4000"),
    ):
        with pytest.raises(error, match=words):
            next(exact_events(pair.target, handoff, given, params, tokenizer=TOKENIZER))
    with pytest.raises(UsageError, match="steps=0"):
        DraftSchedule(steps=0)
