"""Fitting methods. Each is one file with one frozen dataclass; exporting it here is all that registers it."""

from typing import Any

from kvbridge.mappers.base import FittedMap, Mapper
from kvbridge.mappers.identity import Identity
from kvbridge.mappers.joint import Joint
from kvbridge.mappers.random import Random
from kvbridge.mappers.ridge import Ridge
from kvbridge.mappers.shared_basis import ReducedRank

__all__ = ["FittedMap", "Identity", "Joint", "Mapper", "Random", "ReducedRank", "Ridge", "available"]


def available() -> dict[str, type[Any]]:
    """Every exported mapper by its configuration name."""
    exported = (globals()[name] for name in __all__ if name not in ("FittedMap", "Mapper", "available"))
    return {mapper.name: mapper for mapper in exported}
