"""The novelty factor is leverage under the moments, small, and part of a bridge that need not have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationMoments, Moments, fit_novelty
from kvbridge.calibration.moments import PARTS
from kvbridge.calibration.novelty import LARGEST, affordable_rank, leading_directions
from kvbridge.calibration.products import canonical
from kvbridge.errors import ArtifactError, CacheError
from kvbridge.forms import KINDS
from kvbridge.novelty import PENALTY, Novelty
from kvbridge.pair import ModelPair
from kvbridge.states import ContentStates
from tiny_bridge import forge_config, forge_header, random_bridge
from tiny_pair import tiny_pair


@cache
def pair() -> ModelPair:
    return tiny_pair()


@cache
def rows() -> dict[str, Tensor]:
    """Correlated rows with a mean, of all four cache variables."""
    torch.manual_seed(3)
    widths = {f"{role}.{kind}": getattr(pair(), role).geometry.width for role in ("source", "target") for kind in KINDS}
    return {name: torch.randn(400, w) @ torch.randn(w, w) / w**0.5 + 1.0 for name, w in widths.items()}


def moments(wanted: tuple[str, ...] = KINDS) -> CalibrationMoments:
    blocks = [canonical(f"source.{kind}", f"source.{kind}") for kind in wanted]
    widths = {name: value.shape[1] for name, value in rows().items()}
    sets = {(split, part): Moments.zeros(widths, blocks) for split in ("fit", "held_out") for part in PARTS}
    sets["fit", "rest"].add(rows())
    return CalibrationMoments(sets)


@cache
def fitted() -> Novelty:
    made = fit_novelty(moments(), pair().source.geometry, pair().target.geometry)
    assert made is not None
    return made


def states(number: int = 400) -> ContentStates:
    """The rows of the fit as the states of one prompt."""
    geometry = pair().source.geometry
    shape = (number, geometry.layers, geometry.kv_heads, geometry.head_dim)
    keys, values = (rows()[f"source.{k}"][:number].reshape(shape).permute(1, 2, 0, 3)[:, None] for k in KINDS)
    return ContentStates(keys, values, torch.arange(number))


def test_is_the_leverage_of_the_factor() -> None:
    made, expected = fitted(), torch.zeros(400)
    for at, kind in enumerate(KINDS):
        directions = made.directions[at].double()
        width, rank = directions.shape
        # The inverse of the whole matrix, which the factor never forms; bf16 directions are nearly orthonormal.
        directions = torch.linalg.qr(directions).Q
        inside = directions @ torch.diag(made.variances[at].double() - made.rest[at]) @ directions.T
        whole = inside + (made.rest[at] + PENALTY) * torch.eye(width)
        centred = ((rows()[f"source.{kind}"] - made.mean[at]) / made.spread[at]).double()
        expected += ((centred @ torch.linalg.inv(whole)) * centred).sum(dim=1).float() / (2 * width)
        assert rank == width // 2
    assert torch.allclose(made.leverage(states())[0], expected, rtol=0.02)


def test_text_of_the_fit_has_leverage_one_and_other_text_more() -> None:
    own = fitted().score(states())
    assert own == pytest.approx(1.0, abs=0.03)
    noisy = replace(states(), keys=states().keys + torch.randn_like(states().keys))
    assert fitted().score(noisy) > 1.5 * own


def test_first_positions_do_not_count() -> None:
    wild = states(20)
    wild.keys[..., :4, :] = 1e6
    assert fitted().score(wild) < 2
    assert fitted().score(states(4)) == 0


def test_refuses_states_of_another_model() -> None:
    with pytest.raises(CacheError, match=r"have 32 keys per token, the bridge was fitted on 96"):
        fitted().score(states().layers(range(1)))


def test_leading_directions_are_eigenvectors() -> None:
    basis = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    values = torch.cat((torch.linspace(20, 10, 6), torch.linspace(0.5, 0.1, 54))).double()
    found, variances = leading_directions(basis @ torch.diag(values) @ basis.T, 6)
    assert torch.allclose(variances, values[:6], rtol=1e-4)
    assert torch.allclose((found.T @ basis[:, :6]).abs(), torch.eye(6, dtype=torch.float64), atol=1e-2)


@pytest.mark.parametrize("width", [2, 96, 3072, 8192, 36_864, 73_728])
def test_fits_into_five_megabytes(width: int) -> None:
    rank = affordable_rank(width)
    stored = 2 * (width * (2 * 4 + 2 * rank) + 4 * rank + 4)
    assert 1 <= rank < width
    assert stored < 1.01 * LARGEST


def test_moments_without_the_sources_products_give_none() -> None:
    sides = pair().source.geometry, pair().target.geometry
    assert fit_novelty(moments(("keys",)), *sides) is None
    empty = moments()
    empty.sets["fit", "rest"] = empty.sets["held_out", "rest"]
    assert fit_novelty(empty, *sides) is None


# In a bridge


def gate(**changes: Any) -> dict[str, Any]:
    return {
        "map": "ridge",
        "plan": {"sinks": 4, "native_head": 0, "native_tail": 16},
        "novelty": 1.5,
        "tail": 0.25,
        "kl_limit": 1.0,
        "share": 0.1,
        "confidence": 0.95,
        "documents": 60,
        "applied": 58,
        "bad": 1,
        "text": "fedcba9876543210",
    } | changes


def bridge() -> Bridge:
    torch.manual_seed(0)
    return replace(random_bridge(pair()), novelty=fitted(), gates=[gate()])


def test_is_kept_in_the_bridge_and_changes_no_fingerprint(tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "bridge", dtype="int8")
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    assert loaded.novelty is not None
    stored, own = loaded.novelty.tensors(), fitted().tensors()
    assert stored.keys() == own.keys()
    assert all(torch.equal(stored[name], own[name]) for name in own)
    assert (loaded.novelty.first_positions, loaded.gates) == (4, [gate()])
    assert loaded.fingerprint() == replace(loaded, novelty=None, gates=[]).fingerprint()
    replace(loaded, gates=[gate(tail=0.5)]).save_points(tmp_path / "bridge")
    again = Bridge.from_pretrained(tmp_path / "bridge")
    assert again.gates[0]["tail"] == 0.5
    assert again.novelty is not None
    assert again.with_map("ridge", again.map()).gates == []
    assert again.with_map("other", again.map()).gates == again.gates


def test_a_bridge_from_before_there_were_gates_loads(tmp_path: Path) -> None:
    random_bridge(pair()).save_pretrained(tmp_path / "bridge")
    forge_config(tmp_path / "bridge", lambda config: [config.pop(name) for name in ("novelty", "gates")])
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    assert (loaded.novelty, loaded.gates) == (None, [])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: replace(b, gates=[gate(map="third")]), r"gate 0 is of map 'third'; the bridge has ridge"),
        (lambda b: replace(b, gates=[gate(tail=0.0)]), r"gate 0 has a limit of 0 or less"),
        (lambda b: replace(b, gates=[gate(novelty="high")]), r"novelty is of type str"),
        (lambda b: replace(b, gates=[gate(plan={"sinks": 4})]), r"plan lacks 'native_head'"),
    ],
    ids=["map", "limit", "type", "plan"],
)
def test_refuses_to_save_wrong_gates(change: Callable[[Bridge], Bridge], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        change(bridge()).save_pretrained(tmp_path / "bridge")


def _rename(config: dict[str, Any]) -> None:
    config["tensors"]["novelty.breadth"] = config["tensors"].pop("novelty.spread")


def _reshape(config: dict[str, Any]) -> None:
    config["tensors"]["novelty.mean"]["shape"] = [96, 2]


@pytest.mark.parametrize(
    ("config", "header", "sentence"),
    [
        (lambda c: c.update(novelty=None), None, r"disagree about the novelty factor"),
        (lambda c: c.update(novelty={}), None, r"lacks 'first_positions'"),
        (lambda c: c.update(novelty=[4]), None, r"novelty is of type list"),
        (_rename, lambda h: h.update({"novelty.breadth": h.pop("novelty.spread")}), r"disagree about the novelty"),
        (_reshape, lambda h: h["novelty.mean"].update(shape=[96, 2]), r"novelty\.mean has shape \(96, 2\), expected"),
    ],
    ids=["no-options", "half-the-options", "options-of-another-type", "renamed", "misshapen"],
)
def test_refuses_a_damaged_factor(
    config: Callable[[Any], Any], header: Callable[[Any], Any] | None, sentence: str, tmp_path: Path
) -> None:
    bridge().save_pretrained(tmp_path / "bridge")
    forge_config(tmp_path / "bridge", config)
    if header is not None:
        forge_header(tmp_path / "bridge", header)
    with pytest.raises(ArtifactError, match=sentence):
        Bridge.from_pretrained(tmp_path / "bridge")


def test_refuses_a_variance_that_cannot_be(tmp_path: Path) -> None:
    spoilt = replace(fitted(), rest=-fitted().rest)
    replace(bridge(), novelty=spoilt).save_pretrained(tmp_path / "bridge")
    with pytest.raises(ArtifactError, match="a variance that cannot be"):
        Bridge.from_pretrained(tmp_path / "bridge")
