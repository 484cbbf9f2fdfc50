"""Streaming moments against numpy on all rows at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, Moments
from kvbridge.calibration.moments import PARTS, rows_per_product
from kvbridge.calibration.tensorfile import TensorFile
from kvbridge.errors import CalibrationError

WIDTHS = {"source.keys": 5, "source.values": 3, "target.keys": 4}
BLOCKS = frozenset({("source.keys", "source.keys"), ("source.keys", "target.keys"), ("source.values", "target.keys")})
Rows = dict[str, Tensor]


def make_rows(count: int, seed: int = 0, offset: float = 0.0) -> Rows:
    """Correlated rows of scales from 0.01 to 100, around a mean of `offset`."""
    chance = np.random.default_rng(seed)
    shared = chance.standard_normal((count, 2))
    scales = {name: 10.0 ** np.linspace(-2, 2, width) for name, width in WIDTHS.items()}
    rows = {
        name: (chance.standard_normal((count, width)) + shared @ chance.standard_normal((2, width))) * scales[name]
        for name, width in WIDTHS.items()
    }
    return {name: torch.from_numpy(value + offset) for name, value in rows.items()}


def cut(rows: Rows, start: int, stop: int) -> Rows:
    return {name: value[start:stop] for name, value in rows.items()}


def collect(rows: Rows, cuts: list[int], precision: torch.dtype = torch.float64) -> Moments:
    moments = Moments.zeros(WIDTHS, BLOCKS)
    for start, stop in itertools.pairwise([0, *cuts, len(rows["source.keys"])]):
        moments.add(cut(rows, start, stop), precision)
    return moments


def reference(rows: Rows) -> Moments:
    """Two passes in fp64: subtract the mean of all rows, then multiply."""
    plain = {name: value.double().numpy() for name, value in rows.items()}
    centred = {name: value - value.mean(axis=0) for name, value in plain.items()}
    return Moments(
        len(rows["source.keys"]),
        {name: torch.from_numpy(value.mean(axis=0)) for name, value in plain.items()},
        {name: torch.from_numpy((value**2).sum(axis=0)) for name, value in centred.items()},
        {(a, b): torch.from_numpy(centred[a].T @ centred[b]) for a, b in BLOCKS},
    )


def assert_equal(found: Moments, expected: Moments, tolerance: float, *, means: bool = True) -> None:
    """Compare every entry on the scale of its own coordinates: `|Δ xy| ≤ tolerance · √(xx · yy)`."""
    assert found.rows == expected.rows
    spread = {name: square.sqrt() for name, square in expected.square.items()}
    for name, square in expected.square.items():
        assert (found.square[name] - square).abs().le(tolerance * square).all(), name
        if means:
            scale = spread[name] / expected.rows**0.5 + expected.mean[name].abs()
            assert (found.mean[name] - expected.mean[name]).abs().le(tolerance * scale).all(), name
    assert found.cross.keys() == expected.cross.keys()
    for (a, b), product in expected.cross.items():
        assert (found.cross[a, b] - product).abs().le(tolerance * torch.outer(spread[a], spread[b])).all(), (a, b)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    count = draw(st.integers(2, 60))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=6)))
    return make_rows(count, seed=draw(st.integers(0, 100))), cuts


@settings(max_examples=40, deadline=None)
@given(chunked())
def test_any_chunking_gives_the_moments_of_all_rows(case: tuple[Rows, list[int]]) -> None:
    rows, cuts = case
    assert_equal(collect(rows, cuts), reference(rows), 1e-10)


@settings(max_examples=40, deadline=None)
@given(chunked(), st.randoms(use_true_random=False))
def test_shards_merge_in_any_order_into_the_moments_of_all_rows(
    case: tuple[Rows, list[int]], chance: np.random.Generator
) -> None:
    rows, cuts = case
    bounds = list(itertools.pairwise([0, *cuts, len(rows["source.keys"])]))
    chance.shuffle(bounds)
    merged = Moments.zeros(WIDTHS, BLOCKS)
    for start, stop in bounds:
        middle = (start + stop) // 2
        merged.merge(collect(cut(rows, start, stop), [middle - start]))
    assert_equal(merged, reference(rows), 1e-10)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_mean_of_ten_thousand_costs_no_digits(chunk: int) -> None:
    """Rows are 1 wide around 1e4: sums of raw squares would lose eight digits of sixteen."""
    rows = make_rows(100)
    shifted = {name: value / value.std(dim=0) + 1e4 for name, value in rows.items()}
    centred = {name: value / value.std(dim=0) for name, value in rows.items()}
    found = collect(shifted, list(range(chunk, 100, chunk)))
    assert_equal(found, reference(centred), 1e-10, means=False)
    assert_equal(found, reference(shifted), 1e-10)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_products_in_float32_are_right_to_five_digits(offset: float) -> None:
    rows = {name: value.float() for name, value in make_rows(512, offset=offset).items()}
    assert_equal(collect(rows, [100, 101, 300], torch.float32), reference(rows), 1e-5)


def test_sums_over_batches_are_fp64_even_for_float32_products() -> None:
    """Two thousand batches of equal rows: sums in fp32 would drift by 1e-4."""
    rows = {name: value.float() for name, value in make_rows(4).items()}
    moments = Moments.zeros(WIDTHS, BLOCKS)
    for _ in range(2000):
        moments.add(rows, torch.float32)
    once = reference(rows)
    assert moments.rows == 8000
    for block, product in once.cross.items():
        spread = torch.outer(*(once.square[name].sqrt() for name in block))
        assert (moments.cross[block] / 2000 - product).abs().le(1e-6 * spread).all()


def test_only_the_wanted_products_are_kept() -> None:
    wanted = frozenset({("source.values", "target.keys")})
    moments = Moments.zeros(WIDTHS, wanted)
    moments.add(make_rows(5))
    assert moments.cross.keys() == wanted
    assert moments.cross["source.values", "target.keys"].shape == (3, 4)
    assert moments.mean.keys() == moments.square.keys() == WIDTHS.keys()
    assert {tensor.dtype for tensor in moments.tensors().values()} == {torch.float64}


def test_products_of_no_rows_take_no_memory(tmp_path: Path) -> None:
    moments = Moments.zeros({"a": 10**6}, [("a", "a")])
    assert moments.gram(["a"]).untyped_storage().nbytes() == 8
    sets = {(split, part): moments.clone() for split in ("fit", "held_out") for part in PARTS}
    CalibrationMoments(sets, {"identity": {}}).save(tmp_path / "moments.safetensors")
    loaded = CalibrationMoments.load(tmp_path / "moments.safetensors")
    loaded.require([("a", "a")])
    assert loaded.sets["fit", "rest"].gram(["a"]).shape == (10**6, 10**6)


def test_no_rows_change_nothing() -> None:
    moments = collect(make_rows(9), [])
    before = moments.clone()
    moments.add(make_rows(0))
    moments.merge(Moments.zeros(WIDTHS, BLOCKS))
    assert moments.rows == before.rows
    assert all(torch.equal(value, before.tensors()[name]) for name, value in moments.tensors().items())


def test_refuses_to_merge_other_products() -> None:
    with pytest.raises(CalibrationError, match=r"moments of different variables cannot be merged; calibrate both"):
        collect(make_rows(3), []).merge(Moments.zeros(WIDTHS, frozenset()))


@pytest.fixture
def calibration() -> CalibrationMoments:
    sets = {
        (split, part): collect(make_rows(9 + at, seed=at), [4])
        for at, (split, part) in enumerate(itertools.product(("fit", "held_out"), ("first", "rest")))
    }
    return CalibrationMoments(sets, {"identity": {"corpus": "größer"}, "seconds": 0.1 + 0.2})


def assert_bits(found: CalibrationMoments, expected: CalibrationMoments) -> None:
    assert found.sets.keys() == expected.sets.keys()
    for at, moments in expected.sets.items():
        assert found.sets[at].rows == moments.rows
        given = found.sets[at].tensors()
        assert given.keys() == moments.tensors().keys()
        assert all(torch.equal(given[name], value) for name, value in moments.tensors().items())


def test_a_file_gives_back_the_same_bits(calibration: CalibrationMoments, tmp_path: Path) -> None:
    path = tmp_path / "new" / "moments.safetensors"
    calibration.save(path)
    loaded = CalibrationMoments.load(path)
    assert_bits(loaded, calibration)
    assert loaded.info == calibration.info
    assert [file.name for file in path.parent.iterdir()] == ["moments.safetensors"]


def test_first_positions_are_a_part_of_their_own(calibration: CalibrationMoments) -> None:
    without, included = (calibration.select("fit", first=first) for first in (False, True))
    assert (without.rows, included.rows) == (10, 19)
    both = {name: torch.cat((make_rows(9, 0)[name], make_rows(10, 1)[name])) for name in WIDTHS}
    assert_equal(included, reference(both), 1e-10)
    assert_equal(calibration.sets["fit", "rest"], reference(make_rows(10, 1)), 1e-10)


def test_shards_merge_split_by_split(calibration: CalibrationMoments) -> None:
    other = CalibrationMoments({at: moments.clone() for at, moments in calibration.sets.items()})
    calibration.merge(other)
    assert {at: moments.rows for at, moments in calibration.sets.items()} == {
        ("fit", "first"): 18,
        ("fit", "rest"): 20,
        ("held_out", "first"): 22,
        ("held_out", "rest"): 24,
    }


def test_refuses_to_do_without_products_that_a_mapper_reads(calibration: CalibrationMoments) -> None:
    calibration.require(BLOCKS)
    with pytest.raises(
        CalibrationError, match=r"^these moments hold no products of target\.keys and target\.keys, which"
    ):
        calibration.require(BLOCKS | {("target.keys", "target.keys")})


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"none\.safetensors: no moments there; run `kvbridge calibrate` first\.$"
    ):
        CalibrationMoments.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("damage", ["truncated", "header", "another-file", "another-safetensors", "another-layout"])
def test_refuses_a_damaged_file(calibration: CalibrationMoments, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "moments.safetensors"
    calibration.save(path)
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "header":
        path.write_bytes(data[:8] + b"\xff" + data[9:])
    elif damage == "another-file":
        path.write_text("not safetensors")
    elif damage == "another-safetensors":
        save_file({"weight": torch.zeros(2)}, path)
    else:
        save_file({"weight": torch.zeros(2)}, path, metadata={"info": "{}", "rows": "{}"})
    with pytest.raises(
        CalibrationError,
        match=r"moments\.safetensors is damaged or holds something else \(.+\); delete it and calibrate",
    ):
        CalibrationMoments.load(path)


def _drop_mean(named: dict[str, torch.Tensor]) -> None:
    del named["fit/rest/mean/a"]


def _spoil(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(named: dict[str, torch.Tensor]) -> None:
        named[name].view(-1)[0] = torch.nan

    return change


def _reshape(named: dict[str, torch.Tensor]) -> None:
    named["fit/rest/cross/a/a"] = torch.zeros(2, 3)


def _drop_products(named: dict[str, torch.Tensor]) -> None:
    del named["held_out/rest/cross/a/a"]


def _shorten(named: dict[str, torch.Tensor]) -> None:
    named["fit/first/held/a"] = torch.zeros(3, 1)


def _drop_set(named: dict[str, torch.Tensor]) -> None:
    for key in [key for key in named if key.startswith("held_out/first/")]:
        del named[key]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file of moments of one variable, with rows held in one part."""
    sets = {(split, part): Moments.zeros({"a": 2}, [("a", "a")]) for split in ("fit", "held_out") for part in PARTS}
    for split in ("fit", "held_out"):
        sets[split, "rest"].add({"a": torch.eye(2)})
    sets["fit", "first"].hold({"a": torch.ones(3, 2)})
    CalibrationMoments(sets, {"identity": {}}).save(tmp_path / "moments.safetensors")
    return tmp_path / "moments.safetensors"


