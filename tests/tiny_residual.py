"""A joint map of the tiny pair, and what training a residual branch on it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbridge.calibration import CalibrationConfig, CalibrationMoments, calibrate
from kvbridge.forms import Form
from kvbridge.kernels import FormMap
from kvbridge.mappers import Joint
from kvbridge.mappers.residual import prepare_training, training_text
from kvbridge.mappers.residual.mapping import AdaptedMap, branch_inputs, branch_outputs
from kvbridge.mappers.residual.module import ResidualModule
from kvbridge.mappers.residual.readings import Readings, ReadingStore
from kvbridge.mappers.residual.trainer import Trainer
from kvbridge.mappers.residual.units import units_of
from kvbridge.mappers.residual_config import ResidualConfig
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from tiny_pair import tiny_pair, write_corpus

PLAN = HandoffPlan(sinks=4, native_head=0, native_tail=8)
CONFIG = ResidualConfig(
    kind="gelu", rank=6, steps=4, batch=2, accumulate=2, suffixes=2, suffix=8, queries=12, learning_rate=3e-3, warmup=1,
    directions=40, documents=6, dev_documents=2, evaluate_every=2,
)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """A tiny pair with a joint map, and what it was fitted on."""

    pair: ModelPair
    calibration: CalibrationConfig
    moments: CalibrationMoments
    forms: tuple[Form, ...]
    store: ReadingStore
    documents: Tensor

    def adapted(self, kind: str = "gelu", directions: int | None = 40, plan: HandoffPlan = PLAN) -> AdaptedMap:
        inputs = branch_inputs(self.forms, self.pair.source.geometry)
        outputs = branch_outputs(plan, self.pair.target.geometry)
        module = ResidualModule(kind, 6, units_of(self.moments, inputs, outputs, directions))
        return AdaptedMap(self.pair.target, plan, FormMap(self.forms), module, inputs, outputs)

    def readings(self) -> Readings:
        return self.store.load(list(self.documents))


def fit_tiny(folder: Path) -> Fitted:
    """Calibrate and fit in an empty folder, or fit again where it was done."""
    pair, corpus = tiny_pair(), folder / "text.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    calibration = CalibrationConfig(corpus=str(corpus), tokens=2048, block=64)
    mapper = Joint()
    moments = calibrate(pair, calibration, mapper.blocks(), folder)
    assert moments is not None
    forms = mapper.fit(moments, pair.source.geometry, pair.target.geometry).forms
    store = ReadingStore(pair, folder / "readings", (0,), 12, 4)
    documents = training_text(moments, calibration, CONFIG, pair.tokenizer).training[:2]
    store.prepare(documents)
    return Fitted(pair, calibration, moments, forms, store, documents)


def disturbed(mapping: AdaptedMap, size: float = 0.1) -> AdaptedMap:
    """The same map with a branch that adds something."""
    with torch.no_grad():
        for parameter in mapping.module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return mapping


def trainer(fitted: Fitted, folder: Path, **changed: Any) -> Trainer:
    config = replace(CONFIG, **changed)
    text = training_text(fitted.moments, fitted.calibration, config, fitted.pair.tokenizer)
    return prepare_training(fitted.pair, fitted.forms, fitted.moments, text, config, folder, PLAN)
