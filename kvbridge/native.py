"""What the target computes of the carried tokens itself: the first layers of a plan's native head, and exact states.

layers    [ 0 … m | m+1 …………………… L−n−1 | L−n …………………… L−1 ]
            native   mapped               recomputed from the residual stream at the input of layer L−n
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from kvbridge import compat
from kvbridge.errors import CacheError
from kvbridge.layer_pass import run_head, run_tail
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates, check_tensors


@dataclass(frozen=True, slots=True)
class NativeHead:
    """Layers `0 … m` of the target for all tokens before the tail, exact.

    Attributes:
        keys: as cached, of all tokens up to the tail.
        values: as cached.
        residual: residual stream at the inputs of the same layers; what is held already has none.
        held: tokens that the target held before.
    """

    keys: Float[Tensor, "L B H T D"]
    values: Float[Tensor, "L B H T D"]
    residual: list[Float[Tensor, "B N E"]]
    held: int = 0

    @property
    def tokens(self) -> int:
        return self.keys.shape[-2]

    def states(self, target: KVModel, start: int, stop: int) -> ContentStates:
        """Content states of the tokens at positions `start … stop − 1`, with the residual stream of each layer.

        Raises:
            CacheError: the target has not computed these tokens here.
        """
        if not self.held <= start <= stop <= self.tokens:
            raise CacheError(
                f"the native head covers positions {self.held} … {self.tokens - 1}, asked for {start} … {stop - 1}."
            )
        positions = torch.arange(start, stop, device=self.keys.device)
        return ContentStates(
            target.rotary.strip(self.keys[..., start:stop, :], positions),
            self.values[..., start:stop, :].float(),
            positions,
            {at: h[:, start - self.held : stop - self.held].float() for at, h in enumerate(self.residual)},
        )


def check_held(target: KVModel, held: Cache, batch: int) -> None:
    """Refuse a cache that does not hold the same tokens in every layer of the target.

    Raises:
        CacheError: naming the layer.
    """
    geometry, tokens = target.geometry, compat.longest(held)
    shape = (batch, geometry.kv_heads, tokens, geometry.head_dim)
    for layer in range(geometry.layers):
        tensors = compat.layer_tensors(held, layer)
        if tensors is None or tensors[0].shape != shape or tensors[0].dtype != target.dtype:
            found = "nothing" if tensors is None else f"{tuple(tensors[0].shape)}, {tensors[0].dtype}"
            raise CacheError(f"the held cache has {found} at layer {layer}; expected {shape}, {target.dtype}.")


def compute_head(
    target: KVModel, plan: HandoffPlan, input_ids: Int[Tensor, "B T"], held: Cache | None = None
) -> NativeHead | None:
    """Run the plan's native head on everything before the tail.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        input_ids: the prompt.
        held: what the target's cache holds for the first tokens of the prompt; left as it is.

    Returns:
        The head; `None` where the plan has none or carries nothing.

    Raises:
        CacheError: `held` does not fit.
        PlanError: the prompt is empty, all of it is held, or the plan leaves no layer to map.
    """
    tokens = compat.longest(held) if held is not None else 0
    split = plan.split(input_ids.shape[1], tokens)
    plan.mapped_layers(target.geometry.layers)
    if plan.native_head is None or not split.carried:
        return None
    past: list[tuple[Tensor, Tensor]] = []
    if held is not None and tokens:
        check_held(target, held, input_ids.shape[0])
        found = [compat.layer_tensors(held, layer) for layer in range(plan.native_head + 1)]
        past = [tensors for tensors in found if tensors is not None]
    ids = input_ids[:, tokens : split.carried_stop]
    made, residual = run_head(target.model, ids, plan.native_head, past=past)
    keys, values = (torch.stack(parts) for parts in zip(*made, strict=True))
    return NativeHead(keys, values, residual, tokens)


def recompute_layers(
    target: KVModel,
    boundary: Float[Tensor, "B T E"],
    layers: range,
    positions: Int[Tensor, "T"],
    past: list[tuple[Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the last layers, as cached, from the residual stream at the input of the first of them.

    Exact given the boundary and `past`. The last layer costs its norm and its projections alone.

    Args:
        target: the model that goes on.
        boundary: residual stream of the carried tokens.
        layers: `L − n … L − 1`.
        positions: of the carried tokens.
        past: what the target has in these layers for all positions before; not read where there is one layer.

    Raises:
        CacheError: the boundary does not fit, or what follows from it is not finite.
    """
    batch, tokens, geometry = boundary.shape[0], len(positions), target.geometry
    if tuple(boundary.shape[1:]) != (tokens, geometry.hidden_size):
        raise CacheError(
            f"the residual stream at the input of layer {layers.start} has shape {tuple(boundary.shape)}, expected "
            f"{(batch, tokens, geometry.hidden_size)}."
        )
    made = run_tail(target.model, boundary, layers.start, positions, past if len(layers) > 1 else ())
    for layer, (keys, values) in zip(layers, made, strict=True):
        check_tensors(keys, values, geometry, batch, tokens, f"recomputed layer {layer}")
    return made


def exact_states(
    target: KVModel, plan: HandoffPlan, input_ids: Int[Tensor, "B T"], states: ContentStates | None = None
) -> ContentStates:
    """What a perfect map would carry under a plan.

    Args:
        target: the model that goes on.
        plan: what it computes natively.
        input_ids: the prompt.
        states: the target's own content states of the whole prompt, where they are at hand.

    Raises:
        PlanError: the prompt is empty, or the plan leaves no layer to map.
    """
    split, layers = plan.split(input_ids.shape[1]), plan.mapped_layers(target.geometry.layers)
    carried = (target.content(target.read(input_ids)) if states is None else states).layers(layers)
    if plan.tail_recompute:
        carried = replace(carried, residual={layers.stop: read_boundary(target, input_ids, layers.stop)})
    return carried.span(split.carried_start, split.carried_stop)


def read_boundary(target: KVModel, input_ids: Int[Tensor, "B T"], layer: int) -> Float[Tensor, "B T E"]:
    """The target's own residual stream at the input of a layer, in fp32."""
    return run_head(target.model, input_ids, layer).residual[layer].float()
