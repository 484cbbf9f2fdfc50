"""Sizes before anything is loaded: those of live models, of real moments, and of a pair that no test could hold."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from kvbridge.calibration import (
    CalibrationMoments,
    Moments,
    SizeSettings,
    calibration_sizes,
    joint_blocks,
    model_shape,
    sizes_table,
)
from kvbridge.calibration.advice import advice
from kvbridge.calibration.blocks import SPLITS
from kvbridge.calibration.moments import PARTS
from kvbridge.calibration.products import plain_blocks
from kvbridge.calibration.rows import layer_counts, variables_of, widths_of
from kvbridge.calibration.shapes import KNOWN, ModelShape
from kvbridge.calibration.sizes import FitShape, summing_bytes
from kvbridge.calibration.staging import token_bytes
from kvbridge.errors import UsageError
from kvbridge.flops import ModelCost
from kvbridge.geometry import KVGeometry
from kvbridge.mappers import Joint, ReducedRank
from tiny_models import kv_model, tiny_config

NATIVES = ("target.keys[0:2]", "target.values[0:2]", "target.normed_residual[1:2]")
SMALL = ModelShape.of_config(tiny_config("llama"), "small")
LARGE = ModelShape.of_config(tiny_config("qwen3", layers=4, kv_heads=4, head_dim=32), "large")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2"])
def test_a_shape_costs_what_its_model_does(architecture: str) -> None:
    model = kv_model(architecture)
    shape = ModelShape.of_config(tiny_config(architecture), "tiny")
    assert shape.cost() == ModelCost.of(model)
    parameters = sum(parameter.numel() for parameter in model.model.parameters() if parameter.ndim == 2)
    assert shape.parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76)]
)
def test_known_models_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_sizes_are_those_of_the_moments() -> None:
    geometries = kv_model("llama").geometry, kv_model("qwen3", layers=4, kv_heads=4, head_dim=32).geometry
    sizes = calibration_sizes(SMALL, LARGE, SizeSettings(inputs=NATIVES))
    inputs, outputs = ["source.keys", "source.values", *NATIVES], ["target.keys", "target.values"]
    blocks = joint_blocks(inputs, outputs)
    moments = Moments.zeros(widths_of(variables_of(blocks), *geometries), blocks, layer_counts(*geometries))
    assert moments.gram(inputs).shape == (sizes.features, sizes.features)
    assert moments.cross_products(inputs, outputs).shape == (sizes.inputs, sizes.outputs)
    assert sizes.gram == 2 * 8 * sizes.features**2
    assert sizes.cross == 2 * 8 * sizes.features * sizes.outputs
    assert (sizes.passes, sizes.joint.flops) == (1, 2 * sizes.inputs * sizes.outputs)
    staged = [token_bytes(geometry, torch.bfloat16, count) for geometry, count in zip(geometries, (0, 1), strict=True)]
    assert sizes.staged_per_token == sum(staged)


def test_a_sketch_takes_the_place_of_the_source() -> None:
    plain, sketched, full = (
        calibration_sizes(SMALL, LARGE, SizeSettings(inputs=NATIVES, sketch=kept)) for kept in (None, 5, 1000)
    )
    assert plain.features - sketched.features == 3 * (64 - 5)
    assert plain.features == full.features
    assert plain.inputs == sketched.inputs
    assert plain.joint == sketched.joint


def test_a_large_pair_fits_on_one_gpu_with_one_model_a_sketch_and_passes() -> None:
    source, target = model_shape("Qwen/Qwen3-8B"), model_shape("Qwen/Qwen3-32B")
    natives = ("target.keys[0:1]", "target.values[0:1]", "target.normed_residual[0:1]")
    settings = SizeSettings(inputs=natives, sketch=256, memory_gb=16.0, tokens=245_760, rank=2048)
    mapper = ReducedRank(rank=2048)
    sizes = calibration_sizes(source, target, settings, mapper.fit_bytes)
    assert sizes.fits(80)
    assert sizes.peaks["fit"] < 16e9
    assert advice(sizes, 80, mapper.fit_bytes) is None
    assert sizes.passes > 1
    assert max(sizes.peaks, key=lambda stage: sizes.peaks[stage]) == "stage target"
    assert sizes.rows_per_feature > 10
    assert sizes.basis.share < 0.05 < sizes.joint.share
    both = (source.parameters + target.parameters) * 2
    assert both > 80e9 > target.parameters * 2
    whole = dataclasses.replace(settings, sketch=None, memory_gb=None)
    unsketched = calibration_sizes(source, target, whole, mapper.fit_bytes)
    assert not unsketched.fits(80)
    said = advice(unsketched, 80, mapper.fit_bytes)
    assert said is not None
    assert said.startswith(
        "sum and fit take more than planner.memory_gb=80; with calibration.stage=true calibration.memory_gb=16 "
        "calibration.sketch=256 all stages fit: stage source"
    )
    assert advice(unsketched, 5, mapper.fit_bytes) == (
        "stage source and stage target and sum and fit take more than planner.memory_gb=5: a model alone does; read it "
        "in more memory, with another pair.device."
    )


def test_advice_keeps_rows_enough_for_every_feature() -> None:
    source, target = model_shape("qwen3-0.6b"), model_shape("qwen3-8b")
    sizes = calibration_sizes(source, target, SizeSettings(tokens=245_760), Joint().fit_bytes)
    said = advice(sizes, 40, Joint().fit_bytes)
    assert said is not None
    found = re.search(r"calibration\.memory_gb=8 calibration\.sketch=(\d+) all stages fit", said)
    assert found is not None
    changed = dataclasses.replace(sizes.settings, sketch=int(found[1]), memory_gb=8.0)
    again = calibration_sizes(source, target, changed, Joint().fit_bytes)
    assert again.fits(40)
    assert again.rows_per_feature >= 10


def synthetic_moments(mapper: Joint | ReducedRank, geometries: tuple[KVGeometry, KVGeometry]) -> CalibrationMoments:
    """Moments of random rows, of all that a mapper reads of a pair."""
    layers = layer_counts(*geometries)
    blocks = plain_blocks(mapper.blocks(), layers)
    widths, chance = widths_of(variables_of(blocks), *geometries), torch.Generator().manual_seed(0)
    sets = {(split, part): Moments.zeros(widths, blocks, layers) for split in SPLITS for part in PARTS}
    for split in SPLITS:
        rows = {name: torch.randn(1000, width, generator=chance) for name, width in widths.items()}
        sets[split, "rest"].add(rows)
    return CalibrationMoments(sets)


def most_memory(work: Callable[[], Any]) -> int:
    """The most bytes that tensors made by some work take at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


