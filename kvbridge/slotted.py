"""A cache of fixed length in which what a model reads goes to given slots instead of the end."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class SlottedLayer(DynamicLayer):
    """One layer: new keys and values are written to `slots`, and all of them are seen."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.buffers, self.slots = (keys, values), slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers
        keys[:, :, self.slots] = key_states
        values[:, :, self.slots] = value_states
        return keys, values


def slotted(buffers: Float[Tensor, "2 L B H T D"], slots: Int[Tensor, "N"]) -> Cache:
    """A cache over keys and values that are there already; a pass of `N` tokens writes theirs to `slots`.

    Args:
        buffers: keys and values of all layers, written in place.
        slots: where the tokens of the next pass go.
    """
    return Cache(layers=[SlottedLayer(keys, values, slots) for keys, values in zip(*buffers, strict=True)])
