"""Forms in plain torch and fp32: slow, obvious, and what every faster path is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu

from kvbridge.errors import CacheError
from kvbridge.forms import KINDS, Form, ResidualBranch, SharedBasis, SlotAffine, branches_of, frozen_forms
from kvbridge.states import CachedStates, ContentStates, normed
from kvbridge.variables import Span


def input_slots(states: ContentStates) -> Float[Tensor, "slots B T D_s"]:
    """All (kind, layer, head) slots of a source in the order of `kvbridge.forms.input_slot`."""
    return torch.cat((states.keys.transpose(1, 2).flatten(0, 1), states.values.transpose(1, 2).flatten(0, 1)))


def slot_affine(
    form: SlotAffine, slots: Float[Tensor, "slots B T D_s"], layers: range
) -> Float[Tensor, "L B H_t T D_t"]:
    """Execute a slot-affine form for the target `layers`: `y = Σ_j x[slot_j] W_j + b`."""
    made = []
    for layer in layers:
        heads = []
        for head in range(form.slots.shape[1]):
            inputs = slots[form.slots[layer, head].long()].float()  # [S, B, T, D_s]
            weight = form.weight[layer, head].float()  # [S, D_s, D_t]
            heads.append(torch.einsum("sbtd,sde->bte", inputs, weight) + form.bias[layer, head].float())
        made.append(torch.stack(heads, dim=1))
    return torch.stack(made)


def _native_layers(native: ContentStates | None) -> str:
    if native is None:
        return "the plan has no native head"
    return f"the plan's native head makes layers 0 … {len(native.keys) - 1} exact"


def require_span(span: Span, states: ContentStates | CachedStates | None) -> int:
    """Width of a span's rows in some states, which must hold it.

    Raises:
        CacheError: a layer of it is not there.
    """
    if states is not None and span.states in KINDS and span.stop <= len(states.keys):
        return len(span.layers) * states.keys[0].shape[1] * states.keys[0].shape[-1]
    if isinstance(states, ContentStates) and span.states not in KINDS and states.residual.keys() >= set(span.layers):
        return sum(states.residual[layer].shape[-1] for layer in span.layers)
    if span.role == "source":
        held = 0 if states is None else len(states.keys)
        raise CacheError(
            f"the map reads {span}; the source states have {held} layers. The bridge belongs to another source."
        )
    native = states if isinstance(states, ContentStates) else None
    raise CacheError(
        f"the map reads {span} and {_native_layers(native)}; give plan.native_head={span.stop - 1} or more."
    )


def span_rows(span: Span, states: ContentStates) -> Float[Tensor, "B T w"]:
    """Rows of one span that the states hold, in fp32."""
    if span.states in KINDS:
        chosen = getattr(states, span.states)[span.start : span.stop].float()  # [L, B, H, T, D]
        return chosen.permute(1, 3, 0, 2, 4).flatten(2)
    streams = [states.residual[layer].float() for layer in span.layers]
    return torch.cat([normed(h) if span.states == "normed_residual" else h for h in streams], dim=-1)


def rows_of(spans: Sequence[Span], source: ContentStates, native: ContentStates | None) -> Float[Tensor, "B T p"]:
    """Rows of some spans, one after the other, in fp32.

    Args:
        spans: what is wanted.
        source: content states of all layers of the source.
        native: what the target has computed itself at the same positions: its first layers, and the residual stream at
            their inputs.

    Raises:
        CacheError: a span reaches beyond what is there.
    """
    found = []
    for span in spans:
        states = source if span.role == "source" else native
        require_span(span, states)
        found.append(span_rows(span, cast(ContentStates, states)))
    return torch.cat(found, dim=-1)


def _require_width(form: SharedBasis | ResidualBranch, rows: Float[Tensor, "B T p"]) -> None:
    if rows.shape[-1] != form.input_width:
        raise CacheError(
            f"the map reads {form.input_width} numbers per token from {', '.join(map(str, form.inputs))}; the states "
            f"have {rows.shape[-1]} there. The bridge belongs to another pair."
        )


def basis_rows(form: SharedBasis, rows: Float[Tensor, "B T p"]) -> Float[Tensor, "B T R"]:
    """The first half of a shared-basis form: `z = x P`, or `x` itself where there is no `P`.

    Raises:
        CacheError: the rows are of another width.
    """
    _require_width(form, rows)
    return rows.float() if form.reduce is None else rows.float() @ form.reduce.float()


def activated(activation: str, rows: Float[Tensor, "... W"]) -> Float[Tensor, "... R"]:
    """`φ` of a residual branch: nothing, the exact GELU, or the product of the two halves of a row."""
    if activation == "quadratic":
        first, second = rows.chunk(2, dim=-1)
        return first * second
    return gelu(rows) if activation == "gelu" else rows


def branch_rows(form: ResidualBranch, rows: Float[Tensor, "B T p"]) -> Float[Tensor, "B T R"]:
    """The first half of a residual branch: `z = φ(x A + a)`.

    Raises:
        CacheError: the rows are of another width.
    """
    _require_width(form, rows)
    return activated(form.activation, rows.float() @ form.reduce.float() + form.offset.float())


def expanded_rows(
    form: SharedBasis | ResidualBranch, basis: Float[Tensor, "B T R"], layers: range
) -> dict[Span, Float[Tensor, "B T w"]]:
    """The second half: `y = z B + b` of the outputs that belong to the target `layers`."""
    return {
        span: basis @ form.expand[:, columns].float() + form.bias[columns].float()
        for span, columns in form.columns(layers)
    }


def shared_basis(form: SharedBasis, rows: Float[Tensor, "B T p"], layers: range) -> dict[Span, Float[Tensor, "B T w"]]:
    """Execute a shared-basis form on the rows of its inputs: the rows of its outputs for the target `layers`.

    With them comes the residual stream at the input of layer `layers.stop`, where the form makes it.
    """
    return expanded_rows(form, basis_rows(form, rows), layers)


def residual_branch(
    form: ResidualBranch, rows: Float[Tensor, "B T p"], layers: range
) -> dict[Span, Float[Tensor, "B T w"]]:
    """What a residual branch adds, given the rows of its inputs, to the target `layers` and what follows them."""
    return expanded_rows(form, branch_rows(form, rows), layers)


def apply_forms(
    forms: Sequence[Form], source: ContentStates, layers: range, native: ContentStates | None = None
) -> ContentStates:
    """Execute a whole map in fp32: what `FormMap` is compared with.

    Args:
        forms: of the map, which make all of `layers`.
        source: content states of all layers of the source.
        layers: the target layers wanted.
        native: what the target has computed itself at the same positions.

    Returns:
        The states, with the residual stream at the input of layer `layers.stop` where a form makes it.

    Raises:
        CacheError: the forms read what the states do not have.
    """
    executing = _Execution(source, layers, native)
    for form in frozen_forms(forms):
        executing.slots(form) if isinstance(form, SlotAffine) else executing.basis(form)
    for branch in branches_of(forms):
        executing.branch(branch)
    return executing.states()


class _Execution:
    """One application of forms: what they read, gathered once, and what they have made so far."""

    def __init__(self, source: ContentStates, layers: range, native: ContentStates | None) -> None:
        self.source, self.layers, self.native = source, layers, native
        # Keys and values of a layer are [B, H, T, D], a residual stream [B, T, E].
        self.made: dict[tuple[str, int], Tensor] = {}
        self._slots: Float[Tensor, "slots B T D_s"] | None = None
        self._rows: dict[tuple[Span, ...], Float[Tensor, "B T p"]] = {}
        self._bases: dict[tuple[int, tuple[Span, ...]], Float[Tensor, "B T R"]] = {}

    def states(self) -> ContentStates:
        """All that was made."""
        keys, values = (torch.stack([self.made[kind, layer] for layer in self.layers]) for kind in KINDS)
        streams = {layer: rows for (states, layer), rows in self.made.items() if states == "residual"}
        return ContentStates(keys, values, self.source.positions, streams)

    def slots(self, form: SlotAffine) -> None:
        slots = self._slots if self._slots is not None else input_slots(self.source)
        self._slots = slots
        needed = int(form.slots.max()) + 1
        if needed > slots.shape[0] or form.weight.shape[3] != slots.shape[-1]:
            raise CacheError(
                f"the map reads {needed} input slots of width {form.weight.shape[3]}; the source states have "
                f"{slots.shape[0]} of width {slots.shape[-1]}. The bridge belongs to another source."
            )
        for layer, states in zip(self.layers, slot_affine(form, slots, self.layers), strict=True):
            self.made[form.kind, layer] = states

    def basis(self, form: SharedBasis) -> None:
        if not form.columns(self.layers):
            return
        basis = id(form.reduce), form.inputs
        if basis not in self._bases:
            self._bases[basis] = basis_rows(form, self._read(form.inputs))
        self.made.update(self._states(form, self._bases[basis]))

    def branch(self, form: ResidualBranch) -> None:
        if not form.columns(self.layers):
            return
        for place, states in self._states(form, branch_rows(form, self._read(form.inputs))):
            self.made[place] = self.made[place] + states

    def _read(self, inputs: tuple[Span, ...]) -> Float[Tensor, "B T p"]:
        if inputs not in self._rows:
            self._rows[inputs] = rows_of(inputs, self.source, self.native)
        return self._rows[inputs]

    def _states(
        self, form: SharedBasis | ResidualBranch, basis: Float[Tensor, "B T R"]
    ) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """What a form expands to, layer by layer, by the place where it belongs."""
        for span, rows in expanded_rows(form, basis, self.layers).items():
            if span.states == "residual":
                yield (span.states, span.start), rows
                continue
            heads = rows.unflatten(-1, (len(span.layers), form.kv_heads, form.head_dim))  # [B, T, L, H, D]
            for layer, states in zip(span.layers, heads.permute(2, 0, 3, 1, 4), strict=True):
                yield (span.states, layer), states