def change_file(path: Path, change: Callable[[dict[str, torch.Tensor]], None], *, checksums: bool) -> None:
    with safe_open(path, "pt") as file:
        named = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(named)
    if not checksums:
        del metadata["crc32"]
    save_file(named, path, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "checksums", "reason"),
    [
        (_drop_mean, True, "fit/rest lacks a variable"),
        (_spoil("fit/rest/square/a"), True, "fit/rest/square/a has another checksum"),
        (_spoil("fit/rest/square/a"), False, "fit/rest/square/a holds NaN"),
        (_reshape, True, "fit/rest has a block of another shape"),
        (_drop_products, True, "held_out/rest lacks a block"),
        (_shorten, True, "fit/first lacks rows of a variable"),
        (_drop_set, True, "held_out/first lacks"),
    ],
    ids=["no-mean", "checksum", "nan", "shape", "no-products", "held", "no-set"],
)
def test_moments_that_lost_a_part_are_refused(
    small: Path, change: Callable[[dict[str, torch.Tensor]], None], checksums: bool, reason: str
) -> None:
    assert CalibrationMoments.load(small).sets["fit", "first"].rows == 3
    change_file(small, change, checksums=checksums)
    with pytest.raises(CalibrationError, match=rf"damaged or holds something else \(.*{reason}"):
        CalibrationMoments.load(small)


