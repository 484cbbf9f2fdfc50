"""A source and a target that share one tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvbridge import embedded
from kvbridge.checkpoint import (
    DTYPES,
    check_location,
    config_geometry,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
)
from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.fingerprint import fingerprint_tokenizer
from kvbridge.geometry import KVGeometry
from kvbridge.model import KVModel, let_go
from kvbridge.pair_identity import ROLES, ModelRecord, Pair, pair_identity, require_identity, require_length

__all__ = [
    "EMBEDDED",
    "ROLES",
    "ModelPair",
    "ModelRecord",
    "Pair",
    "PairLoader",
    "describe_pair",
    "load_pair",
    "open_pair",
    "pair_identity",
    "require_identity",
    "require_length",
]

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class ModelPair:
    """One ordered (source, target) pair.

    Attributes:
        source: the model whose cache exists.
        target: the model that will use it.
        tokenizer: the target's tokenizer; the source's gives the same ids.
        tokenizer_fingerprint: digest of vocabulary, merges, special tokens and normaliser.
    """

    source: KVModel
    target: KVModel
    tokenizer: PreTrainedTokenizerBase
    tokenizer_fingerprint: str

    @classmethod
    def of(cls, pair: Pair) -> ModelPair:
        """The two models of a pair at once, loaded where they are not yet."""
        return cls(pair.load("source"), pair.load("target"), pair.tokenizer, pair.tokenizer_fingerprint)

    @property
    def max_positions(self) -> int:
        """Longest sequence that both models were made for, in tokens."""
        return min(self.source.geometry.max_positions, self.target.geometry.max_positions)

    def require_length(self, tokens: int, setting: str) -> None:
        """Refuse sequences that one of the models was not made for.

        Raises:
            UsageError: naming the setting that asks for them.
        """
        require_length(self, tokens, setting)

    def identity(self) -> dict[str, str]:
        """The fingerprints by which a bridge or moments recognise their pair."""
        return pair_identity(self)

    def load(self, role: str) -> KVModel:
        """One of the two models."""
        return self.source if role == "source" else self.target

    def geometry(self, role: str) -> KVGeometry:
        return self.load(role).geometry

    def dtype(self, role: str) -> torch.dtype:
        return self.load(role).dtype

    def record(self, role: str) -> ModelRecord:
        return ModelRecord.of(self.load(role))

    def describe(self) -> dict[str, Any]:
        """What results and artifacts record of the pair."""
        return describe_pair(self)

    def require(self, identity: dict[str, str], what: str) -> None:
        """Refuse something that was made for another pair.

        Raises:
            PairMismatchError: naming both fingerprints of each part that differs.
        """
        require_identity(self, identity, what)


def describe_pair(pair: Pair) -> dict[str, Any]:
    """What results and artifacts record of a pair."""
    described: dict[str, Any] = {"tokenizer": {"fingerprint": pair.tokenizer_fingerprint}}
    for role in ROLES:
        record = pair.record(role)
        described[role] = {
            "name": shown_name(record.name),
            "revision": record.revision,
            "fingerprint": record.fingerprint,
            "dtype": str(record.dtype).removeprefix("torch."),
            "geometry": record.geometry.to_dict(),
            "interleaved_rotary": record.interleaved_rotary,
        }
    return described


def shown_name(name: str) -> str:
    """A model's name without the path of the machine that it was loaded on."""
    location = Path(name)
    if location in (embedded.SOURCE, embedded.TARGET):
        return f"{EMBEDDED} {location.name}"
    return location.name if location.exists() else name


def located(source: str, target: str | None) -> tuple[str, str]:
    """Folders or hub ids of the two models of a pair, whose source may be the word for the pair that is shipped.

    Raises:
        UsageError: the target is missing, or there is one too many.
    """
    if source == EMBEDDED:
        if target:
            raise UsageError(f"pair.source={EMBEDDED} brings its own target; {target} needs a source of its own.")
        return str(embedded.SOURCE), str(embedded.TARGET)
    if not target:
        raise UsageError(f"pair.target is missing for pair.source={source}: give two models, or the word {EMBEDDED}.")
    return source, target


