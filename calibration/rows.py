"""Rows of variables from what a model computed for a batch of blocks.

What is read is kept as few matrices as possible, named by span: `source.keys` and so on for all layers, and
`target.residual[4:5]` for each layer whose residual stream is wanted. Every other variable is cut out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge import compat
from kvbridge.calibration.moments import CACHE_VARIABLES
from kvbridge.calibration.products import KNOWN, SKETCH, Extent, MomentBlock
from kvbridge.forms import KINDS
from kvbridge.model import KVModel
from kvbridge.states import normed
from kvbridge.variables import VARIABLES, CacheShape, Span


def layer_counts(source: CacheShape, target: CacheShape) -> dict[str, int]:
    """How many layers each variable has."""
    depth = {"source": source.layers, "target": target.layers}
    return {name: depth[name.split(".")[0]] for name in KNOWN}


def variables_of(blocks: Iterable[MomentBlock]) -> list[str]:
    """All variables whose rows a calibration needs: those of the blocks, and the caches of both models."""
    return sorted({*CACHE_VARIABLES, *(name for block in blocks for name in block)})


def layer_widths(source: CacheShape, target: CacheShape, sketch: int | None = None) -> dict[str, int]:
    """Width of one layer's rows of each variable; a sketch cannot be wider than what it stands for."""
    geometries = {"source": source, "target": target}
    widths = {name: Span(name, 0, 1).width(geometries[name.split(".")[0]]) for name in VARIABLES}
    both = widths["source.keys"] + widths["source.values"]
    return widths | {SKETCH: min(sketch or both, both)}


def widths_of(
    names: Iterable[str], source: CacheShape, target: CacheShape, sketch: int | None = None
) -> dict[str, int]:
    """Width of each variable's rows; `sketch` numbers per source layer."""
    layers, one = layer_counts(source, target), layer_widths(source, target, sketch)
    extents = {name: Extent.of(name, layers) for name in names}
    return {name: len(extent) * one[extent.variable] for name, extent in extents.items()}


def residual_layers(names: Iterable[str], layers: Mapping[str, int]) -> tuple[int, ...]:
    """Layers of the target whose residual stream the variables read."""
    spans = (Span.parse(name, layers[name.partition("[")[0]]) for name in names if "residual" in name)
    return tuple(sorted({layer for span in spans for layer in span.layers}))


def cache_names(role: str) -> list[str]:
    """Names of a model's keys and values of all layers."""
    return [f"{role}.{kind}" for kind in KINDS]


def residual_name(layer: int) -> str:
    return f"target.residual[{layer}:{layer + 1}]"


def read_states(
    model: KVModel, role: str, input_ids: Int[Tensor, "B T"], residuals: tuple[int, ...] = ()
) -> dict[str, Float[Tensor, "B T p"]]:
    """Read blocks with one model.

    Args:
        model: source or target.
        role: which of the two.
        input_ids: tokens.
        residuals: layers whose residual stream is kept.

    Returns:
        Content keys and values of all layers, one row per token, and the residual streams; in fp32.
    """
    with compat.residual_streams(model.model, residuals) as streams:
        content = model.content(model.read(input_ids.to(model.device)))
    read = {f"{role}.{kind}": getattr(content, kind).permute(1, 3, 0, 2, 4).flatten(2).to("cpu") for kind in KINDS}
    return read | {residual_name(layer): stream.float().to("cpu") for layer, stream in streams.items()}


def cut_rows(read: Mapping[str, Float[Tensor, "B T p"]], name: str, depth: int) -> Float[Tensor, "N q"]:
    """Rows of one variable.

    Args:
        read: what `read_states` gave, of the role that the variable belongs to, and the sketch where there is one.
        name: of the variable.
        depth: how many layers its model has.
    """
    extent = Extent.of(name, {name: depth})
    whole = read.get(extent.variable)
    if whole is not None:
        one = whole.shape[-1] // depth
        return whole[..., extent.start * one : extent.stop * one].flatten(0, 1)
    streams = [read[residual_name(layer)] for layer in range(extent.start, extent.stop)]
    kept = [normed(stream) if extent.variable.endswith("normed_residual") else stream for stream in streams]
    return torch.cat(kept, dim=-1).flatten(0, 1)
