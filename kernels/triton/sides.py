"""What the kernels know of the two models: the shape of one cache row, and the rotary tables of a hand-off."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import UnsupportedModelError
from kvbridge.model import KVModel
from kvbridge.rotary import PROBE_POSITIONS, RotaryCodec


@dataclass(frozen=True, slots=True)
class Side:
    """One model of a pair.

    Attributes:
        layers: decoder layers.
        heads: KV heads of a layer.
        head_dim: width of one.
        rotary: leading coordinates of a key that are rotated; 0 for none.
        interleaved: whether rotary pairs are neighbours (2i, 2i+1) or halves (i, i + R/2).
        hidden: width of the residual stream.
    """

    layers: int
    heads: int
    head_dim: int
    rotary: int
    interleaved: bool
    hidden: int

    @classmethod
    def of(cls, model: KVModel) -> Side:
        """The side of a loaded model.

        Raises:
            UnsupportedModelError: its rotary tables give the two members of a pair different angles.
        """
        shape = model.geometry
        codec, device = model.rotary, model.model.device
        if not has_one_angle_per_pair(codec, device):
            raise UnsupportedModelError(
                f"{shape.describe()} turns the two members of a rotary pair by different angles; the Triton kernels "
                "take one angle per pair, so execute its maps on the CPU path."
            )
        rotary = codec.tables(torch.zeros(1, dtype=torch.long, device=device))[0].shape[1]
        return cls(shape.layers, shape.kv_heads, shape.head_dim, rotary, codec.interleaved, shape.hidden_size)

    def content(self) -> Side:
        """The side of content states, whose rotation is off already."""
        return replace(self, rotary=0)


@dataclass(frozen=True, slots=True)
class Tables:
    """Cosines and sines of both models at the positions of the rows, in one fp32 tensor, one for each rotary pair.

    Attributes:
        flat: cosines and sines of the source, `[T, R_s / 2]` each, then of the target.
        tokens: positions in it, `T`; row `n` has position `n mod T`.
        target: where the target's part begins.
    """

    flat: Float[Tensor, "numbers"]
    tokens: int
    target: int

    @classmethod
    def of(cls, source: RotaryCodec | None, target: RotaryCodec, positions: Int[Tensor, "T"]) -> Tables:
        """Tables of the two live models at absolute positions; no source where content states are read."""
        first, second = (
            [one_per_pair(table, codec.interleaved).flatten() for table in codec.tables(positions)] if codec else []
            for codec in (source, target)
        )
        return cls(torch.cat((*first, *second)), positions.shape[0], sum(table.numel() for table in first))


def has_one_angle_per_pair(codec: RotaryCodec, device: torch.device) -> bool:
    """Whether the two members of every rotary pair are turned by the same angle, as the kernels take for granted."""
    table = codec.tables(torch.tensor(PROBE_POSITIONS, device=device))[1]
    first = one_per_pair(table, codec.interleaved)
    second = table[:, 1::2] if codec.interleaved else table[:, first.shape[1] :]
    return torch.equal(first, second)


def one_per_pair(table: Float[Tensor, "T R"], interleaved: bool) -> Float[Tensor, "T half"]:
    """The column of the first member of each rotary pair, which the second member shares."""
    return table[:, ::2] if interleaved else table[:, : table.shape[1] // 2]
