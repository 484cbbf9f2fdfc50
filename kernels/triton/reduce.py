"""Second launch: the bases and the bottlenecks of residual branches, `z = φ(x P + a)`.

Its plain references are `kvbridge.kernels.reference.basis_rows` and `branch_rows`.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.kernels.triton.config import Tile
from kvbridge.kernels.triton.gather import STORED
from kvbridge.kernels.triton.product import TERM, term_product, tile_columns

# Numbers of one tile of columns before its two terms, all int64: workspace column it makes, width, number of its
# activation, and where its two offsets stand.
HEADER = 5
ACTIVATIONS = {"linear": 0, "gelu": 1, "quadratic": 2}


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def reduce_kernel(
    workspace,  # [rows, pitch]; columns of x are read, those of z written
    entries,  # int64 [tiles, HEADER + 2 · TERM]
    blocks,  # int32 [blocks, 3]
    offsets,  # fp32
    rows,
    pitch,
    QUADRATIC: tl.constexpr,
    STORED: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADER: tl.constexpr,
    TERM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    entry = entries + tl.program_id(1).to(tl.int64) * (HEADER + 2 * TERM)
    made, width = tl.multiple_of(tl.load(entry), ALIGN), tl.multiple_of(tl.load(entry + 1), ALIGN)
    activation = tl.load(entry + 2)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column, real = tile_columns(BLOCK_H, BLOCK_H)
    real = real & (column < width)

    zeros = tl.zeros((BLOCK_T, 2 * BLOCK_H), tl.float32)
    z = term_product(
        zeros,
        workspace,
        row,
        rows,
        pitch,
        blocks,
        entry + HEADER,
        column,
        real,
        STORED,
        ALIGN,
        EVEN,
        PRECISION,
        BLOCK_K,
    )
    z += tl.load(offsets + tl.load(entry + 3) + column, mask=real, other=0.0)[None, :]
    if activation == 1:
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    # Only the outer condition is known when the kernel is compiled.
    if QUADRATIC:  # noqa: SIM102
        if activation == 2:
            term = entry + HEADER + TERM
            other = term_product(
                zeros, workspace, row, rows, pitch, blocks, term, column, real, STORED, ALIGN, EVEN, PRECISION, BLOCK_K
            )
            z *= other + tl.load(offsets + tl.load(entry + 4) + column, mask=real, other=0.0)[None, :]
    to = workspace + row[:, None] * pitch + made + column[None, :]
    tl.store(to, z.to(workspace.dtype.element_ty), mask=(row < rows)[:, None] & real[None, :])


def reduce(
    workspace: Float[Tensor, "N pitch"],
    entries: Int[Tensor, "tiles fields"],
    blocks: Int[Tensor, "blocks 3"],
    offsets: Float[Tensor, "W"],
    *,
    quadratic: bool,
    stored: torch.dtype,
    align: int,
    even: bool,
    tile: Tile,
) -> None:
    """Compute `z` from the columns of `x` in the workspace, and write it into its own columns there.

    Args:
        workspace: rows of `[x | z]`.
        entries: tiles of columns, as `HEADER` and `TERM` say.
        blocks: which workspace columns meet which weight rows.
        offsets: `a` of all branches, and zeros.
        quadratic: some activation is a product of two halves.
        stored: dtype of the weights; int8 has scales.
        align: numbers that starts and strides are multiples of.
        even: every block is full.
        tile: shape of one program.
    """
    rows = workspace.shape[0]
    reduce_kernel[(triton.cdiv(rows, tile.tokens), entries.shape[0])](
        workspace,
        entries,
        blocks,
        offsets,
        rows,
        workspace.stride(0),
        QUADRATIC=quadratic,
        STORED=STORED[stored],
        ALIGN=align,
        EVEN=even,
        PRECISION="ieee",
        HEADER=HEADER,
        TERM=TERM,
        BLOCK_T=tile.tokens,
        BLOCK_H=tile.half,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
        num_stages=tile.stages,  # pyright: ignore[reportCallIssue]
    )
