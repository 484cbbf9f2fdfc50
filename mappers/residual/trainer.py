"""The training loop: stages of steps, looks at the dev KL, early stopping, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from kvbridge.errors import TrainingError, UsageError
from kvbridge.mappers.residual.losses import LOSSES, Loss
from kvbridge.mappers.residual.mapping import AdaptedMap
from kvbridge.mappers.residual.progress import Checkpoint, write_curve
from kvbridge.mappers.residual.readings import ReadingStore
from kvbridge.mappers.residual.schedule import Schedule, rate
from kvbridge.mappers.residual.suffixes import frozen
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.processes import process_state, summed

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps on one loss.

    Attributes:
        loss: its name.
        steps: at most.
        setting: of the peak of Adam's rate.
        unfrozen: whether the weights of the map are trained too.
    """

    loss: str
    steps: int
    setting: str = "learning_rate"
    unfrozen: bool = False

    @property
    def name(self) -> str:
        """In the curve."""
        return f"{self.loss}, map unfrozen" if self.unfrozen else self.loss


def stages_of(config: ResidualConfig) -> list[Stage]:
    """The stages that the settings ask for."""
    possible = (
        Stage("attention", config.attention_steps, "attention_rate"),
        Stage(config.loss, config.steps),
        Stage("on_policy", config.on_policy_steps),
        Stage(config.loss, config.unfreeze_steps, "unfreeze_rate", unfrozen=True),
    )
    return [stage for stage in possible if stage.steps]


