"""Parts of one calibration that are collected apart and merged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvbridge.calibration.archive import CalibrationMoments, load_same
from kvbridge.errors import CalibrationError, UsageError


def parse_shard(shard: str | None, process: int, processes: int) -> tuple[int, int]:
    """Which part of how many this process collects: as `i/n` says, else its place among the launched processes.

    Raises:
        UsageError: `shard` is not of that form.
    """
    if shard is None:
        return process, processes
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(f"calibration.shard={shard}: expected i/n with 0 ≤ i < n, such as 0/2.")
    return int(index), int(count)


def shard_path(out: Path, shard: int, shards: int) -> Path:
    """Where the moments of one part lie until they are merged."""
    return out / f"moments-{shard:05d}-of-{shards:05d}.safetensors"


def merge_shards(
    out: Path, wanted: dict[str, Any], shards: int, final: Path, added: CalibrationMoments | None = None
) -> CalibrationMoments:
    """Merge the finished shards of one calibration, in order, into the file `final`; the shards go away.

    Args:
        out: folder of the shards.
        wanted: identity of each, which names what is added.
        shards: how many there are.
        final: file of all.
        added: moments of other documents, which are merged too.

    Raises:
        CalibrationError: one is missing or was collected with other settings.
    """
    paths = [shard_path(out, shard, shards) for shard in range(shards)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CalibrationError(f"{out} lacks {', '.join(missing)}; collect the missing shards before merging.")
    merged = load_same(paths[0], wanted)
    for path in paths[1:]:
        other = load_same(path, wanted)
        merged.merge(other)
        for key, combine in (("seconds", max), ("peak_memory_bytes", max), ("tokens_per_second", lambda a, b: a + b)):
            merged.info[key] = combine(merged.info[key], other.info[key])
    if added is not None:
        merged.merge(added)
        for key in ("seconds", "documents"):
            merged.info[key] += added.info[key]
    merged.save(final)
    for path in paths:
        path.unlink()
    return merged


def finished_shards(out: Path) -> int:
    """How many shards a complete set in `out` has; 0 where there is none at all.

    Raises:
        CalibrationError: some shards are there and some are missing.
    """
    matches = [re.fullmatch(r"moments-\d{5}-of-(\d{5})\.safetensors", path.name) for path in out.glob("moments-*-of-*")]
    counts = [int(match[1]) for match in matches if match]
    complete = [count for count in sorted(set(counts)) if counts.count(count) == count]
    if counts and not complete:
        raise CalibrationError(
            f"{out} holds {len(counts)} of {counts[0]} shards; collect the missing ones with "
            f"calibration.shard=i/{counts[0]}, or delete these."
        )
    return complete[0] if complete else 0
