"""The one place that knows how transformers 5.16 to 5.24+ name and shape things."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache as memoize
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvbridge.errors import UnsupportedModelError

SUPPORTED_ATTENTION = ("sdpa", "eager")


@memoize
def _cache_argument(model_class: type[nn.Module]) -> str:
    # transformers 5.24 renamed `past_key_values` to `cache`; GPT-NeoX forwards keep the same outer name.
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def run(module: transformers.PreTrainedModel, input_ids: Tensor | None, cache: Cache, **arguments: Any) -> Any:
    """Call a model or backbone on `input_ids`, or on `inputs_embeds=`, with `cache`, which it extends in place."""
    return module(input_ids=input_ids, use_cache=True, **{_cache_argument(type(module)): cache}, **arguments)


def backbone(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The decoder without its language-model head."""
    return cast("transformers.PreTrainedModel", model.base_model)


def decoder_layers(model: transformers.PreTrainedModel) -> nn.ModuleList:
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


@contextlib.contextmanager
def residual_streams(model: transformers.PreTrainedModel, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward pass leaves the residual stream `[B, T, E]` at the input of each of `layers`."""
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found[layer] = arguments[0] if arguments else keywords["hidden_states"]

        return hook

    modules = decoder_layers(model)
    handles = [modules[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def head_logits(model: transformers.PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits `[…, V]` of the backbone's output `[…, E]`, for models whose head is one linear map.

    Raises:
        UnsupportedModelError: the model has no head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head.")
    return head(hidden)


def empty_cache(model: transformers.PreTrainedModel) -> DynamicCache:
    """A fresh growing cache laid out for `model`."""
    return DynamicCache(config=model.config)


def layer_kinds(model: transformers.PreTrainedModel) -> list[str]:
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


def _watched(layer: nn.Module, number: int, before: Callable[[int, Tensor], Tensor]) -> nn.Module:
    """A shallow copy of a decoder layer with a hook of its own on what enters it."""

    def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (before(number, given[0]), *given[1:]), named
        return given, named | {"hidden_states": before(number, named["hidden_states"])}

    copied = copy.copy(layer)
    # The dictionaries are shared by a shallow copy; a hook must not reach the live layer.
    copied._forward_pre_hooks = OrderedDict(layer._forward_pre_hooks)
    copied._forward_pre_hooks_with_kwargs = OrderedDict(layer._forward_pre_hooks_with_kwargs)
    copied.register_forward_pre_hook(enter, with_kwargs=True)
    return copied


def with_layers(model: transformers.PreTrainedModel, layers: Iterable[nn.Module]) -> transformers.PreTrainedModel:
    """A shallow copy of the backbone, with all its weights, that runs other decoder layers."""
    copied = copy.copy(backbone(model))
    # A wrapped forward is bound to the original and would run its layers.
    copied.__dict__.pop("forward", None)
    copied._modules = {**copied._modules, "layers": nn.ModuleList(layers)}
    return copied


def watched_backbone(
    model: transformers.PreTrainedModel, layers: range, before: Callable[[int, Tensor], Tensor]
) -> transformers.PreTrainedModel:
    """A backbone that shares all weights with the model's own, runs some of its decoder layers and watches them.

    The model is left as it is, so that other threads can use it meanwhile.

    Args:
        model: the transformer.
        layers: the decoder layers that run.
        before: called with a layer's number and the residual stream `[B, T, E]` at its input; what it returns enters.
    """
    every = decoder_layers(model)
    return with_layers(model, [_watched(every[number], number, before) for number in layers])


def copy_cache(
    cache: Cache, model: transformers.PreTrainedModel, length: int | None = None, batch: int = 1
) -> DynamicCache:
    """An independent growing cache with the first `length` tokens of `cache` (all by default), `batch` times over."""
    copied = empty_cache(model)
    for layer in range(len(cache.layers)):
        tensors = layer_tensors(cache, layer)
        if tensors is not None:
            # `repeat` copies even once.
            keys, values = (t[..., :length, :].repeat(batch, 1, 1, 1) for t in tensors)
            put_layer(copied, layer, keys, values)
    return copied


def static_cache(model: transformers.PreTrainedModel, max_length: int) -> StaticCache:
    """A preallocated cache for up to `max_length` tokens."""
    return StaticCache(config=model.config, max_cache_len=max_length)


def causal_mask(query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask `[1, 1, queries, keys]`: a query sees every key at its own or an earlier position."""
    hidden = key_positions[None, :] > query_positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