@dataclass(slots=True)
class PairLoader:
    """A pair whose tokenizers were compared and whose models are loaded when they are needed, and kept by nobody here.

    Attributes:
        locations: folder or hub id per role.
        revisions: hub revision per role.
        dtype_name: `float32`, `bfloat16` or `float16`.
        device: where models are loaded.
        trust_remote_code: run code that comes with a checkpoint.
        tokenizer: the target's tokenizer; the source's gives the same ids.
        tokenizer_fingerprint: digest of vocabulary, merges, special tokens and normaliser.
    """

    locations: dict[str, str]
    revisions: dict[str, str | None]
    dtype_name: str
    device: str
    trust_remote_code: bool
    tokenizer: PreTrainedTokenizerBase
    tokenizer_fingerprint: str
    _records: dict[str, ModelRecord] = field(default_factory=dict)
    _geometries: dict[str, KVGeometry] = field(default_factory=dict)

    def load(self, role: str) -> KVModel:
        """Load one model.

        Raises:
            UsageError: there is no complete checkpoint.
            UnsupportedModelError: its cache cannot be carried.
        """
        model = load_model(
            self.locations[role], self.revisions[role], DTYPES[self.dtype_name], self.device, self.trust_remote_code
        )
        self._records[role], self._geometries[role] = ModelRecord.of(model), model.geometry
        return model

    def geometry(self, role: str) -> KVGeometry:
        """Shape of a model's KV cache, from its config where it was not loaded yet."""
        if role not in self._geometries:
            config = load_config(self.locations[role], self.revisions[role], self.trust_remote_code)
            self._geometries[role] = config_geometry(config, self.trust_remote_code)
        return self._geometries[role]

    def dtype(self, role: str) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def record(self, role: str) -> ModelRecord:
        """What stays known of a model; it is loaded for that where it was not yet, and let go."""
        if role not in self._records:
            self.load(role)
            let_go()
        return self._records[role]


def open_pair(
    source: str,
    target: str | None = None,
    *,
    source_revision: str | None = None,
    target_revision: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> PairLoader:
    """Check a pair and load its tokenizers, but none of its models yet; the arguments are those of `load_pair`.

    Raises:
        UsageError: a folder, dtype or device does not exist.
        PairMismatchError: the two models have different tokenizers.
    """
    if dtype not in DTYPES:
        raise UsageError(f"pair.dtype={dtype}: expected one of {', '.join(DTYPES)}.")
    device = resolve_device(device)
    source, target = located(source, target)
    for role, location in (("source", source), ("target", target)):
        check_location(role, location)
    source, target = (str(Path(at).expanduser()) if Path(at).expanduser().exists() else at for at in (source, target))
    tokenizers = [
        load_tokenizer(source, source_revision, trust_remote_code),
        load_tokenizer(target, target_revision, trust_remote_code),
    ]
    prints = [fingerprint_tokenizer(tokenizer) for tokenizer in tokenizers]
    if prints[0] != prints[1]:
        raise PairMismatchError(
            f"source {source} and target {target} have different tokenizers ({prints[0]} and {prints[1]}); "
            "a cache can only be carried token by token, so take two models of one family."
        )
    return PairLoader(
        {"source": source, "target": target},
        {"source": source_revision, "target": target_revision},
        dtype,
        device,
        trust_remote_code,
        tokenizers[1],
        prints[1],
    )


def load_pair(
    source: str,
    target: str | None = None,
    *,
    source_revision: str | None = None,
    target_revision: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> ModelPair:
    """Load a pair from two folders or hub ids, or the small pair that is shipped: `load_pair("embedded")`.

    Args:
        source: the small model, or `embedded` for both models.
        target: the large model.
        source_revision: hub revision of the source.
        target_revision: hub revision of the target.
        dtype: `float32`, `bfloat16` or `float16`.
        device: a torch device, or `auto` for the one that accelerate gives this process.
        trust_remote_code: run code that comes with a checkpoint; off unless asked for.

    Raises:
        UsageError: a folder, dtype or device does not exist.
        PairMismatchError: the two models have different tokenizers.
        UnsupportedModelError: a model's cache cannot be carried.
    """
    opened = open_pair(
        source,
        target,
        source_revision=source_revision,
        target_revision=target_revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return ModelPair.of(opened)
