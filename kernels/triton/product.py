"""The inner loop of the second and third launch: a tile of `x W` whose inputs lie in blocks of workspace columns."""

from typing import no_type_check

import triton
import triton.language as tl

# Numbers of one term, all int64: addresses of its first weight, of its scale and its octave (0 for none), elements
# between two inputs of the weight, and the first block of inputs and the one past the last.
TERM = 6


@triton.jit
@no_type_check
def tile_columns(HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Output coordinate of each column of a tile, and whether it is one: pairs of halves stand `BLOCK_H` apart."""
    place = tl.arange(0, 2 * BLOCK_H)
    if HALF == BLOCK_H:
        column = place
        real = place < 2 * BLOCK_H
    else:
        column = (place // BLOCK_H) * HALF + place % BLOCK_H
        real = place % BLOCK_H < HALF
    return column, real


@triton.jit
@no_type_check
def term_product(
    acc,  # fp32 [BT, BD], added to
    workspace,  # [rows, pitch]
    row,  # int64 [BT]
    rows,
    pitch,
    blocks,  # int32 [blocks, 3]: workspace column, weight row, length
    term,  # int64 [TERM]
    column,  # [BD]
    real,  # [BD]
    STORED: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`acc + x W` of one term; weights kept as whole numbers are dequantised exactly, their scale put on at the end."""
    weight = tl.multiple_of(tl.load(term).to(tl.pointer_type(STORED)), ALIGN)
    row_stride = tl.multiple_of(tl.load(term + 3), ALIGN)
    octaves = tl.load(term + 2).to(tl.pointer_type(tl.float32))
    k = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    left = workspace + row[:, None] * pitch + k[None, :]
    right = weight + k[:, None] * row_stride + column[None, :]
    total = acc
    if STORED.is_int8():
        total = tl.zeros_like(acc)
    for block in range(tl.load(term + 4), tl.load(term + 5)):
        start = tl.multiple_of(tl.load(blocks + 3 * block), ALIGN)
        first = tl.load(blocks + 3 * block + 1).to(tl.int64)
        if EVEN:
            x = tl.load(left + start, mask=inside, other=0.0)
            w = tl.load(right + first * row_stride, mask=real[None, :], other=0.0)
        else:
            length = tl.load(blocks + 3 * block + 2)
            x = tl.load(left + start, mask=inside & (k < length)[None, :], other=0.0)
            w = tl.load(right + first * row_stride, mask=(k < length)[:, None] & real[None, :], other=0.0)
        if STORED.is_int8():
            within = k < tl.load(blocks + 3 * block + 2)
            octave = tl.load(octaves + first + k, mask=within, other=0.0)
            w = w.to(x.dtype) * octave.to(x.dtype)[:, None]
        total = tl.dot(x, w, total, input_precision=PRECISION)
    if STORED.is_int8():
        scale = tl.load(term + 1).to(tl.pointer_type(tl.float32))
        total = acc + total * tl.load(scale + column, mask=real, other=0.0)[None, :]
    return total
