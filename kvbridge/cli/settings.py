"""The configuration tree of the command line: one dataclass per group, so that a typo is an error."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from kvbridge.cli.mapper_schema import RESIDUAL, separated, with_residual
from kvbridge.errors import UsageError
from kvbridge.layout import MAP_NAME
from kvbridge.pair import EMBEDDED, ModelPair, PairLoader, open_pair
from kvbridge.plan import HandoffPlan
from kvbridge.planner import AutoPlan
from kvbridge.storage import storage_dtype


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
        return ModelPair.of(self.open())

    def open(self) -> PairLoader:
        """Check the pair, and leave its models to be loaded one at a time.

        Raises:
            UsageError: a model is not named, or what `open_pair` raises.
        """
        if not self.source:
            raise UsageError("pair.source is empty: give model folders or hub ids, pair.source=DIR pair.target=DIR.")
        return open_pair(**dataclasses.asdict(self))


@dataclass
class RootConfig:
    """All settings of a command; the groups hold the rooms' own dataclasses."""

    pair: Any = MISSING
    mapper: Any = MISSING
    plan: Any = MISSING
    planner: Any = MISSING
    gate: Any = MISSING
    calibration: Any = MISSING
    eval: Any = MISSING
    bench: Any = MISSING
    cascade: Any = MISSING
    escalation: Any = MISSING
    experiment: Any = None
    out: str = MISSING
    moments: str | None = None
    moments_store: str | None = None
    bridge: str | None = None
    map: str | None = None
    storage: str = "float32"
    logger: Any = None


@dataclass(frozen=True, slots=True)
class Settings:
    """One composed configuration, every group as the object it describes."""

    pair: PairConfig
    mapper: Any
    residual: Any
    plan: HandoffPlan | AutoPlan
    planner: Any
    gate: Any
    calibration: Any
    eval: Any
    bench: Any
    cascade: Any
    escalation: Any
    out: Path
    moments: Path | None
    moments_store: Path | None
    bridge: str | None
    map: str | None
    storage: str
    logger: Any
    plain: dict[str, Any]

    @classmethod
    def of(cls, config: DictConfig) -> Settings:
        """The objects of a composed configuration.

        Raises:
            UsageError: a setting was added that nothing reads, `out` is empty, or what the objects' own checks raise.
        """
        names = ("pair", "mapper", "plan", "planner", "gate", "calibration", "eval")
        names += ("bench", "cascade", "escalation")
        _refuse_additions("", config)
        if not config.out:
            raise UsageError("out is empty: give the folder of the run, out=DIR.")
        groups: dict[str, Any] = {name: OmegaConf.to_object(config[name]) for name in names}
        plain: Any = OmegaConf.to_container(config, resolve=True)
        groups["mapper"], groups[RESIDUAL] = separated(groups["mapper"])
        # Neither changes what a run leaves.
        del plain["cascade"], plain["escalation"]
        plain["mapper"] = {"name": groups["mapper"].name} | plain["mapper"]
        if not groups[RESIDUAL].wanted:
            # How a branch would have been trained decides nothing where there is none.
            plain["mapper"][RESIDUAL] = {"kind": groups[RESIDUAL].kind}
        _check_text(groups)
        folders: dict[str, Any] = {
            name: Path(config[name]).expanduser() if config[name] else None for name in ("moments", "moments_store")
        }
        logger = OmegaConf.to_object(config.logger) if config.logger else None
        out = Path(config.out).expanduser()
        storage_dtype(config.storage)
        if config.map is not None and not re.fullmatch(MAP_NAME, config.map):
            raise UsageError(f"map={config.map}: a map's name has letters, digits and _ . = , + - only.")
        taken = {name: config[name] for name in ("bridge", "map", "storage")}
        return cls(**groups, **folders, **taken, out=out, logger=logger, plain=plain)

    def refuse(self, name: str) -> None:
        """Refuse a setting that this command does not read.

        Raises:
            UsageError: it was given.
        """
        if getattr(self, name) is not None:
            raise UsageError(f"{name}={getattr(self, name)} is not read by this command; leave it out.")

    def bridge_location(self) -> str:
        """Where the bridge is that a command reads: what `bridge=` says, else that of the run in `out`.

        Raises:
            UsageError: neither is there.
        """
        if self.bridge:
            return self.bridge
        if not (self.out / "bridge").is_dir():
            raise UsageError(f"{self.out / 'bridge'}: no bridge there; give bridge=DIR, or out= of a finished run.")
        return str(self.out / "bridge")

    @property
    def auto(self) -> bool:
        """Whether map and plan are chosen from measured points."""
        return isinstance(self.plan, AutoPlan)

    @property
    def calibration_folder(self) -> Path:
        """Where the moments lie if `moments_store` does not say otherwise."""
        return self.moments or self.out / "calibration"