@pytest.mark.parametrize(("layers", "width"), [(6, 32), (14, 32)], ids=["more-features", "more-outputs"])
@pytest.mark.parametrize(
    "mapper",
    [Joint(), ReducedRank(rank=16), ReducedRank(rank=200), ReducedRank(rank=16, groups=3)],
    ids=["joint", "rank-16", "rank-200", "groups"],
)
def test_a_fit_takes_as_much_memory_as_its_mapper_says(mapper: Joint | ReducedRank, layers: int, width: int) -> None:
    source = KVGeometry("llama", 3, 2, 32, 2, 64, 512, {}, "default", "none")
    target = KVGeometry("llama", layers, 4, width, 4, 4 * width, 512, {}, "default", "none")
    moments = synthetic_moments(mapper, (source, target))
    made = Joint().widths(source, target, range(layers))
    # Layer 0 is native.
    shape = FitShape(made[0], made[0], (4 * width,) * (2 * (layers - 1)))
    assert sum(shape.outputs) == made[1]
    measured = most_memory(lambda: mapper.fit(moments, source, target))
    assert measured == pytest.approx(mapper.fit_bytes(shape), rel=0.15)


def test_sums_take_as_much_memory_as_is_said() -> None:
    rows = 2000
    widths = {"source.keys": 200, "target.keys": 300, "target.values": 100}
    blocks = frozenset({("source.keys", "source.keys"), ("source.keys", "target.keys")})
    batches = [{name: torch.randn(rows // 4, width) for name, width in widths.items()} for _ in range(4)]

    def work() -> None:
        moments = Moments.zeros(widths, blocks)
        for batch in batches:
            moments.hold(batch, torch.float32, enough=rows)

    assert most_memory(work) == pytest.approx(summing_bytes(blocks, widths, rows, sets=1), rel=0.15)


def test_the_table_says_it_all() -> None:
    sizes = calibration_sizes(
        SMALL, LARGE, SizeSettings(inputs=NATIVES, sketch=5, memory_gb=1.0, rank=64), Joint().fit_bytes
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(sizes_table(sizes))
    text = captured.get()
    for part in (
        "small → large",
        "features of the fit (sketch 5)",
        "passes over the staged states",
        "peak memory: fit",
    ):
        assert part in text


def test_a_shape_comes_from_a_folder(tmp_path: Path) -> None:
    tiny_config("qwen3", layers=5).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.name) == (5, 2, 16, tmp_path.name)


def test_refuses_a_model_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^gpt-5 is neither a folder with config\.json nor one of qwen3-0\.6b, "):
        model_shape("gpt-5")
    tiny_config("gpt_neox").save_pretrained(tmp_path)
    assert model_shape(str(tmp_path)).kv_heads == 4


def test_refuses_a_variable_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^'source\.residual' is no variable of a map"):
        calibration_sizes(SMALL, LARGE, SizeSettings(inputs=("source.residual[0:1]",)))
