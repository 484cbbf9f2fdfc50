"""What each command does, in terms of the rooms; the command line reaches them through here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from kvbridge.bridge import Bridge, bridge_bytes
from kvbridge.cli.benching import bench_command as bench_command
from kvbridge.cli.cascading import calibrate_policy_command as calibrate_policy_command
from kvbridge.cli.cascading import cascade_command as cascade_command
from kvbridge.cli.describe import print_results
from kvbridge.cli.fitting import fit_map, maps_in
from kvbridge.cli.gating import calibrate_gate_command as calibrate_gate_command
from kvbridge.cli.planning import Chosen, check_cost, chosen, provisional, require_one_process, with_points
from kvbridge.cli.planning import plan_command as plan_command
from kvbridge.cli.settings import Settings
from kvbridge.errors import UsageError
from kvbridge.fingerprint import digest
from kvbridge.pair import ModelPair, Pair
from kvbridge.plan import HandoffPlan
from kvbridge.processes import alone, process_state


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


def _moments_folder(settings: Settings, pair: Pair) -> Path:
    """Where the moments of this run lie, or will lie."""
    from kvbridge.calibration import moments_folder

    if settings.moments is not None or settings.moments_store is None:
        return settings.calibration_folder
    return moments_folder(pair, settings.calibration, settings.mapper.blocks(), settings.moments_store)


def _calibrate(settings: Settings, pair: Pair, folder: Path) -> Any:
    from kvbridge.calibration import MOMENTS, CalibrationMoments, calibrate, calibrate_once

    if settings.moments is not None:
        moments = CalibrationMoments.load(settings.moments / MOMENTS)
        moments.require_pair(pair)
        moments.require(settings.mapper.blocks())
        return moments
    collect = calibrate if settings.moments_store is None else calibrate_once
    return collect(pair, settings.calibration, settings.mapper.blocks(), folder)


def _shared_moments(settings: Settings, pair: Pair, folder: Path) -> Any:
    """The moments, of processes that only contributed a share too where all are to train a branch; else `None`."""
    from kvbridge.calibration import MOMENTS, CalibrationMoments

    moments = _calibrate(settings, pair, folder)
    if not settings.residual.wanted or settings.calibration.shard is not None:
        return moments
    process_state().wait_for_everyone()
    return CalibrationMoments.load(folder / MOMENTS) if moments is None else moments


def _prepare(settings: Settings, pair: ModelPair, plan: HandoffPlan) -> tuple[Any, dict[str, Any]]:
    """What will be scored, after everything that can be checked before a long run."""
    from kvbridge.eval import suite

    if settings.logger is not None:
        settings.logger.require()
    task = suite.Task.of(pair, plan, settings.eval, settings.out)
    return task, suite.prepare(task)


def _evaluate(
    settings: Settings,
    bridge: Bridge,
    prepared: tuple[Any, dict[str, Any]],
    choice: Chosen,
    location: Path | None,
    seconds: dict[str, float],
) -> None:
    """Score a bridge on what `_prepare` gave, and write results and report."""
    from kvbridge.eval import build_results, suite, write_results
    from kvbridge.eval.report import write_report
    from kvbridge.eval.results import describe_run
    from kvbridge.eval.tracking import track
    from kvbridge.kernels import FormMap

    task, parts = prepared
    mapping = FormMap.of(bridge, choice.map, device=task.pair.target.device)
    subject = suite.Subject(task, bridge, mapping, choice.map)
    measured = suite.measure(subject, parts, seconds)
    plan = parts["documents"][0].plan(task.plan)
    run = describe_run(task.pair, settings.plain, seconds) | {
        "text": task.corpus.fingerprint,
        "planning": choice.planning,
    }
    # A bridge may have been fitted under other settings than those of this command.
    run["seeds"]["calibration"] = bridge.calibration.get("identity", {}).get("calibration.seed")
    results = build_results(task.pair, bridge, subject.mapping, plan, settings.eval, measured, run, choice.map)
    results["cost"]["artifact_bytes"] = bridge_bytes(location) if location else None
    results["cost"]["calibration_seconds"] = bridge.calibration.get("seconds")
    results["cost"]["calibration_peak_memory_bytes"] = bridge.calibration.get("peak_memory_bytes")
    write_results(settings.out / "results.json", results)
    suite.clear_partials(settings.out)
    print_results(results)
    page, _ = write_report(settings.out)
    print(f"report: {page}")
    if settings.logger is not None:
        track(settings.logger, results, location, settings.out)


def run_command(config: DictConfig) -> None:
    """Calibrate, fit and evaluate."""
    settings = Settings.of(config)
    settings.refuse("bridge")
    with alone(settings.out, process_state().is_main_process):
        _run(settings)


def _run(settings: Settings) -> None:
    from kvbridge.eval.status import is_finished, recorded

    seconds: dict[str, float] = {}
    if is_finished(settings.out, settings.plain):
        print(f"{settings.out}: done already")
        return
    pair = settings.pair.load()
    check_cost(settings, pair)
    prepared = _prepare(settings, pair, provisional(settings))
    with recorded(settings.out, settings.plain, process_state().is_main_process):
        with _timed(seconds, "calibrate"):
            moments = _shared_moments(settings, pair, _moments_folder(settings, pair))
        if moments is None:
            return
        with _timed(seconds, "fit"):
            bridge = fit_map(settings, pair, moments)
        if not process_state().is_main_process:
            return
        del moments
        name = settings.map or settings.mapper.name
        choice = Chosen(provisional(settings), name)
        if settings.auto:
            with _timed(seconds, "plan"):
                bridge = with_points(settings, pair, bridge, settings.out / "bridge")
            choice = chosen(settings, pair, bridge)
            prepared = _prepare(settings, pair, choice.plan)
        _evaluate(settings, bridge, prepared, choice, settings.out / "bridge", seconds)


def calibrate_command(config: DictConfig) -> None:
    """Collect the moments that the mapper asks for."""
    from kvbridge.calibration import MOMENTS

    settings = Settings.of(config)
    settings.refuse("bridge")
    # Staged states need one model at a time.
    pair = settings.pair.open() if settings.calibration.stage else settings.pair.load()
    folder = _moments_folder(settings, pair)
    moments = _calibrate(settings, pair, folder)
    if moments is not None:
        rows = {"/".join(key): part.rows for key, part in moments.sets.items()}
        print(f"{folder / MOMENTS}: rows {rows}")


def fit_command(config: DictConfig) -> None:
    """Fit a map on finished moments."""
    from kvbridge.calibration import MOMENTS

    settings = Settings.of(config)
    settings.refuse("bridge")
    held = maps_in(settings.out / "bridge")
    if (settings.out / "results.json").exists() and (not held or (settings.map or settings.mapper.name) in held):
        added = f", or map=NAME to add one to {', '.join(held)}" if held else ""
        raise UsageError(f"{settings.out} holds the results of an earlier bridge; give another out={added}.")
    if not (settings.residual.wanted or process_state().is_main_process):
        return
    pair = settings.pair.open()
    folder = _moments_folder(settings, pair)
    if not (folder / MOMENTS).is_file():
        raise UsageError(f"{folder / MOMENTS}: no moments there; run `kvbridge calibrate` first, or give moments=DIR.")
    check_cost(settings, pair)
    reused = dataclasses.replace(settings, moments=folder)
    bridge = fit_map(reused, pair, _calibrate(reused, pair, folder))
    if process_state().is_main_process:
        print(f"{settings.out / 'bridge'}: {bridge.parameters():,} numbers")


def eval_command(config: DictConfig) -> None:
    """Score a finished bridge."""
    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("eval")
    with alone(settings.out, main=True):
        _score(settings, settings.bridge_location())


def _score(settings: Settings, location: str) -> None:
    from kvbridge.eval.status import is_finished, recorded

    unchecked = Bridge.from_pretrained(location)
    settings.plain.update(bridge=location, bridge_fingerprint=unchecked.fingerprint())
    if settings.auto:
        settings.plain.update(points=digest(unchecked.points))
    else:
        unchecked.map_name(settings.map)
    if is_finished(settings.out, settings.plain):
        print(f"{settings.out}: done already")
        return
    pair = settings.pair.load()
    unchecked.require_pair(pair)
    folder = Path(location).expanduser()
    choice = chosen(settings, pair, unchecked)
    prepared = _prepare(settings, pair, choice.plan)
    with recorded(settings.out, settings.plain, main=True):
        _evaluate(settings, unchecked, prepared, choice, folder if folder.is_dir() else None, {})


def inspect_command(config: DictConfig) -> None:
    """Print what a bridge is made of."""
    from kvbridge.cli.describe import print_bridge

    settings = Settings.of(config)
    location = settings.bridge_location()
    print_bridge(Bridge.from_pretrained(location), location)


def doctor_command(config: DictConfig) -> None:
    """Say what a pair supports and run the gate on both models."""
    from kvbridge.cli.describe import print_gate, print_support
    from kvbridge.eval import identity_gate

    pair = Settings.of(config).pair.load()
    print_support(pair)
    torch.manual_seed(0)
    failed = []
    for role, model in (("source", pair.source), ("target", pair.target)):
        vocabulary = model.model.config.get_text_config(decoder=True).vocab_size
        input_ids = torch.randint(min(10, vocabulary - 1), vocabulary, (1, 160))
        report = identity_gate(model, input_ids)
        print_gate(role, model, report)
        failed += [] if report.passed else [role]
    if failed:
        raise UsageError(
            f"the gate failed for {' and '.join(failed)}: injected keys and values do not give native answers."
        )
