"""Text of a stream: whole characters, nothing of a stop string, and in the end what the tokens say."""

from __future__ import annotations

import random

import pytest
import torch

from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.text import TextStream, end_tokens
from kvbridge.cascade.writing import Writing
from made_handoffs import committed
from tiny_models import kv_model, tiny_model
from tiny_pair import byte_tokenizer

TOKENIZER = byte_tokenizer()
WORDS = "naïve café, 東京 and 👩‍🚀 at −3 °C"


def _ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def _writing(**given: object) -> Writing:
    return Writing(kv_model(), torch.tensor([[5, 6]]), SamplingParams(**given), TOKENIZER)


def test_characters_come_whole_and_complete() -> None:
    stream = TextStream(TOKENIZER)
    parts = [stream.push(token) for token in _ids(WORDS)]
    assert "".join(parts) + stream.flush() == WORDS
    assert "" in parts
    assert not any("\ufffd" in part for part in parts)


def test_an_incomplete_end_is_shown_as_the_tokenizer_shows_it() -> None:
    stream, tokens = TextStream(TOKENIZER), _ids("a👩")[:-1]
    assert "".join(map(stream.push, tokens)) + stream.flush() == TOKENIZER.decode(tokens)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(("STOP",), "one ST two STO"), (("two", "e ST"), "on"), (("東",), "one ST two STOP and "), (("absent",), None)],
    ids=str,
)
def test_text_ends_before_a_stop_string(stops: tuple[str, ...], expected: str | None) -> None:
    text = "one ST two STOSTOP and 東京" if stops == ("STOP",) else "one ST two STOP and 東京"
    stream, shown = TextStream(TOKENIZER, stops), ""
    for token in _ids(text):
        shown += stream.push(token)
        assert text.startswith(shown)
        if stream.stopped:
            break
    assert shown + stream.flush() == (text if expected is None else expected)
    assert stream.push(_ids("x")[0]) == "" or expected is None


def test_every_course_of_drafts_and_commits_shows_the_committed_text() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens = _ids(WORDS)
        writing = _writing(max_new_tokens=rng.randint(1, len(tokens)), stop=rng.choice([(), ("and",), ("at −",)]))
        events = []
        while writing.finish is None:
            at = len(writing.committed)
            for step in range(rng.randint(0, 6)):
                if writing.may_draft:
                    right = rng.random() < 0.8
                    events.append(writing.draft(tokens[at + step] if right else rng.randint(2, 250)))
            same = next((n for n, token in enumerate(writing.drafted) if token != tokens[at + n]), len(writing.drafted))
            events += writing.commit(tokens[at : at + same + 1])
        said, text = committed(events)
        assert said == writing.committed == tokens[: len(said)]
        whole = TOKENIZER.decode(said)
        stop = next((whole.find(stop) for stop in writing.params.stop if stop in whole), len(whole))
        assert text == whole[:stop]
        assert events[-1].finish == ("stop" if stop < len(whole) else "length")


def test_the_end_token_ends_draft_and_text() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [9, 11]
    assert end_tokens(model, TOKENIZER) == {9, 11}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, TOKENIZER) == {TOKENIZER.eos_token_id}
    writing = _writing()
    writing.draft(2)
    assert not writing.may_draft
    (event,) = writing.commit([2, 7])
    assert (event.tokens, event.finish, writing.may_draft) == ((2,), "stop", False)
