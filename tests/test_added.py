"""Calibrations that add to finished moments: as if all text had been read at once, and no document read twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.calibration import CalibrationConfig, CalibrationMoments, calibrate, moments_folder
from kvbridge.calibration.draw import Draw
from kvbridge.errors import CalibrationError, CorpusError, UsageError
from kvbridge.pair import ModelPair
from test_collect import BLOCK, BLOCKS, assert_same_bits, corpus, differences, pair, settings_of, usual
from tiny_pair import write_corpus

__all__ = ["corpus", "pair", "usual"]
pytestmark = pytest.mark.usefixtures("own_dataset_cache")


def collect(pair: ModelPair, config: CalibrationConfig, out: Path) -> CalibrationMoments:
    collected = calibrate(pair, config, BLOCKS, out)
    assert collected is not None
    return collected


@pytest.fixture(scope="module")
def first(pair: ModelPair, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Moments of the first five of the fifteen documents that `usual` reads."""
    out = tmp_path_factory.mktemp("first")
    collect(pair, settings_of(corpus, tokens=4 * BLOCK), out)
    return out


def test_text_added_later_counts_as_text_read_at_once(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path, usual: CalibrationMoments
) -> None:
    config = settings_of(corpus, tokens=8 * BLOCK, add=str(first))
    added = collect(pair, config, tmp_path)
    assert differences(added, usual) < 1e-9
    assert added.info["documents"] == usual.info["documents"] == 15
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["moments.safetensors"]
    # Finished moments are taken as they are, where they are looked for too.
    assert_same_bits(collect(pair, config, tmp_path), added)
    assert moments_folder(pair, config, BLOCKS, tmp_path.parent) == tmp_path


def test_shards_are_added_too(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path, usual: CalibrationMoments
) -> None:
    for shard in range(2):
        sharded = settings_of(corpus, tokens=8 * BLOCK, add=str(first), shard=f"{shard}/2")
        assert calibrate(pair, sharded, BLOCKS, tmp_path) is None
    assert differences(collect(pair, settings_of(corpus, tokens=8 * BLOCK, add=str(first)), tmp_path), usual) < 1e-9


def test_parts_of_a_calibration_that_adds_are_no_parts_of_another(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path
) -> None:
    adding = settings_of(corpus, tokens=4 * BLOCK, add=str(first))
    for shard in range(2):
        calibrate(pair, replace(adding, shard=f"{shard}/2"), BLOCKS, tmp_path / "out")
    with pytest.raises(CalibrationError, match=r"00000-of-00002\.safetensors was collected with calibration\.added"):
        calibrate(pair, settings_of(corpus, tokens=4 * BLOCK), BLOCKS, tmp_path / "out")
    collect(pair, adding, tmp_path / "other")
    with pytest.raises(CalibrationError, match=r"was collected with calibration\.added"):
        calibrate(pair, replace(adding, add=str(tmp_path / "other")), BLOCKS, tmp_path / "out")


def test_no_document_is_drawn_twice_whatever_the_length_of_its_block(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path
) -> None:
    longer = settings_of(corpus, tokens=4 * 2 * BLOCK, block=2 * BLOCK, add=str(first))
    draw = Draw.of(collect(pair, longer, tmp_path / "longer").info["identity"])
    again = settings_of(corpus, tokens=4 * BLOCK, add=str(tmp_path / "longer"))
    last = Draw.of(collect(pair, again, tmp_path / "again").info["identity"])
    assert last.added == (draw,)
    text = longer.open("calibration")
    parts = [part.tokens[:, :BLOCK] for part in last.parts(text, pair.tokenizer)]
    assert [part.shape for part in parts] == [(5, BLOCK)] * 3
    documents = [row.tobytes() for part in parts for row in part]
    assert len(documents) == len(set(documents)) == 15
    assert last.splits(text, pair.tokenizer, BLOCK).keys() == set(documents)


def test_documents_at_the_beginning_are_skipped(pair: ModelPair, corpus: Path) -> None:
    text = settings_of(corpus).open("calibration")
    whole = Draw(tokens=12 * BLOCK, block=BLOCK, held_out=0.0, seed=0).parts(text, pair.tokenizer)[-1].tokens
    late = Draw(tokens=7 * BLOCK, block=BLOCK, held_out=0.0, seed=0, skip=5).parts(text, pair.tokenizer)[-1].tokens
    assert (late == whole[5:]).all()
    with pytest.raises(CorpusError, match="gives 0 fit"):
        Draw(tokens=BLOCK, block=BLOCK, held_out=0.0, seed=0, skip=40).parts(text, pair.tokenizer)


def test_moments_of_more_text_than_asked_for_are_refused(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path
) -> None:
    collect(pair, settings_of(corpus, tokens=8 * BLOCK, add=str(first)), tmp_path)
    with pytest.raises(CalibrationError, match=r"was collected with calibration\.added = "):
        calibrate(pair, settings_of(corpus, tokens=8 * BLOCK), BLOCKS, tmp_path)


@pytest.mark.parametrize("changed", [{"pairing": "shuffled"}, {"corpus": "other"}, {"blocks": frozenset()}], ids=str)
def test_refuses_to_add_to_moments_of_another_kind(
    pair: ModelPair, corpus: Path, tmp_path: Path, first: Path, changed: dict[str, Any]
) -> None:
    if "corpus" in changed:
        changed = {"corpus": str(write_corpus(tmp_path / "other.jsonl", seed=1))}
    blocks = changed.pop("blocks", BLOCKS)
    with pytest.raises(CalibrationError, match=r"cannot be added to moments with .* same pair, text and mapper\.$"):
        calibrate(pair, settings_of(corpus, **({"add": str(first)} | changed)), blocks, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sketch_cannot_be_added(corpus: Path) -> None:
    with pytest.raises(UsageError, match=r"calibration\.add and calibration\.sketch"):
        settings_of(corpus, add="there", stage=True, sketch=4)
