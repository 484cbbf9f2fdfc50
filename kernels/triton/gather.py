"""First launch: read the cache, take RoPE off, and lay content states out as rows.

Its plain reference is `kvbridge.rotary.RotaryCodec.strip` followed by `kvbridge.kernels.reference.rows_of`.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.kernels.triton.config import choose_gather

# Numbers of one segment, all int64: what is read (address in bytes; slots in a block, strides of a block and of a slot,
# in elements; row of the slot table), what is written (workspace column, width), where the cosines start in the tables
# (−1: not rotated; the sines follow them), and whether the row is divided by its root mean square.
SEGMENT = 9


@triton.jit
@no_type_check
def _load_halves(source, live, first, width, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Both members of the pairs `first … first + HALF − 1` of each row, in fp32: two tiles `[BT, HALF]`."""
    pair = first + tl.arange(0, HALF)
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * HALF)
        x = tl.load(source[:, None] + both[None, :], mask=live[:, None] & (both < width)[None, :], other=0.0)
        one, two = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], HALF, 2)))
    else:
        mask = live[:, None] & (pair < half)[None, :]
        one = tl.load(source[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        mask = live[:, None] & ((pair < half) & (pair + half < width))[None, :]
        two = tl.load(source[:, None] + half + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    return one, two


@triton.jit
@no_type_check
def _store_halves(to, inside, one, two, first, width, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """What `_load_halves` reads, the other way round."""
    pair = first + tl.arange(0, HALF)
    kind = to.dtype.element_ty
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * HALF)
        x = tl.reshape(tl.join(one, two), (one.shape[0], 2 * HALF)).to(kind)
        tl.store(to[:, None] + both[None, :], x, mask=inside[:, None] & (both < width)[None, :])
    else:
        mask = inside[:, None] & (pair < half)[None, :]
        tl.store(to[:, None] + pair[None, :], one.to(kind), mask=mask)
        mask = inside[:, None] & ((pair < half) & (pair + half < width))[None, :]
        tl.store(to[:, None] + half + pair[None, :], two.to(kind), mask=mask)


@triton.jit
@no_type_check
def _strip(one, two, cosines, sines, live, first, half, HALF: tl.constexpr):
    """Content coordinates of rotated pairs; dividing by `c² + s²` undoes rounding and scale of the tables."""
    pair = first + tl.arange(0, HALF)
    mask = live[:, None] & (pair < half)[None, :]
    c = tl.load(cosines[:, None] + pair[None, :], mask=mask, other=1.0)
    s = tl.load(sines[:, None] + pair[None, :], mask=mask, other=0.0)
    norm = c * c + s * s
    return (one * c + two * s) / norm, (two * c - one * s) / norm


@triton.jit(do_not_specialize=["rows", "tokens"])
@no_type_check
def gather_kernel(
    segments,  # int64 [segments, SEGMENT]
    slots,  # int64 [3, rows]: of the source, of the target, and 0 … rows − 1
    tables,  # fp32: cosines and sines [tokens, R / 2] of both models, one after the other
    workspace,  # [rows, pitch]
    rows,
    tokens,
    pitch,
    FROM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALF: tl.constexpr,
):
    segment = segments + tl.program_id(1).to(tl.int64) * FIELDS
    address, block_size = tl.load(segment), tl.load(segment + 1)
    block_stride = tl.multiple_of(tl.load(segment + 2), ALIGN)
    slot_stride = tl.multiple_of(tl.load(segment + 3), ALIGN)
    column, width = tl.multiple_of(tl.load(segment + 5), ALIGN), tl.multiple_of(tl.load(segment + 6), ALIGN)
    table, normed = tl.multiple_of(tl.load(segment + 7), ALIGN), tl.load(segment + 8)
    half = tl.multiple_of((width + 1) // 2, ALIGN)

    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < rows
    slot = tl.load(slots + tl.load(segment + 4) * rows + row, mask=inside, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    source = tl.multiple_of(address.to(tl.pointer_type(FROM)), ALIGN)
    source += (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    cosines = tables + table + (row % tokens) * half  # [BT]
    sines = cosines + tokens * half

    scale = tl.full((BLOCK_T,), 1.0, tl.float32)
    if normed > 0:
        squares = tl.zeros((BLOCK_T,), tl.float32)
        for first in range(0, half, HALF):
            one, two = _load_halves(source, live, first, width, half, INTERLEAVED, HALF)
            squares += tl.sum(one * one + two * two, 1)
        scale = 1.0 / tl.maximum(tl.sqrt(squares / width), 1.17549435e-38)
    for first in range(0, half, HALF):
        one, two = _load_halves(source, live, first, width, half, INTERLEAVED, HALF)
        if table >= 0:
            one, two = _strip(one, two, cosines, sines, live, first, half, HALF)
        one, two = one * scale[:, None], two * scale[:, None]
        _store_halves(workspace + row * pitch + column, inside, one, two, first, width, half, INTERLEAVED, HALF)


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Of weights, which may be whole numbers too.
STORED = TYPES | {torch.int8: tl.int8}


def gather(
    segments: Int[Tensor, "segments fields"],
    slots: Int[Tensor, "3 N"],
    tables: Float[Tensor, "numbers"],
    tokens: int,
    workspace: Float[Tensor, "N pitch"],
    *,
    given: torch.dtype,
    interleaved: bool,
    widest: int,
    align: int,
) -> None:
    """Write the content states that `segments` name into their columns of the workspace.

    Args:
        segments: as `SEGMENT` says.
        slots: of each row: in the source's pages, in the target's, and its own number.
        tables: as in `Tables.flat`.
        tokens: positions in the tables.
        workspace: written; rows whose slot is −1 become zero.
        given: dtype of what is read.
        interleaved: rotary convention of the segments.
        widest: the widest segment.
        align: what addresses, strides, columns, starts of tables and halves of widths are multiples of, up to 16.
    """
    rows = workspace.shape[0]
    tile = choose_gather(widest)
    grid = (triton.cdiv(rows, tile.tokens), segments.shape[0])
    gather_kernel[grid](
        segments,
        slots,
        tables,
        workspace,
        rows,
        tokens,
        workspace.stride(0),
        FROM=TYPES[given],
        INTERLEAVED=interleaved,
        ALIGN=align,
        FIELDS=SEGMENT,
        BLOCK_T=tile.tokens,
        HALF=tile.half,
        num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
    )
