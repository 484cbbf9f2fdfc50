"""A text in the making: what was drafted and committed of it, and the events that say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.cascade.events import Event, Finish
from kvbridge.cascade.sampling import SamplingParams, draw, process_logits
from kvbridge.cascade.text import TextStream, end_tokens
from kvbridge.errors import UsageError
from kvbridge.model import KVModel


def agreeing(first: Sequence[object], second: Sequence[object]) -> int:
    """How many entries two sequences have in common before they differ."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


class Writing:
    """One continuation of one prompt under one caller's parameters.

    Attributes:
        prompt: tokens that it continues.
        vocabulary: how many tokens it may use; those that the target knows by default.
        params: what was asked for.
        generator: source of every random draw.
        committed: new tokens that are certain; at the end they are what `generate` returns after the prompt, an end
            token and the tokens of a stop string included.
        drafted: provisional tokens after them.
        finish: why nothing follows, once nothing does.

    Raises:
        UsageError: there is more than one prompt, none, or no room for the new tokens.
    """

    def __init__(
        self,
        target: KVModel,
        input_ids: Int[Tensor, "B T"],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        generator: torch.Generator | None = None,
        vocabulary: int | None = None,
    ) -> None:
        batch, tokens = input_ids.shape
        if batch != 1 or tokens == 0:
            raise UsageError(f"{batch} prompts of {tokens} tokens: give one prompt of one token or more at a time.")
        longest = target.geometry.max_positions
        if tokens + params.max_new_tokens > longest:
            raise UsageError(
                f"a prompt of {tokens} tokens and max_new_tokens={params.max_new_tokens}: the target was made for up "
                f"to {longest} tokens; give a shorter prompt or fewer new tokens."
            )
        self.prompt: list[int] = input_ids[0].tolist()
        self.vocabulary: int = vocabulary or target.model.config.vocab_size
        self.params = params
        self.generator = generator if generator is not None else params.generator()
        self.committed: list[int] = []
        self.drafted: list[int] = []
        self.finish: Finish | None = None
        self._seen = set(self.prompt)
        self._ends = end_tokens(target.model, tokenizer)
        self._text = TextStream(tokenizer, params.stop)
        self._draft_text = self._text
        self._shown = ""

    @property
    def unread(self) -> int:
        """Position of the last committed token, which a model reads next."""
        return len(self.prompt) + len(self.committed) - 1

    @property
    def may_draft(self) -> bool:
        """Whether another provisional token can follow those there are."""
        ended = bool(self.drafted) and (self.drafted[-1] in self._ends or self._draft_text.stopped)
        return self.finish is None and not ended and self.room > len(self.drafted)

    @property
    def room(self) -> int:
        """How many more tokens can be committed."""
        return self.params.max_new_tokens - len(self.committed)

    def distribution(self, logits: Float[Tensor, "V"], ahead: Sequence[int] = ()) -> Float[Tensor, "V"]:
        """What the token after the committed ones and `ahead` is drawn from, given its logits."""
        logits = logits[: self.vocabulary]
        # A model with fewer tokens than the other never makes those that it lacks.
        seen = [token for token in self._seen.union(ahead) if token < len(logits)]
        previous = torch.tensor(seen, dtype=torch.long, device=logits.device)
        return process_logits(logits, self.params, previous)

    def choose(self, logits: Float[Tensor, "V"]) -> int:
        """Draw the token after the committed ones."""
        return draw(self.distribution(logits), self.generator)

    def draft(self, token: int) -> Event:
        """Add a provisional token."""
        if not self.drafted:
            self._draft_text, self._shown = self._text.copy(), ""
        start = len(self.committed) + len(self.drafted)
        self.drafted.append(token)
        text = self._draft_text.push(token)
        self._shown += text
        return Event("draft", start, (token,), text)

    def commit(self, tokens: Sequence[int]) -> Iterator[Event]:
        """Add tokens that are certain, up to one that ends the text; provisional tokens that differ are taken back."""
        start, text, taken = len(self.committed), "", list[int]()
        for token in tokens:
            taken.append(token)
            text += self._text.push(token)
            if token in self._ends or self._text.stopped:
                self.finish = "stop"
            elif len(taken) == self.room:
                self.finish = "length"
            if self.finish is not None:
                break
        if self.finish is not None:
            text += self._text.flush()
        same = agreeing(self.drafted, taken)
        if same < len(self.drafted):
            kept = agreeing(self._shown, text)
            yield Event("retract", start + same, tuple(self.drafted[same:]), self._shown[kept:])
        self.committed += taken
        self._seen.update(taken)
        self.drafted, self._shown = [], ""
        yield Event("commit", start, tuple(taken), text, self.finish)
