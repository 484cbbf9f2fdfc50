"""How far source states lie from the text that a bridge was fitted on: leverage through a rank-limited factor.

The leverage of a row x under ridge is `xᵀ(C + λ)⁻¹x`, with x in units of its spread and C the correlations of the
calibration text: a squared Mahalanobis distance. C is kept as its R leading directions and one variance for all others.
Keys and values have a factor each, so that every mapper's moments hold what is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.artifact import CONFIG
from kvbridge.errors import ArtifactError, CacheError
from kvbridge.states import ContentStates

PREFIX = "novelty."
# λ on the correlation scale: directions that the calibration text never took are not infinitely far.
PENALTY = 1e-3


@dataclass(frozen=True, slots=True)
class Novelty:
    """Moments of a calibration's states, as far as a gate needs them; axis 0 is keys, values.

    Attributes:
        mean: of each coordinate of a source row (layers, heads, dims).
        spread: standard deviation of each coordinate; 1 where it never varied.
        directions: orthonormal leading directions of the correlations, in bf16.
        variances: of the rows along them.
        rest: mean variance along all other directions.
        target_spread: mean variance of a coordinate in each target layer.
        first_positions: positions at the beginning of a text that the moments leave out.
    """

    mean: Float[Tensor, "2 p"]
    spread: Float[Tensor, "2 p"]
    directions: Float[Tensor, "2 p R"]
    variances: Float[Tensor, "2 R"]
    rest: Float[Tensor, "2"]
    target_spread: Float[Tensor, "2 L_t"]
    first_positions: int

    def leverage(self, states: ContentStates) -> Float[Tensor, "B T"]:
        """Leverage of each token per coordinate: 1 on average over the text of the fit.

        Args:
            states: of all layers of the source.

        Raises:
            CacheError: the states are not of as many coordinates.
        """
        rows = torch.stack((states.keys, states.values)).float().permute(0, 2, 4, 1, 3, 5).flatten(3)
        width = self.mean.shape[1]
        if rows.shape[-1] != width:
            raise CacheError(
                f"source states have {rows.shape[-1]} keys per token, the bridge was fitted on {width}; "
                "give the cache of the bridge's own source model."
            )
        centred = (rows - self.mean[:, None, None]) / self.spread[:, None, None]
        directions = self.directions.float()[:, None]
        along = centred @ directions
        beside = (centred - along @ directions.mT).square().sum(dim=-1)
        distance = (along.square() / (self.variances[:, None, None] + PENALTY)).sum(dim=-1)
        distance += beside / (self.rest[:, None, None] + PENALTY)
        return distance.mean(dim=0) / width

    def score(self, states: ContentStates) -> float:
        """Mean leverage of a prompt's tokens, its first positions left out; 0 where there are no others."""
        kept = states.span(self.first_positions, states.tokens)
        return float(self.leverage(kept).mean()) if kept.tokens else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """By name, as a bridge stores them."""
        names = (each.name for each in fields(self) if each.name != "first_positions")
        return {PREFIX + name: getattr(self, name) for name in names}

    def options(self) -> dict[str, Any]:
        """What a bridge's config says beside the tensors."""
        return {"first_positions": self.first_positions}

    def to(self, device: torch.device | str) -> Novelty:
        """The same on another device."""
        moved = {name.removeprefix(PREFIX): tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


def read_novelty(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Novelty | None:
    """The novelty factor of a bridge, if it has one, checked against the geometry that the bridge names.

    Args:
        config: of the bridge, of the right structure.
        tensors: those of the factor, by name.
        folder: for messages.

    Raises:
        ArtifactError: a tensor is missing, left over or of another shape.
    """
    options = config.get("novelty")
    parts = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if options is None and not parts:
        return None
    needed = {each.name for each in fields(Novelty)} - {"first_positions"}
    if options is None or parts.keys() != needed or "first_positions" not in options:
        raise ArtifactError(f"{folder / CONFIG} and the tensors disagree about the novelty factor; it is damaged.")
    source, target = (config["pair"][role]["geometry"] for role in ("source", "target"))
    width, rank = source["layers"] * source["kv_heads"] * source["head_dim"], parts["directions"].shape[-1]
    shapes = {
        "mean": (2, width),
        "spread": (2, width),
        "directions": (2, width, rank),
        "variances": (2, rank),
        "rest": (2,),
        "target_spread": (2, target["layers"]),
    }
    for name, shape in shapes.items():
        if tuple(parts[name].shape) != shape:
            raise ArtifactError(
                f"{folder}: novelty.{name} has shape {tuple(parts[name].shape)}, expected {shape}; it is damaged."
            )
    positive = all(bool((parts[name] > 0).all()) for name in ("spread", "target_spread"))
    if not positive or bool((parts["variances"] < 0).any()) or bool((parts["rest"] < 0).any()):
        raise ArtifactError(f"{folder}: the novelty factor has a variance that cannot be; it is damaged.")
    return Novelty(**parts, **options)
