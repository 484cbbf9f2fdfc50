"""The target reads on after a hand-off, with gradients into what was carried.

cache      [ sinks | carried ……………………………………… ]       positions 0 … C − 1
queries    [ c₁ … c₁+S−1 | c₂ … c₂+S−1 | … ]              one forward pass of all suffixes of a document

Suffix i sees the cached positions below its own start cᵢ, and its own tokens up to each. With one suffix at the start
of the tail this is what `kvbridge.assembly.assemble` gives, which reads the sinks too and takes no gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge import compat
from kvbridge.mappers.residual.readings import Readings
from kvbridge.model import KVModel
from kvbridge.native import recompute_layers
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates


@contextlib.contextmanager
def frozen(target: KVModel) -> Iterator[None]:
    """While open, gradients pass through the target and none is kept for its weights."""
    wanted = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
    target.model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def carried_cache(
    target: KVModel, plan: HandoffPlan, readings: Readings, mapped: ContentStates
) -> list[tuple[Float[Tensor, "B H C D"], Float[Tensor, "B H C D"]]]:
    """Keys and values of every layer at positions `0 … C − 1`, as a hand-off would leave them before the tail.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        readings: of the documents, from which come its sinks and its native head.
        mapped: content states of the plan's mapped layers at positions `sinks … C − 1`, with the boundary's residual
            stream where the plan recomputes the last layers.
    """
    start, stop = plan.sinks, plan.sinks + mapped.tokens
    layers, count = plan.mapped_layers(target.geometry.layers), target.geometry.layers
    turned = target.rotary.apply(mapped.keys, mapped.positions).to(target.dtype)
    values = mapped.values.to(target.dtype)
    made = dict(zip(layers, zip(turned, values, strict=True), strict=True))
    if plan.tail_recompute:
        last = range(layers.stop, count)
        past = [(readings.keys[at][..., :start, :], readings.values[at][..., :start, :]) for at in last]
        boundary = mapped.residual[layers.stop].detach()
        made |= dict(zip(last, recompute_layers(target, boundary, last, mapped.positions, past), strict=True))
    found = []
    for layer in range(count):
        native = readings.keys[layer][..., :stop, :], readings.values[layer][..., :stop, :]
        if layer in made:
            parts = zip(native, made[layer], strict=True)
            native = tuple(torch.cat((exact[..., :start, :], part), dim=-2) for exact, part in parts)
        found.append((native[0], native[1]))
    return found


def suffix_positions(starts: Sequence[int], suffix: int) -> Int[Tensor, "N"]:
    """Positions of all tokens of all suffixes, one suffix after the other."""
    return torch.cat([torch.arange(start, start + suffix) for start in starts])


def suffix_mask(starts: Sequence[int], suffix: int, cached: int, dtype: torch.dtype) -> Float[Tensor, "1 1 N K"]:
    """Additive mask of all suffixes over the cache and themselves."""
    position = suffix_positions(starts, suffix)
    owner = torch.arange(len(starts)).repeat_interleave(suffix)
    before = torch.arange(cached)[None] < torch.tensor(starts)[owner][:, None]
    own = (owner[:, None] == owner[None]) & (position[None] <= position[:, None])
    seen = torch.cat((before, own), dim=1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def read_suffixes(
    target: KVModel,
    cached: Sequence[tuple[Float[Tensor, "B H C D"], Float[Tensor, "B H C D"]]],
    input_ids: Int[Tensor, "B T"],
    starts: Sequence[int],
    suffix: int,
    backbone: transformers.PreTrainedModel | None = None,
) -> Float[Tensor, "B N E"]:
    """The backbone's output for every token of every suffix.

    Args:
        target: the model that goes on.
        cached: keys and values of each layer at positions `0 … C − 1`; no start lies beyond C.
        input_ids: the documents.
        starts: first token of each suffix.
        suffix: tokens of each.
        backbone: a copy of the target's that shows what it does.
    """
    positions = suffix_positions(starts, suffix).to(target.device)
    cache = compat.empty_cache(target.model)
    for layer, (keys, values) in enumerate(cached):
        compat.put_layer(cache, layer, keys, values)
    mask = suffix_mask(starts, suffix, cached[0][0].shape[-2], target.dtype).to(target.device)
    output = compat.run(
        backbone or compat.backbone(target.model),
        input_ids[:, positions],
        cache,
        position_ids=positions[None],
        attention_mask=mask,
    )
    return output.last_hidden_state
