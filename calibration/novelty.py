"""The novelty factor of a bridge, from the moments that its maps are fitted on."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.archive import CalibrationMoments
from kvbridge.calibration.moments import Moments, source_variable, target_variable
from kvbridge.calibration.products import missing_products
from kvbridge.calibration.sums import FIRST_POSITIONS
from kvbridge.forms import KINDS
from kvbridge.geometry import KVGeometry
from kvbridge.novelty import Novelty

# The largest factor, in bytes, and the most directions of each kind.
LARGEST, RANK = 5_000_000, 256
OVERSAMPLED, ITERATIONS = 16, 4


def leading_directions(
    correlation: Float[Tensor, "p p"], rank: int, seed: int = 0
) -> tuple[Float[Tensor, "p R"], Float[Tensor, "R"]]:
    """Leading eigenvectors and eigenvalues, the largest first, by subspace iteration (Halko, Martinsson, Tropp 2011).

    Args:
        correlation: symmetric, positive semi-definite.
        rank: `R`.
        seed: of the directions that the iteration starts from.
    """
    width = min(rank + OVERSAMPLED, len(correlation))
    start = torch.randn(len(correlation), width, generator=torch.Generator().manual_seed(seed), dtype=correlation.dtype)
    for _ in range(ITERATIONS):
        start = correlation @ torch.linalg.qr(start).Q
    basis = torch.linalg.qr(start).Q
    values, vectors = torch.linalg.eigh((basis.T @ (correlation @ basis)).double())
    kept = vectors.flip(1)[:, :rank].to(basis.dtype)
    return basis @ kept, values.flip(0)[:rank].clamp_min(0).to(basis.dtype)


def affordable_rank(width: int) -> int:
    """Directions that fit into the largest factor, and fewer than there are coordinates."""
    exact = 2 * 2 * width * torch.float32.itemsize
    return max(1, min(RANK, width // 2, (LARGEST - exact) // (2 * width * torch.bfloat16.itemsize)))


def fit_novelty(moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> Novelty | None:
    """The factor of moments that hold the source's keys' and values' own products; `None` for others.

    Args:
        moments: of a calibration; of the fit split all but the first positions count.
        source: geometry of the source.
        target: geometry of the target.
    """
    fit = moments.sets["fit", "rest"]
    own = [(source_variable(kind), source_variable(kind)) for kind in KINDS]
    if not fit.rows or next(iter(missing_products(own, fit.cross, fit.layers)), None):
        return None
    parts = [_factor(fit, kind) for kind in KINDS]
    mean, spread, directions, variances, rest = (torch.stack(column) for column in zip(*parts, strict=True))
    made = [fit.squares([target_variable(kind)]).unflatten(0, (target.layers, -1)).mean(dim=1) for kind in KINDS]
    target_spread = (torch.stack(made) / fit.rows).float()
    return Novelty(
        mean,
        spread,
        directions.bfloat16(),
        variances,
        rest,
        torch.where(target_spread > 0, target_spread, 1.0),
        FIRST_POSITIONS,
    )


def _factor(
    fit: Moments, kind: str
) -> tuple[Float[Tensor, "p"], Float[Tensor, "p"], Float[Tensor, "p R"], Float[Tensor, "R"], Float[Tensor, ""]]:
    """Mean, spread, directions, variances and the rest's variance of one kind."""
    name = source_variable(kind)
    spread = (fit.squares([name]) / fit.rows).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    correlation = (fit.gram([name]) / fit.rows / spread[:, None] / spread).float()
    rank = affordable_rank(len(spread))
    directions, variances = leading_directions(correlation, rank)
    rest = (correlation.diagonal().sum() - variances.sum()).clamp_min(0) / (len(spread) - rank)
    return fit.means([name]).float(), spread.float(), directions, variances, rest
