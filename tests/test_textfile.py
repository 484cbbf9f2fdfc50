"""Text files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.textfile import write_whole


def test_a_text_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    for text in ("first\n", "é"):
        write_whole(path, text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "second \ud800")
    assert path.read_text() == "first"
