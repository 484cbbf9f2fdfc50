"""A map's forms as what is computed once and what is written where, with weights ready to be multiplied.

    rows      gathered from the caches once per set of inputs, or projected from other rows (a basis, a branch)
    pieces    heads of one layer: sums of products of rows with weights, and a bias
    streams   the same for a residual stream

Forms that share inputs or a basis share rows; heads that read the same slots share a product; a residual branch is one
more product in the sums of what it adds to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine, branches_of, frozen_forms
from kvbridge.variables import Span


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of some spans side by side; no spans stand for all slots of the source.

    Attributes:
        inputs: the spans.
        needs: numbers that the map reads from one row.
        slot_width: of the source's heads, where slots are read.
    """

    inputs: tuple[Span, ...]
    needs: int
    slot_width: int | None = None


@dataclass(frozen=True, slots=True)
class Projected:
    """Rows `φ(x A + a)` of other rows.

    Attributes:
        of: number of the rows `x`.
        weight: `A`.
        offset: `a`.
        activation: `φ`.
    """

    of: int
    weight: Float[Tensor, "p W"]
    offset: Float[Tensor, "W"] | None
    activation: str


@dataclass(frozen=True, slots=True)
class Term:
    """One product of rows with weights.

    Attributes:
        rows: number of the rows.
        weight: what they are multiplied by.
        slots: which slots of the rows, where not all are read: a run of them is read where it lies.
    """

    rows: int
    weight: Float[Tensor, "r q"]
    slots: range | Int[Tensor, "S"] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What is written in one place: some heads of a layer's keys or values, or a residual stream.

    Attributes:
        heads: which heads; none for a residual stream.
        terms: whose sum it is.
        bias: added to it.
    """

    heads: range
    terms: tuple[Term, ...]
    bias: Float[Tensor, "q"]


@dataclass(frozen=True, slots=True)
class PackedMap:
    """A map as rows and pieces.

    Attributes:
        dtype: of weights and rows, in which products are made.
        rows: in an order in which all are made of earlier ones.
        pieces: by states (`keys`, `values` or `residual`) and target layer.
    """

    dtype: torch.dtype
    rows: tuple[Gathered | Projected, ...]
    pieces: dict[tuple[str, int], tuple[Piece, ...]]


def read_by(form: Form) -> Gathered:
    """What a form reads of the source and of the target."""
    if isinstance(form, SlotAffine):
        width = form.weight.shape[3]
        return Gathered((), (int(form.slots.max()) + 1) * width, width)
    return Gathered(form.inputs, form.input_width)


def made_shape(forms: tuple[Form, ...]) -> tuple[int, int]:
    """KV heads and head width of the target that a map's forms write for."""
    first = forms[0]
    if isinstance(first, SlotAffine):
        return first.slots.shape[1], first.weight.shape[-1]
    return first.kv_heads, first.head_dim


def pack(forms: tuple[Form, ...], dtype: torch.dtype) -> PackedMap:
    """Prepare a map for products in a dtype.

    Weights that have it already are shared with the forms; others are copied in the layout that is multiplied fastest.
    """
    packer = _Packer(dtype)
    for form in frozen_forms(forms):
        packer.slots(form) if isinstance(form, SlotAffine) else packer.basis(form)
    for form in branches_of(forms):
        packer.branch(form)
    return PackedMap(dtype, tuple(packer.rows), packer.pieces)


class _Packer:
    """Rows and pieces found so far."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows: list[Gathered | Projected] = []
        self.pieces: dict[tuple[str, int], tuple[Piece, ...]] = {}
        self._known: dict[object, int] = {}

    def slots(self, form: SlotAffine) -> None:
        read = read_by(form)
        rows = self._number(("slots", read.slot_width), read)
        known = self.rows[rows]
        if isinstance(known, Gathered) and read.needs > known.needs:
            self.rows[rows] = read
        for layer in range(form.layers):
            self.pieces[form.kind, layer] = tuple(
                self._slot_piece(form, layer, heads, rows) for heads in _alike(form.slots[layer])
            )

    def _slot_piece(self, form: SlotAffine, layer: int, heads: range, rows: int) -> Piece:
        # In order, so that slots that lie side by side are found to be a run.
        table, order = form.slots[layer, heads.start].long().sort()
        weight = form.weight[layer, heads.start : heads.stop][:, order]  # [H, S, D_s, D_t]
        flat = weight.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
        first, last = int(table[0]), int(table[-1])
        run = last - first + 1 == len(table) == len(table.unique())
        slots = range(first, last + 1) if run else table
        bias = form.bias[layer, heads.start : heads.stop].flatten().float()
        return Piece(heads, (Term(rows, self._ready(flat), slots),), bias)

    def basis(self, form: SharedBasis) -> None:
        rows = self._gathered(form)
        if form.reduce is not None:
            reduced = Projected(rows, self._ready(form.reduce), None, "linear")
            rows = self._number((id(form.reduce), form.inputs), reduced)
        for place, term, bias in self._expanded(form, rows):
            heads = range(0) if place[0] == "residual" else range(form.kv_heads)
            self.pieces[place] = (Piece(heads, (term,), bias),)

    def branch(self, form: ResidualBranch) -> None:
        reduce = Projected(self._gathered(form), self._ready(form.reduce), form.offset.float(), form.activation)
        rows = self._number(id(form), reduce)
        for place, term, bias in self._expanded(form, rows):
            self.pieces[place] = tuple(_added(piece, term, bias, form.head_dim) for piece in self.pieces[place])

    def _expanded(
        self, form: SharedBasis | ResidualBranch, rows: int
    ) -> Iterator[tuple[tuple[str, int], Term, Tensor]]:
        """For each place that a form makes or adds to, its product and its bias."""
        for (variable, layer), columns in form.rows.places().items():
            term = Term(rows, self._ready(form.expand[:, columns]))
            yield (variable.split(".")[1], layer), term, form.bias[columns].float()

    def _gathered(self, form: SharedBasis | ResidualBranch) -> int:
        return self._number(form.inputs, read_by(form))

    def _number(self, known: object, rows: Gathered | Projected) -> int:
        if known not in self._known:
            self._known[known] = len(self.rows)
            self.rows.append(rows)
        return self._known[known]

    def _ready(self, weight: Float[Tensor, "r q"]) -> Float[Tensor, "r q"]:
        if weight.dtype == self.dtype:
            return weight
        # Column after column: the product that torch makes for linear layers.
        return weight.t().to(self.dtype, memory_format=torch.contiguous_format).t()


def _alike(table: Int[Tensor, "H S"]) -> Iterator[range]:
    """Runs of heads that read the same slots in the same order."""
    first = 0
    for head in range(1, len(table) + 1):
        if head == len(table) or not torch.equal(table[head], table[first]):
            yield range(first, head)
            first = head


def _added(piece: Piece, term: Term, bias: Float[Tensor, "q"], head_dim: int) -> Piece:
    """A piece with one more product; a term for all heads is cut to those of the piece."""
    columns = slice(piece.heads.start * head_dim, piece.heads.stop * head_dim) if piece.heads else slice(None)
    cut = Term(term.rows, term.weight[:, columns], term.slots)
    return Piece(piece.heads, (*piece.terms, cut), piece.bias + bias[columns])
