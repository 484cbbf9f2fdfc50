"""Forms in plain torch and fp32: slow, obvious, and what every faster path is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu

from kvbridge.errors import CacheError
from kvbridge.forms import ResidualBranch, SharedBasis, SlotAffine
from kvbridge.states import ContentStates, normed
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
    return f"the plan's native head makes layers 0 … {native.keys.shape[0] - 1} exact"


def _span_rows(span: Span, states: ContentStates | None) -> Float[Tensor, "B T w"]:
    if span.states in ("residual", "normed_residual"):
        missing = [layer for layer in span.layers if states is None or layer not in states.residual]
    else:
        missing = [layer for layer in span.layers if states is None or layer >= states.keys.shape[0]]
    if states is None or missing:
        if span.role == "source":
            held = 0 if states is None else states.keys.shape[0]
            raise CacheError(
                f"the map reads {span}; the source states have {held} layers. The bridge belongs to another source."
            )
        raise CacheError(
            f"the map reads {span} and {_native_layers(states)}; give plan.native_head={span.stop - 1} or more."
        )
    if span.states in ("keys", "values"):
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
    return torch.cat([_span_rows(span, source if span.role == "source" else native) for span in spans], dim=-1)


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
