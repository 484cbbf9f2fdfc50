"""A control: random weights whose outputs have the target's own means and variances.

A map is only worth something if it beats this one: each coordinate has the right first two moments and carries nothing
of what the target would have computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbridge.calibration import CalibrationMoments, MomentBlock, Moments
from kvbridge.calibration.moments import source_variable, target_variable
from kvbridge.errors import UsageError
from kvbridge.forms import KINDS, SlotAffine, input_slot
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap, own_kind_blocks
from kvbridge.mappers.regression import fitted_slots, slot_columns


@dataclass(frozen=True)
class Random:
    """Every target head reads all heads of the source layer at its relative depth, through random weights.

    Attributes:
        seed: of the weights.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"mapper.seed={self.seed}: expected 0 or more.")

    def blocks(self) -> frozenset[MomentBlock]:
        return own_kind_blocks()

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Draw the weights and scale them to the target's spread."""
        fit = moments.select("fit", first=False)
        chosen = [layer * source.layers // target.layers for layer in range(target.layers)]
        generator = torch.Generator().manual_seed(self.seed)
        forms = tuple(self._form(kind, fit, chosen, source, target, generator) for kind in KINDS)
        return fitted_slots(forms, [[layer] for layer in chosen], moments, source)

    def _form(
        self,
        kind: str,
        fit: Moments,
        chosen: list[int],
        source: KVGeometry,
        target: KVGeometry,
        generator: torch.Generator,
    ) -> SlotAffine:
        heads = range(source.kv_heads)
        slots = torch.tensor(
            [[[input_slot(kind, at, head, source.layers, source.kv_heads) for head in heads]] for at in chosen]
        ).expand(-1, target.kv_heads, -1)
        weight = torch.randn(*slots.shape, source.head_dim, target.head_dim, generator=generator, dtype=torch.float64)
        bias = torch.zeros(target.layers, target.kv_heads, target.head_dim, dtype=torch.float64)
        x, y = [source_variable(kind)], [target_variable(kind)]
        spread, mean = (part.reshape(bias.shape) for part in (fit.squares(y), fit.means(y)))
        products, mean_x = fit.gram(x), fit.means(x)
        for layer, layer_slots in enumerate(slots[:, 0]):
            columns = slot_columns(layer_slots, kind, source)
            gram = products[columns][:, columns]
            for head in range(target.kv_heads):
                flat = weight[layer, head].flatten(0, 1)
                made = (flat * (gram @ flat)).sum(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
                flat *= (spread[layer, head] / made).sqrt()
                bias[layer, head] = mean[layer, head] - mean_x[columns] @ flat
        return SlotAffine(kind, slots.int().contiguous(), weight.float(), bias.float())
