"""What every mapper of the command line has besides its own settings: the residual branch trained on its map."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any

RESIDUAL = "residual"


@cache
def with_residual(mapper: type[Any]) -> type[Any]:
    """The schema of `mapper` with the group `mapper.residual`; the mapper itself knows nothing of it."""
    from kvbridge.mappers.residual_config import ResidualConfig

    added = (RESIDUAL, ResidualConfig, field(default_factory=ResidualConfig))
    return make_dataclass(mapper.__name__, [added], bases=(mapper,), frozen=True, namespace={"__doc__": mapper.__doc__})


def separated(given: Any) -> tuple[Any, Any]:
    """The mapper and the settings of its branch, from an object of a schema that `with_residual` made."""
    (mapper,) = type(given).__bases__
    options = {each.name: getattr(given, each.name) for each in fields(mapper)}
    return mapper(**options), getattr(given, RESIDUAL)
