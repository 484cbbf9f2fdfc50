"""What each command does, in terms of the rooms; the command line reaches them through here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from kvbridge.bridge import Bridge, bridge_bytes
from kvbridge.cli.describe import print_results
from kvbridge.cli.settings import PairConfig
from kvbridge.errors import UsageError
from kvbridge.fingerprint import digest
from kvbridge.pair import EMBEDDED, ModelPair
from kvbridge.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class Settings:
    """One composed configuration, every group as the object it describes."""

    pair: PairConfig
    mapper: Any
    plan: HandoffPlan
    calibration: Any
    eval: Any
    out: Path
    moments: Path | None
    bridge: str | None
    plain: dict[str, Any]

    @classmethod
    def of(cls, config: DictConfig) -> Settings:
        """The objects of a composed configuration.

        Raises:
            UsageError: a setting was added that nothing reads, `out` is empty, or what the objects' own checks raise.
        """
        names = ("pair", "mapper", "plan", "calibration", "eval")
        _refuse_additions("", config)
        if not config.out:
            raise UsageError("out is empty: give the folder of the run, out=DIR.")
        groups: dict[str, Any] = {name: OmegaConf.to_object(config[name]) for name in names}
        plain: Any = OmegaConf.to_container(config, resolve=True)
        plain["mapper"] = {"name": groups["mapper"].name} | plain["mapper"]
        _check_text(groups)
        moments = Path(config.moments).expanduser() if config.moments else None
        return cls(**groups, out=Path(config.out).expanduser(), moments=moments, bridge=config.bridge, plain=plain)

    def refuse(self, name: str) -> None:
        """Refuse a setting that this command does not read.

        Raises:
            UsageError: it was given.
        """
        if getattr(self, name) is not None:
            raise UsageError(f"{name}={getattr(self, name)} is not read by this command; leave it out.")

    @property
    def calibration_folder(self) -> Path:
        return self.moments or self.out / "calibration"


def _check_text(groups: dict[str, Any]) -> None:
    """Refuse the embedded pair's text for other models: it is a language of its own."""
    for name in ("calibration", "eval"):
        if groups[name].corpus == EMBEDDED and groups["pair"].source != EMBEDDED:
            raise UsageError(
                f"{name}.corpus={EMBEDDED} is the embedded pair's text, and pair.source={groups['pair'].source}; "
                f"add pair=local and give {name}.corpus=FILE."
            )


def _refuse_additions(group: str, node: DictConfig) -> None:
    schema: Any = OmegaConf.get_type(node)
    known = [field.name for field in dataclasses.fields(schema)]
    added = [key for key in node if key not in known]
    if added:
        raise UsageError(f"{group}{added[0]} is no setting; expected one of {', '.join(known)}.")
    for name in known:
        if OmegaConf.is_dict(node[name]):
            _refuse_additions(f"{group}{name}.", node[name])


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


def _calibrate(settings: Settings, pair: ModelPair) -> Any:
    from kvbridge.calibration import CalibrationMoments, calibrate

    if settings.moments is not None:
        moments = CalibrationMoments.load(settings.moments / "moments.safetensors")
        moments.require_pair(pair)
        moments.require(settings.mapper.blocks())
        return moments
    return calibrate(pair, settings.calibration, settings.mapper.blocks(), settings.calibration_folder)


def _fit(settings: Settings, pair: ModelPair, moments: Any) -> Bridge:
    fitted = settings.mapper.fit(moments, pair.source.geometry, pair.target.geometry)
    identity = moments.info["identity"]
    bridge = Bridge(
        keys=fitted.keys,
        values=fitted.values,
        identity=pair.identity(),
        pair=pair.describe(),
        mapper={"name": settings.mapper.name} | dataclasses.asdict(settings.mapper),
        calibration={
            "fingerprint": digest(identity),
            "rows": moments.sets["fit", "rest"].rows + moments.sets["fit", "first"].rows,
            "identity": identity,
            "seconds": moments.info.get("seconds"),
            "tokens_per_second": moments.info.get("tokens_per_second"),
            "peak_memory_bytes": moments.info.get("peak_memory_bytes"),
        },
        evidence=fitted.evidence(),
    )
    bridge.save_pretrained(settings.out / "bridge")
    return bridge


