"""Content states: what a KV cache says, without the rotation that says where it was said."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from kvbridge import compat
from kvbridge.errors import CacheError
from kvbridge.geometry import KVGeometry
from kvbridge.rotary import RotaryCodec


def normed(residual: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """A residual stream divided by its root mean square over the hidden width, in fp32."""
    exact = residual.float()
    return exact / exact.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, slots=True)
class ContentStates:
    """De-rotated keys and values of some layers of one model.

    Attributes:
        keys: content keys.
        values: values as cached.
        positions: absolute position of each token.
        residual: residual stream at the input of some layers, where it is known; `E` is the hidden size.
    """

    keys: Float[Tensor, "L B H T D"]
    values: Float[Tensor, "L B H T D"]
    positions: Int[Tensor, "T"]
    residual: dict[int, Float[Tensor, "B T E"]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.keys.shape[-2]

    def span(self, start: int, stop: int) -> ContentStates:
        """The tokens with index `start … stop − 1`."""
        return ContentStates(
            self.keys[..., start:stop, :],
            self.values[..., start:stop, :],
            self.positions[start:stop],
            {layer: stream[:, start:stop] for layer, stream in self.residual.items()},
        )

    def layers(self, chosen: range) -> ContentStates:
        """The layers `chosen` of states that hold all layers, with what is known of the residual stream."""
        part = slice(chosen.start, chosen.stop)
        return ContentStates(self.keys[part], self.values[part], self.positions, self.residual)


@dataclass(frozen=True, slots=True)
class CachedStates:
    """Keys and values as a model cached them, of which content states can be read.

    A map that reads them itself takes the rotation off while it gathers its rows, in the same pass.

    Attributes:
        keys: rotated keys of each layer.
        values: values of each layer.
        positions: absolute position of each token.
        rotary: takes the rotation off.
    """

    keys: tuple[Float[Tensor, "B H T D"], ...]
    values: tuple[Float[Tensor, "B H T D"], ...]
    positions: Int[Tensor, "T"]
    rotary: RotaryCodec

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[-2]

    def span(self, start: int, stop: int) -> CachedStates:
        """The tokens with index `start … stop − 1`."""
        keys, values = (tuple(t[..., start:stop, :] for t in kind) for kind in (self.keys, self.values))
        return CachedStates(keys, values, self.positions[start:stop], self.rotary)

    def content(self) -> ContentStates:
        """The content states, in fp32."""
        keys = self.rotary.strip(torch.stack(self.keys), self.positions)
        return ContentStates(keys, torch.stack(self.values).float(), self.positions)


def check_shapes(keys: Tensor, values: Tensor, geometry: KVGeometry, batch: int, tokens: int, where: str) -> None:
    """Refuse one layer's keys and values `[B, H, T, D]` that do not fit the model and prompts.

    Raises:
        CacheError: naming `where` and what differs.
    """
    expected = (batch, geometry.kv_heads, tokens, geometry.head_dim)
    for kind, tensor in (("keys", keys), ("values", values)):
        if tuple(tensor.shape) != expected:
            raise CacheError(f"{where}: {kind} have shape {tuple(tensor.shape)}, expected {expected}.")
    if keys.dtype != values.dtype or keys.device != values.device:
        raise CacheError(
            f"{where}: keys are {keys.dtype} on {keys.device}, values {values.dtype} on {values.device}; "
            "both must be the same."
        )


def check_finite(keys: Tensor, values: Tensor, where: str) -> None:
    """Refuse one layer's keys and values that hold NaN or infinite numbers.

    Raises:
        CacheError: naming `where`.
    """
    for kind, tensor in (("keys", keys), ("values", values)):
        if not torch.isfinite(tensor).all():
            raise CacheError(f"{where}: {kind} hold NaN or infinite numbers; this cache must not be used.")


def check_tensors(keys: Tensor, values: Tensor, geometry: KVGeometry, batch: int, tokens: int, where: str) -> None:
    """Refuse one layer's keys and values `[B, H, T, D]` that do not fit the model and prompts or are not finite.

    Raises:
        CacheError: naming `where` and what differs.
    """
    check_shapes(keys, values, geometry, batch, tokens, where)
    check_finite(keys, values, where)


def cached_states(
    cache: Cache, geometry: KVGeometry, rotary: RotaryCodec, positions: Int[Tensor, "T"] | None = None
) -> CachedStates:
    """A dynamic or static cache as it lies, without a copy.

    Its numbers are not looked at: what is not finite shows in what a map makes of it.

    Args:
        cache: filled by the model that `geometry` and `rotary` describe; it is not changed.
        positions: absolute position of each cached token, `0 … T − 1` by default.

    Raises:
        CacheError: a layer is missing, lengths differ or a shape is wrong.
    """
    found = [compat.layer_tensors(cache, layer) for layer in range(len(cache.layers))]
    missing = [layer for layer, tensors in enumerate(found) if tensors is None]
    if len(found) != geometry.layers or missing:
        held = f"{len(found)} layers" + (f", of which {missing} are empty" if missing else "")
        raise CacheError(f"the cache holds {held}; {geometry.describe()} needs {geometry.layers} filled layers.")
    layers = [tensors for tensors in found if tensors is not None]
    first = layers[0][0]
    batch, tokens = first.shape[0], first.shape[-2]
    for layer, (keys, values) in enumerate(layers):
        check_shapes(keys, values, geometry, batch, tokens, f"cache layer {layer}")
        if keys.dtype != first.dtype:
            raise CacheError(f"cache layer {layer}: keys are {keys.dtype}, those of layer 0 {first.dtype}.")
    if positions is None:
        positions = torch.arange(tokens, device=first.device)
    elif len(positions) != tokens:
        raise CacheError(f"{len(positions)} positions were given for a cache of {tokens} tokens.")
    keys, values = zip(*layers, strict=True)
    return CachedStates(keys, values, positions, rotary)


def content_states(
    cache: Cache, geometry: KVGeometry, rotary: RotaryCodec, positions: Int[Tensor, "T"] | None = None
) -> ContentStates:
    """Read a dynamic or static cache into content states, in fp32.

    Args:
        cache: filled by the model that `geometry` and `rotary` describe; it is not changed.
        positions: absolute position of each cached token, `0 … T − 1` by default.

    Raises:
        CacheError: a layer is missing, lengths differ, a shape is wrong or a number is not finite.
    """
    cached = cached_states(cache, geometry, rotary, positions)
    for layer, (keys, values) in enumerate(zip(cached.keys, cached.values, strict=True)):
        check_finite(keys, values, f"cache layer {layer}")
    return cached.content()


def rotated(
    states: ContentStates, geometry: KVGeometry, rotary: RotaryCodec, batch: int, layers: range
) -> tuple[Float[Tensor, "L B H T D"], Float[Tensor, "L B H T D"]]:
    """Keys and values of `layers` as the model would cache them for `batch` prompts, completely checked.

    Raises:
        CacheError: the states do not fit or are not finite in the model's dtype.
    """
    expected = (len(layers), batch, geometry.kv_heads, states.tokens, geometry.head_dim)
    if not tuple(states.keys.shape) == tuple(states.values.shape) == expected:
        raise CacheError(
            f"states for layers {layers.start} … {layers.stop - 1} have keys of shape {tuple(states.keys.shape)} and "
            f"values of shape {tuple(states.values.shape)}, expected {expected}."
        )
    keys = rotary.apply(states.keys, states.positions).to(rotary.dtype)
    values = states.values.to(rotary.dtype)
    for index, layer in enumerate(layers):
        check_tensors(keys[index], values[index], geometry, batch, states.tokens, f"states of layer {layer}")
    return keys, values


def fill_cache(cache: Cache, states: ContentStates, geometry: KVGeometry, rotary: RotaryCodec) -> Cache:
    """Rotate content states of all layers, check them completely and put them into an empty cache.

    Args:
        cache: a fresh `DynamicCache` or `StaticCache` of the model that `geometry` and `rotary` describe.

    Returns:
        The same cache.

    Raises:
        CacheError: the states do not fit, are not finite in the model's dtype, or the cache is not empty.
    """
    if len(cache.layers) != geometry.layers:
        raise CacheError(
            f"the cache is made for {len(cache.layers)} layers, the model has {geometry.layers}; "
            "make it with the model's config."
        )
    held = compat.longest(cache)
    if held > 0:
        raise CacheError(f"the cache holds {held} tokens already; give an empty one.")
    room = compat.room(cache)
    if room is not None and room < states.tokens:
        raise CacheError(f"the cache has room for {room} tokens; {states.tokens} were given.")
    keys, values = rotated(states, geometry, rotary, states.keys.shape[1], range(geometry.layers))
    for layer in range(geometry.layers):
        compat.put_layer(cache, layer, keys[layer], values[layer])
    return cache
