"""Fewer inputs for large pairs: each source layer's keys and values by their leading principal directions.

For a layer with keys k and values v, `z = [k, v] P` with `P = D⁻¹ V`: D the spread of each coordinate, V the leading
eigenvectors of their correlations. A map that is fitted on z is a map of the layer's keys and values, `P W`, and a
ridge penalty on z is one on the correlation scale of k and v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.moments import Moments
from kvbridge.calibration.products import SKETCH, MomentBlock, canonical
from kvbridge.errors import UsageError
from kvbridge.variables import Span

SKETCHED = ("source.keys", "source.values")


@dataclass(frozen=True, slots=True)
class Sketch:
    """What stands for the source's keys and values.

    Attributes:
        directions: per source layer `P`, from its keys (all heads), then its values, to `S` numbers.
    """

    directions: Float[Tensor, "L_s p S"]

    @property
    def width(self) -> int:
        """Numbers per token, all layers together."""
        return self.directions.shape[0] * self.directions.shape[2]

    def rows(self, read: Mapping[str, Tensor]) -> Float[Tensor, "B T q"]:
        """Rows of `source.sketch` from those of the source's keys and values `[B, T, L_s · p / 2]`."""
        depth = self.directions.shape[0]
        apart = [read[name].float().unflatten(-1, (depth, -1)) for name in SKETCHED]
        return torch.einsum("btlp,lps->btls", torch.cat(apart, dim=-1), self.directions.float()).flatten(2)

    def features(self, inputs: Iterable[str | Span]) -> list[str]:
        """The variables that stand for the inputs of a map: the sketch, and all that are not of the source.

        Raises:
            UsageError: the inputs do not begin with the source's keys and values of all layers.
        """
        names = [str(name) for name in inputs]
        whole = [{name, f"{name}[0:{self.directions.shape[0]}]"} for name in SKETCHED]
        if len(names) < 2 or any(name not in allowed for name, allowed in zip(names, whole, strict=False)):
            raise UsageError(
                f"a sketch stands for {' and '.join(SKETCHED)} of all layers, which must come first; given: "
                f"{', '.join(names)}."
            )
        return [SKETCH, *names[2:]]

    def unsketched(self, weight: Float[Tensor, "s R"]) -> Float[Tensor, "p R"]:
        """The weights of a map's inputs from those of the features that stand for them, in the same dtype."""
        depth, both, kept = self.directions.shape
        shared = weight[: self.width].unflatten(0, (depth, kept))
        by_layer = self.directions.to(weight.dtype) @ shared
        keys, values = by_layer[:, : both // 2].flatten(0, 1), by_layer[:, both // 2 :].flatten(0, 1)
        return torch.cat((keys, values, weight[self.width :]))


def sketched(blocks: Iterable[MomentBlock]) -> frozenset[MomentBlock]:
    """The blocks of a map that reads a sketch in place of the source's keys and values.

    Raises:
        UsageError: a block reads some layers of them only.
    """

    def replaced(name: str) -> str:
        if name in SKETCHED:
            return SKETCH
        if name.startswith("source."):
            raise UsageError(f"calibration.sketch stands for all source layers, and this mapper reads {name}.")
        return name

    pairs = [(replaced(a), replaced(b)) for a, b in blocks]
    return frozenset(canonical(a, b) for a, b in pairs)


def principal_directions(moments: Moments, layers: int, kept: int) -> Float[Tensor, "L_s p S"]:
    """Leading directions of every layer, from moments that hold its keys' and values' products."""
    found = []
    for layer in range(layers):
        gram = moments.gram(Span(name, layer, layer + 1) for name in SKETCHED)
        spread = gram.diagonal().sqrt()
        inverse = torch.where(spread > 0, 1 / spread, torch.zeros_like(spread))
        _, vectors = torch.linalg.eigh(gram * inverse[:, None] * inverse)
        found.append(vectors[:, -kept:].flip(1) * inverse[:, None] * moments.rows**0.5)
    return torch.stack(found)
