"""Content states of one model on disk, a file per block, so that models are read once and one at a time.

`FOLDER/manifest.json` says of which model and blocks they are; `FOLDER/block_000123.safetensors` holds the rows
`[T, p]` of block 123, named by span: keys in float16, values and residual streams in the model's own dtype (everything
in float32 where the model is not of half precision).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm

from kvbridge.calibration.blocks import BlockSet
from kvbridge.calibration.rows import cache_names, read_states, residual_name
from kvbridge.calibration.tensorfile import TensorFile, damaged, write_tensors
from kvbridge.disk import amount, free_bytes, write_whole
from kvbridge.errors import CalibrationError
from kvbridge.model import KVModel
from kvbridge.pair import Pair
from kvbridge.variables import CacheShape

# Left free on the disk, for moments and whatever else runs.
SPARE_BYTES = 2**30


def stored_dtypes(model: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of staged keys and of everything else; de-rotated keys of a half-precision model fit float16 best."""
    if model.itemsize == 2:
        return torch.float16, model
    return torch.float32, torch.float32


def token_bytes(geometry: CacheShape, model: torch.dtype, residuals: int) -> int:
    """Staged bytes per token."""
    keys, rest = stored_dtypes(model)
    return geometry.width * (keys.itemsize + rest.itemsize) + residuals * geometry.hidden_size * rest.itemsize


@dataclass(frozen=True, slots=True)
class StagedStates:
    """Staged blocks of one model.

    Attributes:
        folder: where they lie.
        role: `source` or `target`.
    """

    folder: Path
    role: str

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def block(self, number: int) -> Path:
        return self.folder / f"block_{number:06d}.safetensors"

    def begin(self, identity: dict[str, Any], residuals: tuple[int, ...]) -> None:
        """Start or go on; blocks that are there already must be of the same model and text and hold what is wanted.

        Raises:
            CalibrationError: they are not.
        """
        described = identity | {"residual streams": list(residuals)}
        if self.manifest.exists():
            try:
                stored: dict[str, Any] = json.loads(self.manifest.read_text())
                held = set(stored.get("residual streams", ()))
            except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
                raise damaged(self.manifest, error) from error
            differing = [key for key in identity if stored.get(key) != identity[key]]
            if not held >= set(residuals):
                differing.append("residual streams")
            if differing:
                key = differing[0]
                raise CalibrationError(
                    f"{self.folder} was staged with {key} = {stored.get(key)} and cannot serve {described[key]}; use "
                    "the same settings, another calibration.stage folder, or delete it."
                )
            return
        write_whole(self.manifest, json.dumps(described, indent=1) + "\n")

    def residuals(self) -> tuple[int, ...]:
        """Layers whose residual stream every block holds."""
        return tuple(json.loads(self.manifest.read_text())["residual streams"])

    def missing(self, numbers: list[int]) -> list[int]:
        """Blocks that are still to be staged."""
        return [number for number in numbers if not self.block(number).exists()]

    def write(self, number: int, states: Mapping[str, Float[Tensor, "T p"]], dtype: torch.dtype) -> None:
        """Stage one block of a model that computes in `dtype`."""
        key_dtype, dtype = stored_dtypes(dtype)
        rows = {}
        for name, exact in states.items():
            rows[name] = exact.to(key_dtype if name.endswith(".keys") else dtype)
            # A key beyond the range of float16 keeps its whole block exact.
            if not torch.isfinite(rows[name]).all():
                rows[name] = exact
        write_tensors(self.block(number), rows, {"block": number})

    def read(self, numbers: list[int]) -> dict[str, Float[Tensor, "B T p"]]:
        """The states of some blocks, as `read_states` gives them, in the dtypes they are staged in.

        Raises:
            CalibrationError: a block is missing or damaged.
        """
        read: dict[str, list[Tensor]] = {}
        names = [*cache_names(self.role), *(residual_name(layer) for layer in self.residuals())]
        for number in numbers:
            path = self.block(number)
            try:
                file = TensorFile(path)
                for name in names:
                    read.setdefault(name, []).append(file.read(name))
            except (SafetensorError, OSError, ValueError) as error:
                raise damaged(path, error) from error
        return {name: torch.stack(rows) for name, rows in read.items()}

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _require_room(staged: StagedStates, needed: int) -> None:
    free = free_bytes(staged.folder)
    if needed + SPARE_BYTES > free:
        raise CalibrationError(
            f"{staged.folder}: staging takes {amount(needed)}, {amount(SPARE_BYTES)} more stay free, and there "
            f"are {amount(free)}; give fewer calibration.tokens, or calibration.stage=DIR on a larger disk."
        )


def stage_model(
    pair: Pair, drawn: BlockSet, numbers: list[int], staged: StagedStates, residuals: tuple[int, ...], batch: int
) -> None:
    """Load one model of a pair, leave its states of some blocks on disk, and let go of it.

    Args:
        pair: where the model comes from.
        drawn: the tokens.
        numbers: of the blocks wanted; those on disk are not read again.
        staged: where the states go.
        residuals: layers whose residual stream is kept.
        batch: blocks per forward pass.

    Raises:
        CalibrationError: the folder holds states of something else, or the disk is too small.
    """
    model = pair.load(staged.role)
    identity = {
        "model": model.fingerprint,
        "geometry": model.geometry.to_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": pair.tokenizer_fingerprint,
        "blocks": drawn.fingerprint,
        "calibration.batch": batch,
    }
    staged.begin(json.loads(json.dumps(identity)), residuals)
    kept, missing = staged.residuals(), staged.missing(numbers)
    length = drawn.tokens.shape[1]
    _require_room(staged, len(missing) * length * token_bytes(model.geometry, model.dtype, len(kept)))
    with tqdm(
        total=len(numbers) * length, initial=(len(numbers) - len(missing)) * length, unit="tok", unit_scale=True,
        desc=f"stage {staged.role}",
    ) as bar:  # fmt: skip
        for at in range(0, len(missing), batch):
            _stage_batch(model, drawn, missing[at : at + batch], staged, kept)
            bar.update(len(missing[at : at + batch]) * length)


def _stage_batch(
    model: KVModel, drawn: BlockSet, numbers: list[int], staged: StagedStates, residuals: tuple[int, ...]
) -> None:
    read = read_states(model, staged.role, drawn.batch(numbers), residuals)
    for row, number in enumerate(numbers):
        staged.write(number, {name: states[row] for name, states in read.items()}, model.dtype)
