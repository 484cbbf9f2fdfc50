"""Where the keys and values of one model lie in memory; strides alone tell contiguous caches and paged ones apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of some layers, each a view `[blocks, H, block_size, D]`; any strides, but the last is 1.

    A contiguous cache `[B, H, T, D]` is one whose blocks are its batch rows. Paged layouts are views of the engine's
    tensor: `cache[0].transpose(1, 2)` of `[2, blocks, block_size, H, D]`, `cache[..., :D]` of
    `[blocks, H, block_size, 2 D]`. Row `n` of a map lies in slot `slots[n]`, that is in block `slot // block_size` at
    place `slot % block_size`; a row with slot −1 reads as zero and is not written. Without slots, row `n` lies in `n`.

    Attributes:
        keys: of each layer.
        values: of each layer, laid out as the keys.
        slots: of each row, unique where written.

    Raises:
        CacheError: layers differ in shape, strides, dtype or device, or the last stride is not 1.
    """

    keys: tuple[Float[Tensor, "blocks H block_size D"], ...]
    values: tuple[Float[Tensor, "blocks H block_size D"], ...]
    slots: Int[Tensor, "N"] | None = None

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise CacheError(
                f"pages hold {len(self.keys)} layers of keys and {len(self.values)} of values; give as many of both."
            )
        first, other = self.keys[0], odd_one((*self.keys, *self.values))
        if other is not None:
            raise CacheError(
                f"pages hold layers of {_describe(first)} and of {_describe(other)}; all must be laid out alike."
            )
        if first.ndim != 4 or first.stride(-1) != 1:
            raise CacheError(
                f"pages hold layers of {_describe(first)}; expected [blocks, heads, block size, head dim] with the "
                "last axis contiguous."
            )

    @classmethod
    def of(
        cls,
        keys: Sequence[Float[Tensor, "blocks H block_size D"]],
        values: Sequence[Float[Tensor, "blocks H block_size D"]],
        slots: Int[Tensor, "N"] | None = None,
    ) -> Pages:
        """Pages of one tensor per layer, such as `layer.keys` and `layer.values` of a transformers cache."""
        return cls(tuple(keys), tuple(values), slots)

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def rows(self) -> int:
        """Rows of a map, `N`: batch rows times tokens."""
        return self.keys[0].shape[0] * self.keys[0].shape[2] if self.slots is None else self.slots.shape[0]

    def place(self) -> tuple[int, int, int]:
        """Slots in a block, and the strides of a block and of a slot, in elements."""
        block, _, slot, _ = self.keys[0].stride()
        return self.keys[0].shape[2], block, slot

    def pointers(self) -> tuple[int, ...]:
        """Addresses of all layers, in bytes: keys, then values."""
        return tuple(tensor.data_ptr() for part in (self.keys, self.values) for tensor in part)

    def addresses(self, at: Int[np.ndarray, "P 4"]) -> Int[np.ndarray, "P"]:
        """Addresses, in bytes, of places of slot 0: kind 0 for keys and 1 for values, then layer, head, coordinate."""
        kind, layer, head, dim = at.T
        bases = np.array(self.pointers(), dtype=np.int64)[kind * self.layers + layer]
        return bases + (head * self.keys[0].stride(1) + dim) * self.dtype.itemsize

    def slot_table(self) -> Int[Tensor, "N"]:
        """Slot of each row, as int64 on the device of the pages."""
        if self.slots is None:
            return torch.arange(self.rows, device=self.keys[0].device)
        return self.slots.to(self.keys[0].device, torch.int64)


def odd_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first of some tensors that is not laid out as the very first, in shape, strides, dtype and device."""
    first = tensors[0]
    alike = (first.shape, first.stride(), first.dtype, first.device)
    return next((t for t in tensors if (t.shape, t.stride(), t.dtype, t.device) != alike), None)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
