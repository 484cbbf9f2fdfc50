"""One map made of executable forms, applied to live states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.bridge import Bridge
from kvbridge.errors import CacheError
from kvbridge.forms import KINDS, Form, flops_per_token, frozen_forms, needed_native_head, require_distinct
from kvbridge.kernels.capability import product_dtype, runs_triton
from kvbridge.kernels.packed import PackedMap, made_shape, pack
from kvbridge.kernels.writing import Source, Writing
from kvbridge.plan import HandoffPlan
from kvbridge.rotary import RotaryCodec
from kvbridge.states import ContentStates

if TYPE_CHECKING:
    from kvbridge.kernels.launching import LaunchedMap


@dataclass(frozen=True, slots=True)
class FormMap:
    """A map as its forms: each makes other layers or another kind of the target's states, and branches add to them.

    Attributes:
        forms: in any order; what two of them share of a basis is computed once.

    Raises:
        CacheError: two forms make the same layer, or a branch adds to one that none makes.
    """

    forms: tuple[Form, ...]
    _packed: dict[torch.dtype, PackedMap] = field(default_factory=dict, init=False, repr=False, compare=False)
    _launched: dict[torch.device, LaunchedMap] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def apply(self, source: Source, layers: range, native: ContentStates | None = None) -> ContentStates:
        """Target content states of the target `layers`, at the positions of `source`, in fp32 throughout.

        Args:
            source: states of all layers of the source.
            layers: the target layers wanted.
            native: what the target has computed itself at the same positions.

        Returns:
            The states, with the residual stream at the input of layer `layers.stop` where a form makes it.

        Raises:
            CacheError: the forms read what the states do not have, or make no states of some layer.
        """
        heads, width = made_shape(self.forms)
        first = source.keys[0]
        made = first.new_empty((2, len(layers), len(first), heads, source.tokens, width), dtype=torch.float32)
        writing = self._writing(source, layers, made, None, native)
        for layer in layers:
            writing.write(layer)
        return ContentStates(made[0], made[1], source.positions, writing.residual())

    def write(
        self,
        source: Source,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec,
        native: ContentStates | None = None,
    ) -> dict[int, Float[Tensor, "B T E"]]:
        """Map into the target's cache, as `WritingMap.write` says, multiplying in what `product_dtype` says.

        Where `runs_triton` says so, by the Triton kernels, if these can read and write the states as they lie; by the
        operators in plain torch otherwise.
        """
        if runs_triton(destination.device):
            launched = self.launched(destination.device)
            if launched.suits(source, destination, rotary, native):
                self._require_room(source, layers, destination)
                return launched.write(source, layers, destination, rotary, native)
        writing = self._writing(source, layers, destination, rotary, native)
        for layer in layers:
            writing.write(layer)
        writing.require_finite()
        return writing.residual()

    def write_layers(
        self,
        source: Source,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec,
        native: ContentStates | None = None,
    ) -> Iterator[int]:
        """The same layer by layer: the number of each target layer once its keys and values are there.

        On every device by the operators in plain torch: the Triton kernels make all layers in one launch.
        """
        writing = self._writing(source, layers, destination, rotary, native)
        for layer in layers:
            writing.write(layer)
            writing.require_finite()
            yield layer

    def _writing(
        self,
        source: Source,
        layers: range,
        destination: Float[Tensor, "2 L B H T D"],
        rotary: RotaryCodec | None,
        native: ContentStates | None,
    ) -> Writing:
        self._require_room(source, layers, destination)
        packed = self.packed(product_dtype(destination.dtype, destination.device))
        return Writing(packed, source, layers, destination, rotary, native)

    def _require_room(self, source: Source, layers: range, destination: Float[Tensor, "2 L B H T D"]) -> None:
        self._require_layers(layers)
        heads, width = made_shape(self.forms)
        made = (2, len(layers), len(source.keys[0]), heads, source.tokens, width)
        if destination.shape != made:
            raise CacheError(
                f"the map makes states of shape {made} for layers {layers.start} … {layers.stop - 1}, and the target's "
                f"cache has room for {tuple(destination.shape)}. The bridge belongs to another target."
            )

    def packed(self, dtype: torch.dtype) -> PackedMap:
        """The map ready for products in a dtype; made once."""
        if dtype not in self._packed:
            self._packed[dtype] = pack(self.forms, dtype)
        return self._packed[dtype]

    def launched(self, device: torch.device) -> LaunchedMap:
        """The map for the Triton kernels on a device; made once."""
        from kvbridge.kernels.launching import LaunchedMap

        if device not in self._launched:
            self._launched[device] = LaunchedMap(self.forms, device)
        return self._launched[device]

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
