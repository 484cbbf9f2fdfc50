"""Every YAML of the installed package composes into the objects it describes, and a typo in any group is an error."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from kvbridge.calibration import CalibrationConfig
from kvbridge.cascade.config import CascadeConfig
from kvbridge.cli.commands import Settings
from kvbridge.cli.mapper_schema import separated, with_residual
from kvbridge.cli.settings import PairConfig, register
from kvbridge.dotted import flatten
from kvbridge.errors import KVBridgeError
from kvbridge.eval import EvalConfig, ProbesConfig
from kvbridge.eval.bench import BenchConfig
from kvbridge.eval.candidates import PlannerConfig
from kvbridge.eval.escalation import EscalationConfig
from kvbridge.eval.gating import GateConfig
from kvbridge.eval.tracking import WandbConfig
from kvbridge.mappers import Joint, Mapper, ReducedRank, Ridge, available
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.plan import HandoffPlan
from kvbridge.planner import AutoPlan

ROOT = Path(str(files("kvbridge.configs")))
YAML = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.yaml"))
GROUPS: dict[str, Any] = {
    "pair": PairConfig,
    "mapper": Mapper,
    "plan": HandoffPlan | AutoPlan,
    "planner": PlannerConfig,
    "gate": GateConfig,
    "calibration": CalibrationConfig,
    "eval": EvalConfig,
    "bench": BenchConfig,
    "cascade": CascadeConfig,
    "escalation": EscalationConfig,
}


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    register()
    with initialize_config_module("kvbridge.configs", version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides))


def chosen(path: Path) -> list[str]:
    """The override that selects a YAML file; none for the root."""
    return [f"{path.parent.as_posix()}={path.stem}"] if path.parent != Path() else []


def needs_plugin(path: Path) -> None:
    """Skip a launcher whose plug-in is not installed."""
    plugin = path.stem if path.parent.name == "launcher" and path.stem != "basic" else None
    if plugin:
        pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")


def leaves(value: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*way, key))
    else:
        yield ".".join(way), value


def test_every_yaml_is_seen() -> None:
    assert {"config.yaml", "plan/default.yaml", "experiment/published_ridge.yaml"} <= {path.as_posix() for path in YAML}


@pytest.mark.parametrize("path", YAML, ids=str)
def test_composes_into_objects(path: Path) -> None:
    needs_plugin(path)
    settings = Settings.of(composed(*chosen(path), "calibration.corpus=a.txt", "eval.corpus=b.txt"))
    for name, kind in GROUPS.items():
        assert isinstance(getattr(settings, name), kind)
    assert settings.plain["mapper"]["name"] == settings.mapper.name
    assert settings.calibration_folder == settings.out / "calibration"


@pytest.mark.parametrize("path", YAML, ids=str)
def test_what_a_yaml_says_is_what_comes_out(path: Path) -> None:
    needs_plugin(path)
    said: Any = OmegaConf.to_container(OmegaConf.load(ROOT / path), resolve=False) or {}
    is_global = path.parent == Path() or "# @package _global_" in (ROOT / path).read_text()
    package = "" if is_global else f"{path.parent.as_posix().replace('/', '.')}."
    config = compose("config", chosen(path), return_hydra_config=True)
    for key in ("defaults", "out"):
        said.pop(key, None)
    for place, value in leaves(said):
        if place and not place.startswith("hydra.sweeper.params"):
            assert OmegaConf.select(config, package + place, throw_on_missing=False) == value, place


@pytest.mark.parametrize("name", available())
def test_every_mapper_is_an_option(name: str) -> None:
    settings = Settings.of(composed(f"mapper={name}"))
    assert settings.mapper == available()[name]()
    assert settings.plain["mapper"]["name"] == name


@pytest.mark.parametrize("name", available())
def test_every_mapper_has_a_residual_branch_that_it_does_not_know(name: str) -> None:
    given = ("mapper.residual.kind=gelu", "mapper.residual.rank=32", "mapper.residual.loss=attention")
    settings = Settings.of(composed(f"mapper={name}", *given))
    assert settings.residual == ResidualConfig("gelu", 32, "attention")
    assert settings.mapper == available()[name]()
    assert type(settings.mapper) is available()[name]
    assert settings.plain["mapper"]["residual"].items() >= {"kind": "gelu", "rank": 32, "loss": "attention"}.items()
    bare = Settings.of(composed(f"mapper={name}", "mapper.residual.rank=32"))
    assert not bare.residual.wanted
    assert bare.plain["mapper"]["residual"] == {"kind": "none"}


def test_a_typo_in_a_residual_branch_is_an_error() -> None:
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'mapper\.residual\.typo'"):
        composed("mapper.residual.typo=1")
    with pytest.raises(KVBridgeError, match=r"^mapper\.residual\.typo is no setting; expected one of kind, rank, loss"):
        Settings.of(composed("+mapper.residual.typo=1"))
    for given in ("kind=relu", "loss=l1", "rank=0"):
        with pytest.raises(KVBridgeError, match=rf"^mapper\.residual\.{given}: expected "):
            Settings.of(composed(f"mapper.residual.{given}"))


@pytest.mark.parametrize("mapper", available().values(), ids=available())
def test_the_settings_of_a_job_travel_to_other_processes(mapper: Any) -> None:
    schema = with_residual(mapper)
    config = pickle.loads(pickle.dumps(composed(f"mapper={mapper.name}", "mapper.residual.rank=7")))
    assert Settings.of(config).residual == ResidualConfig(rank=7)
    assert separated(schema()) == (mapper(), ResidualConfig())


@pytest.mark.parametrize("group", GROUPS)
def test_a_typo_in_a_group_is_an_error(group: str) -> None:
    with pytest.raises(ConfigCompositionException, match=rf"Could not override '{group}\.typo'"):
        composed(f"{group}.typo=1")
    with pytest.raises(KVBridgeError, match=rf"{group}\.typo"):
        Settings.of(composed(f"+{group}.typo=1"))


def test_a_typo_at_the_root_is_an_error() -> None:
    with pytest.raises(ConfigCompositionException, match="Could not override 'moment'"):
        composed("moment=x")
    with pytest.raises(KVBridgeError, match="moment"):
        Settings.of(composed("+moment=x"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_setting_is_explained(group: str) -> None:
    kinds = [*available().values(), ResidualConfig] if group == "mapper" else get_args(GROUPS[group]) or [GROUPS[group]]
    for kind in kinds:
        assert is_dataclass(kind)
        explained = "".join(parent.__doc__ or "" for parent in kind.__mro__)
        assert [field.name for field in fields(kind) if f"    {field.name}: " not in explained] == []


def test_the_published_recipe() -> None:
    settings = Settings.of(composed("experiment=published_ridge"))
    assert settings.mapper == Ridge(k=8, first_positions="included")
    assert settings.plan == HandoffPlan(sinks=0, native_head=None, native_tail=1)


def test_the_best_recipe_trains_on_attention_before_kl_and_the_map_at_last() -> None:
    settings = Settings.of(composed("experiment=trained_branch"))
    assert settings.mapper == ReducedRank(rank=900, groups=2, metric="coordinate", joint=Joint(penalties=[1e-3]))
    assert settings.plan == HandoffPlan(native_head=0, native_tail=16, native_attended=0.17)
    branch = settings.residual
    assert (branch.kind, branch.loss) == ("gelu", "kl")
    assert min(branch.attention_steps, branch.steps, branch.unfreeze_steps) > 0
    assert max(branch.learning_rate, branch.unfreeze_rate) < branch.attention_rate


def test_an_override_beats_an_experiment() -> None:
    settings = Settings.of(composed("experiment=published_ridge", "mapper.k=2", "plan=exact_sinks"))
    assert (settings.mapper.k, settings.mapper.first_positions) == (2, "included")
    assert settings.plan == HandoffPlan(sinks=4, native_head=None, native_tail=1)


def test_the_planner_takes_the_place_of_a_plan() -> None:
    settings = Settings.of(composed("plan=auto", "plan.budget=0.1", "planner.native_tail=[1,64]"))
    assert settings.auto
    assert settings.plan == AutoPlan(budget=0.1)
    assert settings.planner.native_tail == [1, 64]
    assert not Settings.of(composed()).auto


SWEEPS = sorted(path.stem for path in YAML if path.stem.startswith("sweep_"))


@pytest.mark.parametrize("name", SWEEPS)
def test_every_value_of_a_sweep_composes(name: str) -> None:
    params = compose("config", [f"experiment={name}"], return_hydra_config=True).hydra.sweeper.params
    assert params
    for key, values in params.items():
        for value in str(values).split(","):
            settings = Settings.of(composed(f"experiment={name}", f"{key}={value}"))
            assert str(flatten(settings.plain)[key]) == str(yaml_value(value))


def yaml_value(text: str) -> Any:
    return OmegaConf.create(f"value: {text}").value


def test_the_experiments_of_the_design_are_there() -> None:
    assert SWEEPS == ["sweep_calibration", "sweep_k", "sweep_penalty", "sweep_plan", "sweep_residual", "sweep_text"]


def test_a_logger_is_chosen() -> None:
    assert Settings.of(composed()).logger is None
    assert Settings.of(composed("logger=wandb", "logger.tags=[a]")).logger == WandbConfig(tags=["a"])
    with pytest.raises(KVBridgeError, match=r"logger\.typo"):
        Settings.of(composed("logger=wandb", "+logger.typo=1"))


def test_folders_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = Settings.of(composed("out='~/run'", "moments='~/moments'"))
    assert settings.out == Path("/home/me/run")
    assert settings.calibration_folder == Path("/home/me/moments")


def test_probes_are_settings_of_the_evaluation() -> None:
    given = ("eval.probes.count=8", "eval.probes.lengths=[128,256]", "eval.probes.depths=[0,1]")
    settings = Settings.of(composed(*given))
    assert settings.eval.probes == ProbesConfig(
        8, tasks=["passkey", "needles", "pairs"], lengths=[128, 256], depths=[0.0, 1.0], language="embedded"
    )
    assert settings.plain["eval"]["probes"]["lengths"] == [128, 256]
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'eval\.probes\.typo'"):
        composed("eval.probes.typo=1")
    with pytest.raises(
        KVBridgeError, match=r"^eval\.probes\.typo is no setting; expected one of count, tasks, lengths,"
    ):
        Settings.of(composed("+eval.probes.typo=1"))
    with pytest.raises(KVBridgeError, match=r"^eval\.probes\.tasks=\[sums\]: expected some of passkey,"):
        Settings.of(composed("eval.probes.tasks=[sums]"))
