"""Memory addresses of one hand-off, filled into the tables of a compiled map.

What a map reads and writes stays the same from one hand-off to the next, so it is laid out once; per hand-off only
addresses and strides are added, and where these are those of the hand-off before, its tables are taken again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.kernels.triton.entries import Entry
from kvbridge.kernels.triton.pages import Pages
from kvbridge.kernels.triton.sides import Tables
from kvbridge.kernels.triton.workspace import SOURCE, STREAM, TARGET, Segment

Streams = Mapping[int, Float[Tensor, "N E"]]
NOT_ROTATED = -1


def alignment(*numbers: Int[np.ndarray, "..."] | Int[Tensor, "..."]) -> int:
    """The largest power of two up to 16 that divides all numbers."""
    common = 16
    for part in numbers:
        common |= int(np.bitwise_or.reduce(np.asarray(part, dtype=np.int64), axis=None))
    return common & -common


class Places:
    """Where numbers stand in caches and residual streams, apart from addresses.

    Args:
        places: of each: memory, kind, layer, head and coordinate.
    """

    def __init__(self, places: Sequence[tuple[int, int, int, int, int]]) -> None:
        table = np.array(places, dtype=np.int64)
        self.memory, self.at = table[:, 0], table[:, 1:]
        self.chosen = {memory: np.flatnonzero(self.memory == memory) for memory in (SOURCE, TARGET, STREAM)}

    def layers(self, memory: int) -> list[int]:
        """The layers of a memory in which places lie."""
        return np.unique(self.at[self.chosen[memory], 1]).tolist()

    def bind(self, caches: Mapping[int, Pages], streams: Streams) -> Int[np.ndarray, "P 5"]:
        """Address, slots in a block, strides of a block and of a slot, and row of the slot table of each place."""
        table = np.empty((len(self.at), 5), dtype=np.int64)
        for memory, pages in caches.items():
            chosen = self.chosen[memory]
            table[chosen, 0] = pages.addresses(self.at[chosen])
            table[chosen, 1:] = *pages.place(), memory
        for number in self.chosen[STREAM]:
            _, layer, _, dim = self.at[number]
            stream = streams[int(layer)]
            # A row of a residual stream is a block of its own.
            table[number] = stream.data_ptr() + dim * stream.element_size(), 1, stream.stride(0), 0, STREAM
        return table


@dataclass(frozen=True, slots=True)
class Gather:
    """One gather launch.

    Attributes:
        segments: what `gather.SEGMENT` describes, on the device.
        given: dtype of what is read.
        interleaved: rotary convention of the segments.
        widest: the widest segment.
        align: as `gather.gather` takes it.
    """

    segments: Int[Tensor, "segments fields"]
    given: torch.dtype
    interleaved: bool
    widest: int
    align: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Tables of one hand-off, on the device.

    Attributes:
        gathers: one for each rotary convention and dtype that is read.
        entries: what `expand.HEADER` and `product.TERM` describe.
        align: of the entries.
        slots: of each row where no pages have a slot table.
    """

    gathers: tuple[Gather, ...]
    entries: Int[Tensor, "entries fields"]
    align: int
    slots: Int[Tensor, "3 N"]


class Binding:
    """What a program reads and writes, and the tables of its last hand-off.

    Args:
        segments: what is read.
        entries: what is written.
        products: terms of the entries, as `product.TERM` says.
        layers: target layers that are made.
        align: what the program's other numbers are multiples of.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        entries: Sequence[Entry],
        products: Int[Tensor, "entries terms"],
        layers: range,
        align: int,
    ) -> None:
        self.read = Places([(s.memory, s.kind, s.layer, s.head, s.dim) for s in segments])
        self.written = Places(
            [
                (STREAM, 0, e.layer, 0, e.dim)
                if e.kind is None
                else (TARGET, e.kind, e.layer - layers.start, e.head, e.dim)
                for e in entries
            ]
        )
        self._segments = np.array([(s.column, s.width, s.normed) for s in segments], dtype=np.int64)
        self._rotated = np.array([s.rotated for s in segments])
        self._interleaved = np.array([s.interleaved for s in segments])
        self._entries = np.array([(e.width, e.rotated, e.bias) for e in entries], dtype=np.int64)
        self._products, self._align = products.numpy(), align
        self._last: tuple[tuple[object, ...], Bound] | None = None

    def bind(
        self, source: Pages, destination: Pages, native: Pages | None, read: Streams, made: Streams, tables: Tables
    ) -> Bound:
        """The tables of a hand-off.

        Args:
            source: the source's cache.
            destination: the target's cache.
            native: what the target has computed itself.
            read: residual streams that the map reads.
            made: residual streams that it makes.
            tables: rotary tables.
        """
        pages = [found for found in (source, destination, native) if found is not None]
        streams = [*read.values(), *made.values()]
        # Strides and addresses are all that the tables hold of a cache.
        known = (
            *((found.pointers(), found.place(), found.keys[0].stride(1), found.dtype) for found in pages),
            *((stream.data_ptr(), stream.stride(0), stream.dtype) for stream in streams),
            (source.rows, tables.target, source.keys[0].device),
        )
        if self._last is None or self._last[0] != known:
            self._last = known, self._bound(source, destination, native, read, made, tables)
        return self._last[1]

    def _bound(
        self, source: Pages, destination: Pages, native: Pages | None, read: Streams, made: Streams, tables: Tables
    ) -> Bound:
        device = source.keys[0].device
        entries = np.concatenate(
            (self.written.bind({TARGET: destination}, made), self._entries, self._products), axis=1
        )
        return Bound(
            gathers=tuple(self._gathers(source, native, read, tables)),
            entries=torch.from_numpy(entries).to(device),
            align=alignment(np.array([self._align]), entries[:, [0, 2, 3, 5]]),
            slots=torch.arange(source.rows, device=device).expand(3, -1).contiguous(),
        )

    def _gathers(self, source: Pages, native: Pages | None, read: Streams, tables: Tables) -> list[Gather]:
        caches = {SOURCE: source} if native is None else {SOURCE: source, TARGET: native}
        starts = np.where(self._rotated, np.where(self.read.memory == TARGET, tables.target, 0), NOT_ROTATED)
        columns, widths, normed = self._segments.T
        table = np.concatenate(
            (self.read.bind(caches, read), np.stack((columns, widths, starts, normed), axis=1)), axis=1
        )
        dtypes = {memory: pages.dtype for memory, pages in caches.items()}
        if read:
            dtypes[STREAM] = next(iter(read.values())).dtype
        found = []
        for dtype in dict.fromkeys(dtypes.values()):
            given = np.isin(self.read.memory, [memory for memory, held in dtypes.items() if held == dtype])
            for interleaved in (False, True):
                part = table[given & (self._interleaved == interleaved)]
                if not len(part):
                    continue
                align = alignment(part[:, [0, 2, 3, 5]], part[:, 7].clip(0), (part[:, 6] + 1) // 2)
                segments = torch.from_numpy(part).to(source.keys[0].device)
                found.append(Gather(segments, dtype, interleaved, int(part[:, 6].max()), align))
        return found
