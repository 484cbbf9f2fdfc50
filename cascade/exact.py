"""Exact mode: text at once from the mapped cache, and in the end the target's own.

    hand-off ─▶ draft ─▶ [chunk] ─▶ draft ─▶ [chunk] ─▶ draft ─▶ [last chunk + all drafted tokens] ─▶ verify ─▶ go on
                mapped    native     mapped    native    mapped    one native pass                             native

While the target reads the prompt natively, chunk by chunk, it drafts tokens on the mapped cache in between. The last
chunk and the drafted tokens are one pass over the native cache, whose logits verify the draft; the native cache is
cropped to what was accepted, and the rest is written from it. Greedy text is the target's own token for token, sampled
text has its distribution; the mapped cache decides only how much of the draft stays.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.assembly import Handoff
from kvbridge.cascade.events import Event, Finish
from kvbridge.cascade.reader import Reader, decode_events
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.speculative import SourceDrafter, speculate
from kvbridge.cascade.verify import Draft, Tally, verify
from kvbridge.cascade.writing import Writing
from kvbridge.errors import UsageError
from kvbridge.model import KVModel


@dataclass(frozen=True, slots=True)
class DraftSchedule:
    """How drafting and the native prefill take turns on one device; it knows nothing of what the target thinks.

    Attributes:
        chunk: prompt tokens that the target reads natively at a time.
        steps: tokens that are drafted before each chunk.

    Raises:
        UsageError: a number is below 1.
    """

    chunk: int = 128
    steps: int = 2

    def __post_init__(self) -> None:
        for name in ("chunk", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"schedule.{name}={getattr(self, name)}: give 1 or more tokens.")

    def chunks(self, prompt: list[int]) -> list[list[int]]:
        """The prompt in pieces of `chunk` tokens, the last one as long as what is left."""
        return [prompt[start : start + self.chunk] for start in range(0, len(prompt), self.chunk)]


@dataclass(slots=True)
class Ending:
    """What exact mode leaves behind.

    Attributes:
        native: the target over its own, exact cache, with the last committed token still to be read.
        mapped: how the draft on the mapped cache fared.
        source: how the source's drafts after it fared.
    """

    native: Reader
    mapped: Tally = field(default_factory=Tally)
    source: Tally = field(default_factory=Tally)


def _draft_steps(
    mapped: Reader, handoff: Handoff, draft: Draft, writing: Writing, steps: int
) -> Generator[Event, None, None]:
    """Draft up to `steps` more tokens on the mapped cache."""
    for _ in range(steps):
        if not writing.may_draft:
            return
        logits = mapped.read(draft.tokens[-1:])[0] if draft.tokens else handoff.logits[0]
        token = draft.add(logits, writing)
        if token is None:
            return
        yield writing.draft(token)


def write_exactly(
    writing: Writing,
    handoff: Handoff,
    native: Reader,
    schedule: DraftSchedule,
    drafter: SourceDrafter | None = None,
) -> Generator[Event, None, Ending]:
    """Exact mode from where the target's own cache is.

    Args:
        writing: of which nothing is committed yet.
        handoff: the target's mapped cache of the prompt, which is left as it is.
        native: the target over an exact cache of the beginning of the prompt, or of nothing; it reads the rest.
        schedule: how drafting and prefill take turns.
        drafter: the source, which drafts what follows the first verification; without it the target writes alone.

    Raises:
        CacheError: the hand-off was of another prompt, or the target's own logits are not finite.
    """
    mapped = Reader.after(native.model, handoff, writing.prompt)
    draft, ending = Draft(), Ending(native)
    *chunks, last = schedule.chunks(writing.prompt[native.position :])
    try:
        for chunk in chunks:
            yield from _draft_steps(mapped, handoff, draft, writing, schedule.steps)
            native.take_in(chunk)
        yield from _draft_steps(mapped, handoff, draft, writing, schedule.steps)
    finally:
        mapped.rewind(handoff.next_position)
    verified = verify(native.read([*last, *draft.tokens], keep=len(draft.tokens) + 1), draft, writing)
    ending.mapped.add(len(draft.tokens), len(verified) - 1)
    yield from writing.commit(verified)
    native.rewind(writing.unread)
    if drafter is not None:
        yield from speculate(native, drafter, writing, ending.source)
    else:
        yield from decode_events(native, writing)
    return ending


def exact_events(
    target: KVModel,
    handoff: Handoff,
    input_ids: Int[Tensor, "B T"],
    params: SamplingParams,
    *,
    tokenizer: PreTrainedTokenizerBase,
    schedule: DraftSchedule | None = None,
    drafter: SourceDrafter | None = None,
    generator: torch.Generator | None = None,
) -> Generator[Event, None, Ending]:
    """Draft on a mapped cache, verify on the native one, go on natively.

    Args:
        target: the model that writes.
        handoff: its mapped cache of the prompt, which is left as it is.
        input_ids: the prompt, one.
        params: how tokens are chosen.
        tokenizer: for the text of events.
        schedule: how drafting and prefill take turns.
        drafter: the source, which drafts what follows the first verification; without it the target writes alone.
        generator: source of random draws, in place of one that starts at `params.seed`.

    Raises:
        UsageError: there is more than one prompt, or no room for the new tokens.
        CacheError: the hand-off was of another prompt.
    """
    writing = Writing(target, input_ids, params, tokenizer, generator)
    return (yield from write_exactly(writing, handoff, Reader.fresh(target), schedule or DraftSchedule(), drafter))


@dataclass(frozen=True, slots=True)
class ExactText:
    """A finished continuation.

    Attributes:
        tokens: the committed ones; an end token and those of a stop string included.
        text: without them.
        finish: `stop` or `length`.
        ending: the native cache and how the drafts fared.
        seconds: wall time from the call on, to the first `provisional` token, the first `committed` one and the `end`;
            the hand-off came before.
    """

    tokens: list[int]
    text: str
    finish: Finish
    ending: Ending
    seconds: dict[str, float]


def generate_exact(
    target: KVModel,
    handoff: Handoff,
    input_ids: Int[Tensor, "B T"],
    params: SamplingParams,
    **options: Any,
) -> ExactText:
    """The committed text of `exact_events`, whose arguments these are, with the times that drafting is about."""
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    committed: list[Event] = []
    events = exact_events(target, handoff, input_ids, params, **options)
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            ending: Ending = end.value
            break
        if event.kind != "retract":
            name = "provisional" if event.kind == "draft" else "committed"
            seconds.setdefault(name, time.perf_counter() - start)
        if event.kind == "commit":
            committed.append(event)
    seconds["end"] = time.perf_counter() - start
    finish = committed[-1].finish or "length"
    tokens = [token for event in committed for token in event.tokens]
    return ExactText(tokens, "".join(event.text for event in committed), finish, ending, seconds)
