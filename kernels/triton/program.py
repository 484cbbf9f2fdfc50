"""A map made ready for the kernels: weights on the device, and tables of what each program reads and makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine
from kvbridge.kernels.triton.binding import Binding, alignment
from kvbridge.kernels.triton.config import WIDEST, choose_depth, choose_reduce_half
from kvbridge.kernels.triton.entries import Products, slot_spans
from kvbridge.kernels.triton.product import TERM
from kvbridge.kernels.triton.reduce import HEADER
from kvbridge.kernels.triton.sides import Side
from kvbridge.kernels.triton.weights import Weight
from kvbridge.kernels.triton.workspace import STREAM, Workspace
from kvbridge.variables import Span


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Program:
    """A map for certain target layers; memory addresses of a cache are filled in when it runs.

    Attributes:
        layers: target layers that it makes.
        source: shape of the source's rows.
        target: shape of the target's rows.
        native: shape of what the target has computed itself.
        dtype: of the workspace and the products; sums are fp32.
        stored: dtype of the weights; int8 has scales.
        pitch: columns of the workspace.
        binding: what is read and written.
        reads_streams: layers of the residual stream that it reads.
        streams: layers of the residual stream that it makes, and their widths.
        reduces: tiles of `z`, as `reduce.HEADER` says.
        quadratic: some activation is a product of two halves.
        terms: products that are summed in one entry.
        blocks: workspace columns that meet weight rows.
        offsets: of the activations.
        bias: of the entries.
        depth: inputs in one step of a product.
        even: every block has as many.
        align: what starts, strides, addresses of weights and widths of tiles are multiples of, up to 16.
        half: half the width of a rotated entry.
        reduce_half: half the columns of a tile of `z`.
        weights: kept alive.
    """

    layers: range
    source: Side
    target: Side
    native: Side
    dtype: torch.dtype
    stored: torch.dtype
    pitch: int
    binding: Binding
    reads_streams: tuple[int, ...]
    streams: dict[int, int]
    reduces: Int[Tensor, "tiles tile_fields"]
    quadratic: bool
    terms: int
    blocks: Int[Tensor, "blocks 3"]
    offsets: Float[Tensor, "W"]
    bias: Float[Tensor, "q"]
    depth: int
    even: bool
    align: int
    half: int
    reduce_half: int
    weights: tuple[Weight, ...]


def _read_spans(form: Form, layers: range, source: Side) -> tuple[Span, ...]:
    return slot_spans(form, layers, source) if isinstance(form, SlotAffine) else form.inputs


def _products(
    forms: Sequence[Form],
    workspace: Workspace,
    target: Side,
    layers: range,
    stored: torch.dtype,
    device: torch.device,
    depth: int,
) -> Products:
    """The products of all forms; branches come after what they add to."""
    half = min(WIDEST // 2, (target.head_dim + 1) // 2) if not target.rotary else target.rotary // 2
    ranks = [form.expand.shape[0] for form in forms if not isinstance(form, SlotAffine)]
    reduce_half = choose_reduce_half(max(ranks, default=0))
    products = Products(workspace, target, layers, stored, device, depth, half, reduce_half)
    for form in sorted(forms, key=lambda form: isinstance(form, ResidualBranch)):
        products.add(form)
    missing = [str(layer) for kind in (0, 1) for layer in layers if (kind, layer) not in products.made]
    if missing:
        raise CacheError(f"the map does not make all keys and values of target layers {', '.join(missing)}.")
    return products


def compile_map(
    forms: Sequence[Form],
    layers: range,
    source: Side,
    target: Side,
    *,
    dtype: torch.dtype,
    native: Side | None = None,
    stored: torch.dtype | None = None,
    device: torch.device | str = "cuda",
) -> Program:
    """Make a map ready for the kernels.

    Args:
        forms: of the map, residual branches among them.
        layers: target layers wanted; with them comes the residual stream at the input of layer `layers.stop`, where a
            form makes it.
        source: shape of the source's rows.
        target: shape of the target's rows.
        dtype: of the products' inputs, float32, bfloat16 or float16; sums are fp32.
        native: shape of what the target has computed itself, `target` by default.
        stored: dtype of the weights, `dtype` by default; `torch.int8` keeps them as whole numbers with scales.
        device: where it is to run.

    Raises:
        CacheError: the forms read or make what the pair does not have.
    """
    wanted = [form for form in forms if isinstance(form, SlotAffine) or form.columns(layers)]
    workspace = Workspace(source, native or target)
    workspace.reserve([span for form in wanted for span in _read_spans(form, layers, source)])
    segments = workspace.segments()
    depth = choose_depth({length for form in wanted for length in _lengths(form, workspace)}, dtype)
    products = _products(wanted, workspace, target, layers, stored or dtype, torch.device(device), depth)
    entries, terms = products.entries()
    blocks, reduces = torch.cat(products.blocks), products.reduce_table()
    align = alignment(blocks[:, 0], reduces[:, :2], *_addresses(terms), *_addresses(reduces[:, HEADER:]))
    binding = Binding(segments, entries, terms, layers, align)
    return Program(
        layers=layers,
        source=source,
        target=target,
        native=native or target,
        dtype=dtype,
        stored=stored or dtype,
        pitch=workspace.pitch,
        binding=binding,
        reads_streams=tuple(binding.read.layers(STREAM)),
        streams=products.streams(),
        reduces=reduces.to(device),
        quadratic=products.quadratic,
        terms=terms.shape[1] // TERM,
        blocks=blocks.to(device),
        offsets=products.offset_vector(),
        bias=products.bias_vector(),
        depth=depth,
        even=bool((blocks[:, 2] == depth).all()),
        align=align,
        half=products.half,
        reduce_half=products.reduce_half,
        weights=tuple(products.weights.values()),
    )


def _addresses(terms: Int[Tensor, "entries fields"]) -> list[Int[Tensor, "entries terms"]]:
    """Of all terms the addresses of weights and the elements between two inputs."""
    return [terms[:, 0::TERM], terms[:, 3::TERM]]


def _lengths(form: Form, workspace: Workspace) -> set[int]:
    if isinstance(form, SlotAffine):
        return {form.weight.shape[3]}
    widths = {workspace.width(span.variable) for span in form.inputs}
    basis = isinstance(form, SharedBasis) and form.reduce is None
    return widths if basis else {*widths, form.expand.shape[0]}
