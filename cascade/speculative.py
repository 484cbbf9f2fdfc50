"""Speculative use of a pair: after the hand-off the source drafts for the target.

The source has read the prompt before the hand-off, so its cache is there; a round is a few steps of the source and one
pass of the target, which verifies them. Over a mapped cache the text is distributed as the target's own over that
cache; over a native one, as the target's own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from kvbridge import compat
from kvbridge.assembly import Handoff
from kvbridge.cascade.events import Event
from kvbridge.cascade.reader import Reader
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.verify import Draft, Tally, verify
from kvbridge.cascade.writing import Writing, agreeing
from kvbridge.errors import CacheError, UsageError
from kvbridge.model import KVModel


class SourceDrafter:
    """The source, drafting a fixed number of tokens a round.

    Its cache follows the text: what the target did not accept is cropped when the next round begins.

    Attributes:
        reader: the source over its cache of the prompt.
        length: tokens per round.

    Args:
        source: the model that drafts.
        cache: of the prompt and of what was written after it.
        length: tokens per round.
        written: tokens after the prompt that the cache holds.

    Raises:
        UsageError: the length is below 1.
    """

    def __init__(self, source: KVModel, cache: DynamicCache, length: int = 4, written: Sequence[int] = ()) -> None:
        if length < 1:
            raise UsageError(f"draft length {length}: give 1 or more tokens per round.")
        self.length = length
        self._read = list(written)
        self._prompt = compat.longest(cache) - len(self._read)
        self.reader = Reader(source, cache, self._prompt + len(self._read))

    def require_prompt(self, tokens: int) -> None:
        """Refuse to draft for a prompt of another length.

        Raises:
            CacheError: naming both lengths.
        """
        if self._prompt != tokens:
            raise CacheError(
                f"the source's cache covers {self._prompt} tokens and the prompt has {tokens}; "
                "give its cache of the whole prompt."
            )

    def draft(self, writing: Writing) -> Draft:
        """Tokens that may follow the committed ones; one fewer than there is room for, since the target adds one.

        A text with a token that the source does not know is beyond it: nothing is drafted.
        """
        self.follow(writing.committed)
        draft, unread = Draft(), writing.committed[len(self._read) :]
        if max(unread) >= self.reader.model.model.config.vocab_size:
            return draft
        for _ in range(min(self.length, writing.room - 1)):
            token = draft.add(self._step(unread), writing)
            if token is None:
                break
            unread = [token]
        return draft

    def follow(self, committed: list[int]) -> None:
        """Forget what was read and is not the text, and the last committed token, whose logits a draft begins with."""
        same = agreeing(self._read, committed[:-1])
        self.reader.rewind(self._prompt + same)
        self._read = self._read[:same]

    def _step(self, tokens: list[int]) -> Tensor:
        self._read = self._read + tokens
        return self.reader.read(tokens)[0]


def speculate(target: Reader, drafter: SourceDrafter, writing: Writing, tally: Tally) -> Iterator[Event]:
    """Let the source draft and the target verify until the text ends; no cache is left with a token that is not in it.

    Args:
        target: over a cache of all but the last committed token.
        drafter: the source.
        writing: whose first token is committed already.
        tally: counts what was drafted and accepted.

    Raises:
        CacheError: the source has read another prompt, or the target's logits are not finite.
    """
    drafter.require_prompt(len(writing.prompt))
    while writing.finish is None:
        draft = drafter.draft(writing)
        logits = target.read([*writing.committed[-1:], *draft.tokens], keep=len(draft.tokens) + 1)
        verified = verify(logits, draft, writing)
        tally.add(len(draft.tokens), len(verified) - 1)
        yield from writing.commit(verified)
        target.rewind(writing.unread)
    drafter.follow(writing.committed)


def speculative_events(
    target: KVModel,
    handoff: Handoff,
    input_ids: Int[Tensor, "B T"],
    params: SamplingParams,
    drafter: SourceDrafter,
    *,
    tokenizer: PreTrainedTokenizerBase,
    generator: torch.Generator | None = None,
) -> Generator[Event, None, Tally]:
    """Go on from a hand-off with the source drafting; every event is a commit, and the tally is what is returned.

    Args:
        target: the model that writes.
        handoff: its cache of the prompt, which grows with the text.
        input_ids: the prompt, one.
        params: how tokens are chosen.
        drafter: the source over its cache of the prompt.
        tokenizer: for the text of events.
        generator: source of random draws, in place of one that starts at `params.seed`.

    Raises:
        UsageError: there is more than one prompt, or no room for the new tokens.
        CacheError: the hand-off or the source's cache is of another prompt.
    """
    writing, tally = Writing(target, input_ids, params, tokenizer, generator), Tally()
    reader = Reader.after(target, handoff, writing.prompt)
    drafter.require_prompt(len(writing.prompt))
    yield from writing.commit([writing.choose(handoff.logits[0])])
    yield from speculate(reader, drafter, writing, tally)
    return tally