def _check_text(groups: dict[str, Any]) -> None:
    """Refuse the embedded pair's text for other models: it is a language of its own."""
    for name in ("calibration", "eval"):
        if groups[name].corpus == EMBEDDED and groups["pair"].source != EMBEDDED:
            raise UsageError(
                f"{name}.corpus={EMBEDDED} is the embedded pair's text, and pair.source={groups['pair'].source}; "
                f"add pair=local and give {name}.corpus=FILE."
            )
    probes = groups["eval"].probes
    if probes.count and probes.language == EMBEDDED and groups["pair"].source != EMBEDDED:
        raise UsageError(
            f"eval.probes.language={EMBEDDED} is the embedded pair's language, and pair.source="
            f"{groups['pair'].source}; add pair=local, or give eval.probes.language=plain."
        )


def _refuse_additions(group: str, node: DictConfig) -> None:
    schema: Any = OmegaConf.get_type(node)
    # A group that is left out, such as logger=none, has no settings at all.
    known = [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else []
    added = [key for key in node if key not in known]
    if added:
        expected = f"one of {', '.join(known)}" if known else "none"
        raise UsageError(f"{group}{added[0]} is no setting; expected {expected}.")
    for name in known:
        if OmegaConf.is_dict(node[name]):
            _refuse_additions(f"{group}{name}.", node[name])


def _editable(schema: type) -> DictConfig:
    """A dataclass as a typed node; a frozen one is frozen as an object, not while it is composed."""
    node = OmegaConf.structured(schema)
    _thaw(node)
    return node


def _thaw(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, False)
    for name in node:
        if not OmegaConf.is_missing(node, name) and OmegaConf.is_dict(node[name]):
            _thaw(node[name])


def register() -> None:
    """Make the rooms' dataclasses known to Hydra as the schemas of their groups."""
    from kvbridge.calibration import CalibrationConfig
    from kvbridge.cascade.config import CascadeConfig
    from kvbridge.eval import EvalConfig
    from kvbridge.eval.bench import BenchConfig
    from kvbridge.eval.candidates import PlannerConfig
    from kvbridge.eval.escalation import EscalationConfig
    from kvbridge.eval.gating import GateConfig
    from kvbridge.eval.tracking import WandbConfig
    from kvbridge.mappers import available

    store = ConfigStore.instance()
    store.store(name="root_schema", node=_editable(RootConfig))
    groups = {
        "pair": PairConfig,
        "plan": HandoffPlan,
        "planner": PlannerConfig,
        "gate": GateConfig,
        "calibration": CalibrationConfig,
        "eval": EvalConfig,
        "bench": BenchConfig,
        "cascade": CascadeConfig,
        "escalation": EscalationConfig,
    }
    for group, schema in groups.items():
        store.store(group=group, name="schema", node=_editable(schema))
    store.store(group="plan", name="auto_schema", node=_editable(AutoPlan))
    store.store(group="logger", name="wandb_schema", node=_editable(WandbConfig))
    for name, mapper in available().items():
        store.store(group="mapper", name=name, node=_editable(with_residual(mapper)))
