"""A map with the branch that is trained on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvbridge.branch import ResidualBranch, join_branches
from kvbridge.forms import Form, SlotAffine, branches_of, frozen_forms
from kvbridge.geometry import KVGeometry
from kvbridge.kernels import FormMap
from kvbridge.kernels.reference import apply_forms, rows_of
from kvbridge.layout import moved
from kvbridge.mappers.residual.module import ResidualModule
from kvbridge.mappers.residual.readings import Readings
from kvbridge.mappers.residual.unfrozen import UnfrozenForms
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from kvbridge.variables import KINDS, Span


def branch_inputs(forms: Iterable[Form], source: KVGeometry) -> tuple[Span, ...]:
    """Everything that the forms of a map read, all source layers first; of a form that reads slots, all of them."""
    whole = [Span(f"source.{kind}", 0, source.layers) for kind in KINDS]
    read = [span for form in forms for span in (whole if isinstance(form, SlotAffine) else form.inputs)]
    return tuple(sorted(dict.fromkeys(read)))


def streams_read(inputs: Iterable[Span]) -> tuple[int, ...]:
    """Layers of the target whose residual stream is read."""
    return tuple(sorted({layer for span in inputs if "residual" in span.states for layer in span.layers}))


def branch_outputs(plan: HandoffPlan, target: KVGeometry) -> tuple[Span, ...]:
    """Keys and values of the layers that a plan maps."""
    layers = plan.mapped_layers(target.layers)
    return tuple(Span(f"target.{kind}", layers.start, layers.stop) for kind in KINDS)


@dataclass(frozen=True)
class AdaptedMap:
    """A map and its branch.

    Attributes:
        target: the model that goes on.
        plan: what it computes natively.
        forms: of the map, executed without gradients.
        module: the branch.
        inputs: what the branch reads.
        outputs: what it adds to: keys, then values of the layers that the plan maps.
        unfrozen: the map's forms where their weights are trained too, which are executed in place of `forms`.
    """

    target: KVModel
    plan: HandoffPlan
    forms: FormMap
    module: ResidualModule
    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    unfrozen: UnfrozenForms | None = None

    def with_unfrozen(self) -> AdaptedMap:
        """The same, with the weights of the map among what is trained."""
        return self if self.unfrozen is not None else replace(self, unfrozen=UnfrozenForms(self.forms.forms))

    def parameters(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name."""
        named = dict(self.module.named_parameters())
        return named | ({} if self.unfrozen is None else dict(self.unfrozen.named_parameters()))

    def trained(self) -> tuple[Form, ...]:
        """The forms of the map as training leaves it, on the CPU, and the branch where it adds something.

        Where the map had a branch of its kind before, both are one now.
        """
        branch, forms = self.branch(), self.forms.forms if self.unfrozen is None else self.unfrozen.trained()
        added = [branch] if branch.expand.any() or branch.bias.any() else []
        forms = moved(forms, device="cpu")
        return *frozen_forms(forms), *join_branches([*branches_of(forms), *added])

    def branch(self) -> ResidualBranch:
        """The branch as a form of the map."""
        return self.module.branch(self.inputs, self.outputs, self.target.geometry)

    def native(self, readings: Readings, start: int, stop: int) -> ContentStates | None:
        """What the map may read of the target: its native head at positions `start … stop − 1`."""
        if self.plan.native_head is None:
            return None
        count = self.plan.native_head + 1
        positions = torch.arange(start, stop, device=self.target.device)
        return ContentStates(
            self.target.rotary.strip(readings.keys[:count, ..., start:stop, :], positions),
            readings.values[:count, ..., start:stop, :].float(),
            positions,
            {at: stream[:, start:stop].float() for at, stream in readings.residual.items()},
        )

    def mapped(self, readings: Readings, stop: int) -> ContentStates:
        """Content states of the mapped layers at positions `sinks … stop − 1`, with gradients into what is trained."""
        start, layers = self.plan.sinks, self.plan.mapped_layers(self.target.geometry.layers)
        source, native = readings.source.span(start, stop), self.native(readings, start, stop)
        if self.unfrozen is None:
            with torch.no_grad():
                exact = self.forms.apply(source, layers, native)
        else:
            exact = apply_forms(self.unfrozen.forms(), source, layers, native)
        rows = rows_of(self.inputs, source, native)
        keys, values = self._states(self.module(rows), len(layers))
        return replace(exact, keys=exact.keys + keys, values=exact.values + values)

    def _states(
        self, rows: Float[Tensor, "B T q"], layers: int
    ) -> tuple[Float[Tensor, "L B H T D"], Float[Tensor, "L B H T D"]]:
        geometry = self.target.geometry
        heads = rows.unflatten(-1, (2, layers, geometry.kv_heads, geometry.head_dim))
        keys, values = heads.permute(2, 3, 0, 4, 1, 5)
        return keys, values
