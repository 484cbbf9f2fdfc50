"""Tiny randomly initialised models of every supported architecture.

`initializer_range=0.12` gives tests their power: at the default, keys shifted by one position would still pass.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbridge.model import KVModel

VOCABULARY = 128
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-scaling": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}, "pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "cohere-interleaved": ("cohere", {"logit_scale": 1.0}),
}


def tiny_config(
    architecture: str = "llama", *, layers: int = 3, kv_heads: int = 2, head_dim: int = 16, **more: Any
) -> Any:
    """A config of one of `ARCHITECTURES` with 4 query heads and a vocabulary of 128."""
    name, special = ARCHITECTURES[architecture]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.12,
        "rope_parameters": DEFAULT,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name != "gpt_neox":
        settings |= {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    return CONFIG_MAPPING[name](**(settings | special | more))


def tiny_model(
    architecture: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any
) -> PreTrainedModel:
    """A model of one of `ARCHITECTURES`, with its own weights for every seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **more), dtype=dtype, attn_implementation="sdpa")
    _randomise_constants(model)
    return model.eval()


def _randomise_constants(model: PreTrainedModel) -> None:
    """Biases start as zeros and norms as ones, which would hide a map or a norm that forgets them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and (parameter == parameter[0]).all():
                gain = parameter[0].item()
                parameter.copy_(gain + torch.rand_like(parameter) if gain else 0.2 * torch.randn_like(parameter))


def other_model(name: str, **more: Any) -> PreTrainedModel:
    """A tiny model of an architecture that is not among the supported ones."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[name](**(settings | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def tiny_tokenizer(words: str = "the cat sat on the mat") -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on a few words; the same words give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([words] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def random_ids(tokens: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Token ids `[B, T]` without the special ones."""
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@cache
def kv_model(architecture: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> KVModel:
    """`tiny_model`, wrapped and shared between tests, which must leave it as it is."""
    return KVModel.wrap(tiny_model(architecture, dtype=dtype, **more))


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what was expected."""
    return float((given.float() - expected.float()).norm() / expected.float().norm())


def continue_with(model: PreTrainedModel, input_ids: Tensor, held: Cache | None, new_tokens: int = 8) -> list[int]:
    """Tokens that `generate` adds greedily to `input_ids [1, T]`, of which `held` covers the first T − 1 or fewer."""
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    given = {} if held is None else {name: held}
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **given,
    )
    return output[0, input_ids.shape[1] :].tolist()
