"""Sketches: principal directions of each source layer that stand for its keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge.calibration import CalibrationConfig, CalibrationMoments, Sketch, calibrate, joint_blocks
from kvbridge.calibration.sketch import sketched
from kvbridge.calibration.staged import find_sketch
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.pair import ModelPair
from kvbridge.variables import Span
from tiny_pair import tiny_pair, write_corpus

pytestmark = pytest.mark.usefixtures("own_dataset_cache")

BLOCK, FIT, HELD_OUT = 64, 8, 2
SOURCE = ["source.keys", "source.values"]
INPUTS = [*SOURCE, "target.keys[0:1]"]
OUTPUTS = ["target.keys", "target.values"]
JOINT = joint_blocks(INPUTS, OUTPUTS)
LAYER_WIDTH = 64
PENALTY = 1e-3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=30, words=20)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text is staged once for all tests."""
    return tmp_path_factory.mktemp("states")


def collect(pair: ModelPair, corpus: Path, states: Path, out: Path, **changed: Any) -> CalibrationMoments:
    usual: dict[str, Any] = {
        "corpus": str(corpus),
        "tokens": FIT * BLOCK,
        "block": BLOCK,
        "held_out": HELD_OUT / FIT,
        "precision": "float64",
        "stage": str(states),
        "keep_staged": True,
    }
    collected = calibrate(pair, CalibrationConfig(**(usual | changed)), JOINT, out)
    assert collected is not None
    return collected


