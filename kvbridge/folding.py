"""Linear branches as weights of the forms they add to: the same states from a map without them.

`x W + (x A + a) B` is `x (W + A B) + a B`, and `x P B₀ + (x A + a) B` is `x [P A] [B₀; B] + a B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.errors import CacheError
from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine, flops_per_token, input_slot
from kvbridge.geometry import KVGeometry
from kvbridge.variables import KINDS, Span


def fold(forms: Iterable[Form], source: KVGeometry, target: KVGeometry) -> tuple[Form, ...]:
    """A map with its linear branches in the weights of its other forms; branches with an activation stay.

    Args:
        forms: of one map.
        source: geometry of the model whose cache is read.
        target: of the model that goes on.

    Returns:
        Forms that give the same states to rounding. A slot-affine form then reads all slots that a branch reads, and a
        basis is as much wider as the branch's rank; `flops_per_token` says what that costs.

    Raises:
        CacheError: a branch on a slot-affine form reads what is no slot of the source.
    """
    forms = tuple(forms)
    folded = tuple(form for form in forms if not _is_linear(form))
    for branch in forms:
        if isinstance(branch, ResidualBranch) and _is_linear(branch):
            folded = _Folding(branch, source, target).into(folded)
    return folded


def fold_if_not_dearer(forms: Iterable[Form], source: KVGeometry, target: KVGeometry) -> tuple[Form, ...]:
    """The folded map where it takes no more operations than the given one; otherwise the given one."""
    forms = tuple(forms)
    try:
        folded = fold(forms, source, target)
    except CacheError:
        return forms
    costs = [flops_per_token(each, range(target.layers)) for each in (folded, forms)]
    return folded if costs[0] <= costs[1] else forms


def _is_linear(form: Form) -> bool:
    return isinstance(form, ResidualBranch) and form.activation == "linear"


def _taller(weight: Float[Tensor, "p w"], rows: int) -> Float[Tensor, "p2 w"]:
    """The same matrix with rows of zeros below it."""
    return torch.cat((weight, weight.new_zeros(rows - len(weight), weight.shape[1])))


@dataclass(frozen=True, slots=True)
class _Folding:
    """One linear branch, on its way into the other forms of its map."""

    branch: ResidualBranch
    source: KVGeometry
    target: KVGeometry

    def into(self, forms: tuple[Form, ...]) -> tuple[Form, ...]:
        # A basis that one form needs wider stays shared, and so is wider for all its forms.
        wider: dict[tuple[int, tuple[Span, ...]], Tensor] = {}
        for form in forms:
            if isinstance(form, SharedBasis) and form.reduce is not None and self._shared(form):
                wider.setdefault((id(form.reduce), form.inputs), self._beside(form.reduce, form.inputs))
        folded: list[Form] = []
        for form in forms:
            if isinstance(form, SlotAffine):
                folded.append(self._into_slots(form))
            elif isinstance(form, SharedBasis):
                folded.append(self._into_basis(form, wider.get((id(form.reduce), form.inputs))))
            else:
                folded.append(form)
        return tuple(folded)

    @property
    def constant(self) -> Float[Tensor, "q"]:
        """What the branch adds whatever it reads."""
        return self.branch.offset.float() @ self.branch.expand.float() + self.branch.bias.float()

    def _layers(self, spans: Sequence[Span]) -> list[tuple[Span, slice]]:
        """Every single layer of some inputs, and where it stands in their row."""
        sides, found, first = {"source": self.source, "target": self.target}, [], 0
        for span in spans:
            width = span.width(sides[span.role]) // len(span.layers)
            for layer in span.layers:
                found.append((Span(span.variable, layer, layer + 1), slice(first, first + width)))
                first += width
        return found

    def _inputs(self, inputs: tuple[Span, ...]) -> tuple[Span, ...]:
        """What a form with these inputs reads once the branch is in it."""
        read = {span for span, _ in self._layers(inputs)}
        return inputs + tuple(dict.fromkeys(span for span, _ in self._layers(self.branch.inputs) if span not in read))

    def _scattered(self, inputs: tuple[Span, ...]) -> Float[Tensor, "p W"]:
        """The rows of `A` where these inputs have them."""
        places = dict(self._layers(inputs))
        reduce = self.branch.reduce.float()
        rows = reduce.new_zeros(max(place.stop for place in places.values()), reduce.shape[1])
        for span, own in self._layers(self.branch.inputs):
            rows[places[span]] += reduce[own]
        return rows

    def _beside(self, reduce: Float[Tensor, "p R"], inputs: tuple[Span, ...]) -> Float[Tensor, "p2 R2"]:
        """`[P A]`."""
        added = self._scattered(self._inputs(inputs))
        return torch.cat((_taller(reduce, len(added)), added.to(reduce.dtype)), dim=1)

    def _shared(self, form: SharedBasis) -> list[tuple[slice, slice]]:
        """Columns of a form and of the branch that make the same numbers, layer by layer."""
        own = form.rows.places()
        return [(own[place], columns) for place, columns in self.branch.rows.places().items() if place in own]

    def _into_basis(self, form: SharedBasis, wider: Float[Tensor, "p2 R2"] | None) -> SharedBasis:
        shared = self._shared(form)
        if not shared and wider is None:
            return form
        inputs, bias = self._inputs(form.inputs), form.bias.float().clone()
        added = bias.new_zeros(self.branch.rank, len(bias))
        for own, columns in shared:
            added[:, own] = self.branch.expand[:, columns].float()
            bias[own] += self.constant[columns]
        if wider is None:
            rows = self._scattered(inputs)
            expand = (_taller(form.expand.float(), len(rows)) + rows @ added).to(form.expand.dtype)
        else:
            expand = torch.cat((form.expand, added.to(form.expand.dtype)))
        return replace(form, inputs=inputs, reduce=wider, expand=expand, bias=bias)

    def _into_slots(self, form: SlotAffine) -> SlotAffine:
        places = self.branch.rows.places()
        columns = [places.get((f"target.{form.kind}", layer)) for layer in range(form.layers)]
        if not any(columns):
            return form
        read = self._slots()
        bias, tables = form.bias.float().clone(), []
        for layer, own in enumerate(columns):
            product = self.branch.reduce.float() @ self.branch.expand[:, own].float() if own else None
            for head in range(form.slots.shape[1]):
                entries = dict[int, Tensor]()
                given = [*zip(form.slots[layer, head].tolist(), form.weight[layer, head].float(), strict=True)]
                if product is not None:
                    parts = product.unflatten(1, (-1, form.weight.shape[-1]))[:, head]
                    given += zip(read, parts.unflatten(0, (len(read), -1)), strict=True)
                for slot, weight in given:
                    entries[slot] = entries[slot] + weight if slot in entries else weight
                tables.append(entries)
            if own:
                bias[layer] += self.constant[own].view_as(bias[layer])
        slots, weight = _table(tables)
        shape = form.slots.shape[:2]
        weight = weight.unflatten(0, shape).to(form.weight.dtype)
        return replace(form, slots=slots.unflatten(0, shape).to(form.slots), weight=weight, bias=bias)

    def _slots(self) -> list[int]:
        """The slots of the source that the branch reads, in the order of its rows.

        Raises:
            CacheError: it reads something else.
        """
        foreign = [span for span in self.branch.inputs if span.role != "source" or span.states not in KINDS]
        if foreign:
            raise CacheError(
                f"a linear branch that reads {foreign[0]} cannot be folded into a slot-affine form, which reads heads "
                "of the source alone; keep the branch, or fit a map of shared-basis forms."
            )
        heads = range(self.source.kv_heads)
        return [
            input_slot(span.states, span.start, head, self.source.layers, self.source.kv_heads)
            for span, _ in self._layers(self.branch.inputs)
            for head in heads
        ]


def _table(entries: Sequence[dict[int, Tensor]]) -> tuple[Int[Tensor, "N S"], Float[Tensor, "N S D_s D_t"]]:
    """Slots and weights of every output head as tables of one width, filled up with weights of zero."""
    width = max(map(len, entries))
    slots, weights = [], []
    for each in entries:
        missing = width - len(each)
        slots.append([*each, *[next(iter(each))] * missing])
        weight = torch.stack([*each.values()])
        weights.append(torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:]))))
    return torch.tensor(slots), torch.stack(weights)
