"""What training lowers, for the readings of some documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge import compat
from kvbridge.attention import output_projections, queried_backbone
from kvbridge.mappers.residual.mapping import AdaptedMap
from kvbridge.mappers.residual.readings import Readings
from kvbridge.mappers.residual.suffixes import carried_cache, read_suffixes, suffix_mask, suffix_positions
from kvbridge.metrics import kl_divergence
from kvbridge.model import KVModel
from kvbridge.states import ContentStates

KeysValues = tuple[Float[Tensor, "L B H T D"], Float[Tensor, "L B H T D"]]

ROWS_AT_ONCE = 8


@runtime_checkable
class Loss(Protocol):
    """A mean over the documents of one batch."""

    def __call__(
        self, mapping: AdaptedMap, readings: Readings, starts: Sequence[int], suffix: int
    ) -> Float[Tensor, ""]:
        """The loss of a map.

        Args:
            mapping: map and branch.
            readings: of the batch's documents.
            starts: hand-off positions.
            suffix: tokens after each that the target reads.
        """
        ...


def mse_loss(mapping: AdaptedMap, readings: Readings, starts: Sequence[int], suffix: int) -> Float[Tensor, ""]:
    """Squared error of content keys and values after the sinks, in units of the target's own spread."""
    made = mapping.mapped(readings, readings.tokens)
    layers = mapping.plan.mapped_layers(mapping.target.geometry.layers)
    span = slice(mapping.plan.sinks, readings.tokens)
    native = (
        mapping.target.rotary.strip(readings.keys[layers.start : layers.stop, ..., span, :], made.positions),
        readings.values[layers.start : layers.stop, ..., span, :].float(),
    )
    units = mapping.module.units.output.view(2, len(layers), 1, mapping.target.geometry.kv_heads, 1, -1)
    errors = zip((made.keys, made.values), native, units, strict=True)
    return torch.stack([((given - exact) / unit).square().mean() for given, exact, unit in errors]).mean()


def attend(
    queries: Float[Tensor, "L B H_q Q D"],
    keys: Float[Tensor, "L B H T D"],
    values: Float[Tensor, "L B H T D"],
    hidden: Float[Tensor, "B Q T"],
) -> Float[Tensor, "L B Q o"]:
    """Outputs of all query heads side by side, for scaled queries; `hidden` is −∞ where a key is not seen."""
    grouped = queries.float().unflatten(2, (keys.shape[2], -1))
    scores = torch.einsum("lbhgqd,lbhtd->lbhgqt", grouped, keys) + hidden[:, None, None]
    output = torch.einsum("lbhgqt,lbhtd->lbqhgd", scores.softmax(dim=-1), values)
    return output.flatten(3)


def _attention_error(
    target: KVModel,
    layers: range,
    queries: Float[Tensor, "L B H_q Q D"],
    native: KeysValues,
    given: KeysValues,
    hidden: Float[Tensor, "B Q T"],
) -> Float[Tensor, ""]:
    """Squared error of the attention output of some layers, behind the output projection, over its energy."""
    with torch.no_grad():
        wanted = attend(queries, *native, hidden)
    error = attend(queries, *given, hidden) - wanted
    shares = []
    projections = output_projections(target.model)[layers.start : layers.stop]
    for weight, wrong, right in zip(projections, error, wanted, strict=True):
        projected = weight.float().T
        shares.append((wrong @ projected).square().sum() / (right @ projected).square().sum())
    return torch.stack(shares).mean()


def _carried(mapping: AdaptedMap, readings: Readings, made: ContentStates) -> tuple[KeysValues, KeysValues]:
    """Keys and values of the mapped layers at positions `0 … C − 1` in fp32: the target's own, and with mapped ones."""
    layers, sinks = mapping.plan.mapped_layers(mapping.target.geometry.layers), mapping.plan.sinks
    chosen, stop = slice(layers.start, layers.stop), sinks + made.tokens
    given = mapping.target.rotary.apply(made.keys, made.positions), made.values
    native = tuple(states[chosen, ..., :stop, :].float() for states in (readings.keys, readings.values))
    mixed = tuple(torch.cat((exact[..., :sinks, :], part), dim=-2) for exact, part in zip(native, given, strict=True))
    return (native[0], native[1]), (mixed[0], mixed[1])


def attention_loss(mapping: AdaptedMap, readings: Readings, starts: Sequence[int], suffix: int) -> Float[Tensor, ""]:
    """Squared error of each mapped layer's attention output for the target's own queries, over its energy.

    All layers are computed at once, each on native queries, so that an error is charged to the layer that makes it.
    """
    layers = mapping.plan.mapped_layers(mapping.target.geometry.layers)
    native, given = _carried(mapping, readings, mapping.mapped(readings, readings.tokens))
    every = torch.arange(readings.tokens, device=readings.queried.device)
    later = every > readings.queried[..., None]
    hidden = torch.zeros(later.shape, device=later.device).masked_fill_(later, -torch.inf)
    queries = readings.queries[layers.start : layers.stop]
    return _attention_error(mapping.target, layers, queries, native, given, hidden)


