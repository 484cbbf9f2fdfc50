"""A source and a target that share one tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvbridge import embedded
from kvbridge.errors import PairMismatchError, UsageError
from kvbridge.fingerprint import digest, fingerprint_tokenizer
from kvbridge.model import KVModel
from kvbridge.processes import process_state

EMBEDDED = "embedded"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    @property
    def max_positions(self) -> int:
        """Longest sequence that both models were made for, in tokens."""
        return min(self.source.geometry.max_positions, self.target.geometry.max_positions)

    def require_length(self, tokens: int, setting: str) -> None:
        """Refuse sequences that one of the models was not made for.

        Raises:
            UsageError: naming the setting that asks for them.
        """
        if tokens > self.max_positions:
            raise UsageError(
                f"{setting}={tokens}: this pair was made for up to {self.max_positions} tokens; give fewer."
            )

    def identity(self) -> dict[str, str]:
        """The fingerprints by which a bridge or moments recognise their pair."""
        return {
            "source": self.source.fingerprint,
            "source geometry": digest(self.source.geometry.to_dict()),
            "target": self.target.fingerprint,
            "target geometry": digest(self.target.geometry.to_dict()),
            "tokenizer": self.tokenizer_fingerprint,
        }

    def describe(self) -> dict[str, Any]:
        """What results and artifacts record of the pair."""
        described: dict[str, Any] = {"tokenizer": {"fingerprint": self.tokenizer_fingerprint}}
        for role, model in (("source", self.source), ("target", self.target)):
            described[role] = {
                "name": _shown(model.name),
                "revision": model.revision,
                "fingerprint": model.fingerprint,
                "dtype": str(model.dtype).removeprefix("torch."),
                "geometry": model.geometry.to_dict(),
                "interleaved_rotary": model.rotary.interleaved,
            }
        return described

    def require(self, identity: dict[str, str], what: str) -> None:
        """Refuse something that was made for another pair.

        Raises:
            PairMismatchError: naming both fingerprints of each part that differs.
        """
        mine = self.identity()
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


def _load_model(location: str, revision: str | None, dtype: torch.dtype, device: str, trust: bool) -> KVModel:
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": trust}
    if device != "cpu":
        arguments["device_map"] = {"": device}
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location, revision=revision, use_safetensors=True, output_loading_info=True, **arguments
        )
        model, report = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"no model could be loaded from {location!r}: {first_line}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UsageError(
            f"the checkpoint {location!r} lacks {len(missing)} weights ({', '.join(missing[:3])}), "
            "which would be random; download or save it again."
        )
    return KVModel.wrap(model, name=location, revision=getattr(model.config, "_commit_hash", None) or revision)


def _load_tokenizer(location: str, revision: str | None, trust: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"no tokenizer could be loaded from {location!r}: {first_line}") from error


def _resolve_device(device: str) -> str:
    """The device of this process; `auto` is the one that accelerate gives it."""
    if device == "auto":
        return str(process_state().device)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"pair.device={device}: expected cpu, cuda, cuda:N or auto.") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"pair.device={device}: no CUDA device is available here; use pair.device=cpu.")
    return device


def _shown(name: str) -> str:
    """A model's name without the path of the machine that it was loaded on."""
    location = Path(name)
    if location in (embedded.SOURCE, embedded.TARGET):
        return f"{EMBEDDED} {location.name}"
    return location.name if location.exists() else name


def _check_location(role: str, location: str) -> None:
    looks_local = location.startswith((".", "/", "~")) or location.count("/") > 1
    folder = Path(location).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        raise UsageError(
            f"pair.{role}={location}: no such model folder (a folder with config.json and safetensors was expected)."
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
    if dtype not in DTYPES:
        raise UsageError(f"pair.dtype={dtype}: expected one of {', '.join(DTYPES)}.")
    device = _resolve_device(device)
    if source == EMBEDDED:
        if target:
            raise UsageError(f"pair.source={EMBEDDED} brings its own target; {target} needs a source of its own.")
        source, target = str(embedded.SOURCE), str(embedded.TARGET)
    if not target:
        raise UsageError(f"pair.target is missing for pair.source={source}: give two models, or the word {EMBEDDED}.")
    for role, location in (("source", source), ("target", target)):
        _check_location(role, location)
    source, target = (str(Path(at).expanduser()) if Path(at).expanduser().exists() else at for at in (source, target))
    tokenizers = [
        _load_tokenizer(source, source_revision, trust_remote_code),
        _load_tokenizer(target, target_revision, trust_remote_code),
    ]
    prints = [fingerprint_tokenizer(tokenizer) for tokenizer in tokenizers]
    if prints[0] != prints[1]:
        raise PairMismatchError(
            f"source {source} and target {target} have different tokenizers ({prints[0]} and {prints[1]}); "
            "a cache can only be carried token by token, so take two models of one family."
        )
    return ModelPair(
        source=_load_model(source, source_revision, DTYPES[dtype], device, trust_remote_code),
        target=_load_model(target, target_revision, DTYPES[dtype], device, trust_remote_code),
        tokenizer=tokenizers[1],
        tokenizer_fingerprint=prints[1],
    )
