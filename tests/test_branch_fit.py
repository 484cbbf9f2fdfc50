"""Where a fit trains a residual branch: what it is given, what is stored, and when nothing is added."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hydra import compose, initialize_config_module

from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationMoments, Moments
from kvbridge.cli.fitting import fit_map
from kvbridge.cli.settings import Settings, register
from kvbridge.forms import Form, ResidualBranch
from kvbridge.mappers import FittedMap
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.pair import ModelPair
from kvbridge.variables import Span
from tiny_branch import JOINT, make_basis, make_branch, pair

ALL = (Span("target.keys", 0, 4), Span("target.values", 0, 4))
NO_MOMENTS = CalibrationMoments({("fit", part): Moments.zeros({}, ()) for part in ("rest", "first")}, {"identity": {}})


@dataclass(frozen=True)
class Fixed:
    """A mapper that knows its map."""

    name: ClassVar[str] = "fixed"
    seed: int = 3

    def fit(self, *_: Any) -> FittedMap:
        torch.manual_seed(self.seed)
        return FittedMap((make_basis(JOINT, ALL, None),), {})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    register()
    with initialize_config_module("kvbridge.configs", version_base="1.3"):
        composed = Settings.of(compose("config", ["plan.native_tail=8"]))
    return replace(composed, mapper=Fixed(), out=tmp_path / "run")


def fitted(
    settings: Settings, branch: ResidualBranch | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Bridge, list[Any]]:
    """The bridge of a fit whose training adds this branch, or nothing, and what the training was given."""
    given: list[Any] = []

    def train_residual(*arguments: Any) -> tuple[Form, ...] | None:
        given.extend(arguments)
        return None if branch is None else (*arguments[1], branch)

    monkeypatch.setitem(sys.modules, "kvbridge.mappers.residual", SimpleNamespace(train_residual=train_residual))
    return fit_map(settings, pair(), NO_MOMENTS), given


def names(bridge: Bridge) -> list[str]:
    return [form.name for form in bridge.map().forms]


@pytest.mark.parametrize(
    ("kind", "expected"), [("linear", ["shared_basis"]), ("gelu", ["shared_basis", "residual_branch"])]
)
def test_a_fit_adds_the_branch_that_was_trained(
    kind: str, expected: list[str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ResidualConfig(kind, rank=3)
    branch = make_branch(JOINT, ALL, kind, 3)
    bridge, given = fitted(replace(settings, residual=config), branch, monkeypatch)
    assert names(bridge) == expected
    assert bridge.map().mapper["seed"] == 3
    assert bridge.map().mapper["residual"].items() >= {"kind": kind, "rank": 3, "loss": "kl"}.items()
    source, forms, moments, calibration, residual, folder, plan = given
    assert source == pair()
    assert [form.name for form in forms] == ["shared_basis"]
    assert moments is NO_MOMENTS
    assert (calibration, residual, plan) == (settings.calibration, config, settings.plan)
    assert folder == settings.out / "residual"


def test_both_models_are_asked_for_when_the_training_begins(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, solve, steps = ModelPair.of, Fixed.fit, []
    monkeypatch.setattr(ModelPair, "of", lambda known: steps.append("both") or both(known))
    monkeypatch.setattr(Fixed, "fit", lambda *given: steps.append("solve") or solve(*given))
    fitted(replace(settings, residual=ResidualConfig("gelu")), None, monkeypatch)
    assert steps == ["solve", "both"]


def test_a_training_that_helps_nothing_leaves_the_map_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = replace(settings, residual=ResidualConfig("gelu"))
    bridge, _ = fitted(wanted, None, monkeypatch)
    assert names(bridge) == ["shared_basis"]
    assert "training found nothing that beats the map alone" in capsys.readouterr().out


def test_without_a_kind_nothing_is_trained(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, given = fitted(settings, None, monkeypatch)
    assert given == []
    assert "residual" not in bridge.map().mapper
    assert names(bridge) == ["shared_basis"]
