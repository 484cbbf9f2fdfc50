"""Which documents a branch is trained on, and on which its KL is watched: text that the moments have not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration import CalibrationMoments, Corpus, CorpusConfig
from kvbridge.calibration.blocks import SPLITS, first_blocks, opening
from kvbridge.calibration.draw import Draw
from kvbridge.errors import CalibrationError, CorpusError, UsageError
from kvbridge.frame import user_turn
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


def _same_text(moments: CalibrationMoments, corpus: CorpusConfig) -> Corpus:
    """The text that moments were collected from.

    Raises:
        CalibrationError: another text is given.
    """
    known = moments.info["identity"]
    opened = replace(corpus, text_field=known["calibration.text_field"]).open("calibration")
    if opened.fingerprint != known["calibration.corpus"]:
        raise CalibrationError(
            f"the moments were collected from a corpus with fingerprint {known['calibration.corpus']}, and "
            f"{opened.name} has {opened.fingerprint}; give the same text, so that what they have not seen is known."
        )
    return opened


def training_text(
    moments: CalibrationMoments, corpus: CorpusConfig, config: ResidualConfig, tokenizer: PreTrainedTokenizerBase
) -> TrainingText:
    """Draw the text of one training, in the seeded order of the calibration's own documents.

    Args:
        moments: of the map, whose documents count as seen.
        corpus: the text that they were drawn from.
        config: how many documents are wanted; with `fresh=false` those of training are the moments' own.
        tokenizer: the pair's.

    Raises:
        CalibrationError: the moments were collected from another text.
        CorpusError: the corpus has too few documents.
        UsageError: a chat is wanted, and there is no template, or no room for a text in it.
    """
    text, draw = _same_text(moments, corpus), Draw.of(moments.info["identity"])
    block = config.block or draw.block
    # A document is known by how it begins, whatever the length of its blocks.
    common = min(block, draw.shortest)
    split = draw.splits(text, tokenizer, common)
    fresh: list[list[int]] = []
    seen: list[list[int]] = []
    wanted = config.dev_documents + (config.documents if config.fresh else 0), 0 if config.fresh else config.documents
    for ids in first_blocks(text, tokenizer, block, draw.seed):
        part = split.get(np.asarray(ids[:common], dtype=np.int32).tobytes())
        if part is None and len(fresh) < wanted[0]:
            fresh.append(ids)
        elif part == SPLITS.index("fit") and len(seen) < wanted[1]:
            seen.append(ids)
    if len(fresh) < wanted[0] or (wanted[1] and not seen):
        raise CorpusError(
            f"corpus {text.name} has {len(fresh)} documents of {block} tokens that the moments have not seen, and "
            f"mapper.residual takes {wanted[0]}; give more text, fewer mapper.residual.documents or "
            "calibration.tokens, or a shorter mapper.residual.block."
        )
    if config.chat:
        fresh, seen = (_as_user_turns(each, block, tokenizer) for each in (fresh, seen))
    dev = torch.tensor(fresh[: config.dev_documents])
    return TrainingText(torch.tensor(fresh[config.dev_documents :] if config.fresh else seen), dev)


def _as_user_turns(documents: list[list[int]], block: int, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Documents as what a user says, shortened so that they have as many tokens as before."""
    frame = user_turn(tokenizer, "", "mapper.residual.chat=true", "mapper.residual.chat=false")
    room, skipped = block - len(frame.before) - len(frame.after), len(opening(tokenizer))
    if room < 1:
        raise UsageError(
            f"mapper.residual.block={block}: the chat template alone takes {block - room} tokens; give a longer one."
        )
    return [[*frame.before, *ids[skipped : skipped + room], *frame.after] for ids in documents]
