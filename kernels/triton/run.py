"""Run a compiled map: fill in where the caches lie, then launch gather, reduce and expand."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.kernels.triton.binding import Streams, alignment, entry_table, segment_table
from kvbridge.kernels.triton.config import Tile, choose_product, power_of_two
from kvbridge.kernels.triton.expand import expand
from kvbridge.kernels.triton.gather import gather
from kvbridge.kernels.triton.pages import Pages
from kvbridge.kernels.triton.program import Program
from kvbridge.kernels.triton.reduce import reduce
from kvbridge.kernels.triton.sides import Side, Tables
from kvbridge.kernels.triton.workspace import STREAM, TARGET


def run(
    program: Program,
    source: Pages,
    destination: Pages,
    tables: Tables,
    *,
    native: Pages | None = None,
    streams: Streams | None = None,
) -> dict[int, Float[Tensor, "N E"]]:
    """Map a source cache into a target cache: RoPE off, products, RoPE on.

    Args:
        program: the compiled map.
        source: the source's cache, all layers, keys rotated.
        destination: the target's cache, the layers `program.layers` in order; written.
        tables: rotary tables of both models at the positions of the rows.
        native: what the target has computed itself, layers `0 … m`, keys rotated, in the same slots as the destination.
        streams: the target's residual stream at the input of layers that the map reads, in the dtype of the source.

    Returns:
        The residual stream at the input of layers that the map makes, in the dtype of the destination.

    Raises:
        CacheError: caches, tables and map do not fit each other.
    """
    _require(program, source, destination, tables, native, streams or {})
    device = source.keys[0].device
    slots = torch.stack((source.slot_table(), destination.slot_table(), torch.arange(source.rows, device=device)))
    workspace = torch.empty((source.rows, program.pitch), dtype=program.dtype, device=device)
    _gather(program, source, native, streams or {}, tables, slots, workspace)
    if len(program.reduces):
        reduce(
            workspace,
            program.reduces,
            program.blocks,
            program.offsets,
            quadratic=program.quadratic,
            stored=program.stored,
            align=program.align,
            even=program.even,
            tile=_tile(program, workspace, program.reduce_half),
        )
    made = {
        layer: torch.empty((source.rows, width), dtype=destination.dtype, device=device)
        for layer, width in program.streams.items()
    }
    _expand(program, destination, made, tables, slots, workspace)
    return made


def _gather(
    program: Program,
    source: Pages,
    native: Pages | None,
    streams: Streams,
    tables: Tables,
    slots: Int[Tensor, "3 N"],
    workspace: Float[Tensor, "N pitch"],
) -> None:
    for interleaved in sorted({segment.interleaved for segment in program.segments}):
        chosen = [segment for segment in program.segments if segment.interleaved == interleaved]
        table = segment_table(chosen, source, native, streams, tables)
        starts = table[:, 7].clamp_min(0)
        gather(
            table.to(workspace.device),
            slots,
            tables.flat,
            tables.tokens,
            workspace,
            given=source.dtype,
            interleaved=interleaved,
            widest=max(segment.width for segment in chosen),
            align=alignment(table[:, [0, 2, 3, 5]], starts, (table[:, 6] + 1) // 2),
        )


def _expand(
    program: Program,
    destination: Pages,
    made: Streams,
    tables: Tables,
    slots: Int[Tensor, "3 N"],
    workspace: Float[Tensor, "N pitch"],
) -> None:
    entries = entry_table(program.entries, program.products, program.layers, destination, made)
    expand(
        workspace,
        entries.to(workspace.device),
        program.blocks,
        program.bias,
        slots,
        tables.flat[tables.target :],
        tables.tokens,
        terms=program.terms,
        written=destination.dtype,
        interleaved=program.target.interleaved,
        stored=program.stored,
        align=alignment([program.align], entries[:, [0, 2, 3, 5]]),
        even=program.even,
        half=program.half,
        tile=_tile(program, workspace, power_of_two(max(8, program.half))),
    )


def _tile(program: Program, workspace: Float[Tensor, "N pitch"], half: int) -> Tile:
    device = workspace.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return choose_product(workspace.shape[0], half, program.depth, program.stored, program.dtype, capability)


def _require(
    program: Program, source: Pages, destination: Pages, tables: Tables, native: Pages | None, streams: Streams
) -> None:
    read = {segment.memory for segment in program.segments}
    _require_shape("source", source, program.source, program.source.layers)
    _require_shape("target", destination, program.target, len(program.layers))
    if destination.rows != source.rows:
        raise CacheError(
            f"the source has {source.rows} rows and the target's cache takes {destination.rows}; give a slot table "
            "with one slot per row."
        )
    if source.rows % tables.tokens:
        raise CacheError(
            f"the rotary tables have {tables.tokens} positions for {source.rows} rows; give one position per token."
        )
    sizes = tables.tokens * program.source.rotary, tables.tokens * program.target.rotary
    if (tables.target, tables.flat.shape[0]) != (sizes[0], sum(sizes)):
        raise CacheError(
            f"the rotary tables hold {tables.target} numbers of the source and {tables.flat.shape[0] - tables.target} "
            f"of the target, expected {sizes[0]} and {sizes[1]}; take them from the pair's own models."
        )
    if TARGET in read:
        needed = 1 + max(segment.layer for segment in program.segments if segment.memory == TARGET)
        if native is None:
            raise CacheError(f"the map reads the target's own layers up to {needed - 1}; give them as native.")
        _require_shape("native", native, program.target, needed)
        if native.dtype != source.dtype or native.rows != source.rows:
            raise CacheError(
                f"the native cache has {native.rows} rows of {native.dtype}, the source {source.rows} of "
                f"{source.dtype}; both must agree."
            )
    for segment in program.segments:
        if segment.memory == STREAM:
            stream = streams.get(segment.layer)
            shape = (source.rows, program.target.hidden)
            if stream is None or stream.shape != shape or stream.dtype != source.dtype or stream.stride(1) != 1:
                given = "none" if stream is None else f"{stream.dtype} {tuple(stream.shape)}"
                raise CacheError(
                    f"the map reads the residual stream of layer {segment.layer} as {source.dtype} {shape}; given: "
                    f"{given}."
                )


def _require_shape(name: str, pages: Pages, side: Side, layers: int) -> None:
    if (pages.heads, pages.head_dim) != (side.heads, side.head_dim) or pages.layers < layers:
        raise CacheError(
            f"the {name} cache has {pages.layers} layers of {pages.heads} × {pages.head_dim}; the map needs {layers} "
            f"of {side.heads} × {side.head_dim}."
        )
