"""The one place that knows how transformers 5.16 to 5.24+ name and shape things."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from functools import cache as memoize
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvbridge.errors import UnsupportedModelError

SUPPORTED_ATTENTION = ("sdpa", "eager")


@memoize
def _cache_argument(model_class: type[nn.Module]) -> str:
    # transformers 5.24 renamed `past_key_values` to `cache`; GPT-NeoX forwards keep the same outer name.
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def run(module: PreTrainedModel, input_ids: Tensor, cache: Cache, **arguments: Any) -> Any:
    """Call a model or backbone on `input_ids` with `cache`, which it extends in place."""
    return module(input_ids=input_ids, use_cache=True, **{_cache_argument(type(module)): cache}, **arguments)


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder without its language-model head."""
    return cast(PreTrainedModel, model.base_model)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers.

    Raises:
        UnsupportedModelError: the backbone has no `layers` list of `num_hidden_layers` entries.
    """
    layers = getattr(backbone(model), "layers", None)
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(layers, nn.ModuleList) or len(layers) != expected:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {expected} decoder layers in `{model.base_model_prefix}.layers`; "
            "kvbridge supports decoder-only transformers of the Llama kind."
        )
    return layers


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A fresh growing cache laid out for `model`."""
    return DynamicCache(config=model.config)


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """One word per cache layer: `full`, or the class that transformers would use instead."""
    return [
        "full" if type(layer) is DynamicLayer else type(layer).__name__.removeprefix("Dynamic").removesuffix("Layer")
        for layer in empty_cache(model).layers
    ]


def layer_tensors(cache: Cache, layer: int) -> tuple[Tensor, Tensor] | None:
    """Keys and values `[B, H, T, D]` that `cache` holds for `layer`, without a static cache's unused rest."""
    entry: Any = cache.layers[layer] if layer < len(cache.layers) else None
    if entry is None or not entry.is_initialized:
        return None
    if entry.keys is None or entry.values is None:
        return None
    length = int(entry.get_seq_length())
    return entry.keys[..., :length, :], entry.values[..., :length, :]


def put_layer(cache: Cache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Give an empty layer of `cache` its keys and values `[B, H, T, D]`; a dynamic layer takes them without a copy."""
    entry: Any = cache.layers[layer]
    if isinstance(entry, StaticLayer):
        entry.update(keys, values)
        return
    entry.lazy_initialization(keys, values)
    entry.keys, entry.values = keys, values


def longest(cache: Cache) -> int:
    """Tokens that the fullest layer of `cache` holds."""
    layers: list[Any] = cache.layers
    return max((int(layer.get_seq_length()) for layer in layers), default=0)


def room(cache: Cache) -> int | None:
    """How many tokens a preallocated cache can hold; `None` where it grows."""
    sizes = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    return min(sizes, default=None)


class _HeadComplete(Exception):
    """Raised by `_HeadCache` once the last wanted layer is stored."""


class _HeadCache(DynamicCache):
    """A cache that stops the forward pass as soon as layer `last` has its keys and values."""

    def __init__(self, model: PreTrainedModel, last: int, past: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=model.config)
        self.last = last
        for layer, (keys, values) in enumerate(past):
            put_layer(self, layer, keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        stored = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise _HeadComplete
        return stored


def run_head(
    model: PreTrainedModel,
    input_ids: Tensor,
    last: int,
    positions: Tensor | None = None,
    past: Sequence[tuple[Tensor, Tensor]] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[B, H, P + T, D]` of layers `0 … last`, exact for exact `past`, and no work beyond them.

    Layer `last` costs its norm and its projections only, whatever the architecture: the cache ends the pass.

    Args:
        model: the transformer.
        input_ids: tokens `[B, T]`.
        last: the last layer wanted.
        positions: of the tokens `[T]`; those after `past` by default.
        past: keys and values `[B, H, P, D]` of the same layers for the P tokens before, if there are any.
    """
    cache = _HeadCache(model, last, list(past))
    if positions is None:
        held = past[0][0].shape[-2] if past else 0
        positions = torch.arange(held, held + input_ids.shape[1], device=input_ids.device)
    with torch.no_grad(), contextlib.suppress(_HeadComplete):
        run(backbone(model), input_ids, cache, position_ids=positions[None])
    stored = [layer_tensors(cache, layer) for layer in range(last + 1)]
    if any(tensors is None for tensors in stored):
        raise UnsupportedModelError(
            f"{type(model).__name__} stored no keys and values for its first {last + 1} layers."
        )
    return [tensors for tensors in stored if tensors is not None]


def copy_cache(cache: Cache, model: PreTrainedModel, length: int | None = None, batch: int = 1) -> DynamicCache:
    """An independent growing cache with the first `length` tokens of `cache` (all by default), `batch` times over."""
    copied = empty_cache(model)
    for layer in range(len(cache.layers)):
        tensors = layer_tensors(cache, layer)
        if tensors is not None:
            # `repeat` copies even once.
            keys, values = (t[..., :length, :].repeat(batch, 1, 1, 1) for t in tensors)
            put_layer(copied, layer, keys, values)
    return copied


def static_cache(model: PreTrainedModel, max_length: int) -> StaticCache:
    """A preallocated cache for up to `max_length` tokens."""
    return StaticCache(config=model.config, max_cache_len=max_length)


def causal_mask(query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask `[1, 1, queries, keys]`: a query sees every key at its own or an earlier position."""
    hidden = key_positions[None, :] > query_positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
