"""Which documents a branch is trained on, and on which its KL is watched: text that the moments have not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration import CalibrationConfig, CalibrationMoments
from kvbridge.calibration.blocks import SPLITS, draw_blocks, first_blocks
from kvbridge.errors import CalibrationError, CorpusError
from kvbridge.mappers.residual_config import ResidualConfig


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Blocks of tokens, each of another document.

    Attributes:
        training: what the branch learns from.
        dev: fresh text on which the KL is watched.
    """

    training: Int[Tensor, "N T"]
    dev: Int[Tensor, "M T"]


def calibration_of(moments: CalibrationMoments, corpus: str, **more: Any) -> CalibrationConfig:
    """The settings that decide which documents moments were collected from.

    Args:
        moments: whose documents count as seen.
        corpus: the text that they were drawn from.
        more: other settings of how the text is read.

    Raises:
        CalibrationError: the moments were collected from another text.
    """
    known = moments.info["identity"]
    decided = {name: known[f"calibration.{name}"] for name in ("tokens", "block", "held_out", "seed", "text_field")}
    config = CalibrationConfig(corpus=corpus, **decided, **more)
    found = config.open("calibration").fingerprint
    if found != known["calibration.corpus"]:
        raise CalibrationError(
            f"the moments were collected from a corpus with fingerprint {known['calibration.corpus']}, and {corpus} "
            f"has {found}; give the same text, so that what they have not seen is known."
        )
    return config


def training_text(
    calibration: CalibrationConfig, config: ResidualConfig, tokenizer: PreTrainedTokenizerBase
) -> TrainingText:
    """Draw the text of one training, in the seeded order of the calibration's own documents.

    Args:
        calibration: settings of the map's moments, whose documents count as seen.
        config: how many documents are wanted; with `fresh=false` those of training are the moments' own.
        tokenizer: the pair's.

    Raises:
        CorpusError: the corpus has too few documents.
    """
    corpus, block = calibration.open("calibration"), config.block or calibration.block
    drawn = draw_blocks(
        corpus, tokenizer, tokens=calibration.tokens, block=calibration.block, held_out=calibration.held_out,
        seed=calibration.seed,
    )  # fmt: skip
    # A document is known by how it begins, whatever the length of its blocks.
    common = min(block, calibration.block)
    split = {row[:common].tobytes(): part for row, part in zip(drawn.tokens, drawn.split, strict=True)}
    fresh: list[list[int]] = []
    seen: list[list[int]] = []
    wanted = config.dev_documents + (config.documents if config.fresh else 0), 0 if config.fresh else config.documents
    for ids in first_blocks(corpus, tokenizer, block, calibration.seed):
        part = split.get(np.asarray(ids[:common], dtype=drawn.tokens.dtype).tobytes())
        if part is None and len(fresh) < wanted[0]:
            fresh.append(ids)
        elif part == SPLITS.index("fit") and len(seen) < wanted[1]:
            seen.append(ids)
    if len(fresh) < wanted[0] or (wanted[1] and not seen):
        raise CorpusError(
            f"corpus {corpus.name} has {len(fresh)} documents of {block} tokens that the moments have not seen, and "
            f"mapper.residual takes {wanted[0]}; give more text, fewer mapper.residual.documents or "
            "calibration.tokens, or a shorter mapper.residual.block."
        )
    dev = torch.tensor(fresh[: config.dev_documents])
    return TrainingText(torch.tensor(fresh[config.dev_documents :] if config.fresh else seen), dev)
