"""Which carried tokens the target reads itself: those that the end of the prompt attends to most.

positions   [ read | sinks | carried ………… | tail …… | scouts ]
one pass    [      | sinks |              |         | scouts ]    queries; the rest of the tail is not there yet
recorded                     ^ attention of the scouts, summed over layers, heads and scouts
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from kvbridge import compat
from kvbridge.attention import recorded_backbone
from kvbridge.errors import PlanError, UnsupportedModelError
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan, Split

Slotted = Callable[[Tensor], Cache]


def scout(
    target: KVModel, plan: HandoffPlan, split: Split, input_ids: Int[Tensor, "1 T"], slotted: Slotted, read: int
) -> Float[Tensor, "C"]:
    """Attention of the scouts on each carried token, summed over layers, heads and scouts.

    The sinks that have not been read are read too, into their place.

    Args:
        target: the model that goes on.
        plan: how many scouts it has.
        split: of the prompt.
        input_ids: the prompt.
        slotted: a cache of one slot per position, filled up to the tail but for the sinks that have not been read, in
            which new tokens go to the given slots.
        read: first tokens of the prompt, at most up to the last sink, that the target has read.

    Raises:
        UnsupportedModelError: a layer of the target does not show its attention.
    """
    every = torch.arange(split.prompt_length, device=target.device)
    scouts = every[split.carried_stop :][-plan.scouts :]
    slots = torch.cat((every[read : split.carried_start], scouts))
    carried = slice(split.carried_start, split.carried_stop)
    first_scout = split.carried_start - read
    layers: list[Tensor] = []

    def record(probabilities: Tensor) -> None:
        layers.append(probabilities[0, :, first_scout:, carried].sum(dim=(0, 1)))

    visible = every.clone()
    # Nobody has read the rest of the tail yet: its slots lie after all queries.
    visible[split.carried_stop : -len(scouts)] = split.prompt_length
    with torch.no_grad():
        compat.run(
            recorded_backbone(target.model, record),
            input_ids[:, slots],
            slotted(slots),
            position_ids=slots[None],
            attention_mask=compat.causal_mask(slots, visible, target.dtype),
        )
    if len(layers) != target.geometry.layers:
        raise UnsupportedModelError(
            f"{len(layers)} of {target.geometry.layers} layers of {type(target.model).__name__} showed their "
            "attention; use plan.native_attended=0 with this model."
        )
    return torch.stack(layers).sum(dim=0)


def choose_attended(
    target: KVModel, plan: HandoffPlan, split: Split, input_ids: Int[Tensor, "B T"], slotted: Slotted, read: int
) -> Int[Tensor, "N"]:
    """Positions of the carried tokens that the target reads itself, in order; of equals the earlier are taken.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        split: of the prompt.
        input_ids: the prompt.
        slotted: as for `scout`.
        read: as for `scout`.

    Raises:
        PlanError: there is more than one prompt.
        UnsupportedModelError: a layer of the target does not show its attention.
    """
    if input_ids.shape[0] != 1:
        raise PlanError(
            f"plan.native_attended={plan.native_attended} chooses the tokens of one prompt, and {input_ids.shape[0]} "
            "were given; hand over one at a time."
        )
    attention = scout(target, plan, split, input_ids, slotted, read)
    most = attention.sort(descending=True, stable=True).indices[: plan.attended(split.carried)]
    return most.sort().values + split.carried_start
