"""A bridge folder on disk: written atomically, verified completely before any tensor is used.

config.json         what the bridge is and for which pair
model.safetensors   the forms' tensors
SHA256SUMS          of the two files above
README.md           model card, which its owner may edit
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvbridge.disk import writing
from kvbridge.errors import ArtifactError

CONFIG, WEIGHTS, SUMS, CARD = "config.json", "model.safetensors", "SHA256SUMS", "README.md"
SUMMED = (CONFIG, WEIGHTS)
FORMAT, FORMAT_VERSION = "kvbridge-bridge", 2
SIZE_CAPS = {CONFIG: 64 << 20, WEIGHTS: 64 << 30, SUMS: 4 << 10}
HEADER_CAP = 16 << 20
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
}
PICKLE_STARTS = (b"\x80", b"PK\x03\x04")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ArtifactError(f"the key {max(names, key=names.count)!r} stands twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _parse_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except ArtifactError as error:
        raise ArtifactError(f"{what} is refused: {error}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        raise ArtifactError(f"{what} is not valid JSON ({error}); the bridge is damaged.") from error
    if not isinstance(parsed, dict):
        raise ArtifactError(f"{what} holds a JSON {type(parsed).__name__}, expected an object; the bridge is damaged.")
    return parsed


def _read_file(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        pickles = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".pkl")]
        hint = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        hint += f"; did you mean {folder / 'bridge'}?" if (folder / "bridge" / SUMS).is_file() else ""
        raise ArtifactError(f"{folder} has no {name}{hint}. Expected {CONFIG}, {WEIGHTS} and {SUMS}.")
    size = path.stat().st_size
    if size > SIZE_CAPS[name]:
        raise ArtifactError(f"{path} has {size} bytes, more than the {SIZE_CAPS[name]} a bridge may have there.")
    return path.read_bytes()


def _check_sums(folder: Path, contents: dict[str, bytes]) -> None:
    listed = {}
    for line in contents[SUMS].decode("ascii", errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if match is None or match[2] in listed:
            raise ArtifactError(f"{folder / SUMS} has the line {line[:80]!r}, expected one `sha256  name` per file.")
        listed[match[2]] = match[1]
    if set(listed) != set(SUMMED):
        raise ArtifactError(f"{folder / SUMS} lists {sorted(listed)}, expected exactly {list(SUMMED)}.")
    for name in SUMMED:
        found = hashlib.sha256(contents[name]).hexdigest()
        if found != listed[name]:
            raise ArtifactError(
                f"{folder / name} has SHA-256 {found[:12]}…, {SUMS} says {listed[name][:12]}…: the file was changed or "
                "damaged. Fetch the bridge again."
            )


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    if config.get("format") != FORMAT:
        raise ArtifactError(
            f"{folder / CONFIG} says format {config.get('format')!r}, expected {FORMAT!r}: not a bridge."
        )
    version = config.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ArtifactError(f"{folder / CONFIG} says format_version {version!r}, expected a whole number from 1.")
    if version > FORMAT_VERSION:
        raise ArtifactError(
            f"{folder} has bridge format {version}; this kvbridge reads up to {FORMAT_VERSION}. Upgrade kvbridge."
        )
    if not isinstance(config.get("tensors"), dict):
        raise ArtifactError(f"{folder / CONFIG} has no table of tensors; the bridge is damaged.")


def _header(data: bytes, path: Path) -> dict[str, Any]:
    """The safetensors header, read strictly: the library accepts duplicate keys and leading spaces."""
    # A header of some lengths begins with a pickle's first byte; only its brace tells them apart.
    if data.startswith(PICKLE_STARTS) and data[8:9] != b"{":
        raise ArtifactError(f"{path} is a pickle, which is never loaded; a bridge holds safetensors only.")
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 2 <= length <= min(HEADER_CAP, len(data) - 8) or data[8:9] != b"{":
        raise ArtifactError(
            f"{path} does not start with a safetensors header; it is truncated or another kind of file."
        )
    header = _parse_json(data[8 : 8 + length], f"the header of {path}")
    header.pop("__metadata__", None)
    return header


def _describe(name: str, tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype not in DTYPE_NAMES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise ArtifactError(f"tensor {name!r} is {tensor.dtype}, which a bridge does not store; give {expected}.")
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}


def _check_tensors(path: Path, header: dict[str, Any], declared: dict[str, Any]) -> None:
    for word, names in (
        ("lacks", declared.keys() - header.keys()),
        ("has the undeclared", header.keys() - declared.keys()),
    ):
        if names:
            raise ArtifactError(f"{path} {word} tensor {sorted(names)[0]!r}, compared with {CONFIG}.")
    for name, expected in declared.items():
        found = header[name]
        if not isinstance(found, dict) or {key: found.get(key) for key in ("dtype", "shape")} != expected:
            raise ArtifactError(f"{path}: tensor {name!r} is {found}, {CONFIG} says {expected}.")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and verify a bridge folder.

    The bytes that are verified are the bytes that are used: each file is read once.

    Returns:
        The config, and the tensors by name.

    Raises:
        ArtifactError: anything is missing, damaged, undeclared, not finite or too new; nothing was used.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such bridge folder.")
    contents = {name: _read_file(folder, name) for name in (SUMS, *SUMMED)}
    _check_sums(folder, contents)
    config = _parse_json(contents[CONFIG], str(folder / CONFIG))
    _check_config(folder, config)
    path = folder / WEIGHTS
    _check_tensors(path, _header(contents[WEIGHTS], path), config["tensors"])
    try:
        tensors = load(contents[WEIGHTS])
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ArtifactError(f"{path} is not a valid safetensors file ({error}); the bridge is damaged.") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{path}: tensor {name!r} holds NaN or infinite numbers; the bridge must not be used.")
    return config, tensors


def _require_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an empty folder or a bridge and nothing else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ArtifactError(f"{folder} exists and is not a bridge; give an empty or new folder.")
    held = {file.name for file in folder.iterdir()}
    if not held:
        return
    try:
        is_bridge = json.loads((folder / CONFIG).read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        is_bridge = False
    if not is_bridge:
        raise ArtifactError(f"{folder} exists and is not a bridge; give an empty or new folder.")
    others = held - {CONFIG, WEIGHTS, SUMS, CARD}
    if others:
        raise ArtifactError(
            f"{folder} holds more than a bridge ({min(others)}), which would be lost; give an empty or new folder."
        )


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in main memory, no two of which share it: safetensors refuses those."""
    made: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous().cpu()
        made[name] = whole.clone() if whole.untyped_storage().data_ptr() in seen else whole
        seen.add(made[name].untyped_storage().data_ptr())
    return made