class Trainer:
    """One training of one branch.

    Attributes:
        mapping: the map and the branch.
        checkpoint: where it stands.
    """

    def __init__(
        self,
        mapping: AdaptedMap,
        store: ReadingStore,
        training: Int[Tensor, "N T"],
        dev: Int[Tensor, "M T"],
        config: ResidualConfig,
        folder: Path,
    ) -> None:
        """Prepare a training, or the rest of one that was killed.

        Args:
            mapping: map and branch, with the weights that training starts from.
            store: for the readings of all documents.
            training: documents to learn from.
            dev: documents on which the KL is watched.
            config: how long and how fast.
            folder: of the checkpoint and the curve; of this training alone.

        Raises:
            CalibrationError: the checkpoint is damaged.
            UsageError: the processes cannot share a step's batches evenly, or a suffix does not fit a document.
        """
        self.mapping, self.store, self.training, self.dev = mapping, store, training, dev
        self.config, self.folder, self.stages = config, folder, stages_of(config)
        self.schedule = Schedule(config, len(training), training.shape[1], mapping.plan.sinks)
        self.state = process_state()
        if config.accumulate % self.state.num_processes:
            raise UsageError(
                f"mapper.residual.accumulate={config.accumulate}: {self.state.num_processes} processes share the "
                "batches of a step; give a multiple of their number."
            )
        self.checkpoint = Checkpoint(folder / CHECKPOINT, mapping.parameters())
        if self._stage().unfrozen:
            self._begin_stage()
        self.checkpoint.resume()
        # The main process replaces the file as soon as it goes on.
        self.state.wait_for_everyone()
        self.saved = time.monotonic()

    def _stage(self) -> Stage:
        """The stage that runs, or the last one when all are done."""
        return self.stages[min(self.checkpoint.progress.stage, len(self.stages) - 1)]

    def _begin_stage(self) -> None:
        """Train what the stage that runs does, from where it is, with a fresh Adam."""
        if self._stage().unfrozen:
            self.mapping = self.mapping.with_unfrozen()
        self.checkpoint.begin(self.mapping.parameters())

    def run(self) -> float:
        """Read what is missing, train to the end and leave the best weights in the mapping.

        Returns:
            Their KL on the dev documents.

        Raises:
            TrainingError: the loss is not finite; the best weights are in the checkpoint.
            UnsupportedModelError: the target does not show its attention, or its logits are not one linear map.
            UsageError: the readings do not fit the disk.
        """
        progress, documents = self.checkpoint.progress, torch.cat((self.dev, self.training))
        if progress.stage < len(self.stages):
            self.store.prepare(documents)
            self._train()
        self.checkpoint.restore_best()
        if self.state.is_main_process and not self.config.keep_readings:
            self.store.remove(documents)
        return progress.best_kl

    def _train(self) -> None:
        """The rest of all stages."""
        progress, total = self.checkpoint.progress, sum(stage.steps for stage in self.stages)
        self.folder.mkdir(parents=True, exist_ok=True)
        hidden = not self.state.is_main_process
        bar = tqdm(total=total, initial=self._done(), unit="step", desc="residual", disable=hidden)
        with frozen(self.mapping.target), bar:
            if not progress.curve:
                self._look(bar)
            while progress.stage < len(self.stages):
                self._run_stage(bar)
                self.checkpoint.restore_best()
                progress.stage, progress.step, progress.waited, progress.losses = progress.stage + 1, 0, 0, []
                self._begin_stage()
                self._save()

    def _done(self) -> int:
        progress = self.checkpoint.progress
        return sum(stage.steps for stage in self.stages[: progress.stage]) + progress.step

    def _run_stage(self, bar: tqdm) -> None:
        """The rest of the stage that runs."""
        progress, stage = self.checkpoint.progress, self._stage()
        while progress.step < stage.steps and progress.waited < self.config.patience:
            started = time.monotonic()
            loss = self._step(stage)
            progress.seconds += time.monotonic() - started
            progress.step += 1
            progress.losses.append(loss)
            bar.update()
            bar.set_postfix({stage.name: f"{loss:.4f}", "best dev KL": f"{progress.best_kl:.4f}"})
            if progress.step % self.config.evaluate_every == 0 or progress.step == stage.steps:
                self._look(bar)
            elif time.monotonic() - self.saved > self.config.checkpoint_seconds:
                self._save()

    def _step(self, stage: Stage) -> float:
        """One step of Adam; returns the mean loss of its batches over all processes."""
        progress, loss = self.checkpoint.progress, LOSSES[stage.loss]
        batches = self.schedule.batches(progress.stage, progress.step)
        mine = batches[self.state.process_index :: self.state.num_processes]
        optimizer, parameters = self.checkpoint.optimizer, list(self.checkpoint.parameters.values())
        optimizer.zero_grad(set_to_none=True)
        lost = torch.zeros((), device=self.mapping.target.device)
        for batch in mine:
            found = self._loss(loss, self.training[batch.documents], batch.starts) / len(batches)
            found.backward()
            lost += found.detach()
        value = float(summed(lost))
        for parameter in parameters:
            # A process without a batch of its own adds nothing.
            parameter.grad = summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        self._require_finite(value)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip)
        self._require_finite(float(norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(progress.step, stage.steps, self.config.warmup, self._peak(stage))
        optimizer.step()
        return value

    def _peak(self, stage: Stage) -> float:
        return getattr(self.config, stage.setting)

    def _loss(self, loss: Loss, documents: Int[Tensor, "B T"], starts: Sequence[int]) -> Tensor:
        return loss(self.mapping, self.store.load(list(documents)), starts, self.config.suffix)

    def _require_finite(self, value: float) -> None:
        progress, stage = self.checkpoint.progress, self._stage()
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss or its gradient is {value} at step {progress.step} of stage {progress.stage + 1}; the best "
                f"weights so far (KL {progress.best_kl:.4f} on dev documents) are in {self.checkpoint.path}; give a "
                f"smaller mapper.residual.{stage.setting} than {self._peak(stage):g}."
            )

    def dev_kl(self) -> float:
        """Mean KL on the dev documents, at fixed hand-offs; every process looks at a share of them."""
        starts, total = self.schedule.looks(), torch.zeros((), device=self.mapping.target.device)
        shares = self.dev.split(self.config.batch)[self.state.process_index :: self.state.num_processes]
        with torch.no_grad():
            for part in shares:
                total += len(part) * self._loss(LOSSES["kl"], part, starts)
        return float(summed(total)) / len(self.dev)

    def _look(self, bar: tqdm) -> None:
        """Measure the dev KL, keep the best weights, and save everything."""
        progress = self.checkpoint.progress
        kl = self.dev_kl()
        self.checkpoint.keep_best(kl)
        losses = progress.losses
        look = {
            "stage": progress.stage,
            "step": progress.step,
            "total": self._done(),
            "loss": sum(losses) / len(losses) if losses else None,
            "dev_kl": kl,
            "seconds": progress.seconds,
        }
        progress.curve.append(look)
        progress.losses = []
        bar.set_postfix({"dev KL": f"{kl:.4f}", "best": f"{progress.best_kl:.4f}"})
        self._save()
        if self.state.is_main_process:
            write_curve(self.folder, progress.curve, [stage.name for stage in self.stages])

    def _save(self) -> None:
        if self.state.is_main_process:
            self.checkpoint.save()
        self.saved = time.monotonic()
