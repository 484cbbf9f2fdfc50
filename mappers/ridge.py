"""The published recipe: per-layer ridge from the k most predictive source layers (arXiv 2608.03893).

Keys of a target layer are regressed on the content keys of all heads of k source layers, values on their values.
Source layers are ranked per target layer by the R² of ordinary least squares on one source layer alone, averaged over
heads and over keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, MomentBlock, Moments
from kvbridge.calibration.moments import source_variable, target_variable
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.forms import KINDS, SlotAffine, input_slot
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap, own_kind_blocks
from kvbridge.mappers.regression import explained_squares, fitted_slots, head_r2, ridge_solve, slot_columns

SCALES = ("absolute", "correlation")
HEADS = ("all", "matched")
FIRST_POSITIONS = ("excluded", "included")


class _Sums(NamedTuple):
    """What one kind's maps are solved from."""

    gram: Float[Tensor, "p p"]
    cross: Float[Tensor, "p q"]
    mean_x: Float[Tensor, "p"]
    mean_y: Float[Tensor, "q"]


def rank_layers(moments: Moments, source_geometry: KVGeometry, target_geometry: KVGeometry) -> Float[Tensor, "L_t L_s"]:
    """R² of each target layer from each source layer alone, averaged over heads and over keys and values."""
    ranking = torch.zeros(target_geometry.layers, source_geometry.layers, dtype=torch.float64)
    width = source_geometry.kv_heads * source_geometry.head_dim
    for kind in KINDS:
        x, y = [source_variable(kind)], [target_variable(kind)]
        gram, cross, total = moments.gram(x), moments.cross_products(x, y), moments.squares(y)
        for layer in range(source_geometry.layers):
            columns = slice(layer * width, (layer + 1) * width)
            residual = total - explained_squares(gram[columns, columns], cross[columns])
            by_head = head_r2(residual, total, target_geometry.head_dim)
            ranking[:, layer] += by_head.reshape(target_geometry.layers, -1).mean(dim=1) / len(KINDS)
    return ranking


@dataclass(frozen=True)
class Ridge:
    """Ridge regression, keys from keys and values from values.

    Attributes:
        k: source layers per target layer; every layer where the source has fewer.
        penalty: λ.
        scale: what λ is measured on: `absolute` (on `XᵀX`) or `correlation` (on the equilibrated Gram, unit diagonal).
        heads: inputs of a target head: `all` heads of the k layers, or the `matched` head of each.
        first_positions: whether the first four positions of each block are `excluded` from or `included` in the fit.
    """

    name: ClassVar[str] = "ridge"

    k: int = 8
    penalty: float = 0.01
    scale: str = "absolute"
    heads: str = "all"
    first_positions: str = "excluded"

    def __post_init__(self) -> None:
        for option, given, allowed in (
            ("scale", self.scale, SCALES),
            ("heads", self.heads, HEADS),
            ("first_positions", self.first_positions, FIRST_POSITIONS),
        ):
            if given not in allowed:
                raise UsageError(f"mapper.{option}={given}: expected one of {', '.join(allowed)}.")
        if self.k < 1 or not 0 <= self.penalty < math.inf:
            raise UsageError(f"mapper.k={self.k}, mapper.penalty={self.penalty:g}: expected k ≥ 1 and λ ≥ 0.")

    def blocks(self) -> frozenset[MomentBlock]:
        return own_kind_blocks()

    def map_flops(self, source: KVGeometry, target: KVGeometry, layers: range) -> int:
        """Operations of keys and values for one token and the target `layers`."""
        return 2 * len(KINDS) * len(layers) * target.kv_heads * self._features(source) * target.head_dim

    def branch_width(self, source: KVGeometry, target: KVGeometry) -> int:
        return len(KINDS) * source.layers * source.kv_heads * source.head_dim

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Rank source layers, then solve every target layer and head.

        Raises:
            CalibrationError: too few rows, or singular normal equations.
        """
        fit = moments.select("fit", first=self.first_positions == "included")
        features = self._features(source)
        if fit.rows <= features:
            raise CalibrationError(
                f"{fit.rows} calibration rows for {features} features per map: a ridge fit needs more rows than "
                "features (ten times as many to be trusted). Raise calibration.tokens or lower mapper.k."
            )
        ranked = rank_layers(fit, source, target).topk(min(self.k, source.layers), dim=1).indices
        # Mixing layers is order-free; ascending order keeps the slot table readable and the gather sequential.
        chosen = ranked.sort(dim=1).values
        forms = tuple(self._fit_kind(kind, fit, chosen, source, target) for kind in KINDS)
        return fitted_slots(forms, chosen.tolist(), moments, source, fit.rows / features)

    def _features(self, source: KVGeometry) -> int:
        """Numbers that the map of one target head reads."""
        return min(self.k, source.layers) * source.head_dim * (source.kv_heads if self.heads == "all" else 1)

    def _slots(self, kind: str, layers: list[int], head: int, source: KVGeometry, target: KVGeometry) -> list[int]:
        """Input slots of one target head."""
        matched = head * source.kv_heads // target.kv_heads
        heads = range(source.kv_heads) if self.heads == "all" else [matched]
        return [input_slot(kind, layer, at, source.layers, source.kv_heads) for layer in layers for at in heads]

    def _fit_kind(
        self, kind: str, fit: Moments, chosen: Int[Tensor, "L_t k"], source: KVGeometry, target: KVGeometry
    ) -> SlotAffine:
        x, y = [source_variable(kind)], [target_variable(kind)]
        sums = _Sums(fit.gram(x), fit.cross_products(x, y), fit.means(x), fit.means(y))
        made = [
            self._fit_layer(kind, sums, layer, chosen[layer].tolist(), source, target) for layer in range(target.layers)
        ]
        slots, weights, biases = (torch.stack(parts) for parts in zip(*made, strict=True))
        return SlotAffine(kind, slots, weights, biases)

    def _fit_layer(
        self, kind: str, sums: _Sums, layer: int, layers: list[int], source: KVGeometry, target: KVGeometry
    ) -> tuple[Int[Tensor, "H_t S"], Float[Tensor, "H_t S D_s D_t"], Float[Tensor, "H_t D_t"]]:
        slots = torch.tensor([self._slots(kind, layers, head, source, target) for head in range(target.kv_heads)])
        weights, biases = [], []
        # Heads that read the same slots share one factorisation.
        together = range(1) if self.heads == "all" else range(target.kv_heads)
        for first in together:
            heads = range(target.kv_heads) if self.heads == "all" else range(first, first + 1)
            start = (layer * target.kv_heads + heads.start) * target.head_dim
            outputs = slice(start, start + len(heads) * target.head_dim)
            columns = slot_columns(slots[first], kind, source)
            gram, cross = sums.gram[columns][:, columns], sums.cross[columns, outputs]
            weight = ridge_solve(gram, cross, self.penalty, self.scale)
            bias = sums.mean_y[outputs] - sums.mean_x[columns] @ weight
            shaped = weight.reshape(slots.shape[1], source.head_dim, len(heads), target.head_dim)
            weights.append(shaped.permute(2, 0, 1, 3))
            biases.append(bias.reshape(len(heads), target.head_dim))
        return slots.int(), torch.cat(weights).float(), torch.cat(biases).float()
