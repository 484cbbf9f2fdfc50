"""Every supported architecture is read right, and what cannot be carried is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbridge.errors import UnsupportedModelError
from kvbridge.geometry import KVGeometry, read_geometry
from tiny_models import ARCHITECTURES, DEFAULT, kv_model, other_model, tiny_model

ROPE_KINDS = {"llama3-scaling": "llama3", "llama-yarn": "yarn"}
KEY_NORMS = {"qwen3": "head", "olmo2": "all"}


def with_setting(name: str, value: Any) -> PreTrainedModel:
    model = tiny_model()
    setattr(model.config, name, value)
    return model


def with_attention(name: str) -> PreTrainedModel:
    model = tiny_model()
    model.config._attn_implementation = name
    return model


def scaled(rope_type: str, architecture: str = "llama", **more: Any) -> PreTrainedModel:
    return tiny_model(architecture, rope_parameters=DEFAULT | {"rope_type": rope_type, "factor": 2.0} | more)


def gpt2() -> PreTrainedModel:
    config = CONFIG_MAPPING["gpt2"](
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return AutoModelForCausalLM.from_config(config)


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "sliding": (lambda: tiny_model("mistral", sliding_window=8), r"layer 0 is SlidingWindow, .*full attention"),
    "sliding-some": (
        lambda: other_model("gemma3_text", layer_types=["full_attention", "sliding_attention", "full_attention"]),
        r"layer 1 is SlidingWindow",
    ),
    "rope-per-layer-type": (
        lambda: other_model("gemma3_text", layer_types=["full_attention"] * 3),
        r"rope_parameters holds no single rope_type",
    ),
    "hybrid": (
        lambda: other_model("lfm2", layer_types=["full_attention", "full_attention", "conv"]),
        r"layer 2 is LinearAttention",
    ),
    "latent": (
        lambda: other_model(
            "deepseek_v3",
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=3,
            num_key_value_heads=4,
        ),
        r"kv_lora_rank=16 means latent attention",
    ),
    "shared": (lambda: with_setting("num_kv_shared_layers", 2), r"num_kv_shared_layers=2 shares KV"),
    "rope-dynamic": (lambda: scaled("dynamic"), r"rope_type=dynamic: its tables change with the sequence length"),
    "rope-longrope": (lambda: scaled("longrope", "phi3", **LONG), r"rope_type=longrope: its tables change"),
    "no-rotary": (gpt2, r"rope_parameters holds no single rope_type \(no rotary embedding"),
    "flash": (lambda: with_attention("flash_attention_2"), r"'flash_attention_2' takes no explicit mask"),
    "flex": (lambda: with_attention("flex_attention"), r"'flex_attention'.*attn_implementation='sdpa'"),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reads_every_architecture(architecture: str) -> None:
    model = tiny_model(architecture, layers=5, head_dim=32)
    kv_heads = 4 if architecture == "gpt_neox" else 2
    assert read_geometry(model) == KVGeometry(
        model_type=model.config.model_type,
        layers=5,
        kv_heads=kv_heads,
        head_dim=32,
        query_heads=4,
        hidden_size=128,
        max_positions=512,
        rope=dict(model.config.rope_parameters),
        rope_kind=ROPE_KINDS.get(architecture, "default"),
        key_norm=KEY_NORMS.get(architecture, "none"),
    )
    assert read_geometry(model).width == 5 * kv_heads * 32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_geometry_is_that_of_the_cache(architecture: str) -> None:
    model = kv_model(architecture)
    cache = model.read(torch.tensor([[5, 6, 7]]))
    shape = (1, model.geometry.kv_heads, 3, model.geometry.head_dim)
    assert [(layer.keys.shape, layer.values.shape) for layer in cache.layers] == [
        (shape, shape)
    ] * model.geometry.layers


@pytest.mark.parametrize("settings", [{"layers": 4}, {"kv_heads": 1}, {"head_dim": 8}], ids=str)
def test_geometry_follows_the_config(settings: dict[str, int]) -> None:
    read = read_geometry(tiny_model(**settings))
    assert {name: getattr(read, name) for name in settings} == settings
    assert read != kv_model().geometry


def test_linear_scaling_is_supported() -> None:
    assert read_geometry(scaled("linear")).rope_kind == "linear"


def test_head_norms_over_all_heads_and_without_weight_are_told_apart() -> None:
    assert read_geometry(other_model("cohere", use_qk_norm=True)).key_norm == "head"
    assert read_geometry(other_model("stablelm", qk_layernorm=True)).key_norm == "head"


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("llama-yarn", "llama: 3 layers, 2 KV heads × 16, RoPE yarn"),
        ("olmo2", "olmo2: 3 layers, 2 KV heads × 16, RoPE default, keys normalised per all"),
    ],
)
def test_describes_itself(architecture: str, sentence: str) -> None:
    assert kv_model(architecture).geometry.describe() == sentence


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_cannot_be_carried(case: str) -> None:
    build, reason = REFUSED[case]
    model = build()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        read_geometry(model)
    assert str(caught.value).startswith(f"{type(model).__name__} cannot be carried: ")
    assert "kvbridge doctor" in str(caught.value)


def test_refuses_a_model_without_a_list_of_layers() -> None:
    model = tiny_model()
    model.model.layers = model.model.layers[:2]
    with pytest.raises(UnsupportedModelError, match=r"no list of 3 decoder layers in `model\.layers`.*decoder-only"):
        read_geometry(model)
