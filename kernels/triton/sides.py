"""What the kernels know of the two models: the shape of one cache row, and the rotary tables of a hand-off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.model import KVModel
from kvbridge.rotary import RotaryCodec


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
        shape = model.geometry
        rotary = model.rotary.tables(torch.zeros(1, dtype=torch.long, device=model.model.device))[0].shape[-1]
        return cls(shape.layers, shape.kv_heads, shape.head_dim, rotary, model.rotary.interleaved, shape.hidden_size)


@dataclass(frozen=True, slots=True)
class Tables:
    """Cosines and sines of both models at the positions of the rows, in one fp32 tensor.

    Attributes:
        flat: cosines and sines of the source, then of the target.
        tokens: positions in it, `T`; row `n` has position `n mod T`.
        target: where the target's part begins.
    """

    flat: Float[Tensor, "numbers"]
    tokens: int
    target: int

    @classmethod
    def of(cls, source: RotaryCodec, target: RotaryCodec, positions: Int[Tensor, "T"]) -> Tables:
        """Tables of the two live models at absolute positions."""
        return cls.join(source.tables(positions), target.tables(positions))

    @classmethod
    def join(
        cls,
        source: tuple[Float[Tensor, "T R_s"], Float[Tensor, "T R_s"]],
        target: tuple[Float[Tensor, "T R_t"], Float[Tensor, "T R_t"]],
    ) -> Tables:
        """Tables given as cosines and sines.

        Raises:
            CacheError: the two models have tables of different lengths.
        """
        if source[0].shape[0] != target[0].shape[0]:
            raise CacheError(
                f"the source's rotary tables have {source[0].shape[0]} positions, the target's {target[0].shape[0]}; "
                "give both at the same positions."
            )
        flat = torch.cat([table.float().flatten() for table in (*source, *target)])
        return cls(flat, source[0].shape[0], 2 * source[0].numel())