@pytest.fixture(scope="module")
def whole(pair: ModelPair, corpus: Path, states: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationMoments:
    return collect(pair, corpus, states, tmp_path_factory.mktemp("whole"))


def weights(moments: CalibrationMoments, inputs: list[str]) -> Tensor:
    """Ridge weights with λ on the correlation scale, for inputs that are no sketch."""
    fit = moments.select("fit", first=False)
    gram = fit.gram(inputs)
    spread = gram.diagonal().sqrt()
    system = gram / torch.outer(spread, spread) + PENALTY * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(system, fit.cross_products(inputs, OUTPUTS) / spread[:, None]) / spread[:, None]


def sketched_weights(moments: CalibrationMoments, sketch: Sketch) -> Tensor:
    """The same for the source's keys and values, from their sketch, whose coordinates have a spread of one at most."""
    fit = moments.select("fit", first=False)
    features = sketch.features(SOURCE)
    gram = fit.gram(features)
    system = gram + PENALTY * fit.rows * torch.eye(len(gram), dtype=torch.float64)
    return sketch.unsketched(torch.linalg.solve(system, fit.cross_products(features, OUTPUTS)))


@pytest.mark.parametrize("kept", [LAYER_WIDTH, 1000])
def test_a_sketch_of_full_width_gives_the_same_fit(
    pair: ModelPair, corpus: Path, states: Path, tmp_path: Path, whole: CalibrationMoments, kept: int
) -> None:
    found = collect(pair, corpus, states, tmp_path, sketch=kept)
    assert found.sketch is not None
    assert found.sketch.directions.shape == (3, LAYER_WIDTH, LAYER_WIDTH)
    given, expected = sketched_weights(found, found.sketch), weights(whole, SOURCE)
    gram = whole.select("fit", first=False).gram(SOURCE)
    difference = given - expected
    made = (expected * (gram @ expected)).sum()
    assert (difference * (gram @ difference)).sum() < 1e-6 * made


def test_a_sketch_keeps_what_varies_most(
    pair: ModelPair, corpus: Path, states: Path, tmp_path: Path, whole: CalibrationMoments
) -> None:
    found = collect(pair, corpus, states, tmp_path, sketch=5)
    assert found.sketch is not None
    fit = found.sets["fit", "rest"]
    assert fit.gram(["source.sketch"]).shape == (15, 15)
    for layer in range(3):
        gram = fit.gram([f"source.sketch[{layer}:{layer + 1}]"])
        variances = gram.diagonal() / fit.rows
        parts = whole.sets["fit", "rest"].gram([Span(name, layer, layer + 1) for name in SOURCE])
        spread = parts.diagonal().sqrt()
        leading = torch.linalg.eigvalsh(parts / torch.outer(spread, spread)).flip(0)[:5]
        torch.testing.assert_close(variances, leading, rtol=1e-4, atol=1e-5)
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-3 * gram.diagonal().max()


def test_a_sketch_is_stored_and_stands_for_the_source(
    pair: ModelPair, corpus: Path, states: Path, tmp_path: Path
) -> None:
    found = collect(pair, corpus, states, tmp_path, sketch=5)
    assert [path.name for path in tmp_path.iterdir()] == ["moments.safetensors"]
    loaded = CalibrationMoments.load(tmp_path / "moments.safetensors")
    assert found.sketch is not None
    assert loaded.sketch is not None
    assert torch.equal(loaded.sketch.directions, found.sketch.directions)
    loaded.require(JOINT)
    names = {name for block in loaded.sets["fit", "rest"].cross for name in block}
    assert names == {"source.sketch", "target.keys[0:1]", "target.keys", "target.values"}
    with pytest.raises(CalibrationError, match=r"hold no products of source\.keys and source\.keys"):
        loaded.sets["fit", "rest"].gram(["source.keys"])
    with pytest.raises(CalibrationError, match=r"moment blocks = \['source\.sketch×source\.sketch', "):
        collect(pair, corpus, states, tmp_path)
    with pytest.raises(CalibrationError, match=r"calibration\.sketch = 5 and cannot be resumed with 6"):
        collect(pair, corpus, states, tmp_path, sketch=6)


def test_a_resumed_run_goes_on_with_the_same_sketch(
    pair: ModelPair, corpus: Path, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"sketch": 5, "memory_gb": 0.001, "checkpoint_seconds": 0.0}
    straight = collect(pair, corpus, states, tmp_path / "straight", **settings)

    def stopped(*args: Any) -> None:
        find_sketch(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbridge.calibration.staged.find_sketch", stopped)
        with pytest.raises(KeyboardInterrupt):
            collect(pair, corpus, states, tmp_path / "out", **settings)
    monkeypatch.setattr("kvbridge.calibration.staged.principal_directions", None)
    resumed = collect(pair, corpus, states, tmp_path / "out", **settings)
    for key, moments in straight.sets.items():
        for name, value in moments.tensors().items():
            assert torch.equal(resumed.sets[key].tensors()[name], value), (key, name)


def test_unsketched_weights_map_the_states_themselves() -> None:
    sketch = Sketch(torch.randn(3, 8, 5))
    read = {name: torch.randn(2, 7, 12) for name in SOURCE}
    natives, weight = torch.randn(2, 7, 4), torch.randn(3 * 5 + 4, 6)
    made = torch.cat((sketch.rows(read), natives), dim=-1) @ weight
    inputs = torch.cat((read["source.keys"], read["source.values"], natives), dim=-1)
    torch.testing.assert_close(inputs @ sketch.unsketched(weight), made, rtol=1e-4, atol=1e-4)


def test_features_and_blocks_name_the_sketch() -> None:
    sketch = Sketch(torch.randn(3, 8, 5))
    assert sketch.features(INPUTS) == ["source.sketch", "target.keys[0:1]"]
    assert sketch.features([Span("source.keys", 0, 3), Span("source.values", 0, 3)]) == ["source.sketch"]
    assert sketched([("target.keys", "source.values"), ("source.keys", "target.keys")]) == {
        ("source.sketch", "target.keys")
    }
    for inputs in (["source.values", "source.keys"], ["source.keys[0:2]", "source.values[0:2]"], ["target.keys[0:1]"]):
        with pytest.raises(UsageError, match=r"which must come first; given: "):
            sketch.features(inputs)
    with pytest.raises(UsageError, match=r"stands for all source layers, and this mapper reads source\.keys\[0:2\]\."):
        sketched([("source.keys[0:2]", "target.keys")])


@pytest.mark.parametrize("changed", [{"sketch": 0}, {"stage": False, "keep_staged": False}, {"shard": "0/2"}], ids=str)
def test_refuses_a_sketch_that_cannot_be_made(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^calibration\.sketch=\d: expected 1 or more, and all states staged in one"):
        CalibrationConfig(**({"sketch": 5, "stage": True} | changed))
