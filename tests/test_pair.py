"""Loading a pair from folders, and refusing what is not one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvbridge.errors import PairMismatchError, UnsupportedModelError, UsageError
from kvbridge.pair import ModelPair, load_pair
from tiny_models import tiny_model, tiny_tokenizer

Folders = tuple[str, str]


def save(folder: Path, words: str = "the cat sat on the mat", **model: Any) -> str:
    tiny_model(**model).save_pretrained(folder)
    tiny_tokenizer(words).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pair")
    return save(root / "small", layers=2), save(root / "large", architecture="qwen3", seed=1)


@pytest.fixture(scope="module")
def pair(folders: Folders) -> ModelPair:
    return load_pair(*folders, dtype="float32")


@pytest.fixture
def broken(folders: Folders, tmp_path: Path) -> Path:
    """A copy of the source, to be broken."""
    return Path(shutil.copytree(folders[0], tmp_path / "broken"))


def test_loads_two_folders(folders: Folders, pair: ModelPair) -> None:
    assert (pair.source.name, pair.target.name) == folders
    assert (pair.source.geometry.layers, pair.target.geometry.layers) == (2, 3)
    assert pair.target.geometry.model_type == "qwen3"
    assert not pair.source.model.training
    ids = pair.tokenizer("the cat", return_tensors="pt").input_ids
    expected = tiny_model(layers=2)(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(pair.source.prefill(ids)[1][:, -1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loads_in_the_dtype_asked_for_and_keeps_its_identity(folders: Folders, pair: ModelPair, dtype: str) -> None:
    loaded = load_pair(*folders, dtype=dtype)
    assert {str(model.dtype) for model in (loaded.source, loaded.target)} == {f"torch.{dtype}"}
    assert loaded.source.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert loaded.source.rotary.dtype == loaded.source.dtype
    if dtype != "float16":
        assert loaded.identity() == pair.identity()


def test_bfloat16_is_the_default(folders: Folders) -> None:
    assert load_pair(*folders).source.dtype == torch.bfloat16


def test_describes_both_models_without_their_paths(pair: ModelPair) -> None:
    described = json.loads(json.dumps(pair.describe()))
    assert described["tokenizer"]["fingerprint"] == pair.tokenizer_fingerprint
    assert described["source"] | {"geometry": None} == {
        "name": "small",
        "revision": None,
        "fingerprint": pair.source.fingerprint,
        "dtype": "float32",
        "geometry": None,
        "interleaved_rotary": False,
    }
    assert described["target"]["geometry"] == pair.target.geometry.to_dict()


def test_requires_its_own_identity(pair: ModelPair) -> None:
    pair.require(pair.identity(), "this bridge")
    assert {"source", "target", "tokenizer"} <= pair.identity().keys()


@pytest.mark.parametrize("part", ["source", "target", "tokenizer"])
def test_refuses_another_identity_by_both_fingerprints(pair: ModelPair, part: str) -> None:
    mine = pair.identity()
    other = mine | {part: "0123456789abcdef"}
    sentence = (
        rf"^this bridge was made for another pair: {part} 0123456789abcdef where this pair has {mine[part]}\. Load"
    )
    with pytest.raises(PairMismatchError, match=sentence):
        pair.require(other, "this bridge")
    del other[part]
    with pytest.raises(PairMismatchError, match=rf"{part} missing where this pair has {mine[part]}"):
        pair.require(other, "this bridge")


def test_a_swapped_pair_is_another_pair(folders: Folders, pair: ModelPair) -> None:
    with pytest.raises(PairMismatchError, match=r"source \w+ where .*; target \w+ where"):
        load_pair(*reversed(folders), dtype="float32").require(pair.identity(), "these moments")


def test_refuses_different_tokenizers_by_both_fingerprints(folders: Folders, pair: ModelPair, tmp_path: Path) -> None:
    other = save(tmp_path / "other", "a quick brown fox jumps over lazy dogs")
    with pytest.raises(
        PairMismatchError, match=rf"different tokenizers \({pair.tokenizer_fingerprint} and \w{{16}}\)"
    ) as caught:
        load_pair(folders[0], other)
    assert folders[0] in str(caught.value)
    assert other in str(caught.value)
    assert "one family" in str(caught.value)


def test_different_chat_templates_are_one_tokenizer(folders: Folders, broken: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(broken)
    assert load_pair(str(broken), folders[1]).tokenizer.chat_template is None
    assert load_pair(folders[1], str(broken)).tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize("role", ["source", "target"])
def test_refuses_a_missing_folder_by_its_role(folders: Folders, tmp_path: Path, role: str) -> None:
    missing = str(tmp_path / "none")
    given = (missing, folders[1]) if role == "source" else (folders[0], missing)
    with pytest.raises(UsageError, match=rf"pair\.{role}={missing}: no such model folder \(a folder with config\.json"):
        load_pair(*given)


def test_refuses_a_hub_id_that_cannot_be_reached(folders: Folders) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer could be loaded from 'nobody/nothing'"):
        load_pair(folders[0], "nobody/nothing")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, r"pair\.dtype=int8: expected one of float32, bfloat16, float16"),
        ({"device": "cuda"}, r"pair\.device=cuda: no CUDA device is available here; use pair\.device=cpu"),
        ({"device": "gpu7"}, r"pair\.device=gpu7: expected cpu, cuda"),
    ],
    ids=["dtype", "no-cuda", "no-such-device"],
)
def test_refuses_an_unknown_dtype_or_device(
    folders: Folders, settings: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=sentence):
        load_pair(*folders, **settings)


def test_refuses_weights_that_are_not_safetensors(folders: Folders, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    torch.save(tiny_model(layers=2).state_dict(), broken / "pytorch_model.bin")
    with pytest.raises(UsageError, match=rf"no model could be loaded from '{broken}': .*model\.safetensors"):
        load_pair(str(broken), folders[1])


def test_refuses_a_truncated_file(folders: Folders, broken: Path) -> None:
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(UsageError, match=rf"no model could be loaded from '{broken}': "):
        load_pair(str(broken), folders[1])


def test_refuses_a_checkpoint_that_lacks_a_weight(folders: Folders, broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weights \(model\.layers\.1\.self_attn\.k_proj\.weight\)"):
        load_pair(str(broken), folders[1])


def test_refuses_a_checkpoint_with_a_weight_of_another_shape(folders: Folders, broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name][:16].clone()
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=rf"no model could be loaded from '{broken}': "):
        load_pair(str(broken), folders[1])


@pytest.mark.parametrize(
    "text", ["{}", "{broken", '{"model_type": "nothing-like-it"}'], ids=["empty", "no-json", "unknown"]
)
def test_refuses_a_config_that_names_no_model(folders: Folders, broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    with pytest.raises(UsageError, match=rf"could be loaded from '{broken}': "):
        load_pair(str(broken), folders[1])


def test_refuses_a_model_that_cannot_be_carried(folders: Folders, tmp_path: Path) -> None:
    sliding = save(tmp_path / "sliding", architecture="mistral", sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="layer 0 is SlidingWindow"):
        load_pair(sliding, folders[1])
