"""Passes through the first or the last layers of a model, which end with the keys and values of the last one wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.errors import UnsupportedModelError


class _PartComplete(Exception):
    """Raised by `_PartCache` once the last wanted layer is stored."""


class _PartCache(DynamicCache):
    """A cache that stops the forward pass as soon as layer `last` has its keys and values."""

    def __init__(self, model: transformers.PreTrainedModel, last: int, past: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=model.config)
        self.last = last
        for layer, (keys, values) in past.items():
            compat.put_layer(self, layer, keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        stored = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise _PartComplete
        return stored

    def stored(self, model: transformers.PreTrainedModel, layers: range) -> list[tuple[Tensor, Tensor]]:
        found = [compat.layer_tensors(self, layer) for layer in layers]
        if any(tensors is None for tensors in found):
            raise UnsupportedModelError(
                f"{type(model).__name__} stored no keys and values for its layers {layers.start} … {layers.stop - 1}."
            )
        return [tensors for tensors in found if tensors is not None]


class HeadPass(NamedTuple):
    """What a pass through the first layers of a model leaves.

    Attributes:
        layers: keys and values `[B, H, P + T, D]` of layers `0 … last`.
        residual: residual stream `[B, T, E]` at the inputs of layers `0 … last`.
    """

    layers: list[tuple[Tensor, Tensor]]
    residual: list[Tensor]


def run_head(
    model: transformers.PreTrainedModel,
    input_ids: Tensor,
    last: int,
    positions: Tensor | None = None,
    past: Sequence[tuple[Tensor, Tensor]] = (),
) -> HeadPass:
    """Layers `0 … last`, exact for exact `past`, and no work beyond their keys and values.

    Layer `last` costs its norm and its projections only, whatever the architecture: the cache ends the pass.

    Args:
        model: the transformer.
        input_ids: tokens `[B, T]`.
        last: the last layer wanted.
        positions: of the tokens `[T]`; those after `past` by default.
        past: keys and values `[B, H, P, D]` of the same layers for the P tokens before, if there are any.
    """
    cache = _PartCache(model, last, dict(enumerate(past)))
    residual: list[Tensor] = []

    def record(_: int, hidden: Tensor) -> Tensor:
        residual.append(hidden)
        return hidden

    if positions is None:
        held = past[0][0].shape[-2] if past else 0
        positions = torch.arange(held, held + input_ids.shape[1], device=input_ids.device)
    module = compat.watched_backbone(model, range(last + 1), record)
    with torch.no_grad(), contextlib.suppress(_PartComplete):
        compat.run(module, input_ids, cache, position_ids=positions[None])
    return HeadPass(cache.stored(model, range(last + 1)), residual)


def run_tail(
    model: transformers.PreTrainedModel,
    boundary: Tensor,
    first: int,
    positions: Tensor,
    past: Sequence[tuple[Tensor, Tensor]] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[B, H, T, D]` of layers `first … L − 1`, from the residual stream at the input of layer `first`.

    The last layer costs its norm and its projections only, and needs no `past`.

    Args:
        model: the transformer.
        boundary: residual stream `[B, T, E]`.
        first: the layer that it enters.
        positions: of the tokens `[T]`, consecutive.
        past: keys and values `[B, H, P, D]` of layers `first … L − 1` at positions `0 … P − 1`, which the tokens see.
    """
    layers = range(first, len(compat.decoder_layers(model)))
    cache = _PartCache(model, layers[-1], dict(zip(layers, past, strict=False)))
    boundary = boundary.to(model.dtype)
    held = past[0][0].shape[-2] if past else 0
    seen = torch.cat((torch.arange(held, device=positions.device), positions))
    # An architecture may scale what it takes for embeddings: what enters the first layer is set there.
    module = compat.watched_backbone(model, layers, lambda layer, hidden: boundary if layer == first else hidden)
    with torch.no_grad(), contextlib.suppress(_PartComplete):
        compat.run(
            module,
            None,
            cache,
            inputs_embeds=boundary,
            position_ids=positions[None],
            attention_mask=compat.causal_mask(positions, seen, model.dtype),
        )
    return [(keys[..., held:, :], values[..., held:, :]) for keys, values in cache.stored(model, layers)]
