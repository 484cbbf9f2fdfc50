"""Collection: right against numpy, the same however it is cut, resumed after a kill, refused under other settings."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor

from kvbridge.calibration import (
    CalibrationConfig,
    CalibrationMoments,
    MomentBlock,
    Moments,
    calibrate,
    joint_blocks,
    open_corpus,
)
from kvbridge.calibration.draw import Draw
from kvbridge.calibration.moments import CACHE_VARIABLES
from kvbridge.errors import CalibrationError, CorpusError, UsageError
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.processes import alone
from tiny_models import tiny_model
from tiny_pair import byte_tokenizer, tiny_pair, write_corpus

pytestmark = pytest.mark.usefixtures("own_dataset_cache")

BLOCKS: frozenset[MomentBlock] = frozenset(
    {("source.keys", "source.values"), ("source.keys", "target.keys"), ("source.values", "target.values")}
)
BLOCK, FIT, HELD_OUT = 16, 12, 3
CALLS_PER_BATCH = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=40, words=10)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """In fp64, so that the size of a batch leaves no rounding of its own in the states."""
    return tiny_pair(dtype=torch.float64)


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


@pytest.fixture(scope="module")
def usual(pair: ModelPair, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationMoments:
    """One process, one block per batch, never interrupted."""
    collected = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path_factory.mktemp("usual"))
    assert collected is not None
    return collected


def settled(moments: Moments) -> Moments:
    """A copy in which no row waits to be added."""
    copied = moments.clone()
    copied.settle()
    return copied


def differences(found: CalibrationMoments, expected: CalibrationMoments) -> float:
    """Largest difference of any entry, relative to the spread of its coordinates."""
    worst = 0.0
    assert found.sets.keys() == expected.sets.keys()
    for at in expected.sets:
        given, moments = settled(found.sets[at]), settled(expected.sets[at])
        spread = {name: square.sqrt() for name, square in moments.square.items()}
        assert given.rows == moments.rows
        assert given.cross.keys() == moments.cross.keys()
        for name, mean in moments.mean.items():
            worst = max(worst, float(((given.mean[name] - mean).abs() / spread[name]).max()))
            worst = max(worst, float((given.square[name] / moments.square[name] - 1).abs().max()))
        for (a, b), product in moments.cross.items():
            worst = max(worst, float(((given.cross[a, b] - product).abs() / torch.outer(spread[a], spread[b])).max()))
    return worst


def assert_same_bits(found: CalibrationMoments, expected: CalibrationMoments) -> None:
    for at, moments in expected.sets.items():
        assert found.sets[at].rows == moments.rows
        for name, value in moments.tensors().items():
            assert torch.equal(found.sets[at].tensors()[name], value), (at, name)


def rows_of(model: KVModel, tokens: Tensor) -> dict[str, np.ndarray]:
    """Per kind, one row per token: layers outermost, then heads, then head coordinates."""
    states = model.content(model.read(tokens[None]))
    layers, heads = model.geometry.layers, model.geometry.kv_heads
    return {
        kind: np.concatenate(
            [
                getattr(states, kind)[layer, 0, head].double().numpy()
                for layer in range(layers)
                for head in range(heads)
            ],
            axis=1,
        )
        for kind in ("keys", "values")
    }


def test_moments_are_those_of_both_models_states(pair: ModelPair, corpus: Path, usual: CalibrationMoments) -> None:
    drawn = Draw(FIT * BLOCK, BLOCK, HELD_OUT / FIT, seed=0).blocks(open_corpus(str(corpus)), pair.tokenizer)
    positions = {"first": slice(0, 4), "rest": slice(4, BLOCK)}
    for (split, name), (part, span) in itertools.product(enumerate(("fit", "held_out")), positions.items()):
        numbers = [at for at in range(len(drawn)) if drawn.split[at] == split]
        read = {
            f"{role}.{kind}": np.concatenate([rows_of(model, tokens)[kind][span] for tokens in drawn.batch(numbers)])
            for role, model in (("source", pair.source), ("target", pair.target))
            for kind in ("keys", "values")
        }
        found = settled(usual.sets[name, part])
        assert found.rows == len(numbers) * (span.stop - span.start) == len(read["source.keys"])
        centred = {variable: rows - rows.mean(axis=0) for variable, rows in read.items()}
        for variable, rows in read.items():
            np.testing.assert_allclose(found.mean[variable], rows.mean(axis=0), rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found.square[variable], (centred[variable] ** 2).sum(axis=0), rtol=1e-10)
        for a, b in BLOCKS:
            np.testing.assert_allclose(found.cross[a, b], centred[a].T @ centred[b], rtol=1e-9, atol=1e-10)


def native_rows(pair: ModelPair, tokens: Tensor) -> dict[str, np.ndarray]:
    """What the target knows natively, from transformers' own hidden states."""
    with torch.no_grad():
        hidden = pair.target.model(tokens[None], output_hidden_states=True).hidden_states[2][0].float().numpy()
    keys = rows_of(pair.target, tokens)["keys"]
    width = keys.shape[1] // pair.target.geometry.layers
    return {
        "target.keys[0:2]": keys[:, : 2 * width],
        "target.residual[2:3]": hidden,
        "target.normed_residual[2:3]": hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True)),
    }


