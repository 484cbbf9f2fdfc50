"""Measure what the target's attention makes of errors, on the first tokens of the text that moments are of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor

from kvbridge import compat
from kvbridge.attention import output_projections, queried_backbone
from kvbridge.calibration.attention import AttentionMetric
from kvbridge.calibration.blocks import SPLITS, BlockSet
from kvbridge.calibration.config import require_same
from kvbridge.calibration.request import Request
from kvbridge.calibration.sums import FIRST_POSITIONS
from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.forms import KINDS
from kvbridge.geometry import KVGeometry
from kvbridge.model import KVModel

# Of the fit split; moments of one head need no more.
READ_TOKENS = 16_384
# Evenly spread on a logarithmic scale: attention falls off with distance.
DISTANCES = (0, *(2**power for power in range(12)))


def metric_file(path: Path) -> Path:
    """Where the metric for the moments file `path` is kept until they are finished."""
    return path.with_name(f"{path.name}.attention")


def find_metric(request: Request, drawn: BlockSet, path: Path) -> AttentionMetric | None:
    """The metric for the moments file `path`, measured or as a killed run left it; `None` where none is asked for.

    Every shard measures it on the same blocks, so that all have the same one.

    Raises:
        CalibrationError: the file that a killed run left is damaged, or of other settings.
        UnsupportedModelError: the target's attention does not show what is needed.
    """
    if not request.attention:
        return None
    kept = metric_file(path)
    if not kept.exists():
        fit = [number for number in range(len(drawn)) if drawn.split[number] == SPLITS.index("fit")]
        read, size = fit[: max(1, READ_TOKENS // drawn.tokens.shape[1])], request.config.batch
        batches = [drawn.batch(read[at : at + size]) for at in range(0, len(read), size)]
        metric = measure_attention(request.pair.load("target"), batches)
        write_tensors(kept, metric.tensors(), {"identity": request.identity})
    try:
        file = TensorFile(kept)
        require_same(file.described("identity"), request.identity, kept)
        metric = AttentionMetric.stored(file)
    except (SafetensorError, ValueError) as error:
        raise damaged(kept, error) from error
    if metric is None:
        raise damaged(kept, "no metric")
    return metric


@dataclass(slots=True)
class _Second:
    """Second moments of each head's rows, over some batches."""

    rows: int = 0
    total: Tensor | float = 0.0
    square: Tensor | float = 0.0

    def add(self, states: Float[Tensor, "L B H T D"]) -> None:
        """Add a batch, without the first positions of its blocks."""
        rows = states[..., FIRST_POSITIONS:, :].float().transpose(1, 2).flatten(2, 3)
        self.rows += rows.shape[2]
        self.total = self.total + rows.sum(dim=2, dtype=torch.float64)
        self.square = self.square + (rows.mT @ rows).double()

    @property
    def mean_square(self) -> Float[Tensor, "L H D D"]:
        return torch.as_tensor(self.square) / self.rows

    @property
    def covariance(self) -> Float[Tensor, "L H D D"]:
        mean = torch.as_tensor(self.total) / self.rows
        return self.mean_square - mean[..., :, None] * mean[..., None, :]


def _of_unit(square: Float[Tensor, "L H D D"], covariance: Float[Tensor, "L H D D"]) -> Float[Tensor, "L H D D"]:
    """The same squares of each layer, so that what has these covariances varies by 1 in all heads together."""
    varies = (square * covariance).sum(dim=(1, 2, 3), keepdim=True)
    return (square / torch.where(varies > 0, varies, 1.0)).cpu()


def _projected(weight: Float[Tensor, "E o"], geometry: KVGeometry) -> Float[Tensor, "H D D"]:
    """Sum of `WᵀW` over the query heads of each group, for an output projection `W`."""
    heads = weight.detach().double().unflatten(1, (geometry.kv_heads, -1, geometry.head_dim))
    return torch.einsum("ehgd,ehgf->hdf", heads, heads)


def measure_attention(target: KVModel, batches: list[Int[Tensor, "B T"]]) -> AttentionMetric:
    """The metric of a target, from what its queries, keys and values are in some blocks.

    Raises:
        UnsupportedModelError: the target's attention does not show its queries, or has no known output projection.
    """
    geometry, rotary = target.geometry, target.rotary
    projections = output_projections(target.model)
    queried, seen = list[Tensor](), {name: _Second() for name in ("queries", *KINDS)}
    backbone = queried_backbone(target.model, queried.append)
    for ids in batches:
        cache = compat.empty_cache(target.model)
        with torch.no_grad():
            compat.run(backbone, ids.to(target.device), cache)
        content = target.content(cache)
        queries = rotary.strip(torch.stack(queried), content.positions)
        # The query heads of a group read one KV head and lie side by side: to it they are more rows of one query.
        seen["queries"].add(queries.unflatten(2, (geometry.kv_heads, -1)).transpose(2, 3).flatten(1, 2))
        for kind in KINDS:
            seen[kind].add(getattr(content, kind))
        queried.clear()
    distances = tuple(distance for distance in DISTANCES if distance < geometry.max_positions)
    keys = rotary.seen_from(seen["queries"].mean_square, distances)
    values = torch.stack([_projected(weight, geometry) for weight in projections])
    return AttentionMetric(_of_unit(keys, seen["keys"].covariance), _of_unit(values, seen["values"].covariance))
