"""Memory addresses of one hand-off, filled into the tables of a compiled map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.kernels.triton.entries import Entry
from kvbridge.kernels.triton.pages import Pages
from kvbridge.kernels.triton.sides import Tables
from kvbridge.kernels.triton.workspace import SOURCE, STREAM, TARGET, Segment

Streams = Mapping[int, Float[Tensor, "N E"]]
# A row of a residual stream is a block of its own.
NOT_ROTATED = -1


def alignment(*numbers: Int[Tensor, "..."] | Sequence[int]) -> int:
    """The largest power of two up to 16 that divides all numbers."""
    common = 16
    for part in numbers:
        for number in set(torch.as_tensor(part).flatten().tolist()):
            common = math.gcd(common, number)
    return common


def _cache_places(pages: Pages, slot_row: int, rows: Int[Tensor, "P 4"]) -> Int[Tensor, "P 5"]:
    """Address, slots in a block, strides and slot table of places given as (kind, layer, head, coordinate)."""
    block_size, block_stride, slot_stride = pages.place()
    address = pages.addresses(*rows.unbind(1))
    same = torch.tensor([block_size, block_stride, slot_stride, slot_row]).expand(len(rows), 4)
    return torch.cat((address[:, None], same), dim=1)


def _stream_place(stream: Float[Tensor, "N E"], dim: int) -> list[int]:
    return [stream.data_ptr() + dim * stream.element_size(), 1, stream.stride(0), 0, STREAM]


def segment_table(
    segments: Sequence[Segment], source: Pages, native: Pages | None, streams: Streams, tables: Tables
) -> Int[Tensor, "segments fields"]:
    """The rows that `gather.SEGMENT` describes, on the CPU."""
    table = torch.empty((len(segments), 9), dtype=torch.int64)
    for memory, pages in ((SOURCE, source), (TARGET, native)):
        chosen = [number for number, segment in enumerate(segments) if segment.memory == memory]
        if chosen and pages is not None:
            places = [(s.kind, s.layer, s.head, s.dim) for s in (segments[number] for number in chosen)]
            table[chosen, :5] = _cache_places(pages, memory, torch.tensor(places))
    for number, segment in enumerate(segments):
        if segment.memory == STREAM:
            table[number, :5] = torch.tensor(_stream_place(streams[segment.layer], segment.dim))
    start = {SOURCE: 0, TARGET: tables.target, STREAM: NOT_ROTATED}
    written = [(s.column, s.width, start[s.memory] if s.rotated else NOT_ROTATED, int(s.normed)) for s in segments]
    table[:, 5:] = torch.tensor(written)
    return table


def entry_table(
    entries: Sequence[Entry],
    products: Int[Tensor, "entries terms"],
    layers: range,
    destination: Pages,
    streams: Streams,
) -> Int[Tensor, "entries fields"]:
    """The rows that `expand.HEADER` and `product.TERM` describe, on the CPU."""
    header = torch.empty((len(entries), 8), dtype=torch.int64)
    cached = [number for number, entry in enumerate(entries) if entry.kind is not None]
    places = [(e.kind, e.layer - layers.start, e.head, e.dim) for e in (entries[number] for number in cached)]
    header[cached, :5] = _cache_places(destination, TARGET, torch.tensor(places))
    for number, entry in enumerate(entries):
        if entry.kind is None:
            header[number, :5] = torch.tensor(_stream_place(streams[entry.layer], entry.dim))
    header[:, 5:] = torch.tensor([(e.width, int(e.rotated), e.bias) for e in entries])
    return torch.cat((header, products), dim=1)
