"""Least squares on moments: solving, explained variance, held-out R²."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, Moments
from kvbridge.calibration.moments import source_variable, target_variable
from kvbridge.errors import CalibrationError
from kvbridge.forms import KINDS, SlotAffine
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap

# Directions whose variance is below this share of the largest carry rounding, not signal.
RANK_CUTOFF = 1e-10


def _equilibrated(
    gram: Float[Tensor, "p p"], cross: Float[Tensor, "p q"]
) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p q"], Float[Tensor, "p"]]:
    """Gram matrix with unit diagonal, cross products to match, and the spread of each input (1 for a constant one)."""
    spread = gram.diagonal().sqrt()
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return gram / spread[:, None] / spread[None, :], cross / spread[:, None], spread


def ridge_solve(
    gram: Float[Tensor, "p p"], cross: Float[Tensor, "p q"], penalty: float, scale: str
) -> Float[Tensor, "p q"]:
    """Ridge weights from centred moments, in fp64.

    Args:
        gram: `XᵀX` of centred inputs.
        cross: `XᵀY`.
        penalty: λ.
        scale: `absolute` solves `(XᵀX + λ I) W = XᵀY`; `correlation` equilibrates `XᵀX` to unit diagonal first and
            adds λ there, so that λ means the same for every width and row count.

    Raises:
        CalibrationError: the system is singular.
    """
    if scale == "correlation":
        system, right, spread = _equilibrated(gram, cross)
    else:
        system, right, spread = gram, cross, None
    solved = solve_factored(factor_gram(system, torch.full((len(system),), penalty), scale), right)
    return solved if spread is None else solved / spread[:, None]


def factor_gram(gram: Float[Tensor, "p p"], penalty: Float[Tensor, "p"], scale: str) -> Float[Tensor, "p p"]:
    """Cholesky factor of a Gram matrix with a penalty for each input on its diagonal.

    Args:
        gram: `XᵀX`, on the scale that the penalty is measured on.
        penalty: λ of each input.
        scale: name of that scale.

    Raises:
        CalibrationError: the system is singular.
    """
    # Transposed it lies column by column, as LAPACK wants it, and the factor takes the system's own memory.
    factor, failed = gram.clone(memory_format=torch.contiguous_format).T, torch.empty((), dtype=torch.int32)
    factor.diagonal().add_(penalty)
    torch.linalg.cholesky_ex(factor, out=(factor, failed))
    if int(failed):
        raise CalibrationError(
            f"the normal equations of {gram.shape[0]} features are singular at λ={float(penalty.min()):g} ({scale}); "
            "give more calibration tokens or a larger λ."
        )
    return factor


def solve_factored(factor: Float[Tensor, "p p"], right: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
    """`(L Lᵀ)⁻¹ right`, without a copy of the factor `L`."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.T, half, upper=True)


def explained_squares(gram: Float[Tensor, "p p"], cross: Float[Tensor, "p q"]) -> Float[Tensor, "q"]:
    """Sum of squares of each output that ordinary least squares on the inputs explains, whatever their rank."""
    # Equilibrated, so that neither the cut nor rounding depends on the inputs' units.
    system, right, _ = _equilibrated(gram, cross)
    variances, directions = torch.linalg.eigh(system)
    kept = variances > RANK_CUTOFF * variances[-1].clamp_min(torch.finfo(torch.float64).tiny)
    projected = directions[:, kept].T @ right
    return (projected.square() / variances[kept, None]).sum(dim=0)


def head_r2(residual: Float[Tensor, "q"], total: Float[Tensor, "q"], head_dim: int) -> Float[Tensor, "H"]:
    """R² of each head of width `head_dim`: one minus its residual over its total sum of squares."""
    residual, total = residual.reshape(-1, head_dim).sum(dim=1), total.reshape(-1, head_dim).sum(dim=1)
    return 1 - residual / total.clamp_min(torch.finfo(torch.float64).tiny)


def slot_columns(slots: Int[Tensor, "S"], kind: str, geometry: KVGeometry) -> Int[Tensor, "p"]:
    """Columns of one kind's moments `[L·H·D]` that a list of input slots of that kind covers."""
    first = KINDS.index(kind) * geometry.layers * geometry.kv_heads
    offsets = torch.arange(geometry.head_dim)
    return ((slots.long() - first)[:, None] * geometry.head_dim + offsets).flatten()


def held_out_r2(form: SlotAffine, moments: Moments, source_geometry: KVGeometry) -> list[list[float]]:
    """R² of each target layer and head on moments that the fit did not see.

    From `‖y − xW − b‖² = S_yy − 2⟨W, S_xy⟩ + ⟨W, S_xx W⟩ + n‖ȳ − x̄W − b‖²`, the sums centred at their own means.
    """
    x, y = [source_variable(form.kind)], [target_variable(form.kind)]
    gram, cross = moments.gram(x), moments.cross_products(x, y)
    mean_x, mean_y, square = moments.means(x), moments.means(y), moments.squares(y)
    layers, heads, _, _, width = form.weight.shape
    found = torch.empty(layers, heads, dtype=torch.float64)
    for layer in range(layers):
        for head in range(heads):
            columns = slot_columns(form.slots[layer, head], form.kind, source_geometry)
            outputs = slice((layer * heads + head) * width, (layer * heads + head + 1) * width)
            weight = form.weight[layer, head].flatten(0, 1).double()
            offset = mean_y[outputs] - mean_x[columns] @ weight - form.bias[layer, head].double()
            quadratic = (weight * (gram[columns][:, columns] @ weight)).sum(dim=0)
            residual = (
                square[outputs]
                - 2 * (weight * cross[columns, outputs]).sum(dim=0)
                + quadratic
                + moments.rows * offset.square()
            )
            found[layer, head] = head_r2(residual, square[outputs], width)[0]
    return found.tolist()


def fitted_slots(
    forms: tuple[SlotAffine, ...],
    selected_layers: list[list[int]],
    moments: CalibrationMoments,
    source: KVGeometry,
    rows_per_feature: float | None = None,
) -> FittedMap:
    """Forms of keys and values, both from the same source layers, with their R² on the held-out split."""
    held_out = moments.sets["held_out", "rest"]
    r2 = {form.kind: held_out_r2(form, held_out, source) for form in forms} if held_out.rows else {}
    return FittedMap(forms, dict.fromkeys(KINDS, selected_layers), r2, rows_per_feature)