def on_policy_queries(
    mapping: AdaptedMap, readings: Readings, made: ContentStates, starts: Sequence[int], suffix: int
) -> tuple[Float[Tensor, "L B H_q Q D"], Int[Tensor, "Q"]]:
    """Queries of the mapped layers while the target reads the suffixes over the carried cache, without gradients.

    Returns:
        The queries, rotated and scaled, at as many tokens of the suffixes as the readings have queries of; and which
        of all suffixes' tokens these are, evenly spread.
    """
    target, found = mapping.target, list[Tensor]()
    layers, tokens = mapping.plan.mapped_layers(target.geometry.layers), len(starts) * suffix
    count = min(tokens, readings.queried.shape[1])
    picked = torch.linspace(0, tokens - 1, count).round().long()
    backbone = queried_backbone(target.model, lambda query: found.append(query[:, :, picked.to(query.device)]))
    with torch.no_grad():
        cached = carried_cache(target, mapping.plan, readings, made)
        read_suffixes(target, cached, readings.input_ids, starts, suffix, backbone)
    return torch.stack(found[layers.start : layers.stop]), picked


def on_policy_loss(mapping: AdaptedMap, readings: Readings, starts: Sequence[int], suffix: int) -> Float[Tensor, ""]:
    """The attention loss for the queries that the target has while it reads on over the mapped cache.

    Both sides see the suffixes' own keys and values as the target has them natively; what is wanted is what the same
    queries find in the native cache.
    """
    target, layers = mapping.target, mapping.plan.mapped_layers(mapping.target.geometry.layers)
    made = mapping.mapped(readings, max(starts))
    queries, picked = on_policy_queries(mapping, readings, made, starts, suffix)
    native, given = _carried(mapping, readings, made)
    positions = suffix_positions(starts, suffix).to(target.device)
    chosen = slice(layers.start, layers.stop)
    own = [states[chosen][..., positions, :].float() for states in (readings.keys, readings.values)]
    mask = suffix_mask(starts, suffix, max(starts), torch.float32)[0, 0, picked].to(target.device)
    keys, values = ([torch.cat((side[at], own[at]), dim=-2) for side in (native, given)] for at in (0, 1))
    hidden = mask.expand(len(readings.input_ids), -1, -1)
    return _attention_error(target, layers, queries, (keys[0], values[0]), (keys[1], values[1]), hidden)


class _MeanDivergence(torch.autograd.Function):
    """Keeps nothing but the gradient of the logits, which is `softmax(given) − softmax(native)` for every row."""

    @staticmethod
    def forward(ctx: Any, native: Tensor, given: Tensor) -> Tensor:
        total, gradient = torch.zeros((), device=given.device), torch.empty_like(given)
        parts = zip(native.split(ROWS_AT_ONCE), given.split(ROWS_AT_ONCE), gradient.split(ROWS_AT_ONCE), strict=True)
        for exact, made, slope in parts:
            p, q = exact.float().log_softmax(dim=-1), made.float().log_softmax(dim=-1)
            total += kl_divergence(p, q).sum()
            slope.copy_((q.exp() - p.exp()) / len(given))
        ctx.save_for_backward(gradient)
        return total / len(given)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * outer[0]


def mean_divergence(native: Float[Tensor, "*rows V"], given: Float[Tensor, "*rows V"]) -> Float[Tensor, ""]:
    """Mean `KL(native ‖ given)` over rows of logits, in fp32 and a few rows at a time, with gradients into `given`.

    Over 150,000 tokens every pass over all rows at once goes through memory; a few rows stay in the cache of a CPU.
    """
    found: Tensor = _MeanDivergence.apply(native.flatten(0, -2), given.flatten(0, -2))
    return found


def kl_loss(mapping: AdaptedMap, readings: Readings, starts: Sequence[int], suffix: int) -> Float[Tensor, ""]:
    """`KL(native ‖ mapped)` of the next token, in nats, over forced continuations after each hand-off."""
    target = mapping.target
    made = mapping.mapped(readings, max(starts))
    cached = carried_cache(target, mapping.plan, readings, made)
    given = compat.head_logits(target.model, read_suffixes(target, cached, readings.input_ids, starts, suffix))
    with torch.no_grad():
        positions = suffix_positions(starts, suffix).to(readings.output.device)
        native = compat.head_logits(target.model, readings.output[:, positions])
    return mean_divergence(native, given)


# The names stand a second time where settings are read, since this module takes seconds to import.
LOSSES: dict[str, Loss] = {"mse": mse_loss, "attention": attention_loss, "on_policy": on_policy_loss, "kl": kl_loss}