def _prepare(settings: Settings, pair: ModelPair) -> tuple[Any, dict[str, Any]]:
    """What will be scored, after everything that can be checked before a long run."""
    from kvbridge.eval import suite

    task = suite.Task.of(pair, settings.plan, settings.eval, settings.out)
    return task, suite.prepare(task)


def _evaluate(
    settings: Settings,
    bridge: Bridge,
    prepared: tuple[Any, dict[str, Any]],
    location: Path | None,
    seconds: dict[str, float],
) -> None:
    """Score a bridge on what `_prepare` gave, and write results and report."""
    from kvbridge.eval import build_results, suite, write_results
    from kvbridge.eval.report import write_report
    from kvbridge.eval.results import describe_run
    from kvbridge.kernels import FormMap

    task, parts = prepared
    subject = suite.Subject(task, bridge, FormMap.of(bridge))
    measured = suite.measure(subject, parts, seconds)
    plan = parts["documents"][0].plan(settings.plan)
    run = describe_run(task.pair, settings.plain, seconds)
    results = build_results(task.pair, bridge, subject.mapping, plan, settings.eval, measured, run)
    results["cost"]["artifact_bytes"] = bridge_bytes(location) if location else None
    results["cost"]["calibration_seconds"] = bridge.calibration.get("seconds")
    results["cost"]["calibration_peak_memory_bytes"] = bridge.calibration.get("peak_memory_bytes")
    write_results(settings.out / "results.json", results)
    suite.clear_partials(settings.out)
    print_results(results)
    page, _ = write_report(settings.out)
    print(f"report: {page}")


def run_command(config: DictConfig) -> None:
    """Calibrate, fit and evaluate."""
    settings, seconds = Settings.of(config), {}
    settings.refuse("bridge")
    pair = settings.pair.load()
    prepared = _prepare(settings, pair)
    with _timed(seconds, "calibrate"):
        moments = _calibrate(settings, pair)
    if moments is None:
        return
    with _timed(seconds, "fit"):
        bridge = _fit(settings, pair, moments)
    del moments
    _evaluate(settings, bridge, prepared, settings.out / "bridge", seconds)


def calibrate_command(config: DictConfig) -> None:
    """Collect the moments that the mapper asks for."""
    settings = Settings.of(config)
    settings.refuse("bridge")
    moments = _calibrate(settings, settings.pair.load())
    if moments is not None:
        rows = {"/".join(key): part.rows for key, part in moments.sets.items()}
        print(f"{settings.calibration_folder / 'moments.safetensors'}: rows {rows}")


def fit_command(config: DictConfig) -> None:
    """Fit a map on finished moments."""
    settings = Settings.of(config)
    settings.refuse("bridge")
    moments = settings.calibration_folder / "moments.safetensors"
    if not moments.is_file():
        raise UsageError(f"{moments}: no moments there; run `kvbridge calibrate` first, or give moments=DIR.")
    pair = settings.pair.load()
    reused = dataclasses.replace(settings, moments=settings.calibration_folder)
    bridge = _fit(reused, pair, _calibrate(reused, pair))
    print(f"{settings.out / 'bridge'}: {bridge.parameters():,} numbers")


def _bridge_location(settings: Settings) -> str:
    """Where the bridge is that a command reads: what `bridge=` says, else that of the run in `out`.

    Raises:
        UsageError: neither is there.
    """
    if settings.bridge:
        return settings.bridge
    if not (settings.out / "bridge").is_dir():
        raise UsageError(f"{settings.out / 'bridge'}: no bridge there; give bridge=DIR, or out= of a finished run.")
    return str(settings.out / "bridge")


def eval_command(config: DictConfig) -> None:
    """Score a finished bridge."""
    settings = Settings.of(config)
    settings.refuse("moments")
    location = _bridge_location(settings)
    settings.plain["bridge"] = location
    unchecked = Bridge.from_pretrained(location)
    pair = settings.pair.load()
    unchecked.require_pair(pair)
    folder = Path(location).expanduser()
    _evaluate(settings, unchecked, _prepare(settings, pair), folder if folder.is_dir() else None, {})


def inspect_command(config: DictConfig) -> None:
    """Print what a bridge is made of."""
    from kvbridge.cli.describe import print_bridge

    settings = Settings.of(config)
    location = _bridge_location(settings)
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
