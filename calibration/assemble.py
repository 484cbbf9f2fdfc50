"""Vectors and products of wanted variables, put together from stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.calibration.products import Extent, MomentBlock, tiles
from kvbridge.errors import CalibrationError


def missing_sentence(a: str, b: str) -> str:
    return f"these moments hold no products of {a} and {b}, which this mapper reads; calibrate with it."


def vector(stored: Mapping[str, Tensor], names: list[str], layers: Mapping[str, int]) -> Float[Tensor, "p"]:
    """Numbers per coordinate of some variables, one after the other.

    Args:
        stored: numbers by variable.
        names: of the wanted variables.
        layers: how many layers each variable has.

    Raises:
        CalibrationError: nothing is stored of a variable.
    """
    known = {Extent.of(name, layers): value for name, value in stored.items()}
    parts = []
    for name in names:
        whole = Extent.of(name, layers)
        for piece in [whole] if any(extent.covers(whole) for extent in known) else whole.cut(known):
            held = next((extent for extent in known if extent.covers(piece)), None)
            if held is None:
                raise CalibrationError(f"these moments hold nothing of {name}; calibrate with this mapper.")
            parts.append(known[held][held.columns(piece, len(known[held]))])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fill_product(
    out: Float[Tensor, "p q"], wanted: MomentBlock, stored: Mapping[MomentBlock, Any], layers: Mapping[str, int]
) -> None:
    """Write the product of two variables.

    Args:
        out: where it goes.
        wanted: the two variables.
        stored: products by pair of variables.
        layers: how many layers each variable has.

    Raises:
        CalibrationError: a part of it is not stored.
    """
    rows, columns = (Extent.of(name, layers) for name in wanted)
    for tile in tiles(wanted, stored, layers):
        if tile is None:
            raise CalibrationError(missing_sentence(*wanted))
        held = stored[tile.block]
        first, second = (Extent.of(name, layers) for name in tile.block)
        if tile.swapped:
            held, first, second = held.T, second, first
        piece = held[first.columns(tile.first, held.shape[0]), second.columns(tile.second, held.shape[1])]
        out[rows.columns(tile.first, out.shape[0]), columns.columns(tile.second, out.shape[1])] = piece
