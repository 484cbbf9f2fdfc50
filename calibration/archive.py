"""All moments of one calibration, and the file they lie in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbridge.calibration.moments import PARTS, Moments
from kvbridge.calibration.products import MomentBlock
from kvbridge.errors import CalibrationError
from kvbridge.pair import ModelPair

MOMENTS = "moments.safetensors"


@dataclass(slots=True)
class CalibrationMoments:
    """All moments of one calibration: per split (`fit`, `held_out`) and part (`first` positions of a block, `rest`).

    Attributes:
        sets: moments by (split, part).
        info: what they were collected from and how; `identity` within it decides what may be resumed or merged.
    """

    sets: dict[tuple[str, str], Moments]
    info: dict[str, Any] = field(default_factory=dict)

    def select(self, split: str, *, first: bool) -> Moments:
        """Moments of a split, with or without the first positions of each block."""
        rest = self.sets[split, "rest"]
        if not first:
            return rest
        both = rest.clone()
        both.merge(self.sets[split, "first"])
        return both

    def require_pair(self, pair: ModelPair) -> None:
        """Refuse moments of another pair.

        Raises:
            PairMismatchError: naming both fingerprints.
        """
        stored = self.info["identity"].items()
        pair.require({key.removeprefix("pair."): value for key, value in stored}, "this calibration")

    def require(self, blocks: Iterable[MomentBlock]) -> None:
        """Refuse to go on without the cross moments that a mapper reads.

        Raises:
            CalibrationError: naming the first one that was not gathered.
        """
        self.sets["fit", "rest"].require(blocks)

    def merge(self, other: CalibrationMoments) -> None:
        """Add the moments of another shard of the same calibration."""
        for key, moments in self.sets.items():
            moments.merge(other.sets[key])

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        named = {
            f"{split}/{part}/{key}": value.contiguous()
            for (split, part), moments in self.sets.items()
            for key, value in moments.tensors().items()
        }
        rows = {f"{split}/{part}": moments.rows for (split, part), moments in self.sets.items()}
        described = {"info": self.info, "rows": rows, "layers": self.sets["fit", "rest"].layers}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(named, partial, metadata={key: json.dumps(value) for key, value in described.items()})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> CalibrationMoments:
        """Read what `save` wrote.

        Raises:
            CalibrationError: the file is missing or is not one of moments.
        """
        if not path.is_file():
            raise CalibrationError(f"{path}: no moments there; run `kvbridge calibrate` first.")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                info, rows = json.loads(metadata["info"]), json.loads(metadata["rows"])
                layers = json.loads(metadata.get("layers", "{}"))
                named = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            sets: dict[tuple[str, str], dict[str, Tensor]] = {}
            for key, value in named.items():
                split, part, rest = key.split("/", 2)
                sets.setdefault((split, part), {})[rest] = value
            loaded = cls(
                {at: Moments.from_tensors(rows["/".join(at)], tensors, layers) for at, tensors in sets.items()}, info
            )
            loaded._check()
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is damaged or holds no moments ({error}); delete it and calibrate again."
            ) from error
        return loaded

    def _check(self) -> None:
        """Raise `ValueError` where a part is missing, misshapen or not finite."""
        if not isinstance(self.info.get("identity"), dict):
            raise ValueError("no identity")
        for at in ((split, part) for split in ("fit", "held_out") for part in PARTS):
            moments = self.sets[at]
            if not moments.mean or moments.mean.keys() != moments.square.keys():
                raise ValueError(f"{'/'.join(at)} lacks a variable")
            widths = {name: len(mean) for name, mean in moments.mean.items()}
            if any(block.shape != (widths[a], widths[b]) for (a, b), block in moments.cross.items()):
                raise ValueError(f"{'/'.join(at)} has a block of another shape")
            if not all(torch.isfinite(tensor).all() for tensor in moments.tensors().values()):
                raise ValueError(f"{'/'.join(at)} holds NaN or infinite numbers")
