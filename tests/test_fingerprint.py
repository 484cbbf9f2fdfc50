"""Fingerprints: equal for what is the same thing, different for what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvbridge.fingerprint import digest, fingerprint_model, fingerprint_tokenizer
from tiny_models import random_ids, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return str(folder)


def fine_tuned(model: PreTrainedModel) -> PreTrainedModel:
    """The model after one step of AdamW at a usual learning rate."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = random_ids(8, batch=2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    return model


def edited(tokenizer: PreTrainedTokenizerFast, **parts: Any) -> PreTrainedTokenizerFast:
    """The same tokenizer with parts of its `tokenizer.json` replaced."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    description["model"] |= parts.pop("model", {})
    backend = Tokenizer.from_str(json.dumps(description | parts))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_a_digest_is_16_hex_digits_and_ignores_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert len({digest(value) for value in ({"a": 1}, {"a": 2}, {"a": [1]}, {"a": "1"}, {"b": 1}, [], {})}) == 7
    assert len(digest({})) == 16
    assert set(digest({})) <= set("0123456789abcdef")


def test_a_checkpoint_has_one_fingerprint_in_fp32_and_bf16(checkpoint: str) -> None:
    prints = {
        fingerprint_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert prints == {fingerprint_model(tiny_model())}


def test_a_step_of_fine_tuning_changes_the_fingerprint() -> None:
    assert fingerprint_model(fine_tuned(tiny_model())) != fingerprint_model(tiny_model())


@pytest.mark.parametrize("more", [{"seed": 1}, {"layers": 2}, {"kv_heads": 1}], ids=str)
def test_other_weights_have_another_fingerprint(more: dict[str, int]) -> None:
    assert fingerprint_model(tiny_model(**more)) != fingerprint_model(tiny_model())


def test_every_tensor_counts() -> None:
    model = tiny_model()
    seen = {fingerprint_model(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(1.1)
        seen.add(fingerprint_model(model))
    assert len(seen) == 1 + len(list(model.parameters()))


def test_saving_and_loading_keeps_the_tokenizers_fingerprint(tokenizer, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint_tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == fingerprint_tokenizer(tokenizer)


def test_a_chat_template_does_not_count(tokenizer) -> None:
    other = tiny_tokenizer()
    other.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert fingerprint_tokenizer(other) == fingerprint_tokenizer(tokenizer)


def without_last_merge(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return edited(tokenizer, model={"merges": merges[:-1]})


def with_swapped_ids(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    vocabulary = dict(json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"])
    vocabulary["a"], vocabulary["t"] = vocabulary["t"], vocabulary["a"]
    return edited(tokenizer, model={"vocab": vocabulary})


def with_added_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    other = edited(tokenizer)
    other.add_tokens([AddedToken("<tool>", special=True)])
    return other


def with_other_end(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    other = edited(tokenizer)
    other.eos_token = "<s>"
    return other


@pytest.mark.parametrize(
    "change",
    [
        without_last_merge,
        with_swapped_ids,
        with_added_token,
        with_other_end,
        lambda tokenizer: edited(tokenizer, normalizer={"type": "Lowercase"}),
        lambda tokenizer: edited(tokenizer, pre_tokenizer={"type": "Whitespace"}),
        lambda tokenizer: edited(tokenizer, model={"ignore_merges": True}),
    ],
    ids=["merge", "ids", "added-token", "special-id", "normaliser", "pre-tokeniser", "ignore-merges"],
)
def test_whatever_changes_the_ids_changes_the_fingerprint(tokenizer, change) -> None:
    assert fingerprint_tokenizer(edited(tokenizer)) == fingerprint_tokenizer(tokenizer)
    assert fingerprint_tokenizer(change(tokenizer)) != fingerprint_tokenizer(tokenizer)
