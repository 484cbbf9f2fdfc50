"""Cuts a small model out of a trained larger one, as families of models are made; training goes on from there.

The residual stream is turned so that its directions of largest variance come first, and cut: RMSNorm without its
weights does not notice a rotation (SliceGPT, Ashkboos et al. 2024). Layers, heads and neurons are selected.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


@torch.no_grad()
def residual_directions(model: LlamaForCausalLM, input_ids: Tensor) -> Tensor:
    """Principal directions `[hidden, hidden]` of the residual stream over all layers, largest variance first."""
    states = model(input_ids=input_ids, use_cache=False, output_hidden_states=True).hidden_states
    normed = [state.flatten(0, 1) / state.flatten(0, 1).square().mean(1, keepdim=True).sqrt() for state in states]
    together = torch.cat(normed).double()
    return torch.linalg.eigh(together.T @ together).eigenvectors.flip(1).float()


def _rotary_rows(head: int, wide: int, narrow: int) -> Tensor:
    """Rows of one head that keep `narrow` of its `wide` dimensions, with the frequencies of a narrow head."""
    kept = torch.arange(0, wide // 2, wide // narrow)
    return head * wide + torch.cat((kept, kept + wide // 2))


@torch.no_grad()
def prune(large: LlamaForCausalLM, small: LlamaForCausalLM, input_ids: Tensor, layers: list[int]) -> None:
    """Overwrite a small model's weights with what fits of a large one's.

    Args:
        large: the trained model.
        small: of fewer layers, heads, dimensions and neurons; each of its KV heads is one of the large model's.
        input_ids: text `[B, T]` that decides which directions matter.
        layers: the large model's layers that are kept.
    """
    hidden, config, wide = small.config.hidden_size, small.config, large.config
    turn = residual_directions(large, input_ids)[:, :hidden]
    small.model.embed_tokens.weight.copy_(large.model.embed_tokens.weight @ turn)
    small.model.norm.weight.fill_(large.model.norm.weight.mean())
    for layer, kept in zip(small.model.layers, layers, strict=True):
        source = large.model.layers[kept]
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        _prune_attention(layer, source, turn, config, wide)
        _prune_neurons(layer, source, turn, config.intermediate_size)


def _prune_attention(
    layer: LlamaDecoderLayer, source: LlamaDecoderLayer, turn: Tensor, config: LlamaConfig, wide: LlamaConfig
) -> None:
    """Overwrite a layer's heads; `config` is the small model's, `wide` the large one's."""
    before = source.input_layernorm.weight
    groups = config.num_attention_heads // config.num_key_value_heads
    stride = wide.num_key_value_heads // config.num_key_value_heads
    for at in range(config.num_key_value_heads):
        head = at * stride
        rows = _rotary_rows(head, wide.head_dim, config.head_dim)
        into = slice(at * config.head_dim, (at + 1) * config.head_dim)
        layer.self_attn.k_proj.weight[into] = (source.self_attn.k_proj.weight[rows] * before) @ turn
        span = slice(head * wide.head_dim, (head + 1) * wide.head_dim)
        written, read = source.self_attn.o_proj.weight[:, span], source.self_attn.v_proj.weight[span] * before
        left, spread, right = torch.linalg.svd(turn.T @ written @ read @ turn)
        root = spread[: config.head_dim].sqrt()
        layer.self_attn.v_proj.weight[into] = root[:, None] * right[: config.head_dim]
        for query in range(at * groups, (at + 1) * groups):
            own = slice(query * config.head_dim, (query + 1) * config.head_dim)
            layer.self_attn.q_proj.weight[own] = (source.self_attn.q_proj.weight[rows] * before) @ turn
            # Heads of one group share the work of the head that they come from.
            layer.self_attn.o_proj.weight[:, own] = left[:, : config.head_dim] * root / groups


def _prune_neurons(layer: LlamaDecoderLayer, source: LlamaDecoderLayer, turn: Tensor, count: int) -> None:
    """Overwrite a layer's MLP with the `count` neurons of largest weights."""
    after = source.post_attention_layernorm.weight
    sizes = (
        (source.mlp.gate_proj.weight * after).norm(dim=1)
        * (source.mlp.up_proj.weight * after).norm(dim=1)
        * source.mlp.down_proj.weight.norm(dim=0)
    )
    neurons = sizes.topk(count).indices
    layer.mlp.gate_proj.weight.copy_((source.mlp.gate_proj.weight[neurons] * after) @ turn)
    layer.mlp.up_proj.weight.copy_((source.mlp.up_proj.weight[neurons] * after) @ turn)
    layer.mlp.down_proj.weight.copy_(turn.T @ source.mlp.down_proj.weight[:, neurons])
