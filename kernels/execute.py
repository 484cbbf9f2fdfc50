"""One map made of executable forms, applied to live states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.bridge import Bridge
from kvbridge.errors import CacheError
from kvbridge.forms import (
    KINDS,
    Form,
    ResidualBranch,
    SharedBasis,
    SlotAffine,
    branches_of,
    flops_per_token,
    frozen_forms,
    needed_native_head,
    require_distinct,
)
from kvbridge.kernels.reference import basis_rows, branch_rows, expanded_rows, input_slots, rows_of, slot_affine
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from kvbridge.variables import Span


@dataclass(frozen=True, slots=True)
class FormMap:
    """A map as its forms: each makes other layers or another kind of the target's states, and branches add to them.

    Attributes:
        forms: in any order; what two of them share of a basis is computed once.

    Raises:
        CacheError: two forms make the same layer, or a branch adds to one that none makes.
    """

    forms: tuple[Form, ...]

    def __post_init__(self) -> None:
        require_distinct(self.forms)

    @classmethod
    def of(cls, bridge: Bridge, name: str | None = None, *, device: torch.device | str | None = None) -> FormMap:
        """A map of a bridge: the one called `name`, or the only one.

        Args:
            bridge: whose map it is.
            name: of the map; may be left out where the bridge has one alone.
            device: where it is to be executed; where its tensors lie by default.

        Raises:
            UsageError: there is none of that name, or no name was given and there are several.
        """
        return cls(bridge.map(name).to(device=device).forms)

    def needs_native_head(self) -> int | None:
        """The highest target layer that the map reads, which a plan must make exact; `None` for the source alone."""
        return needed_native_head(self.forms)

    def require_plan(self, plan: HandoffPlan, layers: int) -> None:
        """Refuse a plan that does not give what the map reads, or maps what it does not make.

        Args:
            plan: what the target computes natively.
            layers: of the target.

        Raises:
            CacheError: naming the setting that would help.
            PlanError: the plan leaves no layer to map.
        """
        self._require_layers(plan.mapped_layers(layers))
        needed = self.needs_native_head()
        if needed is not None and (plan.native_head is None or plan.native_head < needed):
            given = "null" if plan.native_head is None else plan.native_head
            raise CacheError(
                f"the map reads what the target computes in layers up to {needed}, and plan.native_head={given}; "
                f"give plan.native_head={needed} or more."
            )
        boundary = plan.mapped_layers(layers).stop
        streams = [span for form in frozen_forms(self.forms) for span in form.outputs if span.states == "residual"]
        if plan.tail_recompute and not any(boundary in span.layers for span in streams):
            made = ", ".join(str(layers - layer) for span in streams for layer in span.layers)
            raise CacheError(
                f"plan.tail_recompute={plan.tail_recompute} starts from the residual stream at the input of layer "
                f"{boundary}, which the map does not make; give plan.tail_recompute={made or 0}, or another map."
            )

    def apply(self, source: ContentStates, layers: range, native: ContentStates | None = None) -> ContentStates:
        """Target content states of the target `layers`, at the positions of `source`.

        Args:
            source: content states of all layers of the source.
            layers: the target layers wanted.
            native: what the target has computed itself at the same positions.

        Returns:
            The states, with the residual stream at the input of layer `layers.stop` where a form makes it.

        Raises:
            CacheError: the forms read what the states do not have, or make no states of some layer.
        """
        self._require_layers(layers)
        executing = _Execution(source, layers, native)
        for form in frozen_forms(self.forms):
            executing.slots(form) if isinstance(form, SlotAffine) else executing.basis(form)
        for branch in branches_of(self.forms):
            executing.branch(branch)
        keys, values = (torch.stack([executing.made[kind, layer] for layer in layers]) for kind in KINDS)
        streams = {layer: rows for (states, layer), rows in executing.made.items() if states == "residual"}
        return ContentStates(keys, values, source.positions, streams)

    def flops_per_token(self, layers: range) -> int:
        """Operations that mapping one token into the target `layers` takes; a basis that forms share counts once."""
        return flops_per_token(self.forms, layers)

    def _require_layers(self, layers: range) -> None:
        for kind in KINDS:
            made = {layer for form in self.forms for s in form.outputs if s.states == kind for layer in s.layers}
            missing = [str(layer) for layer in layers if layer not in made]
            if missing:
                raise CacheError(
                    f"the map makes no {kind} of target layers {', '.join(missing)}, which the plan maps; give a plan "
                    "whose native head and tail recompute cover them, or another map."
                )


class _Execution:
    """One application of forms: what they read, gathered once, and what they have made so far."""

    def __init__(self, source: ContentStates, layers: range, native: ContentStates | None) -> None:
        self.source, self.layers, self.native = source, layers, native
        # Keys and values of a layer are [B, H, T, D], a residual stream [B, T, E].
        self.made: dict[tuple[str, int], Tensor] = {}
        self._slots: Float[Tensor, "slots B T D_s"] | None = None
        self._rows: dict[tuple[Span, ...], Float[Tensor, "B T p"]] = {}
        self._bases: dict[tuple[int, tuple[Span, ...]], Float[Tensor, "B T R"]] = {}

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
