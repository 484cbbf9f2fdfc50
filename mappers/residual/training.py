"""Train the residual branch of a fitted map."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from kvbridge.calibration import CalibrationMoments, CorpusConfig
from kvbridge.fingerprint import digest
from kvbridge.forms import Form, needed_native_head
from kvbridge.kernels import FormMap
from kvbridge.layout import moved
from kvbridge.mappers.residual.documents import TrainingText, training_text
from kvbridge.mappers.residual.mapping import AdaptedMap, branch_inputs, branch_outputs, streams_read
from kvbridge.mappers.residual.module import ResidualModule
from kvbridge.mappers.residual.readings import ReadingStore
from kvbridge.mappers.residual.trainer import CHECKPOINT, Trainer
from kvbridge.mappers.residual.units import units_of
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.processes import agreed, process_state


def training_plan(forms: tuple[Form, ...], plan: HandoffPlan) -> HandoffPlan:
    """What of a plan decides the hand-offs that are trained on, with the native head that the map reads.

    The length of the native tail does not: whatever the target reads over the carried tokens is one suffix.
    """
    heads = [head for head in (needed_native_head(forms), plan.native_head) if head is not None]
    head = max(heads, default=None)
    return HandoffPlan(sinks=plan.sinks, native_head=head, native_tail=1, tail_recompute=plan.tail_recompute)


def _fingerprint(forms: tuple[Form, ...]) -> str:
    hasher = hashlib.sha256()
    for form in forms:
        hasher.update(json.dumps([form.name, form.options()]).encode())
        for name, tensor in form.tensors().items():
            hasher.update(f"{name}{tuple(tensor.shape)}".encode())
            hasher.update(tensor.contiguous().cpu().float().numpy().tobytes())
    return hasher.hexdigest()[:16]


def _identity(
    pair: ModelPair, forms: tuple[Form, ...], text: TrainingText, config: ResidualConfig, plan: HandoffPlan
) -> str:
    """Digest of all that decides a training's outcome."""
    indifferent = ("checkpoint_seconds", "keep_readings")
    settings = {name: value for name, value in asdict(config).items() if name not in indifferent}
    documents = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in (text.training, text.dev)]
    return digest([pair.identity(), _fingerprint(forms), documents, settings, plan.to_dict()])


def prepare_training(
    pair: ModelPair,
    forms: tuple[Form, ...],
    moments: CalibrationMoments,
    text: TrainingText,
    config: ResidualConfig,
    folder: Path,
    plan: HandoffPlan,
) -> Trainer:
    """A trainer whose branch adds nothing yet, or is where a killed training left it.

    Args:
        pair: source and target.
        forms: of the map.
        moments: that it was fitted on, which give the units.
        text: documents.
        config: settings.
        folder: for readings, checkpoints and curves; several trainings may share it.
        plan: of the hand-offs.

    Raises:
        CacheError: the map does not make what the plan maps.
        CalibrationError: the moments lack something, or a file is damaged.
        UsageError: processes or suffixes that do not fit, or no kind of branch.
    """
    config.require_wanted()
    plan, target = training_plan(forms, plan), pair.target
    frozen_map = FormMap(moved(forms, device=target.device))
    frozen_map.require_plan(plan, target.geometry.layers)
    inputs, outputs = branch_inputs(forms, pair.source.geometry), branch_outputs(plan, target.geometry)
    units = units_of(moments, inputs, outputs, config.directions).to(target.device)
    module = ResidualModule(config.kind, config.rank, units, config.seed)
    mapping = AdaptedMap(target, plan, frozen_map, module, inputs, outputs)
    store = ReadingStore(pair, folder / "readings", streams_read(inputs), config.queries, plan.sinks)
    # Maps that were solved on several devices may differ in their last bits.
    place = folder / agreed(_identity(pair, forms, text, config, plan))
    return Trainer(mapping, store, text.training, text.dev, config, place)


def _announce(trainer: Trainer) -> None:
    """Say so where a training starts from nothing beside others, which may be meant to go on."""
    folder = trainer.folder
    others = [path.parent.name for path in folder.parent.glob(f"*/{CHECKPOINT}") if path.parent != folder]
    if others and not trainer.checkpoint.path.exists() and process_state().is_main_process:
        print(
            f"residual: {folder.parent} has trainings of other settings, maps or texts ({', '.join(sorted(others))}); "
            f"this one starts anew, in {folder.name}"
        )


def finish(trainer: Trainer) -> tuple[Form, ...] | None:
    """Run a training, or what a killed one has left of it.

    Returns:
        The map where the dev KL was lowest: its forms, as they were but for steps that unfreeze them, and the branch.
        `None` where no look was better than the first.

    Raises:
        TrainingError, UnsupportedModelError, UsageError: as `Trainer.run`.
    """
    _announce(trainer)
    trainer.run()
    return trainer.mapping.trained() if trainer.checkpoint.progress.improved else None


def train_residual(
    pair: ModelPair,
    forms: tuple[Form, ...],
    moments: CalibrationMoments,
    corpus: CorpusConfig,
    config: ResidualConfig,
    folder: Path,
    plan: HandoffPlan | None = None,
) -> tuple[Form, ...] | None:
    """Train what is to be added to a map; a killed training goes on where its last checkpoint was.

    Args:
        pair: source and target.
        forms: of the fitted map.
        moments: that it was fitted on.
        corpus: the text of these moments, of which what they have not seen is fresh.
        config: kind, rank and training of the branch.
        folder: for readings, checkpoints and curves.
        plan: of the hand-offs that are trained on; by default the plain one, with the native head that the map reads.

    Returns:
        The map as `finish` gives it; `None` where no look was better than the first, or no branch is wanted.

    Raises:
        CalibrationError, CorpusError, UnsupportedModelError, UsageError: settings, moments, text or models that
            cannot work.
        TrainingError: the loss is not finite.
    """
    if not config.wanted:
        return None
    text = training_text(moments, corpus, config, pair.tokenizer)
    return finish(prepare_training(pair, forms, moments, text, config, folder, plan or HandoffPlan()))
