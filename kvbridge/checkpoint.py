"""Loading one model or tokenizer from a folder or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry, read_geometry
from kvbridge.model import KVModel
from kvbridge.processes import process_state

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(location: str, revision: str | None = None, trust: bool = False) -> Any:
    """The config of a model, without its weights.

    Raises:
        UsageError: there is none.
    """
    try:
        return transformers.AutoConfig.from_pretrained(location, revision=revision, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"no model config could be loaded from {location!r}: {first_line}") from error


def config_geometry(config: Any, trust: bool = False) -> KVGeometry:
    """Geometry of the model that a config describes, without weights.

    Raises:
        UnsupportedModelError: the model's cache cannot be carried.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", trust_remote_code=trust
        )
    return read_geometry(model)


def load_model(location: str, revision: str | None, dtype: torch.dtype, device: str, trust: bool) -> KVModel:
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "trust_remote_code": trust}
    if device != "cpu":
        arguments["device_map"] = {"": device}
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
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


def load_tokenizer(location: str, revision: str | None, trust: bool) -> PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"no tokenizer could be loaded from {location!r}: {first_line}") from error


def resolve_device(device: str) -> str:
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


def check_location(role: str, location: str) -> None:
    looks_local = location.startswith((".", "/", "~")) or location.count("/") > 1
    folder = Path(location).expanduser()
    if looks_local and not (folder / "config.json").is_file():
        raise UsageError(
            f"pair.{role}={location}: no such model folder (a folder with config.json and safetensors was expected)."
        )
