"""A finished run on Weights & Biases: optional, after everything is on disk, and never the reason that a run fails."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbridge.errors import UsageError
from kvbridge.eval.fidelity import METRICS

MODES = ("online", "offline", "disabled")
SECONDS_TO_LOG_IN = 30


@dataclass
class WandbConfig:
    """Where a run is tracked.

    Attributes:
        project: of Weights & Biases.
        mode: `online` uploads (needs an account), `offline` writes a folder for `wandb sync`, `disabled` does nothing.
        name: of the run; that of its folder by default.
        tags: of the run.
    """

    project: str = "kvbridge"
    mode: str = "offline"
    name: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"logger.mode={self.mode}: expected one of {', '.join(MODES)}.")

    def require(self) -> None:
        """Refuse before a long run what could not be tracked after it.

        Raises:
            UsageError: the package is missing.
        """
        if importlib.util.find_spec("wandb") is None:
            raise UsageError("logger=wandb needs a package: pip install wandb, or leave logger=wandb out.")


def headline(results: dict[str, Any]) -> dict[str, float]:
    """The figures of the map under test that are worth a curve over runs, without those that could not be had."""
    arm, cost = results["arms"]["mapped"], results["cost"]
    found = {name: arm.get(name, {}).get("mean") for name in ("gap_recovered", *METRICS)}
    found |= {name: cost[name] for name in ("target_prefill_flops_share", "warm_ttft_s", "cold_ttft_s")}
    return {name: value for name, value in found.items() if value is not None}


def _settings(wandb: Any) -> Any:
    # Nothing of this machine goes along: no environment, host, console, code or git state.
    return wandb.Settings(
        silent=True,
        console="off",
        host="-",
        username="-",
        email="-",
        save_code=False,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        login_timeout=SECONDS_TO_LOG_IN,
    )


def _log(wandb: Any, config: WandbConfig, results: dict[str, Any], bridge: Path | None, folder: Path) -> None:
    run = wandb.init(
        project=config.project,
        mode=config.mode,
        name=config.name or folder.name,
        tags=config.tags,
        dir=str(folder),
        config=results["run"]["settings"] | {"seeds": results["run"]["seeds"], "pair": results["pair"]},
        settings=_settings(wandb),
    )
    try:
        names = ("gap_recovered", *METRICS)
        rows = [[arm, *(found.get(name, {}).get("mean") for name in names)] for arm, found in results["arms"].items()]
        run.log(headline(results) | {"arms": wandb.Table(columns=["arm", *names], data=rows)})
        if bridge is not None:
            artifact = wandb.Artifact(f"bridge-{results['calibration']['fingerprint']}", type="bridge")
            artifact.add_dir(str(bridge))
            run.log_artifact(artifact)
    finally:
        run.finish()


def track(config: WandbConfig, results: dict[str, Any], bridge: Path | None, folder: Path) -> None:
    """Log a finished run: headline metrics, the table of arms and the bridge's folder.

    Args:
        config: where to.
        results: what `results.json` holds.
        bridge: folder of the bridge; `None` for one on the hub.
        folder: of the run.

    A failure is one sentence on stderr: the run itself is finished and on disk.
    """
    try:
        _log(importlib.import_module("wandb"), config, results, bridge, folder)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"kvbridge: warning: the run is finished but was not tracked by wandb ({reason}).", file=sys.stderr)
