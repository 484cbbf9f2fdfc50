"""Sweeps: a folder per job, one calibration for all, failures that sink nobody, and the page over all runs."""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, as_overrides, in_process_of_its_own, left, sentence
from kvbridge import cli
from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationConfig, calibrate_once, moments_folder, sums
from kvbridge.cli.jobs import Sweep, safe_name
from kvbridge.errors import UsageError
from kvbridge.eval.rank_figure import RANK, rank_figure, rank_lines
from kvbridge.eval.status import deciding, is_alive, is_finished, read_status, recorded, write_status
from kvbridge.eval.sweep import best_under, differing_settings, find_runs, series
from kvbridge.eval.sweep_figures import _places
from kvbridge.eval.sweep_report import short_names, write_sweep_report
from kvbridge.mappers import Ridge
from kvbridge.planner import pareto
from kvbridge.processes import alone
from made_results import results
from tiny_pair import tiny_pair

# A process that cannot be: beyond the largest that Linux gives.
NO_PROCESS = 2**22 + 1


def state(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per calibration that really reads text."""
    calls: list[int] = []
    run = sums.Summation.run

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return run(self, *arguments)

    monkeypatch.setattr(sums.Summation, "run", counted)
    return calls


# On the command line


def test_a_sweep_survives_a_failure_and_a_kill(kvbridge: Run, tmp_path: Path, collected: list[int]) -> None:
    command = ("run", "-m", "mapper.k=0,1,2", "out=runs/k")
    ran = kvbridge(*command)
    folder = tmp_path / "runs/k"
    assert sentence(ran).startswith("runs/k/mapper.k=0: mapper.k=0, mapper.penalty=0.01: expected k ≥ 1")
    assert [state(folder / f"mapper.k={k}") for k in (0, 1, 2)] == ["failed", "finished", "finished"]
    assert len(collected) == 1
    assert len(list(folder.glob("calibration/*/moments.safetensors"))) == 1
    assert not [name for name in left(folder) if "failures" in name or "partial" in name]
    assert json.loads((folder / "sweep.json").read_text())["jobs"] == ["mapper.k=0", "mapper.k=1", "mapper.k=2"]

    # As if the last job had been killed in its evaluation.
    killed, kept = folder / "mapper.k=2", folder / "mapper.k=1/results.json"
    status = json.loads((killed / "status.json").read_text())
    (killed / "status.json").write_text(json.dumps(status | {"state": "running", "pid": NO_PROCESS}))
    (killed / "results.json").unlink()
    before = kept.stat().st_mtime_ns
    again = kvbridge(*command)
    assert again.code == 2
    assert "runs/k/mapper.k=1: done already" in again.out
    assert kept.stat().st_mtime_ns == before
    assert state(killed) == "finished"
    assert json.loads((killed / "results.json").read_text())["mapper"]["k"] == 2
    assert len(collected) == 1


def test_an_out_that_differs_by_job_is_left_alone(kvbridge: Run, tmp_path: Path) -> None:
    ran = kvbridge("fit", "-m", "mapper.k=1,2", "out=runs/k-${mapper.k}")
    assert ran.code == 2
    assert kvbridge("calibrate", "-m", "out=runs").code == 0
    ran = kvbridge("fit", "-m", "mapper.k=1,2", "out=runs/k-${mapper.k}")
    assert (ran.code, ran.errors) == (0, [])
    for k in (1, 2):
        assert Bridge.from_pretrained(tmp_path / f"runs/k-{k}/bridge").map().mapper["k"] == k


def test_every_failing_job_has_its_line(kvbridge: Run) -> None:
    ran = kvbridge("fit", "mapper.k=0,-1", "out=sweep", "-m")
    assert ran.code == 2
    assert [re.match(r"kvbridge: error: sweep/mapper\.k=(\S+): ", line)[1] for line in ran.errors] == ["0", "-1"]


def test_an_error_that_nobody_foresaw_is_kept(kvbridge: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory\nat all")

    monkeypatch.setattr(Ridge, "fit", fail)
    said = sentence(kvbridge("run", "-m", "mapper.k=1", "out=s"))
    status = json.loads(next(tmp_path.glob("s/**/status.json")).read_text())
    assert "RuntimeError: out of memory" in said
    assert status["state"] == "failed"
    assert "in fail" in status["traceback"]


def test_a_finished_run_is_not_repeated_nor_overwritten(kvbridge: Run, tmp_path: Path) -> None:
    assert kvbridge("run", "out=mine").code == 0
    before = (tmp_path / "mine/results.json").stat().st_mtime_ns
    ran = kvbridge("run", "out=mine")
    assert (ran.code, ran.out) == (0, "mine: done already\n")
    said = sentence(kvbridge("run", "out=mine", "mapper.k=1", "eval.documents=2"))
    assert said == (
        "mine holds finished results with mapper.k=2 (now 1), eval.documents=3 (now 2); give another out=, or delete "
        "them."
    )
    assert "bridge=null (now mine/bridge)" in sentence(kvbridge("eval", "out=mine"))
    assert (tmp_path / "mine/results.json").stat().st_mtime_ns == before


def test_another_bridge_of_the_same_name_is_not_done(kvbridge: Run, tmp_path: Path) -> None:
    assert kvbridge("calibrate", "out=fitted").code == 0
    assert kvbridge("fit", "out=fitted", "mapper.k=2").code == 0
    assert kvbridge("eval", "bridge=fitted/bridge", "out=scored").code == 0
    assert kvbridge("fit", "out=fitted", "mapper.k=1").code == 0
    assert "bridge_fingerprint=" in sentence(kvbridge("eval", "bridge=fitted/bridge", "out=scored"))
    said = sentence(kvbridge("fit", "out=scored", f"moments={tmp_path}/fitted/calibration"))
    assert said == "scored holds the results of an earlier bridge; give another out=."


def test_two_processes_do_not_work_in_one_folder(kvbridge: Run, tmp_path: Path) -> None:
    with alone(tmp_path / "mine", main=True):
        said = sentence(kvbridge("run", "out=mine"))
        assert said == "another process is at work in mine; wait for it, or give another out=."
        # A process that only contributes shards may enter.
        with alone(tmp_path / "mine", main=False):
            pass
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_joblib_keeps_failures_and_calibrates_once(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    given = as_overrides({name: value for name, value in settings.items() if name != "mapper.k"})
    command = ("run", "-m", "launcher=joblib", "mapper.k=0,1,2,-1", "out=runs", *given)
    ran = in_process_of_its_own(*command, folder=tmp_path)
    assert ran.code == 2
    errors = [line for line in ran.errors if line.startswith("kvbridge: error: ")]
    assert [re.search(r"runs/mapper\.k=(\S+): ", line)[1] for line in errors] == ["0", "-1"]
    assert [state(tmp_path / f"runs/mapper.k={k}") for k in (0, 1, 2, -1)] == [
        "failed", "finished", "finished", "failed",
    ]  # fmt: skip
    assert len(list(tmp_path.glob("runs/calibration/*/moments.safetensors"))) == 1


# Where jobs work


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (["out=runs/k", "mapper.k=1,2"], "runs/k"),
        (["out='runs/k'", "mapper.k=1,2"], "runs/k"),
        (["out=runs/k-${mapper.k}", "mapper.k=1,2"], "runs"),
        (["out=k-${mapper.k}", "mapper.k=1,2"], "."),
        (["out=a,b"], "."),
        (["out=runs/k", "hydra.sweep.dir=elsewhere"], "elsewhere"),
    ],
    ids=["plain", "quoted", "setting", "bare-setting", "swept", "given"],
)
def test_the_folder_of_a_sweep(overrides: list[str], folder: str) -> None:
    sweep, for_hydra = Sweep.of(["-m", *overrides])
    assert sweep is not None
    assert sweep.folder == folder
    assert f"hydra.sweep.dir='{folder}'" in for_hydra


def test_a_single_run_is_no_sweep() -> None:
    assert Sweep.of(["out=a"]) == (None, ["out=a"])


def test_all_jobs_start_at_one_time() -> None:
    sweep, for_hydra = Sweep.of(["-m", "mapper.k=1,2"])
    assert sweep is not None
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", sweep.folder)
    assert f"out='{sweep.folder}'" in for_hydra


def test_names_are_one_safe_component() -> None:
    assert safe_name("mapper.k=1,plan.native_head=null") == "mapper.k=1,plan.native_head=null"
    made = {
        safe_name(f"calibration.corpus={path}") for path in ("/a/b", "/a_b", "../x", "<script>", "x" * 300, "x" * 301)
    }
    assert len(made) == 6
    for name in made:
        assert len(name) < 200
        assert not set(name) & set("/\\<>'\" ")


# Shared moments


def _config(path: Path) -> CalibrationConfig:
    from tiny_pair import write_corpus

    return CalibrationConfig(corpus=str(write_corpus(path / "text.jsonl")), tokens=1024, block=64)


def test_moments_are_found_by_what_decides_them(tmp_path: Path, collected: list[int]) -> None:
    pair, config, store = tiny_pair(), _config(tmp_path), tmp_path / "store"
    blocks = Ridge().blocks()
    folder = moments_folder(pair, config, blocks, store)
    assert folder.parent == store
    calibrate_once(pair, config, blocks, folder)
    assert moments_folder(pair, config, blocks, store) == folder
    # More blocks than wanted serve as well; other text sizes do not.
    assert moments_folder(pair, config, frozenset(list(blocks)[:1]), store) == folder
    config.tokens = 512
    assert moments_folder(pair, config, blocks, store) != folder
    (folder / "moments.safetensors").write_bytes(b"damaged")
    assert moments_folder(pair, config, frozenset(list(blocks)[:1]), store) != folder
    assert len(collected) == 1


def test_one_collects_and_the_other_waits(
    tmp_path: Path, collected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    from filelock import FileLock

    pair, config = tiny_pair(), _config(tmp_path)
    blocks, folder = Ridge().blocks(), tmp_path / "store/x"
    folder.mkdir(parents=True)
    with FileLock(folder / "collecting.lock"):
        waiting = threading.Thread(target=calibrate_once, args=(pair, config, blocks, folder))
        waiting.start()
        waiting.join(timeout=1)
        assert waiting.is_alive()
        assert collected == []
    waiting.join()
    assert f"{folder}: another run is collecting these moments; waiting for it." in capsys.readouterr().out
    assert (folder / "moments.safetensors").exists()


# Status


def test_a_status_is_written_from_start_to_end(tmp_path: Path) -> None:
    with recorded(tmp_path / "run", {"mapper": {"k": 1}}, True):
        status = read_status(tmp_path / "run")
        assert (status["state"], status["pid"], status["host"]) == ("running", os.getpid(), socket.gethostname())
        assert is_alive(status)
    assert state(tmp_path / "run") == "finished"


def test_what_is_refused_before_anything_was_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError), recorded(tmp_path / "run", {}, True):
        raise UsageError("no")
    assert not (tmp_path / "run").exists()


def test_the_process_that_contributes_writes_nothing(tmp_path: Path) -> None:
    with recorded(tmp_path / "run", {}, False):
        pass
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_gone_is_not_alive() -> None:
    here = {"state": "running", "host": socket.gethostname(), "pid": NO_PROCESS}
    assert not is_alive(here)
    assert is_alive(here | {"host": "elsewhere"})
    for pid in ("junk", 0, -1):
        assert not is_alive(here | {"pid": pid})
    assert not is_alive({})


def test_what_a_status_says_keeps_nobody_out(tmp_path: Path) -> None:
    # A number of a process is given out again; whether one is at work here, the folder's lock says.
    write_status(tmp_path, "running", {})
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"pid": os.getppid()}))
    assert not is_finished(tmp_path, {})


def test_settings_that_a_run_did_not_read_do_not_decide() -> None:
    plain = {"out": "x", "logger": {"project": "p"}, "mapper": {"k": 1}, "calibration": {"tokens": 1}, "moments": None}
    plain |= {"bridge": None, "moments_store": "s", "plan": {"sinks": 4}}
    assert set(deciding(plain)) == {"mapper.k", "calibration.tokens", "moments", "bridge", "plan.sinks"}
    assert set(deciding(plain | {"moments": "m"})) == {"mapper.k", "moments", "bridge", "plan.sinks"}
    assert set(deciding(plain | {"bridge": "b"})) == {"bridge", "plan.sinks"}
    # A branch is trained on text that the calibration's settings choose.
    branch = plain | {"moments": "m", "mapper": {"residual": {"kind": "gelu"}}}
    assert set(deciding(branch)) == {"mapper.residual.kind", "calibration.tokens", "moments", "bridge", "plan.sinks"}


# The page over all runs


def write_run(folder: Path, kl: float, share: float, **settings: Any) -> None:
    found = copy.deepcopy(results())
    found["arms"]["mapped"]["kl"] = {"mean": kl, "ci95": [0.9 * kl, 1.1 * kl], "n": 9}
    found["cost"]["target_prefill_flops_share"] = share
    for name, value in settings.items():
        group, setting = name.split("__")
        found["run"]["settings"][group][setting] = value
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(found))


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """Four finished runs, and one each of failed, stopped, running and missing."""
    folder = tmp_path / "sweep"
    for k, kl, share in ((1, 0.5, 0.02), (2, 0.4, 0.04), (8, 0.3, 0.2), (4, 0.45, 0.3)):
        write_run(folder / f"mapper.k={k}", kl, share, mapper__k=k)
    write_status(folder / "failed", "failed", {"mapper": {"k": -1}}, error="k must be <b>positive</b>")
    write_status(folder / "stopped", "running", {"mapper": {"k": 5}})
    write_status(folder / "running", "running", {"mapper": {"k": 6}})
    status = json.loads((folder / "stopped/status.json").read_text())
    (folder / "stopped/status.json").write_text(json.dumps(status | {"pid": NO_PROCESS}))
    (folder / "stopped/documents.partial.jsonl").write_text("{}\n{}\n{}\n")
    jobs = ["mapper.k=1", "mapper.k=2", "mapper.k=4", "mapper.k=8", "mapper.k=16"]
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return folder


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    """Three kinds and losses of branches at two or three ranks, one at a single rank, and the frozen map."""
    folder = tmp_path / "ranks"
    write_run(folder / "frozen", 0.5, 0.10, mapper__residual={"kind": "none"})
    measured = {("gelu", "kl"): (0.4, 0.3, 0.25), ("linear", "kl"): (0.45, 0.42), ("gelu", "mse"): (0.49,)}
    for (kind, loss), kls in measured.items():
        for rank, kl in zip((128, 32, 512), sorted(kls, reverse=True), strict=False):
            residual = {"kind": kind, "rank": rank, "loss": loss}
            write_run(folder / f"{kind}-{loss}-{rank}", kl, 0.11, mapper__residual=residual)
    return folder


def test_a_curve_over_ranks_for_each_kind_and_loss(ranked: Path) -> None:
    runs = find_runs([ranked])
    lines = rank_lines(runs, differing_settings(runs))
    assert {label: [run.settings[RANK] for run in line] for label, line in lines.items()} == {
        "gelu, kl": [32, 128, 512],
        "linear, kl": [32, 128],
    }
    page, _ = write_sweep_report(ranked, runs)
    text = page.read_text()
    assert text.count("KL against the rank of the trained branch") == 1
    assert "KL against mapper.residual.rank," not in text
    for label in (">gelu, kl<", ">linear, kl<", ">frozen map<"):
        assert label in text
    one = [run for run in runs if run.settings.get(RANK) in (None, 32)]
    assert rank_figure(one, differing_settings(one)) is None


def test_a_curve_over_ranks_names_what_else_differs(ranked: Path) -> None:
    for rank in (32, 128):
        residual = {"kind": "gelu", "rank": rank, "loss": "kl"}
        write_run(ranked / f"tail-{rank}", 0.2, 0.12, mapper__residual=residual, plan__native_tail=64)
    write_run(ranked / "frozen-tail", 0.3, 0.12, mapper__residual={"kind": "none"}, plan__native_tail=64)
    runs = find_runs([ranked])
    lines = rank_lines(runs, differing_settings(runs))
    assert [len(line) for line in lines.values()] == [3, 2, 2]
    assert "gelu, kl, native_tail=64" in lines
    assert rank_figure(runs, differing_settings(runs)) is not None


def test_all_runs_are_found_as_what_they_are(swept: Path) -> None:
    found = {run.name: run for run in find_runs([swept])}
    assert list(found)[:5] == ["mapper.k=1", "mapper.k=2", "mapper.k=4", "mapper.k=8", "mapper.k=16"]
    assert {name: run.state for name, run in found.items() if run.results is None} == {
        "mapper.k=16": "missing", "failed": "failed", "running": "running", "stopped": "stopped",
    }  # fmt: skip
    assert found["failed"].note == "k must be <b>positive</b>"
    assert "2 documents scored" in found["stopped"].note
    assert "mapper.k" in differing_settings(list(found.values()))


def test_damaged_results_are_a_failed_run(swept: Path) -> None:
    (swept / "mapper.k=1/results.json").write_text("{")
    run = next(run for run in find_runs([swept]) if run.name == "mapper.k=1")
    assert run.state == "failed"
    assert "is damaged" in run.note


def test_the_front_and_the_budgets(swept: Path) -> None:
    runs = [run for run in find_runs([swept]) if run.results is not None]
    front = [runs[at].name for at in pareto([(run.share, run.kl) for run in runs])]
    assert front == ["mapper.k=1", "mapper.k=2", "mapper.k=8"]
    best = [best_under(runs, budget) for budget in (0.01, 0.05, 0.25)]
    assert [run and run.name for run in best] == [None, "mapper.k=2", "mapper.k=8"]
    assert pareto([]) == []
    assert sorted(pareto([(1.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 1.0)])) == [0, 1]


def test_a_setting_is_drawn_where_it_varies_alone(tmp_path: Path) -> None:
    for k, sinks, kl in ((1, 0, 0.5), (2, 0, 0.4), (2, 4, 0.3), (4, 8, 0.2)):
        write_run(tmp_path / f"{k}-{sinks}", kl, 0.1, mapper__k=k, plan__sinks=sinks)
    runs = find_runs([tmp_path])
    differing = differing_settings(runs)
    assert differing == ["mapper.k", "plan.sinks"]
    assert [[run.name for run in group] for group in series(runs, "mapper.k", differing)] == [["1-0", "2-0"]]
    assert [[run.name for run in group] for group in series(runs, "plan.sinks", differing)] == [["2-0", "2-4"]]


def test_values_have_their_places_on_the_axis() -> None:
    assert _places([8, 1, 2]) == ({"8": 8.0, "1": 1.0, "2": 2.0}, {})
    places, labels = _places(["b", 4, None, 2])
    assert list(labels.values()) == ["null", "2", "4", "b"]
    assert places["null"] == 0


def test_the_page_says_everything(swept: Path) -> None:
    page, twin = (path.read_text() for path in write_sweep_report(swept, find_runs([swept])))
    for text in (page, twin):
        assert "4 finished" in text
        assert "Within 5 % of the large model's prefill, run 2 (mapper.k=2) is best: KL 0.400 at 4.0 %" in text
        for word in ("missing", "stopped", "running", "failed", "2 documents scored"):
            assert word in text
    assert "k must be &lt;b&gt;positive&lt;/b&gt;" in page
    assert page.count("<svg") == 2
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page)
    defined = re.findall(r"<(?:clipPath|linearGradient) id=\"([^\"]+)\"", page)
    assert len(defined) == len(set(defined))


def test_names_and_values_cannot_inject(tmp_path: Path) -> None:
    write_run(tmp_path / "<script>alert(1)<", 0.3, 0.1, calibration__corpus="<img src=x>|$a$")
    write_run(tmp_path / "b|c", 0.2, 0.1, calibration__corpus="b")
    page, twin = (path.read_text() for path in write_sweep_report(tmp_path, find_runs([tmp_path])))
    for text in (page, twin.replace("\\<", "&lt;")):
        assert "<script" not in text
        assert "<img" not in text
    assert r"b\|c" in twin


def test_a_page_of_nothing_finished(tmp_path: Path) -> None:
    write_status(tmp_path / "a", "failed", {}, error="no")
    page, _ = write_sweep_report(tmp_path, find_runs([tmp_path]))
    assert "<svg" not in page.read_text()
    with pytest.raises(UsageError, match="holds no runs"):
        write_sweep_report(tmp_path, [])


def test_several_folders_and_one(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def report(*folders: str) -> None:
        monkeypatch.setattr(sys, "argv", ["kvbridge", "report", *folders])
        cli.main()

    report("sweep")
    assert (swept / "sweep.html").exists()
    report("sweep/mapper.k=1")
    assert (swept / "mapper.k=1/report.html").exists()
    report("sweep/mapper.k=1", "sweep/mapper.k=2")
    assert "sweep/mapper.k=2" in (swept / "mapper.k=1/sweep.md").read_text()


def test_short_names_only_where_they_are_clear() -> None:
    assert short_names(["mapper.k", "eval.seed", "calibration.seed"]) == {
        "mapper.k": "k", "eval.seed": "eval.seed", "calibration.seed": "calibration.seed",
    }  # fmt: skip
