"""Copies of a model, with all its weights, that show what its attention does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbridge import compat
from kvbridge.errors import UnsupportedModelError

RECORDED_ATTENTION, QUERIED_ATTENTION = "kvbridge_recorded", "kvbridge_queried"
OUTPUT_PROJECTIONS = ("o_proj", "dense")


def _refuse_special(module: nn.Module, given: dict[str, Any], instead: str) -> None:
    special = [name for name in ("softcap", "s_aux") if given.get(name) is not None]
    if special:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives its attention {special[0]}=, which recording does not know; "
            f"use {instead} with this model."
        )


def _queried_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **given: Any
) -> tuple[Tensor, Any]:
    """The library's own attention, after the scaled queries have gone to the module's `record`."""
    _refuse_special(module, given, "a loss or metric other than attention")
    # Importing it takes seconds.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module.record(query * scaling)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **given)


def _recorded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """Attention in fp32, whose probabilities `[B, H_q, queries, keys]` go to the module's `record`."""
    _refuse_special(module, given, "plan.native_attended=0")
    batch, heads, queries, width = query.shape
    # Query heads that share a KV head lie side by side.
    grouped = query.reshape(batch, key.shape[1], -1, width).float()
    scores = (grouped @ key.float().transpose(-1, -2)).view(batch, heads, queries, -1)
    probabilities = torch.softmax(scores * scaling + mask.float(), dim=-1)
    module.record(probabilities)
    output = probabilities.view(*grouped.shape[:3], -1) @ value.float()
    return output.view(batch, heads, queries, -1).transpose(1, 2).to(query.dtype), None


def recorded_backbone(
    model: transformers.PreTrainedModel, record: Callable[[Tensor], None]
) -> transformers.PreTrainedModel:
    """A backbone that shares all weights with the model's own and shows its attention.

    The model keeps its own attention, so that other threads can use it meanwhile.

    Args:
        model: the transformer.
        record: called in every layer with the attention probabilities `[B, H_q, queries, keys]` in fp32.
    """
    transformers.AttentionInterface.register(RECORDED_ATTENTION, _recorded_attention)
    return _with_attention(model, RECORDED_ATTENTION, record)


def queried_backbone(
    model: transformers.PreTrainedModel, record: Callable[[Tensor], None]
) -> transformers.PreTrainedModel:
    """A backbone that shares all weights with the model's own and shows its queries.

    Args:
        model: the transformer.
        record: called in every layer with the rotated queries `[B, H_q, T, D]`, times the scale of their products.
    """
    transformers.AttentionInterface.register(QUERIED_ATTENTION, _queried_attention)
    return _with_attention(model, QUERIED_ATTENTION, record)


def _attention_parts(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a decoder layer that choose an attention implementation, by name."""
    return [
        (n, part) for n, part in layer.named_children() if isinstance(getattr(part, "config", None), PreTrainedConfig)
    ]


def output_projections(model: transformers.PreTrainedModel) -> list[Tensor]:
    """What turns the heads' outputs of each layer into the residual stream: weights `[E, H_q · D]`.

    Raises:
        UnsupportedModelError: an attention module has no such projection of a known name.
    """
    found = []
    for number, layer in enumerate(compat.decoder_layers(model)):
        named = (getattr(part, name, None) for _, part in _attention_parts(layer) for name in OUTPUT_PROJECTIONS)
        weights = [part.weight for part in named if isinstance(part, nn.Linear)]
        if len(weights) != 1:
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} has no output projection called "
                f"{' or '.join(OUTPUT_PROJECTIONS)}; use a loss or metric other than attention."
            )
        found.append(weights[0])
    return found


def _with_attention(
    model: transformers.PreTrainedModel, name: str, record: Callable[[Tensor], None]
) -> transformers.PreTrainedModel:
    """A copy of the backbone, with all its weights, whose attention is the one registered under `name`."""

    def replaced(layer: nn.Module) -> nn.Module:
        copied = copy.copy(layer)
        copied._modules = dict(layer._modules)
        for place, part in _attention_parts(layer):
            copied._modules[place] = attention = copy.copy(part)
            config = copy.copy(cast(Any, part).config)
            config._attn_implementation = name
            attention.__dict__.update(config=config, record=record)
        return copied

    return compat.with_layers(model, map(replaced, compat.decoder_layers(model)))
