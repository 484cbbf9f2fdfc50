"""Assemble the target's cache from what the target computes itself and what is carried.

positions in the cache   [ sinks | carried | tail ]        in this order, carried left out where nothing is carried
one forward pass         [ sinks |         | tail ]        queries; each sees the cached positions up to its own

With a tail recompute of two layers or more the carried tokens attend to the sinks in these layers, so the sinks are
read first, alone, and the tail after it: two passes, and no token is read twice.

A later hand-off of the same conversation goes on from what the target holds:

positions in the cache   [ held …………………… | carried | tail ]     the tail alone is read

Where the plan reads attended tokens itself, a pass of the sinks and of the scouts comes first, and the second reads the
attended tokens and the tail:

first pass, queries      [ sinks |         | scouts ]
second pass, queries     [       | attended | tail ]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache

from kvbridge import compat
from kvbridge.attended import choose_attended
from kvbridge.carried import Carried, UnwrittenStates, inject, map_states, unwritten
from kvbridge.errors import CacheError
from kvbridge.forms import Map, WritingMap
from kvbridge.model import KVModel
from kvbridge.native import NativeHead, check_held, compute_head, recompute_layers
from kvbridge.plan import HandoffPlan, Split
from kvbridge.slotted import slotted
from kvbridge.states import CachedStates, ContentStates


@dataclass(frozen=True, slots=True)
class Handoff:
    """A target cache that is partly an approximation, and the logits that follow the prompt.

    Attributes:
        cache: keys and values in the order of positions; never an exact prefix cache of the prompt.
        logits: of the last prompt token.
        split: which positions the plan carries.
        next_position: position of the first token after the prompt; more than the cache's length where nothing was
            carried, so give positions explicitly when going on.
        seconds: time spent per step (`head`, `map`, `inject`, `recompute`, `scout`, `forward`); a map that writes
            its states injects them too.
        attended: positions of the carried tokens that the target read itself, in order.
    """

    cache: DynamicCache
    logits: Float[Tensor, "B V"]
    split: Split
    next_position: int
    seconds: dict[str, float] = field(default_factory=dict)
    attended: Int[Tensor, "N"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


@contextmanager
def timed(seconds: dict[str, float], step: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of a block to `seconds[step]`, after the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start


def _buffers(target: KVModel, batch: int, tokens: int) -> Tensor:
    geometry = target.geometry
    shape = (2, geometry.layers, batch, geometry.kv_heads, tokens, geometry.head_dim)
    return torch.zeros(shape, dtype=target.dtype, device=target.device)


def _hold(buffers: Tensor, held: Cache, tokens: int) -> None:
    """Write what the target holds already to the front of the cache."""
    for layer in range(buffers.shape[1]):
        tensors = compat.layer_tensors(held, layer)
        if tensors is not None:
            buffers[0, layer, ..., :tokens, :], buffers[1, layer, ..., :tokens, :] = tensors


def _write_head(buffers: Tensor, head: NativeHead, plan: HandoffPlan, split: Split) -> None:
    """Write the keys and values of a native head for everything between what is held and the tail."""
    covers = head.keys.shape[0] - 1, head.keys.shape[1], head.held, head.tokens
    expected = plan.native_head, buffers.shape[2], split.held, split.carried_stop
    if covers != expected:
        raise CacheError(
            f"the native head given covers (last layer, prompts, held, tokens) = {covers}; the plan needs {expected}."
        )
    span = slice(split.held, split.carried_stop)
    for part, tensors in enumerate((head.keys, head.values)):
        buffers[part, : len(tensors), ..., span, :] = tensors[..., span, :]


def _read_sinks(target: KVModel, buffers: Tensor, input_ids: Tensor, sinks: Tensor) -> None:
    """Read the sinks (positions `sinks`), with which `buffers` ends, over what is held before them."""
    seen = torch.arange(buffers.shape[-2], device=target.device)
    with torch.no_grad():
        compat.run(
            compat.backbone(target.model),
            input_ids[:, sinks],
            slotted(buffers, sinks),
            position_ids=sinks[None],
            attention_mask=compat.causal_mask(sinks, seen, target.dtype),
        )


def _recompute(target: KVModel, buffers: Tensor, residual: dict[int, Tensor], layers: range, split: Split) -> None:
    """Write the keys and values of the last `layers` for the carried tokens, from their residual stream."""
    boundary = residual.get(layers.start)
    if boundary is None:
        raise CacheError(
            f"the carried states lack the residual stream at the input of layer {layers.start}, from which the plan "
            "recomputes the last layers; give plan.tail_recompute=0, or a map that makes it."
        )
    positions = torch.arange(split.carried_start, split.carried_stop, device=target.device)
    before = buffers[..., : split.carried_start, :]
    past = [(before[0, layer], before[1, layer]) for layer in layers]
    for layer, tensors in zip(layers, recompute_layers(target, boundary, layers, positions, past), strict=True):
        for part, tensor in enumerate(tensors):
            buffers[part, layer, ..., split.carried_start : split.carried_stop, :] = tensor


def _forward(
    target: KVModel, buffers: Tensor, input_ids: Tensor, kept: Tensor, native: Tensor
) -> tuple[DynamicCache, Tensor]:
    """Run the native tokens (indices `native` of the cache, positions `kept[native]`) over the slotted cache."""
    positions = kept[native]
    mask = compat.causal_mask(positions, kept, target.dtype)
    with torch.no_grad():
        output = compat.run(
            target.model,
            input_ids[:, positions],
            slotted(buffers, native),
            position_ids=positions[None],
            attention_mask=mask,
            logits_to_keep=1,
        )
    cache = compat.empty_cache(target.model)
    for layer, (keys, values) in enumerate(zip(*buffers, strict=True)):
        compat.put_layer(cache, layer, keys, values)
    return cache, output.logits[:, -1]


def _carry(
    target: KVModel,
    plan: HandoffPlan,
    split: Split,
    buffers: Tensor,
    input_ids: Tensor,
    carried: Carried,
    seconds: dict[str, float],
) -> tuple[int, Int[Tensor, "N"]]:
    """Write what is carried and what is recomputed of it, and choose what is read besides.

    Returns:
        How many first tokens have been read by then, and the positions of the attended tokens.
    """
    layers, start = plan.mapped_layers(target.geometry.layers), split.carried_start
    step = "map" if isinstance(carried, UnwrittenStates) else "inject"
    with timed(seconds, step, target.device):
        residual = inject(target, buffers, carried, layers, split)
    read = split.held
    if plan.tail_recompute > 1 and read < start:
        with timed(seconds, "forward", target.device):
            sinks = torch.arange(read, start, device=target.device)
            _read_sinks(target, buffers[..., :start, :], input_ids, sinks)
        read = start
    if plan.tail_recompute:
        with timed(seconds, "recompute", target.device):
            _recompute(target, buffers, residual, range(layers.stop, target.geometry.layers), split)
    if not plan.attended(split.carried):
        return read, torch.arange(0, device=target.device)
    with timed(seconds, "scout", target.device):
        attended = choose_attended(target, plan, split, input_ids, partial(slotted, buffers), read)
    # The scouts' pass leaves the sinks in their place.
    return start, attended


def assemble(
    target: KVModel,
    plan: HandoffPlan,
    input_ids: Int[Tensor, "B T"],
    carried: Carried | None,
    *,
    head: NativeHead | None = None,
    held: Cache | None = None,
) -> Handoff:
    """Build the target's cache for a prompt and read its sinks, its attended tokens and its tail.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        input_ids: the prompt.
        carried: target content states of the plan's mapped layers at the carried positions, or what writes them;
            `None` carries nothing, and the tail sees only what is held, the sinks and itself.
        head: the plan's native head from `compute_head`, of this prompt or of another one (a control arm); by default
            it is computed here.
        held: what the target's cache holds for the first tokens of the prompt, from an earlier hand-off and what it
            has read since; left as it is.

    Raises:
        CacheError: the carried states, `head` or `held` do not fit, or a number is not finite.
        PlanError: the prompt is empty, all of it is held, the plan leaves no layer to map, or it chooses attended
            tokens for more than one prompt.
        UnsupportedModelError: the plan chooses attended tokens, and the target does not show its attention.
    """
    tokens = compat.longest(held) if held is not None else 0
    split = plan.split(input_ids.shape[1], tokens)
    seconds: dict[str, float] = {}
    start, stop, length = split.carried_start, split.carried_stop, split.prompt_length
    carries = carried is not None and split.carried > 0
    kept = torch.arange(length, device=target.device)
    if not carries:
        kept = torch.cat((kept[:start], kept[stop:]))
    buffers = _buffers(target, input_ids.shape[0], len(kept))
    if held is not None:
        check_held(target, held, input_ids.shape[0])
        _hold(buffers, held, tokens)
    read, attended = tokens, kept[:0]
    if carried is not None and carries:
        with timed(seconds, "head", target.device):
            head = head or compute_head(target, plan, input_ids, held)
            if head is not None:
                _write_head(buffers, head, plan, split)
        read, attended = _carry(target, plan, split, buffers, input_ids, carried, seconds)
    native = torch.arange(len(kept), device=target.device)
    native = torch.cat((native[read:start], attended, native[stop if carries else start :]))
    with timed(seconds, "forward", target.device):
        cache, logits = _forward(target, buffers, input_ids, kept, native)
    return Handoff(cache, logits, split, length, seconds, attended)


def hand_off(
    target: KVModel,
    plan: HandoffPlan,
    mapping: Map,
    source_states: ContentStates | CachedStates,
    input_ids: Int[Tensor, "B T"],
    *,
    held: Cache | None = None,
) -> Handoff:
    """Map a source's states and give the result to the target.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        mapping: from source to target states; one that writes fills the target's cache itself.
        source_states: of the whole prompt, from `KVModel.cached` or `KVModel.content` of the source.
        input_ids: the prompt.
        held: what the target's cache holds for the first tokens of the prompt; only what follows is mapped.

    Raises:
        CacheError: the source states do not cover the prompt, or the mapped states are unusable.
        PlanError: the prompt is empty, all of it is held, or the plan leaves no layer to map.
    """
    split = plan.split(input_ids.shape[1], compat.longest(held) if held is not None else 0)
    if source_states.tokens != split.prompt_length:
        raise CacheError(
            f"the source has read {source_states.tokens} tokens and the prompt has {split.prompt_length}; "
            "both must be the same text."
        )
    seconds: dict[str, float] = {}
    carried = head = None
    if split.carried:
        with timed(seconds, "head", target.device):
            head = compute_head(target, plan, input_ids, held)
        if isinstance(mapping, WritingMap):
            carried = unwritten(target, mapping, source_states, split, head)
        else:
            with timed(seconds, "map", target.device):
                carried = map_states(target, plan, mapping, source_states, split, head)
    handoff = assemble(target, plan, input_ids, carried, head=head, held=held)
    for step, spent in seconds.items():
        handoff.seconds[step] = handoff.seconds.get(step, 0.0) + spent
    return handoff
