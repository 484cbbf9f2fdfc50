"""Finished records on disk, one line each, so that killed work goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from kvbridge.disk import write_whole
from kvbridge.errors import UsageError


def _record(line: str) -> dict[str, Any]:
    """One line of the file; `ValueError` where it holds no record."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no record")
    return found


class PartialResults:
    """A file of records under a header that says which settings they belong to.

    Args:
        path: the file; absent until the first record.
        identity: JSON values that decide whether the file may be resumed.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.identity = path, identity

    def load(self) -> list[dict[str, Any]]:
        """The finished records, in the order in which they were appended.

        Raises:
            UsageError: the file belongs to other settings.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(errors="replace").splitlines()
        try:
            header, *records = [_record(line) for line in lines]
        except ValueError:
            # A kill in the middle of a line loses that record only.
            header, records = self._salvage(lines)
        if header != self.identity:
            differing = sorted(key for key in self.identity if header.get(key) != self.identity[key])
            raise UsageError(
                f"{self.path} belongs to an evaluation with other settings ({', '.join(differing) or 'unreadable'}); "
                "use another out= or delete it."
            )
        self._write([header, *records])
        return records

    def _salvage(self, lines: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        parsed = []
        for line in lines:
            try:
                parsed.append(_record(line))
            except ValueError:
                break
        return (parsed[0], parsed[1:]) if parsed else (self.identity, [])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def finish(
        self, total: int, make: Callable[[int], Iterator[dict[str, Any]]], *, unit: str, desc: str
    ) -> list[dict[str, Any]]:
        """All records: those on disk, then those still to be made, each written as soon as it is there.

        Args:
            total: how many there will be.
            make: makes the records from a number on, in inference mode.
            unit, desc: of the progress bar.

        Raises:
            UsageError: the file belongs to other settings.
        """
        records = self.load()
        bar = tqdm(total=total, initial=len(records), unit=unit, desc=desc)
        with bar, torch.inference_mode():
            for record in make(len(records)):
                self.append(record)
                records.append(record)
                bar.update(1)
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Add one finished record."""
        if not self.path.exists():
            self._write([self.identity])
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
