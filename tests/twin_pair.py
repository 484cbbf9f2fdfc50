"""A pair of one model with itself and a bridge that changes nothing: a hand-off must give the model's own answers."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvbridge.bridge import Bridge
from kvbridge.fingerprint import fingerprint_tokenizer
from kvbridge.forms import KINDS
from kvbridge.layout import BridgeMap
from kvbridge.mappers.identity import identity_form
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from tiny_models import tiny_model
from tiny_pair import byte_tokenizer


def twin_pair(**special: str) -> ModelPair:
    """One tiny model as source and as target, in objects of their own; keyword arguments name special tokens."""
    tokenizer = byte_tokenizer(**special)
    models = [tiny_model("qwen2", seed=3, vocab_size=len(tokenizer)) for _ in range(2)]
    for model in models:
        # No random text ends by itself.
        model.generation_config.eos_token_id = None
    names = "twin-source", "twin-target"
    wrapped = [KVModel.wrap(model, name=name) for model, name in zip(models, names, strict=True)]
    tokenizer.eos_token = None
    return ModelPair(*wrapped, tokenizer, fingerprint_tokenizer(tokenizer))


def twin_bridge(pair: ModelPair, *, bias: float = 0.0) -> Bridge:
    """Carries every state as it is, plus `bias`."""
    forms = tuple(identity_form(kind, pair.target.geometry) for kind in KINDS)
    shifted = tuple(replace(form, bias=torch.full_like(form.bias, bias)) for form in forms)
    return Bridge({"identity": BridgeMap(shifted, {"name": "identity"}, {})}, pair.identity(), pair.describe())
