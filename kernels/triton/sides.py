"""What the kernels know of the two models: the shape of one cache row, and the rotary tables of a hand-off."""

from __future__ import annotations

from dataclasses import dataclass

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
        codec = model.rotary
        table = codec.tables(torch.tensor(PROBE_POSITIONS, device=model.model.device))[1]
        half = one_per_pair(table, codec.interleaved)
        second = table[:, 1::2] if codec.interleaved else table[:, half.shape[1] :]
        if not torch.equal(half, second):
            raise UnsupportedModelError(
                f"{shape.describe()} turns the two members of a rotary pair by different angles; the Triton kernels "
                "take one angle per pair, so execute its maps on the CPU path."
            )
        rotary = table.shape[1]
        return cls(shape.layers, shape.kv_heads, shape.head_dim, rotary, codec.interleaved, shape.hidden_size)


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
    def of(cls, source: RotaryCodec, target: RotaryCodec, positions: Int[Tensor, "T"]) -> Tables:
        """Tables of the two live models at absolute positions."""
        first, second = (
            torch.stack([one_per_pair(table, codec.interleaved) for table in codec.tables(positions)])
            for codec in (source, target)
        )
        return cls(torch.cat((first.flatten(), second.flatten())), positions.shape[0], first.numel())


def one_per_pair(table: Float[Tensor, "T R"], interleaved: bool) -> Float[Tensor, "T half"]:
    """The column of the first member of each rotary pair, which the second member shares."""
    return table[:, ::2] if interleaved else table[:, : table.shape[1] // 2]
