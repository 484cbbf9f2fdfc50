"""Forms of random weights for the tiny pair: shared bases, branches on them, and states to read."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvbridge.branch import ACTIVATIONS
from kvbridge.forms import ResidualBranch, SharedBasis
from kvbridge.pair import ModelPair
from kvbridge.states import ContentStates
from kvbridge.variables import Span
from tiny_pair import tiny_pair

BATCH, TOKENS = 2, 7
JOINT = (Span("source.keys", 0, 3), Span("source.values", 0, 3))
NATIVE = (Span("target.keys", 0, 2), Span("target.values", 0, 2), Span("target.normed_residual", 1, 2))
REST = (Span("target.keys", 2, 4), Span("target.values", 2, 4))


@cache
def pair() -> ModelPair:
    """Source of 3 layers, 2 KV heads of 16; target of 4 layers, 4 KV heads of 32, hidden size 128."""
    return tiny_pair()


def width(spans: tuple[Span, ...]) -> int:
    sides = {"source": pair().source.geometry, "target": pair().target.geometry}
    return sum(span.width(sides[span.role]) for span in spans)


def make_basis(inputs: tuple[Span, ...], outputs: tuple[Span, ...], rank: int | None = 5) -> SharedBasis:
    p, q, target = width(inputs), width(outputs), pair().target.geometry
    reduce = None if rank is None else torch.randn(p, rank) / p**0.5
    expand = torch.randn(p if rank is None else rank, q)
    return SharedBasis(inputs, outputs, reduce, expand, torch.randn(q), target.kv_heads, target.head_dim)


def make_branch(
    inputs: tuple[Span, ...], outputs: tuple[Span, ...], activation: str = "gelu", rank: int = 5
) -> ResidualBranch:
    p, q, target, wide = width(inputs), width(outputs), pair().target.geometry, rank * ACTIVATIONS[activation]
    return ResidualBranch(
        inputs,
        outputs,
        activation,
        torch.randn(p, wide) / p**0.5,
        torch.randn(wide),
        torch.randn(rank, q) / rank**0.5,
        torch.randn(q),
        target.kv_heads,
        target.head_dim,
    )


def make_states(role: str, layers: int | None = None, residual: tuple[int, ...] = ()) -> ContentStates:
    geometry = getattr(pair(), role).geometry
    shape = (2, layers or geometry.layers, BATCH, geometry.kv_heads, TOKENS, geometry.head_dim)
    keys, values = torch.randn(shape)
    streams = {layer: 3 * torch.randn(BATCH, TOKENS, geometry.hidden_size) for layer in residual}
    return ContentStates(keys, values, torch.arange(4, 4 + TOKENS), streams)


def row(states: ContentStates, span: Span, batch: int, token: int) -> Tensor:
    """One row of a span in fp64, layer by layer and head by head."""
    if span.states in ("keys", "values"):
        tensor = getattr(states, span.states)
        heads = [tensor[layer, batch, head, token] for layer in span.layers for head in range(tensor.shape[2])]
        return torch.cat(heads).double()
    streams = [states.residual[layer][batch, token].double() for layer in span.layers]
    if span.states == "normed_residual":
        streams = [stream / stream.square().mean().sqrt() for stream in streams]
    return torch.cat(streams)
