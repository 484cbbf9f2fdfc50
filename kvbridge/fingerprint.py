"""Short digests that tell one model, tokenizer or text from another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

# Every tensor contributes this many evenly spaced numbers: any fine-tuning changes some, and no weight is read whole.
SAMPLES_PER_TENSOR = 64


def digest(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON value with sorted keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint_model(model: transformers.PreTrainedModel) -> str:
    """Digest of the names, shapes and sampled values of all weights.

    Values are compared as bf16, so that one checkpoint has one fingerprint in fp32 and bf16, on every device.
    """
    hasher = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        sample = flat[::step][:SAMPLES_PER_TENSOR].to("cpu", torch.bfloat16).view(torch.int16)
        hasher.update(f"{name}{tuple(tensor.shape)}".encode())
        hasher.update(sample.numpy().tobytes())
    return hasher.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of vocabulary, merges, special tokens, normaliser and pre-tokeniser; the chat template is left out."""
    described: dict[str, Any] = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id],
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        described["model"] = parts["model"]
        described["normalizer"] = parts.get("normalizer")
        described["pre_tokenizer"] = parts.get("pre_tokenizer")
    return digest(described)