def test_what_the_target_knows_natively_is_gathered(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    natives = ["target.keys[0:2]", "target.normed_residual[2:3]"]
    blocks = joint_blocks(["source.keys", *natives], ["target.values", "target.residual[2:3]"])
    collected = calibrate(pair, settings_of(corpus), blocks, tmp_path)
    assert collected is not None
    drawn = Draw(FIT * BLOCK, BLOCK, HELD_OUT / FIT, seed=0).blocks(open_corpus(str(corpus)), pair.tokenizer)
    read = [
        native_rows(pair, tokens)
        for at, tokens in enumerate(drawn.batch(list(range(len(drawn)))))
        if not drawn.split[at]
    ]
    found = collected.sets["fit", "rest"]
    centred = {}
    for name in read[0]:
        rows = np.concatenate([block[name][4:] for block in read]).astype(np.float64)
        np.testing.assert_allclose(found.mean[name], rows.mean(axis=0), rtol=1e-5, atol=1e-5)
        centred[name] = rows - rows.mean(axis=0)
    inputs, outputs = [
        np.concatenate([centred[name] for name in names], axis=1) for names in (natives, ["target.residual[2:3]"])
    ]
    np.testing.assert_allclose(found.gram(natives), inputs.T @ inputs, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        found.cross_products(natives, ["target.residual[2:3]"]), inputs.T @ outputs, rtol=1e-4, atol=1e-4
    )
    collected.require(blocks)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("target.keys[2:9]", r"target\.keys\[2:9\] reaches beyond the model's 4 layers"),
        ("source.residual", r"'source\.residual' is no variable of a map"),
        ("target.keys[1]", r"'target\.keys\[1\]' is no span"),
    ],
    ids=["beyond", "no-variable", "no-span"],
)
def test_refuses_what_no_model_of_the_pair_has(
    pair: ModelPair, corpus: Path, tmp_path: Path, name: str, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        calibrate(pair, settings_of(corpus), frozenset({("source.keys", name)}), tmp_path)


def test_finished_moments_are_reused_for_parts_of_their_variables(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    interrupt(monkeypatch, 1)
    part = frozenset({("target.keys[1:3]", "source.keys")})
    reused = calibrate(pair, settings_of(corpus), part, tmp_path)
    assert reused is not None
    reused.require(part)
    width = pair.target.geometry.width // 4
    expected = usual.sets["fit", "rest"].cross["source.keys", "target.keys"][:, width : 3 * width]
    assert torch.equal(reused.sets["fit", "rest"].cross_products(["source.keys"], ["target.keys[1:3]"]), expected)


def test_rows_are_counted_by_split_and_part(usual: CalibrationMoments) -> None:
    assert {at: moments.rows for at, moments in usual.sets.items()} == {
        ("fit", "first"): FIT * 4,
        ("fit", "rest"): FIT * (BLOCK - 4),
        ("held_out", "first"): HELD_OUT * 4,
        ("held_out", "rest"): HELD_OUT * (BLOCK - 4),
    }
    assert usual.info["documents"] == FIT + HELD_OUT


@pytest.mark.parametrize("blocks", [frozenset(), frozenset({("source.values", "target.keys")}), BLOCKS], ids=len)
def test_only_the_wanted_products_are_gathered(
    pair: ModelPair, corpus: Path, tmp_path: Path, blocks: frozenset[MomentBlock]
) -> None:
    collected = calibrate(pair, settings_of(corpus, tokens=2 * BLOCK), blocks, tmp_path)
    assert collected is not None
    for moments in collected.sets.values():
        assert moments.cross.keys() == blocks
        assert moments.mean.keys() == moments.square.keys() == set(CACHE_VARIABLES)


@pytest.mark.parametrize("batch", [2, 5, 100])
def test_the_size_of_a_batch_changes_nothing(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, batch: int
) -> None:
    collected = calibrate(pair, settings_of(corpus, batch=batch), BLOCKS, tmp_path)
    assert collected is not None
    assert differences(collected, usual) < 1e-10


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_shards_in_any_order_merge_into_the_same(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, order: tuple[int, ...]
) -> None:
    for shard in order:
        assert calibrate(pair, settings_of(corpus, shard=f"{shard}/3"), BLOCKS, tmp_path) is None
    assert len(list(tmp_path.iterdir())) == 3
    merged = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    assert merged is not None
    assert differences(merged, usual) < 1e-10
    assert merged.info["identity"] == usual.info["identity"]
    assert [file.name for file in tmp_path.iterdir()] == ["moments.safetensors"]
    assert_same_bits(CalibrationMoments.load(tmp_path / "moments.safetensors"), merged)


def test_a_shard_alone_is_not_merged(pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments) -> None:
    calibrate(pair, settings_of(corpus, shard="1/3"), BLOCKS, tmp_path)
    with pytest.raises(CalibrationError, match=r"holds 1 of 3 shards; collect the missing ones"):
        calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    for path in tmp_path.glob("moments-*"):
        path.unlink()
    whole = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    assert whole is not None
    assert_same_bits(whole, usual)


def test_two_processes_do_not_collect_one_file(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments
) -> None:
    said = r"^another process is at work in .*moments\.safetensors; wait for it, or"
    with alone(tmp_path / "moments.safetensors", main=True), pytest.raises(UsageError, match=said):
        calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    assert not list(tmp_path.iterdir())
    whole = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    assert whole is not None
    assert_same_bits(whole, usual)


def test_a_finished_shard_of_other_settings_is_refused(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    calibrate(pair, settings_of(corpus, shard="0/2"), BLOCKS, tmp_path)
    with pytest.raises(CalibrationError, match=r"calibration\.seed"):
        calibrate(pair, settings_of(corpus, shard="0/2", seed=9), BLOCKS, tmp_path)


@pytest.mark.parametrize("shard", ["2/2", "1", "-1/2", "a/b", "1/2/3", ""])
def test_refuses_a_shard_that_is_none(pair: ModelPair, corpus: Path, tmp_path: Path, shard: str) -> None:
    with pytest.raises(UsageError, match=rf"^calibration\.shard={shard}: expected i/n with 0 ≤ i < n, such as 0/2\.$"):
        calibrate(pair, settings_of(corpus, shard=shard), BLOCKS, tmp_path)


def interrupt(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Let `Moments.hold` end the run in its call number `calls`, counted from 1."""
    hold, count = Moments.hold, itertools.count(1)

    def counted(self: Moments, *args: Any) -> None:
        if next(count) == calls:
            raise KeyboardInterrupt
        hold(self, *args)

    monkeypatch.setattr(Moments, "hold", counted)


def interrupted(pair: ModelPair, config: CalibrationConfig, out: Path, calls: int) -> None:
    """A run that ended in its call number `calls` of `Moments.hold`, of which there are two per batch."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, calls)
        with pytest.raises(KeyboardInterrupt):
            calibrate(pair, config, BLOCKS, out)


@pytest.mark.parametrize("batch", [1, 5], ids="batch{}".format)
@pytest.mark.parametrize("part", [0, 1], ids=["between-batches", "within-a-batch"])
def test_an_interrupted_run_ends_with_the_same_bits(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, batch: int, part: int
) -> None:
    config = settings_of(corpus, batch=batch)
    rows = []
    for _ in range(2):
        interrupted(pair, config, tmp_path, CALLS_PER_BATCH + part + 1)
        stored = CalibrationMoments.load(tmp_path / "moments.safetensors.progress")
        rows.append(stored.sets["fit", "rest"].rows)
    assert rows[0] < rows[1], "the second run went on from the first"
    resumed = calibrate(pair, config, BLOCKS, tmp_path)
    assert resumed is not None
    straight = usual if batch == 1 else calibrate(pair, config, BLOCKS, tmp_path / "straight")
    assert straight is not None
    assert_same_bits(resumed, straight)
    assert not (tmp_path / "moments.safetensors.progress").exists()


KILLED = """
import itertools, json, os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from kvbridge.calibration import CalibrationConfig, Moments, calibrate
from tiny_pair import tiny_pair

config, blocks, out, calls = CalibrationConfig(**json.loads(sys.argv[2])), json.loads(sys.argv[3]), *sys.argv[4:]
hold, count = Moments.hold, itertools.count(1)

def killed(self, *args):
    hold(self, *args)
    if next(count) == int(calls):
        os.kill(os.getpid(), signal.SIGKILL)

Moments.hold = killed
if calibrate(tiny_pair(torch.float64), config, frozenset(map(tuple, blocks)), Path(out)) is None:
    print("contributed")
"""


def launch(prefix: list[str], config: CalibrationConfig, out: Path, calls: int = 0) -> subprocess.CompletedProcess[str]:
    """Calibrate in processes of their own; a process kills itself in its call number `calls` of `Moments.hold`."""
    script = out.parent / "killed.py"
    script.write_text(KILLED)
    arguments = [
        str(Path(__file__).parent),
        json.dumps(dataclasses.asdict(config)),
        json.dumps(sorted(BLOCKS)),
        str(out),
    ]
    environment = os.environ | {"HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *prefix, str(script), *arguments, str(calls)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)  # imports torch anew, in processes of its own
def test_a_killed_process_ends_with_the_same_bits(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments
) -> None:
    done = launch([], settings_of(corpus), tmp_path / "out", calls=2 * (FIT // 2) + 1)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["moments.safetensors.progress"]
    stored = CalibrationMoments.load(tmp_path / "out" / "moments.safetensors.progress")
    assert stored.sets["fit", "rest"].rows == FIT // 2 * (BLOCK - 4)
    resumed = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path / "out")
    assert resumed is not None
    assert_same_bits(resumed, usual)


@pytest.mark.timeout(300)  # imports torch anew, in processes of its own
def test_two_processes_give_the_same(corpus: Path, tmp_path: Path, usual: CalibrationMoments) -> None:
    """By torchrun: on a CPU `accelerate launch` starts several processes only through mpirun."""
    prefix = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = launch(prefix, settings_of(corpus), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("contributed") == 1
    merged = CalibrationMoments.load(tmp_path / "out" / "moments.safetensors")
    assert differences(merged, usual) < 1e-10
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["moments.safetensors"]


def test_the_time_of_a_run_counts_what_came_before_an_interruption(
    pair: ModelPair, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("kvbridge.calibration.sums.time.monotonic", lambda: float(next(ticks)))
    interrupted(pair, settings_of(corpus), tmp_path, CALLS_PER_BATCH * FIT + 1)
    before = next(ticks)
    resumed = calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    assert resumed is not None
    assert resumed.info["seconds"] > next(ticks) - before


def changed_pair(pair: ModelPair, role: str) -> ModelPair:
    """The same shapes, other weights."""
    shapes: dict[str, Any] = {} if role == "source" else {"layers": 4, "kv_heads": 4, "head_dim": 32}
    architecture = getattr(pair, role).geometry.model_type
    other = tiny_model(architecture, seed=9, dtype=torch.float64, vocab_size=len(byte_tokenizer()), **shapes)
    return dataclasses.replace(pair, **{role: KVModel.wrap(other)})


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, r"calibration\.seed = 0 and cannot be resumed with 1;"),
    "block": ({"block": 20}, r"calibration\.block = 16 and cannot be resumed with 20;"),
    "tokens": ({"tokens": 2 * BLOCK}, r"calibration\.tokens = 192 and cannot be resumed with 32;"),
    "held_out": ({"held_out": 0.5}, r"calibration\.held_out = 0\.25 and cannot be resumed with 0\.5;"),
    "precision": ({"precision": "float32"}, r"calibration\.precision = float64 and cannot be resumed with float32;"),
    "corpus": ({"corpus": "other"}, r"calibration\.corpus = \w{16} and cannot be resumed with \w{16};"),
    "source": ({}, r"pair\.source = \w{16} and cannot be resumed with \w{16};"),
    "target": ({}, r"pair\.target = \w{16} and cannot be resumed with \w{16};"),
    "blocks": ({}, r"moment blocks = \[.*\] and cannot be resumed with \['source\.keys×source\.keys'\];"),
}


@pytest.fixture(scope="module", params=["progress", "finished"])
def stored(
    request: pytest.FixtureRequest, pair: ModelPair, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with an interrupted, or a finished, calibration under the usual settings."""
    out = tmp_path_factory.mktemp(request.param)
    if request.param == "finished":
        calibrate(pair, settings_of(corpus), BLOCKS, out)
    else:
        interrupted(pair, settings_of(corpus), out, 3 * CALLS_PER_BATCH)
    return out


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_other_settings_and_says_which(
    pair: ModelPair, corpus: Path, tmp_path: Path, stored: Path, change: str
) -> None:
    changed, sentence = CHANGES[change]
    if change == "corpus":
        changed = {"corpus": str(write_corpus(tmp_path / "other.jsonl", documents=40, words=10, seed=5))}
    blocks = frozenset({("source.keys", "source.keys")}) if change == "blocks" else BLOCKS
    other = changed_pair(pair, change) if change in ("source", "target") else pair
    before = {file.name: file.read_bytes() for file in stored.iterdir()}
    with pytest.raises(CalibrationError, match=rf"^{stored}/moments\.safetensors\S* was collected with {sentence}"):
        calibrate(other, settings_of(corpus, **changed), blocks, stored)
    assert {file.name: file.read_bytes() for file in stored.iterdir()} == before


def test_finished_moments_are_reused_for_fewer_products(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(pair, settings_of(corpus), BLOCKS, tmp_path)
    interrupt(monkeypatch, 1)
    fewer = frozenset({("source.keys", "target.keys")})
    reused = calibrate(pair, settings_of(corpus), fewer, tmp_path)
    assert reused is not None
    assert_same_bits(reused, usual)


def test_refuses_to_merge_shards_of_other_settings(pair: ModelPair, corpus: Path, tmp_path: Path) -> None:
    for shard in range(2):
        calibrate(pair, settings_of(corpus, tokens=4 * BLOCK, seed=shard, shard=f"{shard}/2"), BLOCKS, tmp_path)
    with pytest.raises(
        CalibrationError, match=r"moments-00001-of-00002\.safetensors .* calibration\.seed = 1 .* with 0;"
    ):
        calibrate(pair, settings_of(corpus, tokens=4 * BLOCK), BLOCKS, tmp_path)


def test_memory_does_not_grow_with_tokens(
    pair: ModelPair, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors alive while the third and the last batch are taken, of which every second one makes a product."""
    hold, held = Moments.hold, []

    def measured(self: Moments, *args: Any) -> None:
        if len(held) in (2 * CALLS_PER_BATCH, CALLS_PER_BATCH * FIT - 2 * CALLS_PER_BATCH):
            gc.collect()
            alive = [one for one in gc.get_objects() if type(one) is Tensor]
            held.append((len(alive), sum(one.untyped_storage().nbytes() for one in alive)))
        else:
            held.append(None)
        hold(self, *args)

    monkeypatch.setattr(Moments, "hold", measured)
    monkeypatch.setattr("kvbridge.calibration.moments.ROWS_PER_PRODUCT", 8)
    calibrate(pair, settings_of(corpus, held_out=0.0), BLOCKS, tmp_path)
    early, late = (entry for entry in held if entry is not None)
    assert early == late


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"precision": "float16"}, r"^calibration\.precision=float16: expected one of bfloat16, float32, float64\.$"),
        ({"batch": 0}, r"^calibration\.batch=0: expected 1 or more blocks per forward pass\.$"),
    ],
    ids=["precision", "batch"],
)
def test_refuses_impossible_settings(corpus: Path, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        settings_of(corpus, **changed)


def test_refuses_no_corpus_before_anything_is_written(pair: ModelPair, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"^calibration\.corpus is empty"):
        calibrate(pair, CalibrationConfig(), BLOCKS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_products_of_less_precision_stay_close(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, precision: str, close: float
) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    collected = calibrate(pair, settings_of(corpus, precision=precision), BLOCKS, tmp_path)
    assert collected is not None
    assert 1e-10 < differences(collected, usual) < close
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # pyright: ignore[reportAttributeAccessIssue]


def test_the_pair_is_of_unequal_shapes(pair: ModelPair) -> None:
    """What the tests above rest on."""
    source, target = pair.source.geometry, pair.target.geometry
    assert all(getattr(source, name) != getattr(target, name) for name in ("layers", "kv_heads", "head_dim"))


@pytest.mark.parametrize("batch", [1, 3])
def test_shuffled_pairing_gives_the_target_another_document(
    pair: ModelPair, corpus: Path, tmp_path: Path, usual: CalibrationMoments, batch: int
) -> None:
    shuffled = calibrate(pair, settings_of(corpus, pairing="shuffled", batch=batch), BLOCKS, tmp_path)
    assert shuffled is not None
    for at in usual.sets:
        given, moments = settled(shuffled.sets[at]), settled(usual.sets[at])
        # Both models read the same blocks in all, so that only what joins them differs.
        for variable in CACHE_VARIABLES:
            torch.testing.assert_close(given.mean[variable], moments.mean[variable], rtol=0, atol=1e-8)
        joined, apart = (one.cross["source.keys", "target.keys"] for one in (moments, given))
        assert (joined - apart).abs().max() > 0.1 * joined.abs().max()
    own = ("source.keys", "source.values")
    torch.testing.assert_close(shuffled.sets["fit", "rest"].cross[own], usual.sets["fit", "rest"].cross[own])


def test_refuses_an_unknown_pairing(corpus: Path) -> None:
    with pytest.raises(UsageError, match=r"calibration\.pairing=other: expected one of same, shuffled"):
        settings_of(corpus, pairing="other")
