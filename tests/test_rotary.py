"""The rotary codec against the model's own keys; a round trip alone would hide a wrong theta or pairing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvbridge import compat
from kvbridge.errors import UnsupportedModelError
from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.rotary import read_rotary
from tiny_models import (
    ARCHITECTURES,
    DEFAULT,
    kv_model,
    other_model,
    random_ids,
    relative_error,
    tiny_config,
    tiny_model,
)

SCATTERED = torch.tensor([0, 1, 5, 17, 18, 90, 255, 400])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTIAL = {"phi3": 8, "gpt_neox": 4}


@contextmanager
def rotary_answers(model: PreTrainedModel, answer: Any) -> Iterator[None]:
    """Replace the tables that the model itself gets; the codec, which asks with an empty tensor, sees the real ones."""

    def hook(module: Any, given: Any, named: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return answer(tables, *given, **named) if given[0].numel() else tables

    handle = compat.backbone(model).rotary_emb.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def no_rotation(tables: tuple[Tensor, Tensor], *_: Tensor, **__: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(tables[0]), torch.zeros_like(tables[1])


def first_layer_keys(model: KVModel, positions: Tensor = SCATTERED) -> Tensor:
    """Layer-0 keys `[B, H, T, D]` of two rows of random tokens."""
    ((keys, _),) = run_head(model.model, random_ids(len(positions), batch=2), 0, positions).layers
    return keys


def own_content_keys(model: KVModel) -> Tensor:
    """What `first_layer_keys` would be had the model not rotated them: its own code, with a rotation by nothing."""
    with rotary_answers(model.model, no_rotation):
        return first_layer_keys(model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_own_content_keys_are_the_projected_and_normalised_hidden_states(architecture: str) -> None:
    model = kv_model(architecture)
    layer = compat.decoder_layers(model.model)[0]
    ids = random_ids(len(SCATTERED), batch=2)
    with torch.no_grad():
        hidden = layer.input_layernorm(compat.backbone(model.model).embed_tokens(ids))
        keys = layer.self_attn.k_proj(hidden).unflatten(-1, (2, 16))
        keys = layer.self_attn.k_norm(keys) if architecture == "qwen3" else keys
    torch.testing.assert_close(own_content_keys(model), keys.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_strip_gives_the_models_own_content_keys(architecture: str, dtype: torch.dtype) -> None:
    model = kv_model(architecture, dtype)
    rotated, content = first_layer_keys(model), own_content_keys(model)
    # The rest in half precision is what storing the rotated keys costs.
    limit = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
    assert relative_error(model.rotary.strip(rotated, SCATTERED), content) <= limit
    assert relative_error(rotated, content) > 0.1
    assert relative_error(model.rotary.strip(rotated, SCATTERED + 1), content) > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_apply_gives_the_models_own_rotated_keys(architecture: str) -> None:
    model = kv_model(architecture)
    assert relative_error(model.rotary.apply(own_content_keys(model), SCATTERED), first_layer_keys(model)) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_strip_undoes_apply_and_apply_undoes_strip(architecture: str, dtype: torch.dtype) -> None:
    codec = kv_model(architecture, dtype).rotary
    keys = torch.randn(3, 2, 4, len(SCATTERED), 16)
    assert relative_error(codec.strip(codec.apply(keys, SCATTERED), SCATTERED), keys) <= 1e-6
    assert relative_error(codec.apply(codec.strip(keys, SCATTERED), SCATTERED), keys) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tables_are_those_that_the_model_uses(architecture: str, dtype: torch.dtype) -> None:
    model, used = kv_model(architecture, dtype), []
    with rotary_answers(model.model, lambda tables, *_, **__: used.append(tables) or tables):
        first_layer_keys(model)
    ((cos, sin),) = used
    read_cos, read_sin = model.rotary.tables(SCATTERED)
    assert read_cos.dtype == read_sin.dtype == torch.float32
    assert read_cos.shape == (len(SCATTERED), PARTIAL.get(architecture, 16))
    assert torch.equal(read_cos, cos[0].float())
    assert torch.equal(read_sin, sin[0].float())


@pytest.mark.parametrize("architecture", PARTIAL)
def test_numbers_beyond_the_rotary_width_are_untouched(architecture: str) -> None:
    codec, keys = kv_model(architecture).rotary, torch.randn(2, len(SCATTERED), 16)
    width = PARTIAL[architecture]
    for turned in (codec.strip(keys, SCATTERED), codec.apply(keys, SCATTERED)):
        assert torch.equal(turned[..., width:], keys[..., width:])
        assert not torch.equal(turned[..., :width], keys[..., :width])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pairing_is_found_and_the_other_one_would_be_wrong(architecture: str, dtype: torch.dtype) -> None:
    model = kv_model(architecture, dtype)
    assert model.rotary.interleaved == (architecture == "cohere-interleaved")
    other = replace(model.rotary, interleaved=not model.rotary.interleaved)
    assert relative_error(other.strip(first_layer_keys(model), SCATTERED), own_content_keys(model)) > 0.1


@pytest.mark.parametrize("theta", [9000.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_theta_is_caught(theta: float, dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    actual = LlamaRotaryEmbedding(tiny_config(rope_parameters={**DEFAULT, "rope_theta": theta}))
    with (
        rotary_answers(model, lambda _, *given, **named: actual(*given, **named)),
        pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM does not explain its own keys.*under 2 %"),
    ):
        read_rotary(model)


def test_layers_without_rotation_are_caught() -> None:
    model = other_model("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1])
    with pytest.raises(UnsupportedModelError, match=r"layer 2"):
        read_rotary(model)
    assert read_rotary(other_model("smollm3", num_hidden_layers=4, no_rope_layers=[1] * 4)).interleaved is False


def test_cast_frequencies_are_caught() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"frequencies of LlamaForCausalLM were cast to torch\.bfloat16.*dtype=torch\.bfloat16",
    ):
        read_rotary(tiny_model().to(torch.bfloat16))


def test_a_missing_rotary_module_is_caught() -> None:
    model = tiny_model()
    del model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM has no rotary module"):
        read_rotary(model)
