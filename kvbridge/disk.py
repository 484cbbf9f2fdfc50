"""Writing to a disk that may be full: whole files or none, and sentences that a person can act on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from kvbridge.errors import UsageError

# What the system says where no more fits.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def amount(size: float | int) -> str:
    """So many bytes, in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} PB"


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder that exists."""
    return shutil.disk_usage(folder).free


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While open, what keeps files from being written becomes one sentence.

    Args:
        path: the file or folder that the sentence names.

    Raises:
        UsageError: the disk is full, or refuses to be written to.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        elsewhere = isinstance(error, OSError) and error.errno not in FULL
        advice = "give another folder" if elsewhere else "make room on that disk, or give a folder on another one"
        raise UsageError(f"{path} could not be written ({reason}); {advice}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place in the end; where that fails, nothing of it is left.

    Raises:
        UsageError: the disk is full, or refuses to be written to.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one step, with its folder where that is missing; several processes may write it at once.

    Raises:
        UsageError: the disk is full, or refuses to be written to.
    """
    with replacing(path) as partial:
        partial.write_text(text)
