"""A safetensors file whose tensors are read, and checked, when they are first used.

A tensor that was read is a view of the file: the system takes its memory back whenever it is needed elsewhere.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbridge.disk import replacing
from kvbridge.errors import CalibrationError

Key = TypeVar("Key", bound=Hashable)
CHECKSUMS = "crc32"
CALIBRATE_AGAIN = "and calibrate again"


def damaged(path: Path, reason: object, then: str = CALIBRATE_AGAIN) -> CalibrationError:
    """The error of a file that cannot be used; `then` says how it is made again once it is deleted."""
    return CalibrationError(f"{path} is damaged or holds something else ({reason}); delete it {then}.")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def write_tensors(path: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write one file, atomically, with a checksum of every tensor beside the description.

    Raises:
        UsageError: the disk is full, or refuses to be written to; nothing is left of the file.
    """
    named = {name: tensor.contiguous() for name, tensor in tensors.items()}
    sums = {name: _checksum(tensor) for name, tensor in named.items()}
    metadata = {key: json.dumps(value) for key, value in {**described, CHECKSUMS: sums}.items()}
    with replacing(path) as partial:
        save_file(named, partial, metadata=metadata)


class TensorFile:
    """An open file.

    Attributes:
        path: where it lies.
        then: what to do once it is deleted, if it is damaged.
        shapes: of every tensor, from the header.
    """

    def __init__(self, path: Path, then: str = CALIBRATE_AGAIN) -> None:
        """Open a file and read its header.

        Raises:
            SafetensorError: it is no safetensors file.
        """
        self.path, self.then = path, then
        self._file = safe_open(path, "pt")
        self._metadata: dict[str, str] = self._file.metadata() or {}
        self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        self._checksums: dict[str, int] = self.described(CHECKSUMS, {})
        self._checked: set[str] = set()

    def described(self, key: str, default: Any = None) -> Any:
        """One entry of the description.

        Raises:
            KeyError: it is missing and there is no default.
        """
        if default is not None and key not in self._metadata:
            return default
        return json.loads(self._metadata[key])

    def read(self, name: str) -> Tensor:
        """One tensor, checked when it is first read.

        Raises:
            CalibrationError: it is damaged, or holds NaN or infinite numbers.
        """
        try:
            tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise damaged(self.path, error, self.then) from error
        if name not in self._checked:
            if name in self._checksums and _checksum(tensor) != self._checksums[name]:
                raise damaged(self.path, f"{name} has another checksum", self.then)
            # The sum is finite only where every number is, and needs no memory.
            if tensor.is_floating_point() and not math.isfinite(float(tensor.sum(dtype=torch.float64))):
                raise damaged(self.path, f"{name} holds NaN or infinite numbers", self.then)
            self._checked.add(name)
        return tensor


class StoredTensors(Mapping[Key, Tensor], Generic[Key]):
    """Some tensors of files by keys of one's own; each is read when it is used."""

    def __init__(self, places: Mapping[Key, tuple[TensorFile, str]]) -> None:
        """Remember where each tensor lies: its file, and its name there."""
        self.places = dict(places)

    def __getitem__(self, key: Key) -> Tensor:
        file, name = self.places[key]
        return file.read(name)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, key: object) -> bool:
        return key in self.places
