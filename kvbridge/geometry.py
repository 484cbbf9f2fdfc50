"""The shape of one model's KV cache, read from its config and its live modules."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn

from kvbridge import compat
from kvbridge.errors import UnsupportedModelError

REFUSED_ROPE = {
    "dynamic": "its tables change with the sequence length, so one cache can hold keys of two tables",
    "longrope": "its tables change with the sequence length, so one cache can hold keys of two tables",
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Everything about a model that a map between KV caches depends on.

    Attributes:
        model_type: the architecture's name in transformers.
        layers: decoder layers, `L`.
        kv_heads: key-value heads per layer, `H`.
        head_dim: width of one key or value head, `D`.
        query_heads: query heads per layer.
        hidden_size: width of the residual stream.
        max_positions: longest sequence the model was made for, in tokens.
        rope: the model's `rope_parameters`, by value.
        rope_kind: the scaling rule among them (`default`, `llama3`, `yarn`, `linear`).
        key_norm: `none`, `head` (each key head normalised on its own) or `all` (all heads of a layer together).
    """

    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    hidden_size: int
    max_positions: int
    rope: dict[str, Any]
    rope_kind: str
    key_norm: str

    @property
    def width(self) -> int:
        """Numbers that all heads and layers hold for one token and one kind (keys or values)."""
        return self.layers * self.kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """One line for a person."""
        heads = f"{self.kv_heads} KV heads × {self.head_dim}"
        norm = "" if self.key_norm == "none" else f", keys normalised per {self.key_norm}"
        return f"{self.model_type}: {self.layers} layers, {heads}, RoPE {self.rope_kind}{norm}"


def _refuse(model: transformers.PreTrainedModel, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be carried: {what}. Run `kvbridge doctor` for what is supported."
    )


def _check_layers(model: transformers.PreTrainedModel, config: Any) -> None:
    if getattr(config, "kv_lora_rank", None):
        raise _refuse(model, f"setting kv_lora_rank={config.kv_lora_rank} means latent attention (MLA)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _refuse(model, f"setting num_kv_shared_layers={config.num_kv_shared_layers} shares KV between layers")
    kinds = compat.layer_kinds(model)
    if len(kinds) != config.num_hidden_layers:
        raise _refuse(model, f"its cache has {len(kinds)} layers for {config.num_hidden_layers} decoder layers")
    for layer, kind in enumerate(kinds):
        if kind != "full":
            raise _refuse(model, f"layer {layer} is {kind}, and only full attention keeps every token")


def _rope(model: transformers.PreTrainedModel, config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None)
    # transformers 5.16 adds a rope_type beside the per-layer-type tables.
    if not rope or "rope_type" not in rope or any(isinstance(value, dict) for value in rope.values()):
        raise _refuse(
            model, "setting rope_parameters holds no single rope_type (no rotary embedding, or one per layer)"
        )
    if rope["rope_type"] in REFUSED_ROPE:
        raise _refuse(model, f"setting rope_type={rope['rope_type']}: {REFUSED_ROPE[rope['rope_type']]}")
    return dict(rope)


def _key_norm(model: transformers.PreTrainedModel, kv_heads: int, head_dim: int) -> str:
    kinds = {(head_dim,): "head", (kv_heads * head_dim,): "all", (kv_heads, head_dim): "head"}
    for name, module in compat.decoder_layers(model)[0].named_modules():
        if name.rsplit(".", 1)[-1] in ("k_norm", "k_layernorm") and isinstance(module, nn.Module):
            weight = getattr(module, "weight", None)
            return kinds.get(tuple(weight.shape), "head") if isinstance(weight, torch.Tensor) else "head"
    return "none"


def read_geometry(model: transformers.PreTrainedModel) -> KVGeometry:
    """Read the KV geometry of a loaded model.

    Raises:
        UnsupportedModelError: the model's cache cannot be carried; the message names the layer or setting.
    """
    config = model.config.get_text_config(decoder=True)
    _check_layers(model, config)
    rope = _rope(model, config)
    if model.config._attn_implementation not in compat.SUPPORTED_ATTENTION:
        raise _refuse(
            model,
            f"attention implementation {model.config._attn_implementation!r} takes no explicit mask; "
            "load it with attn_implementation='sdpa'",
        )
    compat.decoder_layers(model)
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return KVGeometry(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        query_heads=query_heads,
        hidden_size=config.hidden_size,
        max_positions=config.max_position_embeddings,
        rope=rope,
        rope_kind=rope["rope_type"],
        key_norm=_key_norm(model, kv_heads, head_dim),
    )