def _sums(contents: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in SUMMED).encode()


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], card: str) -> None:
    """Write a bridge folder, all of it or nothing; an existing bridge is replaced, any other folder refused.

    Raises:
        ArtifactError: `folder` exists and is not a bridge alone, or a tensor is not finite or of an odd dtype.
        UsageError: the disk is full, or refuses to be written to.
    """
    _require_replaceable(folder)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(f"tensor {name!r} holds NaN or infinite numbers; such a bridge is not saved.")
    header = {"format": FORMAT, "format_version": FORMAT_VERSION}
    config = header | config | {"tensors": {name: _describe(name, tensor) for name, tensor in sorted(tensors.items())}}
    contents = {
        CONFIG: _json(config),
        WEIGHTS: save(_apart(tensors)),
    }
    _write_contents(folder, contents | {SUMS: _sums(contents), CARD: card.encode()})


def rewrite_config(folder: Path, changed: dict[str, Any]) -> None:
    """Change some values of a bridge's config, all or nothing; weights and card stay as they are.

    Raises:
        ArtifactError: the folder is damaged, or holds more than a bridge.
        UsageError: the disk is full, or refuses to be written to.
    """
    _require_replaceable(folder)
    contents = {name: _read_file(folder, name) for name in (SUMS, *SUMMED)}
    _check_sums(folder, contents)
    contents[CONFIG] = _json(_parse_json(contents[CONFIG], str(folder / CONFIG)) | changed)
    card = {CARD: (folder / CARD).read_bytes()} if (folder / CARD).is_file() else {}
    _write_contents(folder, contents | {SUMS: _sums(contents)} | card)


def _write_contents(folder: Path, contents: dict[str, bytes]) -> None:
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _write_and_replace(folder, contents)


def _write_and_replace(folder: Path, contents: dict[str, bytes]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        for name, data in contents.items():
            (partial / name).write_bytes(data)
        _replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(partial: Path, folder: Path) -> None:
    """Put a finished folder in its place; the former one goes away only afterwards."""
    if not folder.exists():
        os.rename(partial, folder)
        return
    former = Path(tempfile.mkdtemp(prefix=f".{folder.name}-former-", dir=folder.parent)) / "bridge"
    try:
        os.rename(folder, former)
        os.rename(partial, folder)
    except BaseException:
        if former.exists():
            os.rename(former, folder)
        former.parent.rmdir()
        raise
    shutil.rmtree(former.parent)


def folder_bytes(folder: Path) -> int:
    """Size of the files that a bridge needs, in bytes."""
    return sum((folder / name).stat().st_size for name in (SUMS, *SUMMED))
