"""After a hand-off: what the target computed for its tail, against what the map makes of the same tokens.

The target reads the tail over the mapped cache, so its keys and values there are better than mapped ones and cost
nothing more; the map is applied to the tail's tokens besides. Where both agree, the map fits this text.

carried …… | read natively …………………………… ]
                          | compared ………… ]      as many last tokens as the plan reads, also where more were read
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge import compat
from kvbridge.assembly import Handoff
from kvbridge.errors import CacheError
from kvbridge.forms import Map
from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.native import NativeHead
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates


def computed_layer(handoff: Handoff, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, T, D]` of one layer of the handed-off cache.

    Raises:
        CacheError: the layer is empty.
    """
    tensors = compat.layer_tensors(handoff.cache, layer)
    if tensors is None:
        raise CacheError(f"the handed-off cache is empty at layer {layer}; check it before it is used further.")
    return tensors


def map_tail(
    target: KVModel,
    plan: HandoffPlan,
    mapping: Map,
    source_states: ContentStates,
    input_ids: Int[Tensor, "B T"],
    handoff: Handoff,
) -> ContentStates:
    """What the map makes of the plan's tail, for its mapped layers.

    A chat's scaffold and a kept draft can make the target read more than that itself; those tokens are left out, since
    limits are of as many tokens as the plan's tail has, in the same place.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        mapping: from source to target content states.
        source_states: of the whole prompt.
        input_ids: the prompt.
        handoff: of this prompt, before anything was read after it.
    """
    stop = handoff.split.prompt_length
    start = max(handoff.split.carried_stop, stop - plan.native_tail)
    native = None
    if plan.native_head is not None:
        past = [
            (keys[..., :start, :], values[..., :start, :])
            for keys, values in (computed_layer(handoff, layer) for layer in range(plan.native_head + 1))
        ]
        made, residual = run_head(target.model, input_ids[:, start:stop], plan.native_head, past=past)
        keys, values = (torch.stack(parts) for parts in zip(*made, strict=True))
        native = NativeHead(keys, values, residual, start).states(target, start, stop)
    return mapping.apply(source_states.span(start, stop), plan.mapped_layers(target.geometry.layers), native)


def tail_discrepancy(
    target: KVModel, layers: range, spread: Float[Tensor, "2 L_t"], handoff: Handoff, mapped: ContentStates
) -> Float[Tensor, "2 L"]:
    """Mean squared difference of mapped and computed tail keys and values, in units of their variance.

    Args:
        target: the model that goes on.
        layers: mapped layers, `L` of them.
        spread: variance of a coordinate in each target layer, keys and values.
        handoff: before anything was read after it.
        mapped: of the tail, from `map_tail`.
    """
    stop = handoff.split.prompt_length
    start = stop - mapped.tokens
    read = [computed_layer(handoff, layer) for layer in layers]
    keys, values = (torch.stack(parts)[..., start:stop, :] for parts in zip(*read, strict=True))
    positions = torch.arange(start, stop, device=keys.device)
    computed = torch.stack((target.rotary.strip(keys, positions), values.float()))
    error = (torch.stack((mapped.keys, mapped.values)).to(computed) - computed).square().mean(dim=(2, 3, 4, 5))
    return error / spread[:, layers.start : layers.stop].to(error)
