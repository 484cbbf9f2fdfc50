"""What every mapper of the command line has besides its own settings: the residual branch trained on its map."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any

RESIDUAL = "residual"
SUFFIX = "WithResidual"


@cache
def with_residual(mapper: type[Any]) -> type[Any]:
    """The schema of `mapper` with the group `mapper.residual`; the mapper itself knows nothing of it."""
    from kvbridge.mappers.residual_config import ResidualConfig

    added = (RESIDUAL, ResidualConfig, field(default_factory=ResidualConfig))
    named = {"__doc__": mapper.__doc__, "__module__": __name__}
    return make_dataclass(mapper.__name__ + SUFFIX, [added], bases=(mapper,), frozen=True, namespace=named)


def __getattr__(name: str) -> Any:
    """The schema called `name`, which settings that travel to another process are known by there."""
    from kvbridge.mappers import available

    for mapper in available().values():
        if name == mapper.__name__ + SUFFIX:
            return with_residual(mapper)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def separated(given: Any) -> tuple[Any, Any]:
    """The mapper and the settings of its branch, from an object of a schema that `with_residual` made."""
    (mapper,) = type(given).__bases__
    options = {each.name: getattr(given, each.name) for each in fields(mapper)}
    return mapper(**options), getattr(given, RESIDUAL)
