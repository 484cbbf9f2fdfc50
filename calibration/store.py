"""Moments that several runs share: one folder per calibration, found by what decides the moments' values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments
from kvbridge.calibration.collect import calibrate
from kvbridge.calibration.config import CalibrationConfig, require_same
from kvbridge.calibration.products import MomentBlock
from kvbridge.calibration.request import Request
from kvbridge.calibration.tensorfile import TensorFile
from kvbridge.errors import CalibrationError
from kvbridge.fingerprint import digest
from kvbridge.pair import Pair
from kvbridge.processes import process_state


def _holds(path: Path, wanted: dict[str, Any]) -> bool:
    """Whether a file of moments is of this calibration, from its header alone."""
    try:
        require_same(TensorFile(path).described("info")["identity"], wanted, path)
    except (SafetensorError, CalibrationError, KeyError, ValueError, TypeError, AttributeError, OSError):
        return False
    return True


def moments_folder(pair: Pair, config: CalibrationConfig, blocks: frozenset[MomentBlock], store: Path) -> Path:
    """Where the moments of a calibration lie in `store`, finished or not.

    Finished moments with more blocks than wanted serve as well; otherwise the folder is `store/FINGERPRINT`.

    Raises:
        CorpusError: there is no text to calibrate on.
        CalibrationError: the moments that these are added to are missing, or of another kind.
    """
    wanted = Request.of(pair, config, blocks).identity
    folder = store / digest(wanted)
    if (folder / MOMENTS).is_file():
        return folder
    finished = (path.parent for path in sorted((*store.glob(MOMENTS), *store.glob(f"*/{MOMENTS}"))))
    return next((at for at in finished if _holds(at / MOMENTS, wanted)), folder)


def calibrate_once(
    pair: Pair, config: CalibrationConfig, blocks: frozenset[MomentBlock], folder: Path
) -> CalibrationMoments | None:
    """`calibrate` in a folder that other runs may want at the same time: one collects and the others wait.

    The lock goes with its process, so a killed run blocks nobody and the next one goes on from its checkpoint.
    Processes that split one collection between them take no lock.

    Returns:
        The moments; `None` on a process that only contributed a shard.

    Raises:
        UsageError, CorpusError, CalibrationError: as `calibrate`.
    """
    if config.shard is not None or process_state().num_processes > 1:
        return calibrate(pair, config, blocks, folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "collecting.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"{folder}: another run is collecting these moments; waiting for it.", flush=True)
        lock.acquire()
    try:
        return calibrate(pair, config, blocks, folder)
    finally:
        lock.release()
