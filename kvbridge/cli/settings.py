"""The configuration tree of the command line: one dataclass per group, so that a typo is an error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from kvbridge.errors import UsageError
from kvbridge.pair import ModelPair, load_pair


@dataclass
class PairConfig:
    """Which pair is loaded, and how.

    Attributes:
        source: folder or hub id of the small model, or `embedded` for the pair that is shipped.
        target: folder or hub id of the large model.
        source_revision: hub revision of the source.
        target_revision: hub revision of the target.
        dtype: `float32`, `bfloat16` or `float16`.
        device: a torch device, or `auto` for the one that accelerate gives this process.
        trust_remote_code: run code that comes with a checkpoint.
    """

    source: str = ""
    target: str = ""
    source_revision: str | None = None
    target_revision: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> ModelPair:
        """Load the pair.

        Raises:
            UsageError: a model is not named, or what `load_pair` raises.
        """
        if not self.source:
            raise UsageError("pair.source is empty: give model folders or hub ids, pair.source=DIR pair.target=DIR.")
        return load_pair(**dataclasses.asdict(self))


@dataclass
class RootConfig:
    """All settings of a command; the groups hold the rooms' own dataclasses."""

    pair: Any = MISSING
    mapper: Any = MISSING
    plan: Any = MISSING
    calibration: Any = MISSING
    eval: Any = MISSING
    experiment: Any = None
    out: str = MISSING
    moments: str | None = None
    bridge: str | None = None


def _editable(schema: type) -> DictConfig:
    """A dataclass as a typed node; a frozen one is frozen as an object, not while it is composed."""
    node = OmegaConf.structured(schema)
    OmegaConf.set_readonly(node, False)
    return node


def register() -> None:
    """Make the rooms' dataclasses known to Hydra as the schemas of their groups."""
    from kvbridge.calibration import CalibrationConfig
    from kvbridge.eval import EvalConfig
    from kvbridge.mappers import available
    from kvbridge.plan import HandoffPlan

    store = ConfigStore.instance()
    store.store(name="root_schema", node=_editable(RootConfig))
    groups = {"pair": PairConfig, "plan": HandoffPlan, "calibration": CalibrationConfig, "eval": EvalConfig}
    for group, schema in groups.items():
        store.store(group=group, name="schema", node=_editable(schema))
    for name, mapper in available().items():
        store.store(group="mapper", name=name, node=_editable(mapper))
