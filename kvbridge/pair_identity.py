"""What is known of a pair one model at a time, and by what others recognise it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedTokenizerBase

from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.fingerprint import digest
from kvbridge.flops import ModelCost
from kvbridge.geometry import KVGeometry
from kvbridge.model import KVModel

ROLES = ("source", "target")


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What stays known of a loaded model when it is let go.

    Attributes:
        name: folder or hub id it came from.
        revision: hub revision, where there is one.
        fingerprint: digest of its weights.
        dtype: what it computes in.
        geometry: shape of its KV cache.
        interleaved_rotary: whether rotary pairs are neighbours, as in GPT-J, and not halves of a head.
        cost: its operation counts.
    """

    name: str
    revision: str | None
    fingerprint: str
    dtype: torch.dtype
    geometry: KVGeometry
    interleaved_rotary: bool
    cost: ModelCost

    @classmethod
    def of(cls, model: KVModel) -> ModelRecord:
        return cls(
            model.name,
            model.revision,
            model.fingerprint,
            model.dtype,
            model.geometry,
            model.rotary.interleaved,
            ModelCost.of(model),
        )


@runtime_checkable
class Pair(Protocol):
    """What can be known of a pair one model at a time; each role is `source` or `target`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    def geometry(self, role: str) -> KVGeometry:
        """Shape of a model's KV cache."""
        ...

    def dtype(self, role: str) -> torch.dtype:
        """What a model computes in."""
        ...

    def record(self, role: str) -> ModelRecord:
        """What stays known of a model."""
        ...

    def load(self, role: str) -> KVModel:
        """A model, ready to be run."""
        ...


def pair_identity(pair: Pair) -> dict[str, str]:
    """The fingerprints by which a bridge or moments recognise their pair."""
    models = {
        name: value
        for role in ROLES
        for name, value in (
            (role, pair.record(role).fingerprint),
            (f"{role} geometry", digest(pair.geometry(role).to_dict())),
        )
    }
    return models | {"tokenizer": pair.tokenizer_fingerprint}


def require_identity(pair: Pair, identity: dict[str, str], what: str) -> None:
    """Refuse something that was made for another pair.

    Raises:
        PairMismatchError: naming both fingerprints of each part that differs.
    """
    mine = pair_identity(pair)
    differing = [
        f"{part} {identity.get(part, 'missing')} where this pair has {mine[part]}"
        for part in mine
        if identity.get(part) != mine[part]
    ]
    if differing:
        raise PairMismatchError(
            f"{what} was made for another pair: {'; '.join(differing)}. "
            "Load the pair it names, or calibrate and fit anew."
        )


def require_length(pair: Pair, tokens: int, setting: str) -> None:
    """Refuse sequences that one of the models was not made for.

    Raises:
        UsageError: naming the setting that asks for them.
    """
    longest = min(pair.geometry(role).max_positions for role in ROLES)
    if tokens > longest:
        raise UsageError(f"{setting}={tokens}: this pair was made for up to {longest} tokens; give fewer.")
