"""A disk that takes no more: one sentence that names the file, and nothing half-written."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import Run, sentence
from kvbridge.calibration.tensorfile import write_tensors
from kvbridge.disk import amount, replacing, write_whole
from kvbridge.errors import UsageError
from kvbridge.mappers.residual.progress import write_curve
from tiny_bridge import random_bridge
from tiny_residual import Fitted, trainer

SAID = r"could not be written \(.*[Ff]ile too large.*\); make room on that disk, or give a folder on another one\.$"


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """While open, the system lets no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (23_456, "23.5 kB"), (6e6, "6 MB"), (5e15, "5 PB")],
)
def test_amounts_have_the_unit_that_suits_them(size: float, text: str) -> None:
    assert amount(size) == text


Writer = tuple[Path, Callable[[], None]]


def _readings(fitted: Fitted, folder: Path) -> Writer:
    store = replace(fitted.store, folder=folder)
    return store.place(fitted.documents[0]), lambda: store.prepare(fitted.documents[:1])


def _checkpoint(fitted: Fitted, folder: Path) -> Writer:
    checkpoint = trainer(fitted, folder).checkpoint
    return checkpoint.path, checkpoint.save


def _curve(fitted: Fitted, folder: Path) -> Writer:
    look = {"stage": 0, "step": 0, "total": 0, "loss": None, "dev_kl": 0.1, "seconds": 0.0}
    return folder / "curve.png", lambda: write_curve(folder, [look], ["kl"])


def _bridge(fitted: Fitted, folder: Path) -> Writer:
    bridge = random_bridge(fitted.pair)
    return folder / "bridge", lambda: bridge.save_pretrained(folder / "bridge")


@pytest.mark.parametrize("writer", [_readings, _checkpoint, _curve, _bridge], ids=lambda writer: writer.__name__[1:])
def test_what_does_not_fit_is_named_and_leaves_nothing(
    fitted: Fitted, tmp_path: Path, writer: Callable[[Fitted, Path], Writer]
) -> None:
    path, write = writer(fitted, tmp_path)
    with no_file_above(4096), pytest.raises(UsageError, match=SAID) as raised:
        write()
    assert str(raised.value).startswith(f"{path} could not")
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} <= {"curve.json"}
    write()
    assert path.exists()


def test_a_full_disk_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    write_tensors(path, {"a": torch.zeros(4)}, {})
    before = path.read_bytes()
    with no_file_above(4096), pytest.raises(UsageError, match=SAID):
        write_tensors(path, {"a": torch.ones(10_000)}, {})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_other_errors_pass_and_leave_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "made" / "text") as partial:
            partial.write_text("half")
            raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        write()
    assert not any((tmp_path / "made").iterdir())


def test_a_command_on_a_full_disk_says_which_file(kvbridge: Run, tmp_path: Path) -> None:
    with no_file_above(50_000):
        ran = kvbridge("calibrate", "out=out")
    said = sentence(ran)
    assert said.startswith("out/calibration/moments"), said
    assert "could not be written" in said
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("moments*.safetensors"))


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
    assert list(tmp_path.iterdir()) == [path]
