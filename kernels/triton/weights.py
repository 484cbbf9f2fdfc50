"""Weights as the kernels read them: in the dtype of the product, or as whole numbers with their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvbridge.storage import INPUT_AXES, input_octaves, quantise


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight tensor `[…, inputs, outputs]` on the device: `w = octave · scale · q` where scales are there.

    Attributes:
        values: contiguous; int8 where `scale` is given.
        scale: of each output coordinate.
        octave: of each input coordinate.
    """

    values: Shaped[Tensor, "..."]
    scale: Float[Tensor, "..."] | None
    octave: Float[Tensor, "..."] | None

    @classmethod
    def of(cls, name: str, tensor: Float[Tensor, "..."], dtype: torch.dtype, device: torch.device) -> Weight:
        """A form's tensor, called as there, in `dtype`; int8 quantises it as `kvbridge.storage` does.

        A weight that was stored as int8 is quantised anew: the octave of an input, and with it the rounding of its
        numbers, may differ from the stored one.
        """
        if dtype != torch.int8:
            return cls(tensor.to(device=device, dtype=dtype).contiguous(), None, None)
        octave = input_octaves(tensor)
        whole, scale = quantise(tensor.float() / octave[..., None], INPUT_AXES[name])
        return cls(whole.to(device).contiguous(), scale.to(device).contiguous(), octave.to(device).contiguous())

    def term(self, column: int, at: tuple[int, ...] = ()) -> tuple[int, int, int, int]:
        """Addresses of the first weight, of its scale and its octave (0 for none), and elements between two inputs.

        Args:
            column: first output coordinate.
            at: indices of leading axes.
        """
        values = self.values[at].data_ptr() + column * self.values.element_size()
        if self.scale is None or self.octave is None:
            return values, 0, 0, self.values.shape[-1]
        return values, self.scale[at].data_ptr() + 4 * column, self.octave[at].data_ptr(), self.values.shape[-1]


def block_table(runs: list[tuple[int, int, int]], size: int) -> Int[Tensor, "blocks 3"]:
    """Runs of (workspace column, weight row, length), neighbours joined, cut into blocks of at most `size` inputs."""
    joined: list[list[int]] = []
    for column, row, length in runs:
        last = joined[-1] if joined else None
        if last is not None and (column, row) == (last[0] + last[2], last[1] + last[2]):
            last[2] += length
        else:
            joined.append([column, row, length])
    cut = [
        [column + done, row + done, min(size, length - done)]
        for column, row, length in joined
        for done in range(0, length, size)
    ]
    return torch.tensor(cut, dtype=torch.int32).reshape(-1, 3)
