"""Whatever way products are cut and stored, the same matrix is put together from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbridge.calibration import MomentBlock, Moments, joint_blocks
from kvbridge.calibration.products import Extent, canonical, missing_products, plain_blocks
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.variables import Span

LAYERS = {"source.keys": 2, "source.values": 2, "target.keys": 6, "target.values": 6, "target.residual": 6}
WIDTH = 3
ROWS = 50
Names = list[str]


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """Rows of all layers of every variable, around means of their own."""
    chance = np.random.default_rng(0)
    return {
        name: torch.from_numpy(chance.standard_normal((ROWS, layers * WIDTH)) + chance.standard_normal(layers * WIDTH))
        for name, layers in LAYERS.items()
    }


def cut(rows: dict[str, Tensor], name: str) -> Tensor:
    extent = Extent.of(name, LAYERS)
    return rows[extent.variable][:, extent.start * WIDTH : extent.stop * WIDTH]


def side_by_side(rows: dict[str, Tensor], names: Names) -> Tensor:
    joined = torch.cat([cut(rows, name) for name in names], dim=1)
    return joined - joined.mean(dim=0)


def gather(rows: dict[str, Tensor], blocks: frozenset[MomentBlock]) -> Moments:
    names = {name for block in blocks for name in block}
    moments = Moments.zeros({name: cut(rows, name).shape[1] for name in names}, blocks, LAYERS)
    moments.add({name: cut(rows, name) for name in names})
    return moments


INPUTS = ["source.keys", "source.values", "target.keys[0:2]", "target.residual[2:3]"]
CHUNKS = ["target.keys[0:1]", "target.keys[1:4]", "target.keys[4:6]", "target.values[0:4]", "target.values[4:6]"]
STORED = {
    "as-asked": joint_blocks(INPUTS, ["target.keys", "target.values"]),
    "in-chunks": joint_blocks(INPUTS, CHUNKS),
    "wider": joint_blocks(["source.keys", "source.values", "target.keys", "target.residual"], ["target.values"]),
    "swapped": frozenset((b, a) for a, b in joint_blocks(INPUTS, ["target.keys", "target.values"])),
    "overlapping": joint_blocks(INPUTS, ["target.keys[0:4]", "target.keys[2:6]", "target.values"]),
}


@pytest.mark.parametrize(
    "outputs", [["target.keys"], ["target.keys[3:5]", "target.values[1:5]"]], ids=["whole", "part"]
)
@pytest.mark.parametrize("stored", STORED)
def test_products_are_put_together_from_what_is_stored(rows: dict[str, Tensor], stored: str, outputs: Names) -> None:
    moments = gather(rows, STORED[stored])
    inputs = side_by_side(rows, INPUTS)
    moments.require(joint_blocks(INPUTS, outputs))
    torch.testing.assert_close(moments.gram(INPUTS), inputs.T @ inputs)
    torch.testing.assert_close(moments.cross_products(INPUTS, outputs), inputs.T @ side_by_side(rows, outputs))
    expected = torch.cat([cut(rows, name) for name in outputs], dim=1)
    torch.testing.assert_close(moments.means(outputs), expected.mean(dim=0))
    torch.testing.assert_close(moments.squares(outputs), side_by_side(rows, outputs).square().sum(dim=0))


def test_spans_name_variables_as_their_text_does(rows: dict[str, Tensor]) -> None:
    moments = gather(rows, STORED["as-asked"])
    spans = [Span("source.keys", 0, 2), Span("source.values", 0, 2)]
    assert torch.equal(moments.gram(spans), moments.gram(["source.keys", "source.values"]))
    assert moments.means([Span("target.keys", 0, 6)]).data_ptr() == moments.mean["target.keys"].data_ptr()
    assert joint_blocks(spans, []) == joint_blocks(map(str, spans), [])


def test_the_product_of_one_part_with_itself_is_cut_out(rows: dict[str, Tensor]) -> None:
    part = side_by_side(rows, ["source.keys[1:2]"])
    torch.testing.assert_close(gather(rows, STORED["as-asked"]).gram(["source.keys[1:2]"]), part.T @ part)


def test_one_stored_block_is_not_copied(rows: dict[str, Tensor]) -> None:
    moments = gather(rows, STORED["as-asked"])
    block = ("source.keys", "target.keys")
    assert moments.cross_products(*([name] for name in block)).data_ptr() == moments.cross[block].data_ptr()


@pytest.mark.parametrize("stored", ["as-asked", "in-chunks"])
@pytest.mark.parametrize(
    "missing",
    [("target.keys", "target.keys[3:4]"), ("source.keys", "target.residual[3:4]"), ("target.values", "target.keys")],
    ids="×".join,
)
def test_says_which_products_are_missing(rows: dict[str, Tensor], stored: str, missing: MomentBlock) -> None:
    moments = gather(rows, STORED[stored])
    sentence = rf"^these moments hold no products of {missing[0]} and .*, which this mapper reads; calibrate with it\.$"
    with pytest.raises(CalibrationError, match=sentence.replace("[", r"\[")):
        moments.require({missing, ("source.keys", "target.keys")})
    with pytest.raises(CalibrationError, match="these moments hold no"):
        moments.cross_products([missing[0]], [missing[1]])


def test_means_that_were_not_gathered_are_missed(rows: dict[str, Tensor]) -> None:
    with pytest.raises(CalibrationError, match=r"hold nothing of target\.residual\[4:5\]; calibrate with this mapper"):
        gather(rows, STORED["as-asked"]).means(["target.residual[4:5]"])


def test_without_the_number_of_layers_nothing_is_cut_out(rows: dict[str, Tensor]) -> None:
    """Moments of version 0.1.0 do not say it; whole variables are read as ever."""
    moments = gather(rows, STORED["as-asked"])
    moments.layers = {}
    assert moments.means(["target.keys"]).shape == (18,)
    with pytest.raises(CalibrationError, match=r"do not say how many layers target\.keys has, so layers 1 … 2 cannot"):
        moments.means(["target.keys[1:3]"])


def test_joint_blocks_are_all_pairs_each_once() -> None:
    blocks = joint_blocks(["target.keys[0:1]", "source.values", "source.keys"], ["target.keys", "target.values"])
    assert blocks == {
        ("source.keys", "source.keys"),
        ("source.keys", "source.values"),
        ("source.keys", "target.keys[0:1]"),
        ("source.values", "source.values"),
        ("source.values", "target.keys[0:1]"),
        ("target.keys[0:1]", "target.keys[0:1]"),
        *itertools.product(("source.keys", "source.values", "target.keys[0:1]"), ("target.keys", "target.values")),
    }


def test_one_product_has_one_name() -> None:
    assert canonical("target.keys", "source.values") == ("source.values", "target.keys")
    assert canonical("target.keys[10:12]", "target.keys[9:10]") == ("target.keys[9:10]", "target.keys[10:12]")
    plain = plain_blocks([("target.keys[0:6]", "source.keys[0:2]"), ("source.keys", "target.keys")], LAYERS)
    assert plain == {("source.keys", "target.keys")}
    assert not missing_products([("target.keys[0:2]", "source.keys")], [("source.keys", "target.keys")], {})


@pytest.mark.parametrize("name", ["target.keys[3]", "target.keys [0:2]", ""], ids=repr)
def test_refuses_a_name_that_is_no_span(name: str) -> None:
    with pytest.raises(UsageError, match="is no span of layers; write target"):
        joint_blocks([name], [])
