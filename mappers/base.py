"""What a fitting method is, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from kvbridge.branch import ACTIVATIONS
from kvbridge.calibration import CalibrationMoments, MomentBlock
from kvbridge.calibration.moments import source_variable, target_variable
from kvbridge.calibration.sizes import FitShape
from kvbridge.forms import KINDS, Form
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.residual_config import ResidualConfig


def own_kind_blocks() -> frozenset[MomentBlock]:
    """What a map reads that makes keys from keys and values from values."""
    return frozenset(
        pair
        for kind in KINDS
        for pair in ((source_variable(kind), source_variable(kind)), (source_variable(kind), target_variable(kind)))
    )


@dataclass(frozen=True, slots=True)
class FittedMap:
    """What fitting leaves: executable forms and the evidence for them.

    Attributes:
        forms: which make the target's content keys and values.
        selected_layers: per kind, the source layers that each target layer reads.
        r2: per kind, held-out R² of each target layer and head; a row without heads for a layer that no form makes;
            empty without a held-out split.
        rows_per_feature: fit rows for every input of one map.
        penalties: per output that they were chosen for, the penalties by name.
    """

    forms: tuple[Form, ...]
    selected_layers: dict[str, list[list[int]]]
    r2: dict[str, list[list[float]]] = field(default_factory=dict)
    rows_per_feature: float | None = None
    penalties: dict[str, dict[str, float]] = field(default_factory=dict)

    def evidence(self) -> dict[str, Any]:
        """What the bridge and the results keep of a fit."""
        names = ("r2", "selected_layers", "rows_per_feature", "penalties")
        return {name: getattr(self, name) for name in names}


@runtime_checkable
class Mapper(Protocol):
    """A fitting method: a frozen dataclass whose fields are its hyper-parameters."""

    name: ClassVar[str]

    def blocks(self) -> frozenset[MomentBlock]:
        """The cross moments that `fit` reads, so that calibration gathers only those; `ATTENTION` asks for a metric."""
        ...

    def fit(self, moments: CalibrationMoments, source: KVGeometry, target: KVGeometry) -> FittedMap:
        """Solve for the forms.

        Raises:
            CalibrationError: the moments lack rows or blocks.
            UsageError: a hyper-parameter does not fit the pair.
        """
        ...


@runtime_checkable
class CostedMapper(Protocol):
    """A mapper that can say before the fit what its map will cost, so that one too dear is never fitted."""

    def map_flops(self, source: KVGeometry, target: KVGeometry, layers: range) -> int:
        """Operations that mapping one token into the target `layers` will take."""
        ...

    def branch_width(self, source: KVGeometry, target: KVGeometry) -> int:
        """Numbers per token that a residual branch on the map will read."""
        ...


@runtime_checkable
class SizedMapper(Protocol):
    """A mapper that can say before the fit how much memory it will take."""

    def fit_bytes(self, shape: FitShape) -> int:
        """Bytes that `fit` holds at most, beside moments in their file."""
        ...


@dataclass(frozen=True, slots=True)
class Unfitted:
    """The cost of a map that is still to be fitted, with the branch that will be trained on it.

    Attributes:
        mapper: that will fit it.
        source: geometry of the model whose cache is read.
        target: of the model that goes on.
        residual: settings of the branch; by default there is none.
    """

    mapper: CostedMapper
    source: KVGeometry
    target: KVGeometry
    residual: ResidualConfig = field(default_factory=ResidualConfig)

    def flops_per_token(self, layers: range) -> int:
        """Operations that mapping one token into the target `layers` will take.

        A linear branch counts as what is cheaper, beside the map or folded into it.
        """
        frozen = self.mapper.map_flops(self.source, self.target, layers)
        if not self.residual.wanted:
            return frozen
        read = self.mapper.branch_width(self.source, self.target)
        made = len(KINDS) * len(layers) * self.target.kv_heads * self.target.head_dim
        rank, kind = self.residual.rank, self.residual.kind
        beside = frozen + 2 * rank * (ACTIVATIONS[kind] * read + made)
        # Folded, it makes a dense map of all that it reads.
        return min(beside, max(frozen, 2 * read * made)) if kind == "linear" else beside
