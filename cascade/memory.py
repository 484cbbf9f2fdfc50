"""One model's part of a conversation: what it has read of it, and that alone is read which it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.cascade.reader import Reader
from kvbridge.cascade.sampling import check_logits
from kvbridge.model import KVModel


def common_length(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with; the last of `tokens` is left out, since it must be read for its logits."""
    limit = min(len(held), len(tokens) - 1)
    return next((at for at in range(limit) if held[at] != tokens[at]), limit)


def shared_cache(model: KVModel, cache: DynamicCache) -> DynamicCache:
    """A cache that grows and is cropped on its own, over the same tensors: a dynamic layer never writes in place."""
    shared = compat.empty_cache(model.model)
    for layer in range(len(cache.layers)):
        tensors = compat.layer_tensors(cache, layer)
        if tensors is not None:
            compat.put_layer(shared, layer, *tensors)
    return shared


class Memory:
    """A model in the middle of a conversation.

    Attributes:
        tokens: that its cache holds, in order, from position 0 on.
        approximate: some of the cache was mapped, so it is never an exact prefix of anything.
        read_tokens: how many tokens the model has read so far, also of what was dropped since.
        origin: name of the stored cache that this one goes on from; `None` where there is none.
    """

    def __init__(self, model: KVModel) -> None:
        self.model = model
        self.read_tokens = 0
        self.reset()

    @property
    def cache(self) -> DynamicCache:
        """Of `tokens`."""
        return self._reader.cache

    def reset(self) -> None:
        """Forget the conversation."""
        self.adopt((), compat.empty_cache(self.model.model), approximate=False)

    def adopt(
        self,
        tokens: Sequence[int],
        cache: DynamicCache,
        *,
        approximate: bool,
        origin: tuple[Any, tuple[int, ...]] | None = None,
    ) -> None:
        """Go on from a cache that holds `tokens`."""
        self._reader = Reader(self.model, cache, len(tokens))
        self.tokens, self.approximate, self.origin = list(tokens), approximate, origin

    def follow(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Go on where a reader over this memory's cache has got to in `tokens`."""
        self.adopt(tokens[: reader.position], reader.cache, approximate=self.approximate, origin=self.origin)
        self.read_tokens += reader.read_tokens

    def align(self, tokens: Sequence[int]) -> int:
        """Drop what does not begin `tokens`; how many are held then, the last of `tokens` never."""
        common = common_length(self.tokens, tokens)
        if common < 1:
            self.reset()
        self._reader.rewind(common)
        self.tokens = self.tokens[:common]
        return common

    def read(self, tokens: Sequence[int]) -> Float[Tensor, "V"]:
        """The logits that follow `tokens`, of which those are read that are not held.

        Raises:
            CacheError: a logit is not a number, or none is finite.
        """
        fresh = tokens[self.align(tokens) :]
        logits = self._reader.read(fresh)[-1]
        self.tokens += fresh
        self.read_tokens += len(fresh)
        check_logits(logits)
        return logits

    def hold(self, tokens: Sequence[int]) -> None:
        """Hold `tokens` and no more.

        Raises:
            CacheError: a logit is not a number, or none is finite.
        """
        if self.tokens[: len(tokens)] != list(tokens):
            self.read(tokens)
        self._reader.rewind(len(tokens))
        self.tokens = self.tokens[: len(tokens)]
