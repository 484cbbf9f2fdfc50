"""A tiny pair on disk with a byte-level tokenizer, and text for it: all plumbing runs without a real model."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbridge.fingerprint import fingerprint_tokenizer
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from tiny_models import tiny_model

WORDS = "amber basil cedar delta ember fjord grove heron iris juniper kestrel larch".split()


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per byte, after two special tokens."""
    names = [special.get("bos_token", "<s>"), special.get("eos_token", "</s>")]
    vocabulary = {token: at for at, token in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=names[0], eos_token=names[1])


def tiny_pair(dtype: torch.dtype = torch.float32, source: str = "llama", target: str = "qwen3") -> ModelPair:
    """A pair that differs in layers (3, 4), KV heads (2, 4) and head width (16, 32)."""
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    small = tiny_model(source, seed=1, dtype=dtype, vocab_size=size)
    large = tiny_model(target, seed=2, dtype=dtype, vocab_size=size, layers=4, kv_heads=4, head_dim=32)
    return ModelPair(
        KVModel.wrap(small, name="tiny-source"),
        KVModel.wrap(large, name="tiny-target"),
        tokenizer,
        fingerprint_tokenizer(tokenizer),
    )


def save_pair(pair: ModelPair, folder: Path) -> tuple[Path, Path]:
    """Write both models and their tokenizer; returns the two folders."""
    folders = folder / "source", folder / "target"
    for model, place in zip((pair.source, pair.target), folders, strict=True):
        model.model.save_pretrained(place)
        pair.tokenizer.save_pretrained(place)
    return folders


def sentences(documents: int, words: int, seed: int = 0) -> list[str]:
    """Seeded text that repeats itself enough for a map to learn something."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choice(WORDS) for _ in range(words)) for _ in range(documents)]


def write_corpus(path: Path, documents: int = 60, words: int = 40, seed: int = 0) -> Path:
    """A `.jsonl` or `.jsonl.gz` corpus with ids."""
    lines = [json.dumps({"id": f"d{n}", "text": text}) for n, text in enumerate(sentences(documents, words, seed))]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
