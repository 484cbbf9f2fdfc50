"""From forms to tables: which products make which coordinates of the target's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine
from kvbridge.kernels.triton.product import TERM
from kvbridge.kernels.triton.reduce import ACTIVATIONS, HEADER
from kvbridge.kernels.triton.sides import Side
from kvbridge.kernels.triton.weights import Weight, block_table
from kvbridge.kernels.triton.workspace import Workspace, parts
from kvbridge.variables import KINDS, Span

STREAM_KIND = 2
Blocks = tuple[int, int]
# The term of a head and coordinate: see `product.TERM`.
Term = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """Coordinates of the target that one column of programs makes.

    Attributes:
        kind: 0 for keys, 1 for values, `None` for the residual stream.
        layer: of the target.
        head: in the layer.
        dim: first coordinate in the head, or in the residual stream.
        width: coordinates.
        rotated: whether the target's RoPE is put on.
        bias: where its bias stands.
    """

    kind: int | None
    layer: int
    head: int
    dim: int
    width: int
    rotated: bool
    bias: int


@dataclass(slots=True)
class Made:
    """One layer of one kind: the terms that are summed, and the bias over all its coordinates."""

    terms: list[Term]
    bias: Float[Tensor, "w"]


def slot_of(slot: int, source: Side) -> tuple[str, int, int]:
    """Variable, layer and head of an input slot, numbered as `kvbridge.forms.input_slot` does."""
    rest, head = divmod(slot, source.heads)
    kind, layer = divmod(rest, source.layers)
    if kind >= len(KINDS):
        raise CacheError(
            f"the map reads input slot {slot} of a source with {2 * source.layers * source.heads}. The bridge belongs "
            "to another source."
        )
    return f"source.{KINDS[kind]}", layer, head


def slot_spans(form: SlotAffine, layers: range, source: Side) -> tuple[Span, ...]:
    """What a slot-affine form reads for the target `layers`, one span per layer of the source."""
    slots = form.slots[layers.start : layers.stop].unique().tolist()
    read = sorted({slot_of(slot, source)[:2] for slot in slots})
    return tuple(Span(variable, layer, layer + 1) for variable, layer in read)


@dataclass(slots=True)
class Products:
    """Tables in the making.

    Attributes:
        workspace: its columns of `x`; those of `z` are taken here.
        target: shape of the rows that are made.
        layers: target layers wanted.
        stored: dtype of the weights.
        device: of the weights.
        depth: inputs in one step.
        half: half the width of an entry.
        reduce_half: half the columns of a tile of `z`.
    """

    workspace: Workspace
    target: Side
    layers: range
    stored: torch.dtype
    device: torch.device
    depth: int
    half: int
    reduce_half: int
    made: dict[tuple[int, int], Made] = field(default_factory=dict)
    weights: dict[int, Weight] = field(default_factory=dict)
    blocks: list[Int[Tensor, "blocks 3"]] = field(default_factory=list)
    quadratic: bool = False
    _reduces: list[list[int]] = field(default_factory=list)
    _offsets: list[Float[Tensor, "W"]] = field(default_factory=list)
    _bases: dict[tuple[int, tuple[Span, ...]], Blocks] = field(default_factory=dict)
    _placed: dict[tuple[tuple[int, int, int], ...], Blocks] = field(default_factory=dict)

    def add(self, form: Form) -> None:
        """Take in a form; residual branches after those that they add to."""
        if isinstance(form, SlotAffine):
            self._slots(form)
        elif isinstance(form, SharedBasis):
            basis = self._place(self.workspace.runs(form.inputs))
            if form.reduce is not None:
                key = id(form.reduce), form.inputs
                if key not in self._bases:
                    zeros = torch.zeros(form.reduce.shape[1])
                    self._bases[key] = self._reduce(form.reduce, basis, "linear", zeros)
                basis = self._bases[key]
            self._expand(form, basis)
        else:
            inputs = self._place(self.workspace.runs(form.inputs))
            self._expand(form, self._reduce(form.reduce, inputs, form.activation, form.offset))

    def _weight(self, name: str, tensor: Tensor) -> Weight:
        if id(tensor) not in self.weights:
            self.weights[id(tensor)] = Weight.of(name, tensor, self.stored, self.device)
        return self.weights[id(tensor)]

    def _place(self, runs: list[tuple[int, int, int]]) -> Blocks:
        key = tuple(runs)
        if key not in self._placed:
            first = sum(map(len, self.blocks))
            self.blocks.append(block_table(runs, self.depth))
            self._placed[key] = first, first + len(self.blocks[-1])
        return self._placed[key]

    def _slots(self, form: SlotAffine) -> None:
        weight, kind, width = self._weight("weight", form.weight), KINDS.index(form.kind), form.weight.shape[3]

        def blocks(layer: int, head: int) -> Blocks:
            runs = []
            for number, slot in enumerate(form.slots[layer, head].tolist()):
                variable, source_layer, source_head = slot_of(slot, self.workspace.source)
                column = self.workspace.columns[variable, source_layer] + source_head * width
                runs.append((column, number * width, width))
            return self._place(runs)

        for layer in self.layers:
            places = [blocks(layer, head) for head in range(form.slots.shape[1])]

            def term(head: int, dim: int, layer: int = layer, places: list[Blocks] = places) -> tuple[int, ...]:
                return *weight.term(dim, (layer, head)), *places[head]

            self.made[kind, layer] = Made([term], form.bias[layer].float().flatten())

    def _reduce(
        self, reduce: Float[Tensor, "p W"], inputs: Blocks, activation: str, offset: Float[Tensor, "W"]
    ) -> Blocks:
        """Tiles of one basis or bottleneck; the blocks of its `z`."""
        weight, code = self._weight("reduce", reduce), ACTIVATIONS[activation]
        rank = reduce.shape[1] // (2 if activation == "quadratic" else 1)
        self.quadratic |= activation == "quadratic"
        first, before = self.workspace.take(rank), sum(map(len, self._offsets))
        self._offsets.append(offset.float())
        for column in range(0, rank, 2 * self.reduce_half):
            width = min(2 * self.reduce_half, rank - column)
            second = rank + column if activation == "quadratic" else column
            header = [first + column, width, code, before + column, before + second]
            one, two = (weight.term(start) for start in (column, second))
            self._reduces.append([*header, *one, *inputs, *two, *inputs])
        return self._place([(first, 0, rank)])

    def _expand(self, form: SharedBasis | ResidualBranch, basis: Blocks) -> None:
        weight, width = self._weight("expand", form.expand), form.head_dim
        for span, columns in form.columns(self.layers):
            each = (columns.stop - columns.start) // len(span.layers)
            for number, layer in enumerate(span.layers):
                first = columns.start + number * each

                def term(head: int, dim: int, first: int = first) -> tuple[int, ...]:
                    return *weight.term(first + head * width + dim), *basis

                kind = KINDS.index(span.states) if span.states in KINDS else STREAM_KIND
                made = self.made.setdefault((kind, layer), Made([], torch.zeros(each, device=form.bias.device)))
                made.terms.append(term)
                made.bias = made.bias + form.bias[first : first + each].float()

    def entries(self) -> tuple[tuple[Entry, ...], Int[Tensor, "entries fields"]]:
        """What is written, in the order of layers, and its terms, as many for each; missing ones read no block."""
        side, found, rows, bias = self.target, [], [], 0
        most = max(len(made.terms) for made in self.made.values())
        for (kind, layer), made in sorted(self.made.items()):
            width = made.bias.shape[0]
            if kind == STREAM_KIND:
                pieces = [(0, dim, min(2 * self.half, width - dim), False) for dim in range(0, width, 2 * self.half)]
            else:
                cut = parts(KINDS[kind], side, 2 * self.half)
                pieces = [(head, *piece) for head in range(side.heads) for piece in cut]
            for head, dim, wide, rotated in pieces:
                at = bias + head * side.head_dim + dim
                place = None if kind == STREAM_KIND else kind
                found.append(Entry(place, layer, head, dim, wide, rotated, at))
                terms = [number for term in made.terms for number in term(head, dim)]
                missing = most - len(made.terms)
                rows.append(terms + [*terms[: TERM - 2], 0, 0] * missing)
            bias += width
        return tuple(found), torch.tensor(rows)

    def streams(self) -> dict[int, int]:
        """Layers of the residual stream that are made, and their widths."""
        return {layer: made.bias.shape[0] for (kind, layer), made in sorted(self.made.items()) if kind == STREAM_KIND}

    def reduce_table(self) -> Int[Tensor, "tiles fields"]:
        return torch.tensor(self._reduces, dtype=torch.int64).reshape(len(self._reduces), HEADER + 2 * TERM)

    def offset_vector(self) -> Float[Tensor, "W"]:
        return torch.cat([part.to(self.device) for part in self._offsets] or [torch.zeros(1, device=self.device)])

    def bias_vector(self) -> Float[Tensor, "q"]:
        return torch.cat([made.bias.to(self.device) for _, made in sorted(self.made.items())])
