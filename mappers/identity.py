"""The map that changes nothing, for pairs of equal geometry: the raw source cache as an arm, and a check in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbridge.calibration import CalibrationMoments, MomentBlock
from kvbridge.errors import UsageError
from kvbridge.forms import KINDS, SlotAffine, input_slot
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap


def same_shape(source: KVGeometry, target: KVGeometry) -> bool:
    """Whether a source cache has the target's layers, heads and widths."""
    return all(getattr(source, name) == getattr(target, name) for name in ("layers", "kv_heads", "head_dim"))


def identity_form(kind: str, geometry: KVGeometry) -> SlotAffine:
    """Each head of each layer copies the source head of the same place."""
    slots = torch.tensor(
        [
            [[input_slot(kind, layer, head, geometry.layers, geometry.kv_heads)] for head in range(geometry.kv_heads)]
            for layer in range(geometry.layers)
        ],
        dtype=torch.int32,
    )
    weight = torch.eye(geometry.head_dim).expand(*slots.shape, -1, -1).contiguous()
    return SlotAffine(kind, slots, weight, torch.zeros(*slots.shape[:2], geometry.head_dim))


@dataclass(frozen=True)
class Identity:
    """Copies every head; reads no moments."""

    name: ClassVar[str] = "identity"

    def blocks(self) -> frozenset[MomentBlock]:
        return frozenset()

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Build the forms.

        Raises:
            UsageError: source and target differ in layers, heads or head width.
        """
        if not same_shape(source, target):
            raise UsageError(
                f"mapper=identity needs equal shapes; the source is {source.describe()}, "
                f"the target {target.describe()}."
            )
        selected = [[layer] for layer in range(target.layers)]
        forms = tuple(identity_form(kind, target) for kind in KINDS)
        return FittedMap(forms, dict.fromkeys(KINDS, selected))
