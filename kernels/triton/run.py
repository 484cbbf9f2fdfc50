"""Run a compiled map: fill in where the caches lie, then launch gather, reduce and expand."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.kernels.triton.binding import Bound, Streams
from kvbridge.kernels.triton.config import Tile, choose_product, power_of_two
from kvbridge.kernels.triton.expand import expand
from kvbridge.kernels.triton.gather import gather
from kvbridge.kernels.triton.pages import Pages
from kvbridge.kernels.triton.program import Program
from kvbridge.kernels.triton.reduce import reduce
from kvbridge.kernels.triton.sides import Side, Tables
from kvbridge.kernels.triton.workspace import TARGET


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
        source: the source's cache, all layers; keys rotated unless the map was compiled for content states.
        destination: the target's cache, the layers `program.layers` in order; written.
        tables: rotary tables of both models at the positions of the rows.
        native: what the target has computed itself, layers `0 … m`, in the same slots as the destination; its keys are
            rotated unless the map was compiled for content states.
        streams: the target's residual stream at the input of layers that the map reads, all in one dtype.

    Returns:
        The residual stream at the input of layers that the map makes, in the dtype of the destination.

    Raises:
        CacheError: caches, tables and map do not fit each other.
    """
    _require(program, source, destination, tables, native, streams or {})
    read = {} if streams is None else {layer: streams[layer] for layer in program.reads_streams}
    device = source.keys[0].device
    made = {
        layer: torch.empty((source.rows, width), dtype=destination.dtype, device=device)
        for layer, width in program.streams.items()
    }
    bound = program.binding.bind(source, destination, native, read, made, tables)
    slots = bound.slots
    if source.slots is not None or destination.slots is not None:
        slots = torch.stack((source.slot_table(), destination.slot_table(), slots[2]))
    workspace = torch.empty((source.rows, program.pitch), dtype=program.dtype, device=device)
    _gather(bound, tables, slots, workspace)
    if len(program.reduces):
        _reduce(program, workspace)
    _expand(program, bound, destination.dtype, tables, slots, workspace)
    return made


def _gather(bound: Bound, tables: Tables, slots: Int[Tensor, "3 N"], workspace: Float[Tensor, "N pitch"]) -> None:
    for part in bound.gathers:
        gather(
            part.segments,
            slots,
            tables.flat,
            tables.tokens,
            workspace,
            given=part.given,
            interleaved=part.interleaved,
            widest=part.widest,
            align=part.align,
        )


def _reduce(program: Program, workspace: Float[Tensor, "N pitch"]) -> None:
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


def _expand(
    program: Program,
    bound: Bound,
    written: torch.dtype,
    tables: Tables,
    slots: Int[Tensor, "3 N"],
    workspace: Float[Tensor, "N pitch"],
) -> None:
    expand(
        workspace,
        bound.entries,
        program.blocks,
        program.bias,
        slots,
        tables.flat[tables.target :],
        tables.tokens,
        terms=program.terms,
        written=written,
        interleaved=program.target.interleaved,
        stored=program.stored,
        align=bound.align,
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
    _require_native(program, source.rows, native, streams)


def _require_native(program: Program, rows: int, native: Pages | None, streams: Streams) -> None:
    layers = program.binding.read.layers(TARGET)
    if layers:
        if native is None:
            raise CacheError(f"the map reads the target's own layers up to {layers[-1]}; give them as native.")
        _require_shape("native", native, program.native, layers[-1] + 1)
        if native.rows != rows:
            raise CacheError(f"the native cache has {native.rows} rows, the source {rows}; both must agree.")
    needed, shape = program.reads_streams, (rows, program.native.hidden)
    kinds = {streams[layer].dtype for layer in needed if layer in streams}
    for layer in needed:
        stream = streams.get(layer)
        if stream is None or stream.shape != shape or stream.stride(1) != 1 or len(kinds) > 1:
            given = "none" if stream is None else f"{stream.dtype} {tuple(stream.shape)}"
            raise CacheError(
                f"the map reads the residual stream of layer {layer} as {shape}, in one dtype for all; given: {given}."
            )


def _require_shape(name: str, pages: Pages, side: Side, layers: int) -> None:
    if (pages.heads, pages.head_dim) != (side.heads, side.head_dim) or pages.layers < layers:
        raise CacheError(
            f"the {name} cache has {pages.layers} layers of {pages.heads} × {pages.head_dim}; the map needs {layers} "
            f"of {side.heads} × {side.head_dim}."
        )
