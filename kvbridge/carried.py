"""What is carried into the target's cache: content states, or a map that will write them there itself."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import Map, WritingMap
from kvbridge.model import KVModel
from kvbridge.native import NativeHead
from kvbridge.plan import HandoffPlan, Split
from kvbridge.states import CachedStates, ContentStates, rotated


@dataclass(frozen=True, slots=True)
class UnwrittenStates:
    """States of the carried tokens that a map makes when it is told where to write them.

    Attributes:
        mapping: what writes them.
        source: states of the source at the carried positions.
        native: what the target has computed itself there.
    """

    mapping: WritingMap
    source: ContentStates | CachedStates
    native: ContentStates | None

    @property
    def tokens(self) -> int:
        return self.source.tokens

    @property
    def positions(self) -> Int[Tensor, "T"]:
        return self.source.positions


@dataclass(frozen=True, slots=True)
class RotatedStates:
    """States of the carried tokens that a map has written before, as the target caches them.

    Attributes:
        tensors: keys and values, known to be finite.
        positions: absolute position of each token.
        residual: residual stream of the carried tokens, by the layer that it enters.
    """

    tensors: Float[Tensor, "2 L B H T D"]
    positions: Int[Tensor, "T"]
    residual: dict[int, Float[Tensor, "B T E"]]

    @property
    def tokens(self) -> int:
        return self.tensors.shape[-2]


Carried = ContentStates | UnwrittenStates | RotatedStates


def inject(
    target: KVModel,
    buffers: Float[Tensor, "2 L B H T D"],
    carried: Carried,
    layers: range,
    split: Split,
) -> dict[int, Float[Tensor, "B C E"]]:
    """Write the carried states of `layers` into their place in the target's cache, rotated and fully checked.

    Returns:
        The residual stream that belongs to the carried states, by the layer that it enters.

    Raises:
        CacheError: the states do not fit, or a number is not finite.
    """
    _require_place(carried, layers, split)
    span = slice(split.carried_start, split.carried_stop)
    place = buffers[:, layers.start : layers.stop, ..., span, :]
    if isinstance(carried, UnwrittenStates):
        return carried.mapping.write(carried.source, layers, place, target.rotary, carried.native)
    if isinstance(carried, RotatedStates):
        place.copy_(carried.tensors)
        return carried.residual
    place[0], place[1] = rotated(carried, target.geometry, target.rotary, buffers.shape[2], layers)
    return carried.residual


def _require_place(carried: Carried, layers: range, split: Split) -> None:
    covers = len(layers)
    if not isinstance(carried, UnwrittenStates):
        covers = len(carried.keys) if isinstance(carried, ContentStates) else carried.tensors.shape[1]
    if carried.tokens != split.carried or covers != len(layers):
        raise CacheError(
            f"carried states cover {covers} layers and {carried.tokens} tokens; the plan needs "
            f"{len(layers)} layers and {split.carried} tokens."
        )
    expected = range(split.carried_start, split.carried_stop)
    if carried.positions.tolist() != list(expected):
        raise CacheError(
            f"carried states do not lie at positions {expected.start} … {expected.stop - 1}, where the plan puts them."
        )


def _inputs(
    target: KVModel, source_states: ContentStates | CachedStates, split: Split, head: NativeHead | None
) -> tuple[ContentStates | CachedStates, ContentStates | None]:
    """What a map reads at the carried positions: of the source, and of the target's native head."""
    start, stop = split.carried_start, split.carried_stop
    return source_states.span(start, stop), None if head is None else head.states(target, start, stop)


def map_states(
    target: KVModel,
    plan: HandoffPlan,
    mapping: Map,
    source_states: ContentStates | CachedStates,
    split: Split,
    head: NativeHead | None,
) -> ContentStates:
    """What a map makes of the carried tokens, given the source's states of the prompt and the target's native head."""
    source, native = _inputs(target, source_states, split, head)
    content = source.content() if isinstance(source, CachedStates) else source
    return mapping.apply(content, plan.mapped_layers(target.geometry.layers), native)


def unwritten(
    target: KVModel,
    mapping: WritingMap,
    source_states: ContentStates | CachedStates,
    split: Split,
    head: NativeHead | None,
) -> UnwrittenStates:
    """What `map_states` gives, left to be written by the map itself."""
    return UnwrittenStates(mapping, *_inputs(target, source_states, split, head))
