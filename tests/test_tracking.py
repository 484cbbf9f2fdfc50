"""Tracking: what goes to the tracker, and that its failures stay its own."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvbridge.errors import UsageError
from kvbridge.eval.tracking import WandbConfig, headline, track
from made_results import ARMS, results


@dataclass
class FakeRun:
    """Keeps what a run of the tracker is given."""

    logged: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[Any] = field(default_factory=list)
    finished: bool = False

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.finished = True


@dataclass
class FakeArtifact:
    name: str
    type: str
    folders: list[str] = field(default_factory=list)

    def add_dir(self, folder: str) -> None:
        self.folders.append(folder)


class FakeWandb(types.ModuleType):
    """The part of the package that is used."""

    Artifact = FakeArtifact

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run, self.given = FakeRun(), {}

    def init(self, **given: Any) -> FakeRun:
        self.given = given
        return self.run

    def Settings(self, **given: Any) -> dict[str, Any]:  # noqa: N802
        return given

    def Table(self, columns: list[str], data: list[list[Any]]) -> dict[str, Any]:  # noqa: N802
        return {"columns": columns, "data": data}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_headlines_arms_and_bridge_are_logged(
    wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    track(WandbConfig(project="p", tags=["t"]), results(), tmp_path / "bridge", tmp_path / "mine")
    assert capsys.readouterr().err == ""
    assert {key: wandb.given[key] for key in ("project", "mode", "name", "tags")} == {
        "project": "p", "mode": "offline", "name": "mine", "tags": ["t"],
    }  # fmt: skip
    (logged,) = wandb.run.logged
    assert logged["gap_recovered"] == pytest.approx(0.75)
    assert logged["target_prefill_flops_share"] == 0.07
    assert [row[0] for row in logged["arms"]["data"]] == list(ARMS)
    assert all(len(row) == len(logged["arms"]["columns"]) for row in logged["arms"]["data"])
    assert [artifact.folders for artifact in wandb.run.artifacts] == [[str(tmp_path / "bridge")]]
    assert wandb.run.finished


def test_nothing_of_the_machine_goes_along(wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-very-secret-value")
    track(WandbConfig(), results(), None, tmp_path)
    assert "a-very-secret-value" not in repr((wandb.given, wandb.run.logged))
    settings = wandb.given["settings"]
    assert settings["x_disable_meta"]
    assert settings["x_disable_machine_info"]
    assert settings["disable_git"]
    assert (settings["console"], settings["host"]) == ("off", "-")
    assert wandb.run.artifacts == []


def test_a_gap_that_cannot_be_said_is_left_out() -> None:
    found = results()
    found["arms"]["mapped"]["gap_recovered"] = {"mean": None, "ci95": None, "n": 9, "reason": "noise"}
    assert "gap_recovered" not in headline(found)


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_failure_is_a_sentence_and_no_more(
    where: str, wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(wandb if where == "init" else wandb.run, where, fail)
    track(WandbConfig(), results(), None, tmp_path)
    warned = capsys.readouterr().err
    assert warned == "kvbridge: warning: the run is finished but was not tracked by wandb (no network).\n"
    assert wandb.run.finished == (where == "log")


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install wandb"):
        WandbConfig().require()
