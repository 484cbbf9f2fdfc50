"""One map made of two executable forms, applied to live states."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.bridge import Bridge
from kvbridge.errors import CacheError
from kvbridge.forms import Form
from kvbridge.kernels.reference import input_slots, slot_affine
from kvbridge.states import ContentStates


@dataclass(frozen=True, slots=True)
class FormMap:
    """The map of a bridge: one form makes the target's keys, one its values.

    Attributes:
        keys: form of the keys.
        values: form of the values.
    """

    keys: Form
    values: Form

    @classmethod
    def of(cls, bridge: Bridge) -> FormMap:
        """The map of a bridge."""
        return cls(bridge.keys, bridge.values)

    def apply(self, states: ContentStates, layers: range) -> ContentStates:
        """Target content states of the target `layers`, at the positions of `states`.

        Raises:
            CacheError: the forms read slots that the states do not have.
        """
        slots = input_slots(states)
        for form in (self.keys, self.values):
            needed = int(form.slots.max()) + 1
            if needed > slots.shape[0] or form.weight.shape[3] != slots.shape[-1]:
                raise CacheError(
                    f"the map reads {needed} input slots of width {form.weight.shape[3]}; the source states have "
                    f"{slots.shape[0]} of width {slots.shape[-1]}. The bridge belongs to another source."
                )
        return ContentStates(
            slot_affine(self.keys, slots, layers), slot_affine(self.values, slots, layers), states.positions
        )

    def flops_per_token(self, layers: range) -> int:
        """Operations that mapping one token into the target `layers` takes."""
        return self.keys.flops_per_token(layers) + self.values.flops_per_token(layers)