@pytest.mark.parametrize(
    ("checksums", "reason"), [(True, "another checksum"), (False, "NaN or infinite")], ids=["checksum", "nan"]
)
def test_damaged_products_are_refused_when_they_are_used(small: Path, checksums: bool, reason: str) -> None:
    change_file(small, _spoil("fit/rest/cross/a/a"), checksums=checksums)
    loaded = CalibrationMoments.load(small)
    assert torch.equal(loaded.sets["held_out", "rest"].gram(["a"]), torch.eye(2).double() - 0.5)
    with pytest.raises(CalibrationError, match=rf"{small} is damaged .*fit/rest/cross/a/a (has|holds) {reason}"):
        loaded.sets["fit", "rest"].gram(["a"])


def test_only_what_is_used_is_read(
    calibration: CalibrationMoments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "moments.safetensors", []
    calibration.save(path)
    loaded, plain = CalibrationMoments.load(path), TensorFile.read
    monkeypatch.setattr(TensorFile, "read", lambda self, name: (read.append(name), plain(self, name))[1])
    loaded.require(BLOCKS)
    assert read == []
    fit = loaded.select("fit", first=False)
    expected = calibration.sets["fit", "rest"]
    assert torch.equal(fit.gram(["source.keys"]), expected.cross["source.keys", "source.keys"])
    assert read == ["fit/rest/cross/source.keys/source.keys"]


def test_what_was_loaded_can_be_added_to_and_leaves_its_file_alone(
    calibration: CalibrationMoments, tmp_path: Path
) -> None:
    path = tmp_path / "moments.safetensors"
    calibration.save(path)
    before, loaded = path.read_bytes(), CalibrationMoments.load(path)
    loaded.merge(CalibrationMoments.load(path))
    loaded.sets["fit", "rest"].add(make_rows(5))
    twice = [calibration.sets["fit", "rest"], calibration.sets["fit", "rest"].clone()]
    twice[0].merge(twice[1])
    twice[0].add(make_rows(5))
    assert_equal(loaded.sets["fit", "rest"], twice[0], 1e-12)
    assert path.read_bytes() == before


@pytest.mark.parametrize("enough", [1, 4, 10, 100])
def test_rows_that_are_held_count_as_those_that_were_added(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbridge.calibration.moments.ROWS_PER_PRODUCT", enough)
    rows, moments = make_rows(23), Moments.zeros(WIDTHS, BLOCKS)
    for start in range(0, 23, 3):
        moments.hold(cut(rows, start, start + 3))
    assert moments.rows == 23
    assert moments.held_rows < enough
    moments.settle()
    assert (moments.rows, moments.held_rows) == (23, 0)
    assert_equal(moments, reference(rows), 1e-10)


def test_fewer_of_wider_rows_wait_for_one_product() -> None:
    assert [rows_per_product(width) for width in (10, 22_000, 60_000, 10**6)] == [8192, 8192, 4166, 2048]


def test_held_rows_do_not_keep_alive_what_they_were_cut_from() -> None:
    block, moments = torch.randn(1000, 2), Moments.zeros({"a": 2}, [])
    moments.hold({"a": block[:3]})
    assert moments.held[0]["a"].untyped_storage().nbytes() == 3 * 2 * 4


@pytest.mark.parametrize("enough", [4, 100])
def test_held_rows_are_stored_merged_and_selected(
    calibration: CalibrationMoments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int
) -> None:
    monkeypatch.setattr("kvbridge.calibration.moments.ROWS_PER_PRODUCT", enough)
    first = Moments.zeros(WIDTHS, BLOCKS)
    first.hold(make_rows(3, seed=7))
    calibration.sets["fit", "first"] = first
    calibration.save(tmp_path / "moments.safetensors")
    loaded = CalibrationMoments.load(tmp_path / "moments.safetensors")
    assert loaded.sets["fit", "first"].held_rows == 3
    joined = {name: torch.cat((make_rows(3, 7)[name], make_rows(10, 1)[name])) for name in WIDTHS}
    assert_equal(loaded.select("fit", first=True), reference(joined), 1e-10)
    loaded.merge(CalibrationMoments.load(tmp_path / "moments.safetensors"))
    merged = loaded.sets["fit", "first"]
    assert (merged.rows, merged.held_rows) == (6, 0 if enough == 4 else 6)
    merged.settle()
    assert_equal(merged, reference({name: value.repeat(2, 1) for name, value in make_rows(3, 7).items()}), 1e-10)
