"""A model going on from a cache, token by token or several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.assembly import Handoff
from kvbridge.cascade.events import Event
from kvbridge.cascade.sampling import check_logits
from kvbridge.cascade.writing import Writing
from kvbridge.errors import CacheError
from kvbridge.model import KVModel


@dataclass(slots=True)
class Reader:
    """A model and what it holds of a text.

    Attributes:
        model: the model that reads.
        cache: what it has read; it grows and is cropped in place.
        position: of the token that it reads next.
        read_tokens: how many it has read, also of what was forgotten since.
    """

    model: KVModel
    cache: DynamicCache
    position: int
    read_tokens: int = 0

    @classmethod
    def fresh(cls, model: KVModel) -> Reader:
        """A model that has read nothing."""
        return cls(model, compat.empty_cache(model.model), 0)

    @classmethod
    def after(cls, target: KVModel, handoff: Handoff, prompt: Sequence[int]) -> Reader:
        """The target over the cache of a hand-off of `prompt`.

        Raises:
            CacheError: the hand-off was of a prompt of another length.
        """
        if handoff.next_position != len(prompt):
            raise CacheError(
                f"the hand-off covers {handoff.next_position} tokens and the prompt has {len(prompt)}; "
                "give the prompt that was handed off."
            )
        return cls(target, handoff.cache, handoff.next_position)

    def read(self, tokens: Sequence[int], keep: int = 1) -> Float[Tensor, "K V"]:
        """Read tokens; the logits of the last `keep` of them."""
        return self._run(self.model.model, tokens, logits_to_keep=keep).logits[0]

    def take_in(self, tokens: Sequence[int]) -> None:
        """Read tokens for the cache alone, without the language-model head."""
        self._run(compat.backbone(self.model.model), tokens)

    def _run(self, module: transformers.PreTrainedModel, tokens: Sequence[int], **more: int) -> Any:
        start, self.position = self.position, self.position + len(tokens)
        self.read_tokens += len(tokens)
        device = self.model.device
        with torch.no_grad():
            return compat.run(
                module,
                torch.tensor([list(tokens)], device=device),
                self.cache,
                position_ids=torch.arange(start, self.position, device=device)[None],
                **more,
            )

    def rewind(self, position: int) -> None:
        """Forget all tokens from `position` on."""
        if position < self.position:
            self.cache.crop(position - self.position)
            self.position = position


def decode_events(reader: Reader, writing: Writing) -> Iterator[Event]:
    """Commit token after token until the text ends; the last committed token is the next one that `reader` reads.

    Raises:
        CacheError: the logits are not finite.
    """
    while writing.finish is None:
        logits = reader.read(writing.committed[-1:])[0]
        check_logits(logits)
        yield from writing.commit([writing.choose(logits)])
