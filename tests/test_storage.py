"""Stored weights: how far int8 is from what was given, how small it is, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge.artifact import WEIGHTS, read_folder, write_folder
from kvbridge.bridge import Bridge, bridge_bytes
from kvbridge.errors import ArtifactError, UsageError
from kvbridge.forms import SharedBasis
from kvbridge.layout import BridgeMap
from kvbridge.pair import ModelPair
from kvbridge.storage import INPUT_AXES, STORAGES, dequantise, input_octaves, pack_weights, quantise, unpack_weights
from kvbridge.variables import Span
from tiny_bridge import random_bridge, same_bridge
from tiny_pair import tiny_pair


@cache
def pair() -> ModelPair:
    return tiny_pair()


def low_rank(rank: int = 64) -> BridgeMap:
    """Two shared-basis forms of one basis, the outputs of very different sizes."""
    inputs = (Span("source.keys", 0, 3), Span("source.values", 0, 3))
    reduce, size = torch.randn(192, rank), torch.logspace(-3, 3, 512)
    forms = tuple(
        SharedBasis(inputs, (Span(f"target.{kind}", 0, 4),), reduce, torch.randn(rank, 512) * size, size, 4, 32)
        for kind in ("keys", "values")
    )
    return BridgeMap(forms, {"name": "shared_basis", "rank": rank})


@cache
def bridge() -> Bridge:
    torch.manual_seed(0)
    made = random_bridge(pair())
    return replace(made, maps=made.maps | {"low": low_rank()})


def by_name(given: Bridge) -> dict[str, Tensor]:
    return {f"{name}/{key}": t for name, each in given.maps.items() for key, t in each.distinct_tensors().items()}


@pytest.mark.parametrize("axes", [(0,), (2, 3)], ids=["column", "slots"])
def test_a_number_is_off_by_half_a_step_of_its_own_output_coordinate(axes: tuple[int, ...]) -> None:
    weight = torch.randn(3, 4, 5, 6, 7) * torch.logspace(-4, 4, 7)
    whole, scale = quantise(weight, axes)
    assert whole.dtype == torch.int8
    assert int(whole.abs().max()) == 127
    kept = [size for axis, size in enumerate(weight.shape) if axis not in axes]
    assert list(scale.shape) == kept
    off = (dequantise(whole, scale, axes) - weight).abs().amax(dim=axes)
    assert (off <= 0.5001 * scale).all()
    largest = weight.abs().amax(dim=axes)
    torch.testing.assert_close(scale * 127, largest, rtol=1e-6, atol=0)


def test_a_coordinate_of_zeros_stays_zero() -> None:
    weight = torch.randn(5, 3)
    weight[:, 1] = 0
    whole, scale = quantise(weight, (0,))
    assert scale[1] == 0
    assert torch.equal(dequantise(whole, scale, (0,))[:, 1], torch.zeros(5))


def test_inputs_of_every_spread_keep_their_digits() -> None:
    spread = 10.0 ** torch.linspace(-4, 4, 64)
    weight = torch.randn(64, 9) / spread[:, None]
    packed = pack_weights({"low/0.reduce": weight})
    found = unpack_weights({name.removeprefix("low/0."): part for name, part in packed.items()}, "a form")["reduce"]
    assert packed["low/0.reduce"].dtype == torch.int8
    # In units of what each input adds to the sum.
    error, size = ((part * spread[:, None]).square().sum(dim=1).sqrt() for part in (found - weight, weight))
    assert (error < 0.03 * size).all()


def test_int8_is_loaded_as_fp32_and_close_to_what_was_given(tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "bridge", dtype="int8")
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    given, found = by_name(bridge()), by_name(loaded)
    assert given.keys() == found.keys()
    for name, tensor in given.items():
        axes = INPUT_AXES.get(name.rsplit(".", 1)[-1])
        if axes is None:
            assert torch.equal(found[name], tensor)
            continue
        assert found[name].dtype == torch.float32
        octave = input_octaves(tensor)[..., None]
        step = octave * (tensor / octave).abs().amax(dim=axes, keepdim=True) / 127
        assert ((found[name] - tensor).abs() <= 0.5001 * step).all()
        assert not torch.equal(found[name], tensor)
    keys, values = loaded.map("low").forms
    assert isinstance(keys, SharedBasis)
    assert isinstance(values, SharedBasis)
    assert keys.reduce is values.reduce
    assert loaded.fingerprint() != bridge().fingerprint()
    assert Bridge.from_pretrained(tmp_path / "bridge").fingerprint() == loaded.fingerprint()


def test_int8_saved_again_stays_within_a_step(tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "once", dtype=torch.int8)
    loaded = Bridge.from_pretrained(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "again", dtype="int8")
    first, second = by_name(loaded), by_name(Bridge.from_pretrained(tmp_path / "again"))
    for name, tensor in first.items():
        axes = INPUT_AXES.get(name.rsplit(".", 1)[-1])
        if axes is not None:
            octave = input_octaves(tensor)[..., None]
            step = octave * (tensor / octave).abs().amax(dim=axes, keepdim=True) / 127
            assert ((second[name] - tensor).abs() <= 0.5001 * step).all()
    loaded.save_pretrained(tmp_path / "whole")
    assert same_bridge(Bridge.from_pretrained(tmp_path / "whole"), loaded)


def test_sizes_are_those_of_the_storage(tmp_path: Path) -> None:
    sizes = {}
    for storage in STORAGES:
        bridge().save_pretrained(tmp_path / storage, dtype=storage)
        sizes[storage] = bridge_bytes(tmp_path / storage)
    numbers = bridge().parameters()
    assert sizes["float32"] == pytest.approx(4 * numbers, rel=0.1)
    assert sizes["bfloat16"] < 0.55 * sizes["float32"]
    assert sizes["int8"] < 0.32 * sizes["float32"]
    halves = [t.dtype for t in by_name(Bridge.from_pretrained(tmp_path / "bfloat16")).values()]
    assert set(halves) == {torch.bfloat16, torch.float32, torch.int32}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("low/0.reduce_scale"), r"form 0 of map low: reduce lacks its scale"),
        (lambda t: t.update({"low/1.expand": t["low/1.expand"].float()}), r"form 1 of map low: expand has a scale"),
        (lambda t: t.update({"ridge/0.weight_scale": torch.ones(3)}), r"form 0 of map ridge: weight of shape .*\[3\]"),
        (lambda t: t.update({"ridge/0.bias_scale": torch.ones(3)}), r"form 0 of map ridge .*bias_scale|belongs to no"),
    ],
    ids=["lost", "left-over", "shape", "of-a-bias"],
)
def test_refuses_scales_that_do_not_fit(change: Any, sentence: str, tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "bridge", dtype="int8")
    config, tensors = read_folder(tmp_path / "bridge")
    change(tensors)
    write_folder(tmp_path / "bridge", config, tensors, "")
    with pytest.raises(ArtifactError, match=sentence):
        Bridge.from_pretrained(tmp_path / "bridge")


def test_refuses_another_storage_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^storage=int4: expected one of float32, bfloat16, int8\.$"):
        bridge().save_pretrained(tmp_path / "bridge", dtype="int4")
    spoilt = random_bridge(pair())
    spoilt.map().forms[0].tensors()["weight"].view(-1)[5] = float("inf")
    with pytest.raises(ArtifactError, match=r"'ridge/0\.weight' holds NaN or infinite numbers; such a bridge is not"):
        spoilt.save_pretrained(tmp_path / "bridge", dtype="int8")
    assert not (tmp_path / "bridge" / WEIGHTS).exists()
