"""A bridge knows its pair, has one fingerprint for its numbers, and goes to and comes from the hub."""

from __future__ import annotations

import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError

import kvbridge
from kvbridge.artifact import CARD, CONFIG, SUMS, WEIGHTS
from kvbridge.bridge import Bridge
from kvbridge.cli.describe import print_bridge
from kvbridge.errors import ArtifactError, PairMismatchError, UsageError
from kvbridge.forms import KINDS, SlotAffine
from kvbridge.kernels import FormMap
from kvbridge.layout import BridgeMap
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from tiny_bridge import forge_config, random_bridge, same_bridge, with_form
from tiny_models import YARN, tiny_model
from tiny_pair import byte_tokenizer, tiny_pair


@cache
def pair() -> ModelPair:
    return tiny_pair()


@cache
def bridge() -> Bridge:
    return random_bridge(pair())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bridge"
    bridge().save_pretrained(folder)
    return folder


def other_source(**changes: Any) -> KVModel:
    """The source of the tiny pair, but for these settings."""
    return KVModel.wrap(tiny_model("llama", **{"seed": 1, "vocab_size": len(byte_tokenizer())} | changes), "other")


def other_tokenizer() -> ModelPair:
    return replace(pair(), tokenizer_fingerprint="fedcba9876543210")


OTHER_PAIRS = {
    "other-weights": (lambda: replace(pair(), source=other_source(seed=7)), ["source"]),
    "other-rope": (
        lambda: replace(pair(), source=other_source(rope_parameters=YARN)),
        ["source geometry"],
    ),
    "longer-rope": (lambda: replace(pair(), source=other_source(max_position_embeddings=1024)), ["source geometry"]),
    "swapped": (
        lambda: replace(pair(), source=pair().target, target=pair().source),
        ["source", "source geometry", "target", "target geometry"],
    ),
    "other-tokenizer": (other_tokenizer, ["tokenizer"]),
}


def test_the_public_name_is_the_class() -> None:
    assert kvbridge.Bridge is Bridge


def test_is_loaded_for_its_own_pair(saved: Path) -> None:
    assert same_bridge(Bridge.from_pretrained(saved, pair=pair()), bridge())
    assert same_bridge(Bridge.from_pretrained(str(saved)), bridge())


@pytest.mark.parametrize("case", OTHER_PAIRS)
def test_refuses_another_pair_by_both_fingerprints(case: str, saved: Path) -> None:
    make, parts = OTHER_PAIRS[case]
    other = make()
    with pytest.raises(PairMismatchError) as caught:
        Bridge.from_pretrained(saved, pair=other)
    mine, theirs = bridge().identity, other.identity()
    differing = "; ".join(f"{part} {mine[part]} where this pair has {theirs[part]}" for part in parts)
    assert str(caught.value) == (
        f"this bridge was made for another pair: {differing}. Load the pair it names, or calibrate and fit anew."
    )


def test_refuses_another_pair_when_asked_later() -> None:
    with pytest.raises(PairMismatchError, match=r"this bridge was made for another pair: tokenizer \w{16} where"):
        bridge().require_pair(other_tokenizer())
    bridge().require_pair(pair())


# Fingerprint


@pytest.mark.parametrize("name", ["slots", "weight", "bias"])
@pytest.mark.parametrize("at", range(2), ids=KINDS)
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_the_fingerprint_follows_every_number(at: int, name: str, place: int) -> None:
    form = bridge().map().forms[at]
    changed = form.tensors()[name].clone()
    changed.view(-1)[place] += 1
    assert with_form(bridge(), at, replace(form, **{name: changed})).fingerprint() != bridge().fingerprint()


def test_the_fingerprint_follows_the_pair_the_kinds_and_the_names() -> None:
    keys, values = bridge().map().forms
    assert isinstance(keys, SlotAffine)
    assert isinstance(values, SlotAffine)
    swapped = replace(bridge().map(), forms=(replace(keys, kind="values"), replace(values, kind="keys")))
    others = [
        replace(bridge(), identity=other_tokenizer().identity()),
        replace(bridge(), maps={"ridge": swapped}),
        replace(bridge(), maps={"other": bridge().map()}),
    ]
    assert len({made.fingerprint() for made in [bridge(), *others]}) == 4


