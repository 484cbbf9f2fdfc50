"""Where a training stands: weights, optimiser, best weights so far and the curve, in one file that replaces itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors import SafetensorError
from torch import Tensor

from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.mappers.residual.module import ResidualModule

MOMENTUM = ("step", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """A training's counters and curve.

    Attributes:
        stage: number of the stage that runs.
        step: steps done in it.
        best_kl: lowest KL seen on dev documents.
        waited: looks since then, in this stage.
        losses: of the steps since the last look.
        seconds: spent in steps, over all runs.
        curve: one entry a look: stage, step, mean training loss, dev KL, rate, seconds.
    """

    stage: int = 0
    step: int = 0
    best_kl: float = float("inf")
    waited: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoint:
    """All that a training goes on from.

    Attributes:
        path: the file.
        module: the branch.
        optimizer: Adam over its parameters.
        best: its parameters where the dev KL was lowest.
        progress: counters and curve.
    """

    path: Path
    module: ResidualModule
    optimizer: torch.optim.Optimizer
    best: dict[str, Tensor]
    progress: Progress

    def save(self) -> None:
        """Replace the file."""
        tensors = {f"now/{name}": value.detach().cpu() for name, value in self.module.named_parameters()}
        tensors |= {f"best/{name}": value.cpu() for name, value in self.best.items()}
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"adam/{name}/{part}": state[part].cpu() for part in MOMENTUM if part in state}
        write_tensors(self.path, tensors, {"progress": asdict(self.progress)})

    def resume(self) -> bool:
        """Go on from the file, if there is one.

        Raises:
            CalibrationError: it is damaged.
        """
        if not self.path.exists():
            return False
        try:
            file = TensorFile(self.path)
            self.progress = Progress(**file.described("progress"))
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(file.read(f"now/{name}"))
                    self.best[name] = file.read(f"best/{name}").clone().to(parameter.device)
                    held = [part for part in MOMENTUM if f"adam/{name}/{part}" in file.shapes]
                    if held:
                        read = {part: file.read(f"adam/{name}/{part}").clone() for part in held}
                        moved = {
                            part: value if part == "step" else value.to(parameter.device)
                            for part, value in read.items()
                        }
                        self.optimizer.state[parameter] = moved
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(self.path, error) from error
        return True

    def keep_best(self, kl: float) -> None:
        """Note a look at the dev documents."""
        if kl < self.progress.best_kl:
            self.progress.best_kl, self.progress.waited = kl, 0
            self.best = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        else:
            self.progress.waited += 1

    def restore_best(self) -> None:
        """Put the best weights back."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.best[name])


def write_curve(folder: Path, curve: list[dict[str, Any]], stages: list[str]) -> None:
    """Leave `curve.json` and `curve.png`: dev KL and training loss over the steps of all stages."""
    partial = folder / f"curve.json.{os.getpid()}.partial"
    partial.write_text(json.dumps({"stages": stages, "looks": curve}, indent=1) + "\n")
    os.replace(partial, folder / "curve.json")
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [look["total"] for look in curve]
    axes.plot(steps, [look["dev_kl"] for look in curve], marker="o", markersize=3, label="KL on dev documents, nats")
    for number, name in enumerate(stages):
        looks = [look for look in curve if look["stage"] == number and look["loss"] is not None]
        if looks:
            axes.plot(
                [look["total"] for look in looks],
                [look["loss"] for look in looks],
                "--",
                label=f"training loss, {name}",
            )
    axes.set_xlabel("step")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "curve.png", dpi=120)
