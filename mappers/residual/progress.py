"""Where a training stands: weights, optimiser, best weights so far and the curve, in one file that replaces itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors import SafetensorError
from torch import nn

from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.disk import replacing, write_whole

START_ANEW = "and the training starts anew"
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

    @property
    def improved(self) -> bool:
        """Whether a look was better than the first."""
        return bool(self.curve) and self.best_kl < self.curve[0]["dev_kl"]


class Checkpoint:
    """All that a training goes on from.

    Attributes:
        path: the file.
        parameters: what the stage that runs trains, by name.
        optimizer: Adam over it.
        best: its numbers where the dev KL was lowest.
        progress: counters and curve.
    """

    def __init__(self, path: Path, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read where the training stands, if it has begun.

        Args:
            path: the file.
            parameters: what the first stage trains.

        Raises:
            CalibrationError: the file is damaged.
        """
        self.path, self.progress = path, Progress()
        self.begin(parameters)
        if path.exists():
            with self._reading() as file:
                self.progress = Progress(**file.described("progress"))

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start a stage: all of `parameters` are as good as they were."""
        self.parameters = dict(parameters)
        self.optimizer = torch.optim.Adam(self.parameters.values())
        self.best = {name: value.detach().clone() for name, value in self.parameters.items()}

    @contextmanager
    def _reading(self) -> Iterator[TensorFile]:
        try:
            yield TensorFile(self.path, START_ANEW)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(self.path, error, START_ANEW) from error

    def save(self) -> None:
        """Replace the file."""
        tensors = {f"now/{name}": value.detach().cpu() for name, value in self.parameters.items()}
        tensors |= {f"best/{name}": value.cpu() for name, value in self.best.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"adam/{name}/{part}": state[part].cpu() for part in MOMENTUM if part in state}
        write_tensors(self.path, tensors, {"progress": asdict(self.progress)})

    def resume(self) -> None:
        """Go on from the numbers in the file, which hold what the stage that runs trains, if there is one.

        Raises:
            CalibrationError: it is damaged.
        """
        if not self.path.exists():
            return
        with self._reading() as file, torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(file.read(f"now/{name}"))
                self.best[name] = file.read(f"best/{name}").clone().to(parameter.device)
                held = [part for part in MOMENTUM if f"adam/{name}/{part}" in file.shapes]
                if held:
                    read = {part: file.read(f"adam/{name}/{part}").clone() for part in held}
                    self.optimizer.state[parameter] = {
                        part: value if part == "step" else value.to(parameter.device) for part, value in read.items()
                    }

    def keep_best(self, kl: float) -> None:
        """Note a look at the dev documents."""
        if kl < self.progress.best_kl:
            self.progress.best_kl, self.progress.waited = kl, 0
            with torch.no_grad():
                for name, value in self.parameters.items():
                    self.best[name].copy_(value)
        else:
            self.progress.waited += 1

    def restore_best(self) -> None:
        """Put the best weights back."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.best[name])


def write_curve(folder: Path, curve: list[dict[str, Any]], stages: list[str]) -> None:
    """Leave `curve.json` and `curve.png`: dev KL and training loss over the steps of all stages."""
    write_whole(folder / "curve.json", json.dumps({"stages": stages, "looks": curve}, indent=1) + "\n")
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
    with replacing(folder / "curve.png") as partial:
        figure.savefig(partial, dpi=120, format="png")
