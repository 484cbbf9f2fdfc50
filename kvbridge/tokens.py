"""Token ids of a prompt."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a document as a prompt would have them, without a trailing end-of-sequence token."""
    ids: list[int] = tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
