"""Staged calibration: the same moments with one model at a time, in passes, resumed, and summed again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import Run
from kvbridge.calibration import CalibrationConfig, CalibrationMoments, MomentBlock, Moments, calibrate, joint_blocks
from kvbridge.calibration.passes import plan_passes
from kvbridge.calibration.staging import StagedStates, stored_dtypes, token_bytes
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair, PairLoader, describe_pair, load_pair, open_pair
from tiny_models import kv_model
from tiny_pair import save_pair, tiny_pair, write_corpus

pytestmark = pytest.mark.usefixtures("own_dataset_cache")

BLOCK, FIT, HELD_OUT = 16, 8, 2
INPUTS = ["source.keys", "source.values", "target.keys[0:2]", "target.normed_residual[1:2]"]
OUTPUTS = ["target.keys", "target.values", "target.residual[3:4]"]
JOINT = joint_blocks(INPUTS, OUTPUTS)
# A quarter of what all sums of the joint map take.
PASSES_GB = 0.003


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=30, words=10)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


def settings_of(path: Path, **changed: Any) -> CalibrationConfig:
    usual: dict[str, Any] = {
        "corpus": str(path),
        "tokens": FIT * BLOCK,
        "block": BLOCK,
        "held_out": HELD_OUT / FIT,
        "precision": "float64",
        "checkpoint_seconds": 0.0,
    }
    return CalibrationConfig(**(usual | changed))


def collect(
    pair: ModelPair | PairLoader, config: CalibrationConfig, out: Path, blocks: frozenset[MomentBlock] = JOINT
) -> CalibrationMoments:
    collected = calibrate(pair, config, blocks, out)
    assert collected is not None
    return collected


@pytest.fixture(scope="module")
def unstaged(pair: ModelPair, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationMoments:
    return collect(pair, settings_of(corpus), tmp_path_factory.mktemp("unstaged"))


def matrices(moments: CalibrationMoments, split: str, *, first: bool = False) -> tuple[Tensor, ...]:
    chosen = moments.select(split, first=first)
    return chosen.gram(INPUTS), chosen.cross_products(INPUTS, OUTPUTS), chosen.means(OUTPUTS), chosen.squares(OUTPUTS)


def assert_same(found: CalibrationMoments, expected: CalibrationMoments, tolerance: float = 1e-9) -> None:
    for split, first in itertools.product(("fit", "held_out"), (False, True)):
        assert found.sets[split, "rest"].rows == expected.sets[split, "rest"].rows
        for given, wanted in zip(
            matrices(found, split, first=first), matrices(expected, split, first=first), strict=True
        ):
            assert (given - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("memory", [None, PASSES_GB], ids=["one-pass", "passes"])
def test_staged_states_give_the_same_moments(
    pair: ModelPair, corpus: Path, tmp_path: Path, unstaged: CalibrationMoments, memory: float | None
) -> None:
    found = collect(pair, settings_of(corpus, stage=True, memory_gb=memory, batch=3), tmp_path)
    assert_same(found, unstaged, 1e-5)
    assert ("target.keys" in {b for _, b in found.sets["fit", "rest"].cross}) == (memory is None)
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]
    assert_same(collect(pair, settings_of(corpus, batch=3), tmp_path), found)


def test_passes_keep_their_sums_within_the_memory(
    pair: ModelPair, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, taken = Moments.settle, []

    def measured(self: Moments, *args: Any) -> None:
        settle(self, *args)
        taken.append(sum(block.numel() * 8 for block in self.cross.values()))

    monkeypatch.setattr(Moments, "settle", measured)
    collect(pair, settings_of(corpus, stage=True, memory_gb=PASSES_GB), tmp_path)
    # Each pass settles the fit and the held-out part.
    assert max(a + b for a, b in zip(taken[::2], taken[1::2], strict=True)) <= PASSES_GB * 1e9
    assert len(taken) > 4


def test_one_model_is_in_memory_at_a_time(
    pair: ModelPair, corpus: Path, tmp_path: Path, unstaged: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = open_pair(*map(str, save_pair(pair, tmp_path / "models")), dtype="float32", device="cpu")
    load, loaded = PairLoader.load, []

    def counted(self: PairLoader, role: str) -> KVModel:
        loaded.append(role)
        return load(self, role)

    monkeypatch.setattr(PairLoader, "load", counted)
    found = collect(loader, settings_of(corpus, stage=True), tmp_path / "out")
    assert loaded == ["source", "target"]
    assert_same(found, unstaged, 1e-5)
    assert found.info["identity"] == unstaged.info["identity"]


def test_passes_of_unequal_width_sum_the_same_rows(
    pair: ModelPair, corpus: Path, tmp_path: Path, unstaged: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = sum(map(len, unstaged.sets["fit", "rest"].mean.values()))
    # Rows of all variables together reach the limit of one product after 20; those of one pass alone would later.
    monkeypatch.setattr("kvbridge.calibration.moments.HELD_BYTES", 20 * 4 * width)
    monkeypatch.setattr("kvbridge.calibration.moments.FEWEST_ROWS_PER_PRODUCT", 1)
    found = collect(pair, settings_of(corpus, stage=True, memory_gb=PASSES_GB), tmp_path)
    assert found.sets["fit", "first"].summed > 0
    assert_same(found, unstaged, 1e-5)


@pytest.mark.parametrize("memory", [None, PASSES_GB], ids=["one-pass", "passes"])
@pytest.mark.parametrize("at", ["staging", "summing"])
def test_an_interrupted_run_ends_with_the_same_bits(
    pair: ModelPair, corpus: Path, tmp_path: Path, at: str, memory: float | None
) -> None:
    config = settings_of(corpus, stage=True, memory_gb=memory)
    straight = collect(pair, config, tmp_path / "straight")
    owner, name = (StagedStates, "write") if at == "staging" else (Moments, "hold")
    plain, count = getattr(owner, name), itertools.count(1)

    def stopped(self: Any, *args: Any) -> None:
        if next(count) == 13:
            raise KeyboardInterrupt
        plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopped)
        with pytest.raises(KeyboardInterrupt):
            calibrate(pair, config, JOINT, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/staged").rglob("block_*")}
    assert len(before) == (12 if at == "staging" else 2 * (FIT + HELD_OUT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedStates, "remove", lambda self: None)
        resumed = collect(pair, config, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for key, moments in straight.sets.items():
        for name, value in moments.tensors().items():
            assert torch.equal(resumed.sets[key].tensors()[name], value), (key, name)


def test_kept_states_serve_another_mapper_without_reading_again(
    pair: ModelPair, corpus: Path, tmp_path: Path, unstaged: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of(corpus, stage=str(tmp_path / "states"), keep_staged=True)
    collect(pair, config, tmp_path / "first")
    monkeypatch.setattr(KVModel, "read", None)
    other = frozenset({("source.values", "target.residual[1:2]"), ("source.keys", "target.keys[1:3]")})
    found = collect(pair, config, tmp_path / "second", other)
    width = pair.target.geometry.width // 4
    expected = unstaged.sets["fit", "rest"].cross["source.keys", "target.keys"][:, width : 3 * width]
    product = found.sets["fit", "rest"].cross["source.keys", "target.keys[1:3]"]
    assert (product - expected).norm() <= 1e-6 * expected.norm()
    with pytest.raises(
        CalibrationError, match=r"target was staged with residual streams = \[1, 3\] and cannot serve \[2\]"
    ):
        calibrate(pair, config, frozenset({("source.keys", "target.residual[2:3]")}), tmp_path / "third")


def test_states_of_other_text_are_refused(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    config = settings_of(corpus, stage=True, keep_staged=True)
    collect(pair, config, tmp_path)
    (tmp_path / "moments.safetensors").unlink()
    with pytest.raises(
        CalibrationError, match=r"staged/source was staged with blocks = \w{16} and cannot serve \w{16};"
    ):
        calibrate(pair, settings_of(corpus, stage=True, seed=1), JOINT, tmp_path)


def test_a_damaged_block_is_refused(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    config = settings_of(corpus, stage=True, keep_staged=True)
    collect(pair, config, tmp_path)
    (tmp_path / "moments.safetensors").unlink()
    block = tmp_path / "staged/target/block_000003.safetensors"
    data = block.read_bytes()
    block.write_bytes(data[:-4] + bytes(4))
    with pytest.raises(CalibrationError, match=r"block_000003\.safetensors is damaged .* another checksum"):
        calibrate(pair, config, JOINT, tmp_path)


@pytest.mark.parametrize("pairing", ["same", "shuffled"])
def test_shards_stage_their_own_blocks(pair: ModelPair, corpus: Path, tmp_path: Path, pairing: str) -> None:
    blocks = frozenset({("source.keys", "target.values")})
    whole = collect(pair, settings_of(corpus, pairing=pairing), tmp_path / "whole", blocks)
    for shard in range(2):
        config = settings_of(corpus, pairing=pairing, stage=True, shard=f"{shard}/2")
        assert calibrate(pair, config, blocks, tmp_path / "shards") is None
    merged = collect(pair, settings_of(corpus, pairing=pairing, stage=True), tmp_path / "shards", blocks)
    for split in ("fit", "held_out"):
        given, wanted = (one.select(split, first=True).cross["source.keys", "target.values"] for one in (merged, whole))
        assert (given - wanted).norm() <= 1e-5 * wanted.norm()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["moments.safetensors"]


def test_a_layer_that_needs_more_memory_is_refused(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"memory_gb=1e-06: the products with one layer of source\.keys alone take"):
        calibrate(pair, settings_of(corpus, stage=True, memory_gb=1e-6), JOINT, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"memory_gb": 1.0}, r"^calibration\.memory_gb=1: expected more than 0, and states that are staged; add"),
        ({"memory_gb": 0.0, "stage": True}, r"^calibration\.memory_gb=0: expected more than 0"),
        ({"keep_staged": True}, r"^calibration\.keep_staged=true keeps staged states; add calibration\.stage=true\.$"),
    ],
    ids=["unstaged", "none", "keep"],
)
def test_refuses_settings_that_do_nothing(corpus: Path, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings_of(corpus, **changed)


def test_passes_hold_every_product_once() -> None:
    layers = {"source.keys": 3, "target.keys": 5, "target.values": 5}
    widths = {"source.keys": 6, "target.keys": 20, "target.values": 20}
    blocks = frozenset({("source.keys", name) for name in widths})
    passes = plan_passes(blocks, widths, layers, 2, 8.0 * 2 * 6 * 9 / 1e9)
    assert passes == [
        {("source.keys", "source.keys")},
        {("source.keys", "target.keys[0:2]")},
        {("source.keys", "target.keys[2:4]")},
        {("source.keys", "target.keys[4:5]"), ("source.keys", "target.values[0:1]")},
        {("source.keys", "target.values[1:3]")},
        {("source.keys", "target.values[3:5]")},
    ]
    assert plan_passes(blocks, widths, layers, 2, None) == [blocks]


def test_half_precision_states_are_staged_in_sixteen_bits(tmp_path: Path) -> None:
    geometry = kv_model().geometry
    assert stored_dtypes(torch.bfloat16) == (torch.float16, torch.bfloat16)
    assert token_bytes(geometry, torch.bfloat16, 2) == 4 * geometry.width + 2 * 2 * geometry.hidden_size
    staged = StagedStates(tmp_path / "target", "target")
    staged.begin({"model": "m"}, (2,))
    exact = {"target.keys": torch.randn(5, 8), "target.values": torch.randn(5, 8).bfloat16().float()}
    exact["target.residual[2:3]"] = torch.randn(5, 4).bfloat16().float()
    staged.write(7, exact, torch.bfloat16)
    read = staged.read([7])
    assert torch.equal(read["target.values"][0].float(), exact["target.values"])
    torch.testing.assert_close(read["target.keys"][0].float(), exact["target.keys"], rtol=1e-3, atol=1e-6)
    assert json.loads((tmp_path / "target/manifest.json").read_text()) == {"model": "m", "residual streams": [2]}
    exact["target.keys"][3, 3] = 1e6
    staged.write(8, exact, torch.bfloat16)
    assert torch.equal(staged.read([8])["target.keys"][0], exact["target.keys"])


def test_loaded_and_unloaded_pairs_are_known_by_the_same(pair: ModelPair, tmp_path: Path) -> None:
    folders = [str(folder) for folder in save_pair(pair, tmp_path)]
    loader, loaded = (make(*folders, dtype="float32", device="cpu") for make in (open_pair, load_pair))
    assert {role: loader.geometry(role) for role in ("source", "target")} == {
        role: getattr(pair, role).geometry for role in ("source", "target")
    }
    assert describe_pair(loader) == loaded.describe()
    assert loader.record("target") == loaded.record("target")
    assert dataclasses.asdict(loader)["locations"]["source"].endswith("source")


def test_the_command_stages_with_one_model_at_a_time(
    kvbridge: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelPair, "of", None)
    staged = ("calibration.stage=true", "calibration.memory_gb=1", "calibration.keep_staged=true")
    ran = kvbridge("calibrate", *staged, "out=a")
    assert ran.code == 0, ran.errors
    assert ran.out.startswith("a/calibration/moments.safetensors: rows {'fit/first'")
    assert sorted(path.name for path in (tmp_path / "a/calibration/staged").iterdir()) == ["source", "target"]
    again = kvbridge("calibrate", "calibration.stage=a/calibration/staged", "calibration.keep_staged=true", "out=b")
    assert again.code == 0, again.errors
