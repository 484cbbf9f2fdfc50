"""Settings of a calibration, and what decides whether two calibrations are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbridge.calibration.corpus import Corpus, CorpusConfig
from kvbridge.calibration.products import MomentBlock, missing_products
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.pair import Pair, pair_identity

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
PAIRINGS = ("same", "shuffled")


@dataclass
class CalibrationConfig(CorpusConfig):
    """What text is streamed through the pair, and how.

    Attributes:
        tokens: tokens in the fit split; the held-out split comes on top.
        block: tokens per block; one block per document before any gives a second.
        held_out: size of the held-out split as a share of the fit split.
        seed: of the order of documents.
        skip: documents at the beginning of that order which are left out, such as those of an earlier calibration.
        batch: blocks per forward pass.
        precision: of the products within one batch (`float64`, `float32`, or `bfloat16`, which rounds their factors and
            sums in fp32: faster on some CPUs with bf16 products); sums over batches are always fp64.
        checkpoint_seconds: time between checkpoints.
        pairing: `same` reads each block with both models; `shuffled`, a control, gives the target another block, of
            another document where each gives one, so that nothing but averages can be learned.
        stage: leave the states of each model, read alone, on disk before they are summed: `true` for the folder
            `staged` beside the moments, or a folder.
        keep_staged: keep them afterwards, for other mappers' moments of the same text.
        memory_gb: memory for the sums of staged states, in 10⁹ bytes; they are summed in passes over target layers
            where they take more. No limit by default.
        sketch: how many leading principal directions of each source layer, keys and values together, stand for it in
            the products; none by default. It needs staged states.
        add: folder of finished moments of other documents of the same text, whose sums are added at the end; none of
            their documents is drawn again.
        shard: `i/n` collects the i-th of n parts only; without it complete shards are merged, or all is collected.
    """

    tokens: int = 122_880
    block: int = 512
    held_out: float = 0.1
    seed: int = 0
    skip: int = 0
    batch: int = 1
    precision: str = "float32"
    checkpoint_seconds: float = 120.0
    pairing: str = "same"
    stage: bool | str = False
    keep_staged: bool = False
    memory_gb: float | None = None
    sketch: int | None = None
    add: str | None = None
    shard: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"calibration.precision={self.precision}: expected one of {', '.join(PRECISIONS)}.")
        if self.pairing not in PAIRINGS:
            raise UsageError(f"calibration.pairing={self.pairing}: expected one of {', '.join(PAIRINGS)}.")
        for option in ("seed", "skip"):
            if getattr(self, option) < 0:
                raise UsageError(f"calibration.{option}={getattr(self, option)}: expected 0 or more.")
        if self.memory_gb is not None and not (self.stage and self.memory_gb > 0):
            raise UsageError(
                f"calibration.memory_gb={self.memory_gb:g}: expected more than 0, and states that are staged; add "
                "calibration.stage=true."
            )
        if self.sketch is not None and not (self.stage and self.sketch > 0 and self.shard is None):
            raise UsageError(
                f"calibration.sketch={self.sketch}: expected 1 or more, and all states staged in one place; add "
                "calibration.stage=true and leave out calibration.shard."
            )
        if self.add is not None and self.sketch is not None:
            raise UsageError(
                "calibration.add and calibration.sketch: products with a sketch cannot be added to others."
            )
        if self.keep_staged and not self.stage:
            raise UsageError("calibration.keep_staged=true keeps staged states; add calibration.stage=true.")
        if self.batch < 1:
            raise UsageError(f"calibration.batch={self.batch}: expected 1 or more blocks per forward pass.")


def identity(pair: Pair, corpus: Corpus, config: CalibrationConfig, blocks: Iterable[MomentBlock]) -> dict[str, Any]:
    """All that decides the values of moments, without those that they are added to.

    Two runs may share moments if these are equal.
    """
    optional = {"calibration.sketch": config.sketch, "calibration.skip": config.skip or None}
    settings = ("text_field", "tokens", "block", "held_out", "seed", "batch", "precision", "pairing")
    return {key: value for key, value in optional.items() if value is not None} | {
        **{f"pair.{part}": value for part, value in pair_identity(pair).items()},
        "pair.dtype": f"{pair.dtype('source')}/{pair.dtype('target')}",
        "calibration.corpus": corpus.fingerprint,
        **{f"calibration.{name}": getattr(config, name) for name in settings},
        "moment blocks": sorted(f"{a}×{b}" for a, b in blocks),
    }


def _pairs(texts: Iterable[str]) -> list[MomentBlock]:
    return [(a, b) for a, _, b in (text.partition("×") for text in texts)]


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two identities differ in, but for the moment blocks: mappers ask for different ones of one text."""
    return [key for key in {**one, **other} if key != "moment blocks" and one.get(key) != other.get(key)]


def require_same(stored: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse to go on from, merge or reuse moments of other settings; more or wider moment blocks are fine.

    Raises:
        CalibrationError: naming the first setting that differs.
    """
    for key in (*wanted, *(stored.keys() - wanted.keys())):
        value = wanted.get(key)
        enough = key == "moment blocks" and not missing_products(_pairs(value or ()), _pairs(stored.get(key, ())), {})
        if stored.get(key) != value and not enough:
            raise CalibrationError(
                f"{path} was collected with {key} = {stored.get(key)} and cannot be resumed with {value}; "
                "use the same settings, another out=, or delete it."
            )