def test_the_fingerprint_leaves_evidence_and_storage_out() -> None:
    strided = tuple(
        replace(form, weight=form.weight.transpose(-1, -2).contiguous().transpose(-1, -2))
        for form in bridge().map().forms
        if isinstance(form, SlotAffine)
    )
    other = replace(bridge(), maps={"ridge": BridgeMap(strided, {"name": "other"})}, calibration={})
    assert other.fingerprint() == bridge().fingerprint()
    assert len(bridge().fingerprint()) == 16


def test_counts_its_parameters() -> None:
    source, target = pair().source.geometry, pair().target.geometry
    inputs = 2 * source.kv_heads * source.head_dim
    outputs = target.layers * target.kv_heads * target.head_dim
    assert bridge().parameters() == 2 * (inputs + 1) * outputs


def test_a_bridge_without_evidence_has_a_card(tmp_path: Path) -> None:
    bare = {"ridge": replace(bridge().map(), evidence={})}
    replace(bridge(), maps=bare, calibration={}).save_pretrained(tmp_path / "bridge")
    card = (tmp_path / "bridge" / CARD).read_text()
    assert "| map ridge | ridge (k=2, penalty=0.01); held-out R² of keys, values: not measured |" in card
    assert "| calibration | no rows, fingerprint None |" in card


# Several maps, and points measured with them


def point(name: str = "ridge", **changes: Any) -> dict[str, Any]:
    return {
        "map": name,
        "plan": {"sinks": 4, "native_head": 0, "native_tail": 16, "tail_recompute": 1},
        "share": 0.125,
        "kl": {"mean": 0.25, "ci95": [0.2, 0.3], "n": 40},
        "kl_first": {"mean": 0.5, "ci95": [0.4, 0.6], "n": 40},
        "source_kl": 0.35,
        "gap_recovered": {"mean": None, "ci95": None, "n": 40, "reason": "noise"},
        "documents": 40,
        "text": "fedcba9876543210",
    } | changes


