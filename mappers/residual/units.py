"""In what units a branch reads and makes its numbers: whitened inputs, outputs in units of the target's own spread.

Adam's rate means the same for every coordinate only where all have unit variance. Inputs are centred, divided by their
spread and, where directions are asked for, projected on the leading principal directions of their correlations, each
divided by its own spread too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, Moments
from kvbridge.calibration.products import missing_products
from kvbridge.errors import CalibrationError
from kvbridge.mappers.shared_basis import principal_outputs
from kvbridge.variables import Span

# A direction with a smaller share of one coordinate's variance carries rounding, not signal.
SMALLEST_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Units:
    """How rows become features `z = (x − mean) / spread · D`, and in what units outputs are made.

    Attributes:
        mean: of each input.
        spread: standard deviation of each input; 1 for a constant one.
        directions: `D`, by which features have unit variance; `None` takes every input for itself.
        output: standard deviation of each output.
    """

    mean: Float[Tensor, "p"]
    spread: Float[Tensor, "p"]
    directions: Float[Tensor, "p d"] | None
    output: Float[Tensor, "q"]

    @property
    def width(self) -> int:
        """Numbers of one row of features, `d`."""
        return len(self.spread) if self.directions is None else self.directions.shape[1]

    def features(self, rows: Float[Tensor, "*batch p"]) -> Float[Tensor, "*batch d"]:
        """Features of some rows."""
        scaled = (rows - self.mean) / self.spread
        return scaled if self.directions is None else scaled @ self.directions

    def on_inputs(self, weight: Float[Tensor, "d W"]) -> Float[Tensor, "p W"]:
        """The weights of the inputs as they are, from those of the features."""
        return (weight if self.directions is None else self.directions @ weight) / self.spread[:, None]

    def to(self, device: torch.device) -> Units:
        directions = None if self.directions is None else self.directions.to(device)
        return Units(self.mean.to(device), self.spread.to(device), directions, self.output.to(device))


def _spread(moments: Moments, names: Sequence[str]) -> Float[Tensor, "p"]:
    spread = (moments.squares(names) / moments.rows).sqrt()
    return torch.where(spread > 0, spread, torch.ones_like(spread))


def _correlation(moments: Moments, names: Sequence[str]) -> Float[Tensor, "p p"]:
    """Correlations of some variables; those between variables whose products were not gathered count as none."""
    widths = [len(moments.means([name])) for name in names]
    spreads = [_spread(moments, [name]) for name in names]
    out = torch.zeros(sum(widths), sum(widths), dtype=torch.float32)
    starts = torch.tensor([0, *widths]).cumsum(0).tolist()
    for a, row in enumerate(names):
        for b, column in enumerate(names[: a + 1]):
            if a != b and missing_products([(row, column)], moments.cross, moments.layers):
                continue
            block = moments.cross_products([row], [column]) / moments.rows
            scaled = (block / spreads[a][:, None] / spreads[b]).float()
            here, there = slice(starts[a], starts[a + 1]), slice(starts[b], starts[b + 1])
            out[here, there], out[there, here] = scaled, scaled.T
    return out


def _whitening(correlation: Float[Tensor, "p p"], count: int) -> Float[Tensor, "p d"]:
    """Leading directions, each divided by the spread of the inputs along it."""
    width = len(correlation)
    directions = principal_outputs(correlation, torch.eye(width), min(count, width))
    variance = (directions * (correlation @ directions)).sum(dim=0)
    kept = variance > SMALLEST_VARIANCE
    return directions[:, kept] / variance[kept].sqrt()


def units_of(
    moments: CalibrationMoments, inputs: Sequence[Span], outputs: Sequence[Span], directions: int | None
) -> Units:
    """Units from the moments of the fit split, first positions left out.

    Args:
        moments: of the map's calibration.
        inputs: what the branch reads.
        outputs: what it makes.
        directions: how many leading directions are read; `None` reads every input.

    Raises:
        CalibrationError: the moments lack a variable, or products that directions need.
    """
    fit = moments.select("fit", first=False)
    names = [str(span) for span in inputs]
    mean, spread = fit.means(names).float(), _spread(fit, names).float()
    found = None
    if directions is not None:
        features = names if moments.sketch is None else moments.sketch.features(names)
        missing = missing_products([(name, name) for name in features], fit.cross, fit.layers)
        if missing:
            raise CalibrationError(
                f"mapper.residual.directions={directions} needs the products of {missing[0][0]} with itself, which "
                "these moments lack; give mapper.residual.directions=null, or another mapper."
            )
        whitening = _whitening(_correlation(fit, features), directions)
        if moments.sketch is None:
            found = whitening
        else:
            plain = moments.sketch.unsketched(whitening / _spread(fit, features).float()[:, None])
            found = plain * spread[:, None]
    return Units(mean, spread, found, _spread(fit, [str(span) for span in outputs]).float())
