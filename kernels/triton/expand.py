"""Third launch: `y = [x | z] W + b` of every target layer, kind and head, RoPE put on, written into the target's cache.

A slot-affine map is the gathered batched product whose blocks are its slots; a shared basis or residual branch one
whose blocks are columns of `z`. Their plain references are `kvbridge.kernels.reference.slot_affine`, `expanded_rows`
and `kvbridge.rotary.RotaryCodec.apply`.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.kernels.triton.config import Tile
from kvbridge.kernels.triton.gather import STORED, TYPES
from kvbridge.kernels.triton.product import TERM, term_product, tile_columns

# Numbers of one entry before its terms, all int64: where it is written (address in bytes; slots in a block, strides of
# a block and of a slot, in elements; row of the slot table), width, whether it is rotated, and where its bias stands.
HEADER = 8


@triton.jit
@no_type_check
def _turn(y, tables, row, rows, tokens, rotated, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rotate the pairs of a tile `[BT, 2 · BLOCK_H]` by the angles of its rows, or by none."""
    if INTERLEAVED:
        one, two = tl.split(tl.reshape(y, (y.shape[0], BLOCK_H, 2)))
    else:
        one, two = tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, BLOCK_H)), (0, 2, 1)))
    pair = tl.arange(0, BLOCK_H)
    turned = (row < rows)[:, None] & (pair < rotated * HALF)[None, :]
    cosines = tables + (row % tokens)[:, None] * HALF + pair[None, :]
    c = tl.load(cosines, mask=turned, other=1.0)
    s = tl.load(cosines + tokens * HALF, mask=turned, other=0.0)
    return one * c - two * s, two * c + one * s


@triton.jit(do_not_specialize=["rows", "tokens"])
@no_type_check
def expand_kernel(
    workspace,  # [rows, pitch]
    entries,  # int64 [entries, HEADER + TERMS · TERM]
    blocks,  # int32 [blocks, 3]
    bias,  # fp32
    slots,  # int64 [3, rows]
    tables,  # fp32: cosines and sines [tokens, HALF] of the target
    rows,
    tokens,
    pitch,
    TERMS: tl.constexpr,
    TO: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORED: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADER: tl.constexpr,
    TERM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    entry = entries + tl.program_id(1).to(tl.int64) * (HEADER + TERMS * TERM)
    width = tl.multiple_of(tl.load(entry + 5), ALIGN)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if INTERLEAVED:
        column, real = tile_columns(BLOCK_H, BLOCK_H)
    else:
        column, real = tile_columns(HALF, BLOCK_H)
    real = real & (column < width)

    y = tl.zeros((BLOCK_T, 2 * BLOCK_H), tl.float32)
    for number in tl.static_range(TERMS):
        term = entry + HEADER + number * TERM
        y = term_product(
            y, workspace, row, rows, pitch, blocks, term, column, real, STORED, ALIGN, EVEN, PRECISION, BLOCK_K
        )
    y += tl.load(bias + tl.load(entry + 7) + column, mask=real, other=0.0)[None, :]
    one, two = _turn(y, tables, row, rows, tokens, tl.load(entry + 6), INTERLEAVED, HALF, BLOCK_H)

    slot = tl.load(slots + tl.load(entry + 4) * rows + row, mask=row < rows, other=-1)
    live = (slot >= 0)[:, None]
    slot = tl.where(slot >= 0, slot, 0)
    block_size = tl.load(entry + 1)
    block_stride, slot_stride = tl.multiple_of(tl.load(entry + 2), ALIGN), tl.multiple_of(tl.load(entry + 3), ALIGN)
    place = (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    to = tl.multiple_of(tl.load(entry).to(tl.pointer_type(TO)), ALIGN) + place[:, None]
    pair = tl.arange(0, BLOCK_H)[None, :]
    if INTERLEAVED:
        both = tl.reshape(tl.join(one, two), (BLOCK_T, 2 * BLOCK_H))
        tl.store(to + column[None, :], both.to(TO), mask=live & real[None, :])
    else:
        tl.store(to + pair, one.to(TO), mask=live & ((pair < HALF) & (pair < width)))
        tl.store(to + HALF + pair, two.to(TO), mask=live & ((pair < HALF) & (pair + HALF < width)))


def expand(
    workspace: Float[Tensor, "N pitch"],
    entries: Int[Tensor, "entries fields"],
    blocks: Int[Tensor, "blocks 3"],
    bias: Float[Tensor, "q"],
    slots: Int[Tensor, "3 N"],
    tables: Float[Tensor, "numbers"],
    tokens: int,
    *,
    terms: int,
    written: torch.dtype,
    interleaved: bool,
    stored: torch.dtype,
    align: int,
    even: bool,
    half: int,
    tile: Tile,
) -> None:
    """Write what `entries` name into the target's cache; rows whose slot is −1 are not written.

    Args:
        workspace: rows of `[x | z]`.
        entries: as `HEADER` and `TERM` say.
        blocks: which workspace columns meet which weight rows.
        bias: of all entries.
        slots: as in `gather`.
        tables: cosines and sines of the target, `[tokens, half]` each.
        tokens: positions in the tables.
        terms: products that are summed in one entry.
        written: dtype of the cache.
        interleaved: rotary convention of the target.
        stored: dtype of the weights; int8 has scales.
        align: numbers that starts and strides are multiples of.
        even: every block is full.
        half: half the width of a rotated entry.
        tile: shape of one program.
    """
    rows = workspace.shape[0]
    expand_kernel[(triton.cdiv(rows, tile.tokens), entries.shape[0])](
        workspace,
        entries,
        blocks,
        bias,
        slots,
        tables,
        rows,
        tokens,
        workspace.stride(0),
        TERMS=terms,
        TO=TYPES[written],
        INTERLEAVED=interleaved,
        STORED=STORED[stored],
        ALIGN=align,
        EVEN=even,
        PRECISION="ieee",
        HEADER=HEADER,
        TERM=TERM,
        HALF=half,
        BLOCK_T=tile.tokens,
        BLOCK_H=tile.half,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
        num_stages=tile.stages,  # pyright: ignore[reportCallIssue]
    )