def test_a_bridge_keeps_several_maps_and_their_points(tmp_path: Path) -> None:
    torch.manual_seed(5)
    maps = bridge().maps | {"other-2": random_bridge(pair()).map()}
    both = replace(bridge(), maps=maps, points=[point(), point("other-2", share=0.0625)])
    both.save_pretrained(tmp_path / "bridge")
    loaded = Bridge.from_pretrained(tmp_path / "bridge", pair=pair())
    assert same_bridge(loaded, both)
    assert loaded.points == both.points
    assert loaded.fingerprint() == both.fingerprint() == replace(both, points=[]).fingerprint()
    assert loaded.map("other-2").forms[0].tensors()["bias"].equal(maps["other-2"].forms[0].tensors()["bias"])
    with pytest.raises(UsageError, match=r"^the bridge has the maps ridge, other-2; say which one, map=NAME\.$"):
        FormMap.of(loaded)
    with pytest.raises(UsageError, match=r"^the bridge has no map 'third'; it has ridge, other-2\.$"):
        FormMap.of(loaded, "third")
    assert FormMap.of(loaded, "ridge").forms == loaded.map("ridge").forms
    card = (tmp_path / "bridge" / CARD).read_text()
    rows = [line for line in card.splitlines() if "native_head=0" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| other-2", "| ridge"]
    assert rows[1].endswith("tail_recompute=1 | 12.5% | 0.250 (0.200 … 0.300) |")
    with redirect_stdout(StringIO()) as said:
        print_bridge(loaded, "here")
    assert re.search(r"other-2 .* 6\.2% .* 0\.2500 .* 40", said.getvalue())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"map": "third"}, r"point 0 is of map 'third'; the bridge has ridge"),
        ({"plan": point()["plan"] | {"native_head": 3}}, r"point 0 has no plan for this target: .*makes all 4 target"),
        ({"plan": point()["plan"] | {"speed": 3}}, r"point 0 has no plan for this target: .*speed"),
        ({"plan": {"sinks": 4}}, r"plan lacks 'native_head'"),
        ({"share": "12 %"}, r"share is of type str, expected float or int"),
        ({"kl": {"mean": None, "ci95": [], "n": 3}}, r"kl\.mean is of type NoneType"),
        ({"kl": 0.25}, r"kl is of type float, expected dict"),
        ({"gap_recovered": "most"}, r"gap_recovered is of type str"),
        ({"text": None}, r"text is of type NoneType"),
    ],
    ids=["map", "plan", "plan-key", "half-a-plan", "share", "no-kl", "bare-kl", "gap", "text"],
)
def test_refuses_points_that_say_something_else(
    changes: dict[str, Any], sentence: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        replace(bridge(), points=[point(**changes)]).save_pretrained(tmp_path / "bridge")
    folder = shutil.copytree(saved, tmp_path / "forged")
    forge_config(folder, lambda config: config["points"].append(point(**changes)))
    with pytest.raises(ArtifactError, match=sentence):
        Bridge.from_pretrained(folder)


# Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was asked of the hub, in order; `upload_folder` reads the folder at once, as it will be gone."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def create_repo(_: HfApi, repo_id: str, **options: Any) -> str:
        asked.append(("create", {"repo_id": repo_id, **options}))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(_: HfApi, **options: Any) -> str:
        loaded = Bridge.from_pretrained(options["folder_path"])
        files = {file.name for file in Path(options.pop("folder_path")).iterdir()}
        asked.append(("upload", {**options, "loaded": loaded, "files": files}))
        return f"https://huggingface.co/{options['repo_id']}/commit/1"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return asked


def test_is_pushed_whole_and_private_by_default(hub: list[tuple[str, dict[str, Any]]]) -> None:
    assert bridge().push_to_hub("me/bridge") == "https://huggingface.co/me/bridge/commit/1"
    (first, created), (second, uploaded) = hub
    assert (first, second) == ("create", "upload")
    assert created == {"repo_id": "me/bridge", "private": True, "exist_ok": True}
    assert uploaded["files"] == {CARD, CONFIG, SUMS, WEIGHTS}
    assert same_bridge(uploaded["loaded"], bridge())


def test_is_pushed_in_public_to_a_revision_when_asked(hub: list[tuple[str, dict[str, Any]]]) -> None:
    bridge().push_to_hub("me/bridge", private=False, revision="v2")
    assert hub[0][1]["private"] is False
    assert hub[-1][1]["revision"] == "v2"


def test_a_bridge_that_is_not_finite_is_not_pushed(hub: list[tuple[str, dict[str, Any]]]) -> None:
    spoilt = random_bridge(pair())
    spoilt.map().forms[0].bias.view(-1)[0] = float("nan")
    with pytest.raises(ArtifactError, match=r"'ridge/0\.bias' holds NaN"):
        spoilt.push_to_hub("me/bridge")
    assert hub == []


def test_is_loaded_from_the_hub_without_anything_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert same_bridge(Bridge.from_pretrained("me/bridge", pair=pair(), revision="v2"), bridge())
    assert asked == [("me/bridge", {"revision": "v2", "allow_patterns": [CONFIG, WEIGHTS, SUMS, CARD]})]


@pytest.mark.parametrize("location", ["me/bridge", "bridge", "a/b/c", "./nothing", "", " ", "me/bri\0dge"])
def test_refuses_a_name_that_is_neither_folder_nor_reachable(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        Bridge.from_pretrained(location)
    assert str(caught.value).startswith(location or ".")
    assert "\n" not in str(caught.value)
    assert "bridge folder" in str(caught.value) or "SHA256SUMS" in str(caught.value)


@pytest.mark.parametrize(
    "error", [OSError(), ConnectionError("no route\nto host"), LocalEntryNotFoundError("not cached\n\nand offline")]
)
def test_whatever_the_hub_answers_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ArtifactError, match=r"\Ame/bridge: neither a bridge folder nor a hub repository[^\n]*\Z"):
        Bridge.from_pretrained("me/bridge")
