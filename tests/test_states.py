"""Content states from caches and back into them, and every cache that must not be believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kvbridge import compat
from kvbridge.errors import CacheError
from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.states import ContentStates, content_states, fill_cache
from tiny_models import ARCHITECTURES, continue_with, kv_model, random_ids

TOKENS = 21
KINDS = ["dynamic", "static"]


def new_cache(kind: str, model: KVModel, length: int = 64) -> Cache:
    return compat.empty_cache(model.model) if kind == "dynamic" else compat.static_cache(model.model, length)


def filled_cache(kind: str, model: KVModel, ids: Tensor) -> Cache:
    """A cache that the model itself filled."""
    cache = new_cache(kind, model)
    with torch.no_grad():
        compat.run(compat.backbone(model.model), ids, cache)
    return cache


def hand_made(tensors: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache of these keys and values per layer, which transformers takes as they are."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(tensors):
        cache.update(keys, values, layer)
        # transformers 5.16 stores values in the dtype of the keys.
        cache.layers[layer].values = values
    return cache


def random_layers(model: KVModel, batch: int = 2, tokens: int = 5) -> list[tuple[Tensor, Tensor]]:
    shape = (2, batch, model.geometry.kv_heads, tokens, model.geometry.head_dim)
    return [tuple(torch.randn(shape).to(model.dtype)) for _ in range(model.geometry.layers)]


def random_states(model: KVModel, batch: int = 2, tokens: int = 5) -> ContentStates:
    shape = (model.geometry.layers, batch, model.geometry.kv_heads, tokens, model.geometry.head_dim)
    return ContentStates(torch.randn(shape), torch.randn(shape), torch.arange(tokens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reads_a_cache_and_fills_an_equal_one(architecture: str, kind: str) -> None:
    model = kv_model(architecture)
    ids = random_ids(TOKENS, batch=2)
    cache = filled_cache(kind, model, ids)
    states = model.content(cache)
    native = compat.layer_tensors(filled_cache("dynamic", model, ids), 1)
    assert states.tokens == TOKENS
    assert states.positions.tolist() == list(range(TOKENS))
    torch.testing.assert_close(states.values[1], native[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        states.keys, model.rotary.strip(model.rotary.apply(states.keys, states.positions), states.positions)
    )
    again = fill_cache(new_cache(kind, model), states, model.geometry, model.rotary)
    for layer in range(model.geometry.layers):
        for given, expected in zip(compat.layer_tensors(again, layer), compat.layer_tensors(cache, layer), strict=True):
            torch.testing.assert_close(given, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_changes_neither_cache_nor_dtype(kind: str) -> None:
    model = kv_model(dtype=torch.bfloat16)
    cache = filled_cache(kind, model, random_ids(TOKENS))
    before = [tensor.clone() for tensor in compat.layer_tensors(cache, 2)]
    states = model.content(cache)
    assert states.keys.dtype == states.values.dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(before, compat.layer_tensors(cache, 2), strict=True))
    assert (
        fill_cache(new_cache(kind, model), states, model.geometry, model.rotary).layers[0].keys.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "llama-yarn", "qwen3", "cohere-interleaved"])
def test_generation_from_a_filled_cache_is_the_plain_one(architecture: str, kind: str, dtype: torch.dtype) -> None:
    model = kv_model(architecture, dtype)
    ids = random_ids(TOKENS)
    cache = new_cache(kind, model)
    fill_cache(cache, model.content(model.read(ids[:, :-1])), model.geometry, model.rotary)
    plain = continue_with(model.model, ids, None)
    assert continue_with(model.model, ids, cache) == plain
    wrong = fill_cache(new_cache(kind, model), random_states(model, 1, TOKENS - 1), model.geometry, model.rotary)
    assert continue_with(model.model, ids, wrong) != plain


def test_positions_are_those_given() -> None:
    model = kv_model()
    positions = torch.tensor([3, 9, 40, 41, 300])
    (stored,) = run_head(model.model, random_ids(5), 0, positions).layers
    states = model.content(hand_made([stored] * 3), positions)
    ((content, _),) = run_head(model.model, random_ids(5), 0, torch.zeros(5, dtype=torch.long)).layers
    torch.testing.assert_close(states.keys[0], content, rtol=0, atol=1e-5)
    again = fill_cache(new_cache("dynamic", model), states, model.geometry, model.rotary)
    torch.testing.assert_close(again.layers[2].keys, stored[0], rtol=0, atol=1e-5)


def test_span_takes_tokens_by_index() -> None:
    states = random_states(kv_model())
    part = states.span(1, 4)
    assert part.positions.tolist() == [1, 2, 3]
    assert torch.equal(part.keys, states.keys[..., 1:4, :])
    assert torch.equal(part.values, states.values[..., 1:4, :])


@pytest.mark.parametrize("where", ["first", "last"])
def test_refuses_a_cache_without_a_layer(where: str) -> None:
    model = kv_model()
    cache = filled_cache("dynamic", model, random_ids(5))
    if where == "first":
        cache.layers[0] = type(cache.layers[0])()
        expected = r"holds 3 layers, of which \[0\] are empty; llama: 3 layers.* needs 3 filled layers"
    else:
        del cache.layers[2]
        expected = r"holds 2 layers; llama: 3 layers.* needs 3 filled layers"
    with pytest.raises(CacheError, match=expected):
        model.content(cache)


def test_refuses_an_empty_cache() -> None:
    model = kv_model()
    with pytest.raises(CacheError, match=r"of which \[0, 1, 2\] are empty"):
        model.content(compat.empty_cache(model.model))


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (
            lambda keys, values: (keys[:, :, 1:], values[:, :, 1:]),
            r"layer 1: keys .*\(2, 2, 4, 16\), expected \(2, 2, 5, 16\)",
        ),
        (lambda keys, values: (keys, values[:, :, 1:]), r"layer 1: values .*\(2, 2, 4, 16\), expected \(2, 2, 5, 16\)"),
        (
            lambda keys, values: (keys[:, :1], values[:, :1]),
            r"layer 1: keys .*\(2, 1, 5, 16\), expected \(2, 2, 5, 16\)",
        ),
        (
            lambda keys, values: (keys[..., :8], values[..., :8]),
            r"layer 1: keys .*\(2, 2, 5, 8\), expected \(2, 2, 5, 16\)",
        ),
        (lambda keys, values: (keys[:1], values[:1]), r"layer 1: keys .*\(1, 2, 5, 16\), expected \(2, 2, 5, 16\)"),
        (lambda keys, values: (keys, values.half()), r"layer 1: keys are torch\.float32.*values torch\.float16"),
        (lambda keys, values: (keys.half(), values.half()), r"layer 1: .*torch\.float16.*torch\.float32"),
    ],
    ids=["short-layer", "short-values", "heads", "width", "batch", "half-values", "half-layer"],
)
def test_refuses_a_misshapen_layer(cut, expected: str) -> None:
    model = kv_model()
    layers = random_layers(model)
    layers[1] = cut(*layers[1])
    with pytest.raises(CacheError, match=rf"^cache {expected}"):
        model.content(hand_made(layers))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_refuses_numbers_that_are_not_finite(kind: str, number: float) -> None:
    model = kv_model()
    layers = random_layers(model)
    layers[2][kind == "values"][1, 0, 3, 7] = number
    with pytest.raises(CacheError, match=rf"cache layer 2: {kind} hold NaN or infinite numbers.*must not be used"):
        model.content(hand_made(layers))


@pytest.mark.parametrize("count", [4, 6])
def test_refuses_a_wrong_number_of_positions(count: int) -> None:
    model = kv_model()
    with pytest.raises(CacheError, match=rf"{count} positions were given for a cache of 5 tokens"):
        model.content(hand_made(random_layers(model)), torch.arange(count))


def test_refuses_the_cache_of_another_model() -> None:
    wide = kv_model(kv_heads=4)
    with pytest.raises(CacheError, match=r"layer 0: keys .*\(2, 4, 5, 16\), expected \(2, 2, 5, 16\)"):
        content_states(hand_made(random_layers(wide)), kv_model().geometry, kv_model().rotary)


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.float16, 7e4), (torch.bfloat16, 3.4e38)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_refuses_states_that_overflow_the_models_dtype(kind: str, dtype: torch.dtype, number: float) -> None:
    model = kv_model(dtype=dtype)
    states = random_states(model)
    getattr(states, kind)[1, 0, 1, 0, 15] = number
    cache = new_cache("dynamic", model)
    with pytest.raises(CacheError, match=rf"states of layer 1: {kind} hold NaN or infinite"):
        fill_cache(cache, states, model.geometry, model.rotary)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_filling_leaves_the_cache_empty(kind: str) -> None:
    model = kv_model()
    states = random_states(model)
    states.values[2, 1, 1, 4, 0] = float("nan")
    cache = new_cache(kind, model)
    with pytest.raises(CacheError, match=r"states of layer 2: values hold NaN"):
        fill_cache(cache, states, model.geometry, model.rotary)
    assert all(compat.layer_tensors(cache, layer) is None for layer in range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_to_fill_a_cache_that_holds_tokens(kind: str) -> None:
    model = kv_model()
    cache = filled_cache(kind, model, random_ids(4))
    with pytest.raises(CacheError, match=r"holds 4 tokens already; give an empty one"):
        fill_cache(cache, random_states(model), model.geometry, model.rotary)


@pytest.mark.parametrize("layers", [0, 2, 4])
def test_refuses_to_fill_a_cache_of_another_depth(layers: int) -> None:
    model = kv_model()
    cache = compat.empty_cache(kv_model(layers=layers).model) if layers else DynamicCache()
    with pytest.raises(CacheError, match=rf"cache.* {layers} layers.* 3"):
        fill_cache(cache, random_states(model), model.geometry, model.rotary)


def test_refuses_a_static_cache_that_is_too_short() -> None:
    model = kv_model()
    cache = new_cache("static", model, length=4)
    with pytest.raises(CacheError, match=r"room for 4 tokens.* 5"):
        fill_cache(cache, random_states(model), model.geometry, model.rotary)
    assert cache.get_seq_length() == 0


def test_refuses_states_of_too_few_layers_or_heads() -> None:
    model = kv_model()
    states = random_states(model)
    fewer = ContentStates(states.keys[1:], states.values[1:], states.positions)
    with pytest.raises(CacheError, match=r"keys of shape \(2, 2, 2, 5, 16\).*expected \(3, 2, 2, 5, 16\)"):
        fill_cache(new_cache("dynamic", model), fewer, model.geometry, model.rotary)
    wide = replace(states, keys=states.keys.repeat(1, 1, 2, 1, 1), values=states.values.repeat(1, 1, 2, 1, 1))
    with pytest.raises(CacheError, match=r"keys of shape \(3, 2, 4, 5, 16\).*expected \(3, 2, 2, 5, 16\)"):
        fill_cache(new_cache("dynamic", model), wide, model.geometry, model.rotary)
