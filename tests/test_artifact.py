"""Bridge folders: written whole or not at all, and refused for any damage before a tensor is used."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbridge import artifact
from kvbridge.artifact import CARD, CONFIG, SUMMED, SUMS, WEIGHTS, read_folder, write_folder
from kvbridge.bridge import Bridge, bridge_bytes
from kvbridge.cli.describe import print_bridge
from kvbridge.errors import ArtifactError, UsageError
from kvbridge.forms import KINDS
from kvbridge.pair import ModelPair
from tiny_bridge import (
    JSON,
    forge,
    forge_config,
    forge_header,
    join_weights,
    load_or_refuse,
    random_bridge,
    same_bridge,
    seal,
    split_weights,
)
from tiny_pair import tiny_pair

Damage = Callable[[Path], Any]
FUZZ = settings(deadline=None, max_examples=60)


@cache
def pair() -> ModelPair:
    return tiny_pair()


@cache
def bridge() -> Bridge:
    return random_bridge(pair())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good bridge folder, which tests copy before they touch it."""
    folder = tmp_path_factory.mktemp("saved") / "bridge"
    bridge().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "bridge")


@pytest.fixture(scope="module")
def scratch(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every example of a property fills anew."""
    return shutil.copytree(saved, tmp_path_factory.mktemp("scratch") / "bridge")


def restore(scratch: Path, saved: Path) -> Path:
    for name in (SUMS, *SUMMED):
        shutil.copyfile(saved / name, scratch / name)
    return scratch


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shape checker of the test run, which would refuse many a lie before the artifact's own checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


# Round trips


def test_a_header_that_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    """A safetensors header of 0x…80 bytes starts with the first byte of a pickle."""
    for padding in range(400):
        tensors = {"map/0.bias" + "x" * padding: torch.zeros(1)}
        write_folder(tmp_path / "folder", {}, tensors, "")
        if (tmp_path / "folder" / "model.safetensors").read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header of such a length")
    assert read_folder(tmp_path / "folder")[1].keys() == tensors.keys()


def test_what_was_saved_comes_back_to_the_bit(saved: Path) -> None:
    loaded = Bridge.from_pretrained(saved, pair=pair())
    assert same_bridge(loaded, bridge())
    assert loaded.fingerprint() == bridge().fingerprint()
    assert {file.name for file in saved.iterdir()} == {CARD, SUMS, *SUMMED}
    assert bridge_bytes(saved) == sum((saved / name).stat().st_size for name in (SUMS, *SUMMED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_stored_in_the_dtype_asked_for(dtype: torch.dtype, saved: Path, tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "half", dtype=dtype)
    loaded = Bridge.from_pretrained(tmp_path / "half").map().forms
    for half, form in zip(loaded, bridge().map().forms, strict=True):
        stored, given = half.tensors(), form.tensors()
        assert torch.equal(stored["weight"], given["weight"].to(dtype))
        assert stored["weight"].dtype == dtype
        assert torch.equal(stored["bias"], given["bias"])
        assert torch.equal(stored["slots"], given["slots"])
    assert bridge_bytes(tmp_path / "half") < 0.6 * bridge_bytes(saved)


def test_a_saved_half_is_saved_again_to_the_bit(tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    Bridge.from_pretrained(tmp_path / "half").save_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "half" / WEIGHTS).read_bytes()


def test_two_saves_are_one_file(saved: Path, tmp_path: Path) -> None:
    bridge().save_pretrained(tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_bytes() for name in (*SUMMED, SUMS, CARD)} == {
        name: (saved / name).read_bytes() for name in (*SUMMED, SUMS, CARD)
    }


def save_as_version_1(folder: Path) -> None:
    """The same bridge as kvbridge wrote it before a bridge could hold several maps."""
    config, tensors = read_folder(folder)
    (fit,) = config.pop("maps").values()
    config |= {name: fit[name] for name in ("mapper", "evidence")} | {"forms": dict.fromkeys(KINDS, "slot_affine")}
    names = {f"ridge/{at}.": f"{kind}." for at, kind in enumerate(KINDS)}
    renamed = {names[key[:8]] + key[8:]: tensor for key, tensor in tensors.items()}
    write_folder(folder, config | {"format_version": 1}, renamed, "")


def test_a_folder_of_format_1_is_one_map(folder: Path) -> None:
    save_as_version_1(folder)
    header = json.loads((folder / CONFIG).read_text())
    assert (header["format_version"], header["forms"]["keys"]) == (1, "slot_affine")
    assert same_bridge(Bridge.from_pretrained(folder, pair=pair()), bridge())
    forge_config(folder, lambda config: config["forms"].update(values="hologram"))
    with pytest.raises(ArtifactError, match="form 1 of map ridge is 'hologram'"):
        Bridge.from_pretrained(folder)


def test_a_view_is_saved_as_what_it_shows(tmp_path: Path) -> None:
    strided = torch.arange(24, dtype=torch.float32).reshape(4, 6).T
    whole = torch.arange(6, dtype=torch.float32)
    shown = {"a": strided, "b": strided, "c": whole, "d": whole, "e": whole[2:4]}
    write_folder(tmp_path / "bridge", {}, shown, "")
    read = read_folder(tmp_path / "bridge")[1]
    assert all(torch.equal(read[name], tensor) for name, tensor in shown.items())


def test_the_model_card_may_be_edited_or_removed(folder: Path) -> None:
    (folder / CARD).write_text("# mine\n")
    assert same_bridge(Bridge.from_pretrained(folder), bridge())
    (folder / CARD).unlink()
    assert same_bridge(Bridge.from_pretrained(folder), bridge())


def test_the_model_card_names_pair_method_and_evidence(saved: Path) -> None:
    card = (saved / CARD).read_text()
    for fact in ("base_model: [tiny-source, tiny-target]", "ridge (k=2, penalty=0.01)", "4096 rows, fingerprint 0123"):
        assert fact in card
    r2 = torch.tensor(bridge().map().evidence["r2"]["keys"]).mean().item()
    assert f"held-out R² of keys, values: {r2:.3f}, {r2:.3f} |" in card
    assert all(f"`{pair().identity()[role]}`" in card for role in ("source", "target"))


# Damage


def flip(name: str, at: int) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return damage


def truncate(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize(
    "damage", [lambda n: flip(n, 20), lambda n: flip(n, -2), truncate], ids=["start", "end", "cut"]
)
def test_damage_shows_in_the_sums(damage: Callable[[str], Damage], name: str, folder: Path) -> None:
    damage(name)(folder)
    with pytest.raises(
        ArtifactError,
        match=rf"^{folder / name} has SHA-256 \w{{12}}…, SHA256SUMS says \w{{12}}…: the file was changed or damaged\. "
        r"Fetch the bridge again\.$",
    ):
        Bridge.from_pretrained(folder)


def as_pickle(folder: Path) -> None:
    torch.save({"ridge/0.weight": torch.zeros(1)}, folder / WEIGHTS)
    seal(folder)


def only_pickles(folder: Path) -> None:
    for name in (SUMS, *SUMMED):
        (folder / name).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def twice_in_config(data: bytes) -> bytes:
    return data.replace(b'"mapper"', b'"mapper": {}, "mapper"', 1)


def twice_in_header(data: bytes) -> bytes:
    header, numbers = split_weights(data)
    text = json.dumps(header)
    return join_weights((text[:-1] + f', "ridge/0.bias": {json.dumps(header["ridge/0.bias"])}}}').encode(), numbers)


def spaced_header(data: bytes) -> bytes:
    header, numbers = split_weights(data)
    return join_weights(b" " + json.dumps(header).encode(), numbers)


def ridge(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the bridge's only map."""
    return config["maps"]["ridge"]


def not_a_number(data: bytes) -> bytes:
    header, numbers = split_weights(data)
    start = header["ridge/0.weight"]["data_offsets"][0]
    changed = numbers[:start] + b"\x00\x00\xc0\x7f" + numbers[start + 4 :]
    return join_weights(json.dumps(header).encode(), changed)


def rename(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


def add_tensor(name: str) -> Callable[[bytes], bytes]:
    """Declare four more bytes under a new name."""

    def change(data: bytes) -> bytes:
        header, numbers = split_weights(data)
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(numbers), len(numbers) + 4]}
        return join_weights(json.dumps(header).encode(), numbers + bytes(4))

    return change


def sums(change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(folder: Path) -> None:
        lines = (folder / SUMS).read_text().splitlines()
        (folder / SUMS).write_text("".join(line + "\n" for line in change(lines)))

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no-folder": (shutil.rmtree, r"bridge: neither a bridge folder nor a hub repository that answers: "),
    "empty-folder": (
        lambda f: [file.unlink() for file in f.iterdir()],
        r"bridge has no SHA256SUMS\. Expected config\.json, model\.safetensors and SHA256SUMS\.$",
    ),
    "no-config": (lambda f: (f / CONFIG).unlink(), r"bridge has no config\.json\. Expected"),
    "no-weights": (lambda f: (f / WEIGHTS).unlink(), r"bridge has no model\.safetensors\. Expected"),
    "only-pickles": (
        only_pickles,
        r"bridge has no SHA256SUMS; pytorch_model\.bin is a pickle, which is never loaded\.",
    ),
    "sums-malformed": (
        sums(lambda lines: ["0" * 63 + "  " + CONFIG, lines[1]]),
        r"SHA256SUMS has the line '0{63}  config\.json', expected one `sha256  name` per file",
    ),
    "sums-upper-case": (
        sums(lambda lines: [lines[0].upper(), lines[1]]),
        r"SHA256SUMS has the line '[0-9A-F]{64}  CONFIG",
    ),
    "sums-twice": (sums(lambda lines: [*lines, lines[0]]), r"SHA256SUMS has the line '[0-9a-f]{64}  config\.json'"),
    "sums-extra": (
        sums(lambda lines: [*lines, "0" * 64 + "  README.md"]),
        r"lists \['README\.md', 'config\.json', 'model\.safetensors'\], expected exactly",
    ),
    "sums-lacking": (sums(lambda lines: lines[:1]), r"lists \['config\.json'\], expected exactly"),
    "sums-empty": (sums(lambda _: []), r"lists \[\], expected exactly \['config\.json', 'model\.safetensors'\]"),
    "config-no-json": (
        lambda f: forge(f, CONFIG, lambda data: data[: len(data) // 2]),
        r"config\.json is not valid JSON \((?!Infinity).+\); the bridge is damaged\.$",
    ),
    "config-no-object": (
        lambda f: forge(f, CONFIG, lambda _: b"[1]"),
        r"config\.json holds a JSON list, expected an object",
    ),
    "config-not-finite": (
        lambda f: forge_config(f, lambda c: ridge(c)["evidence"].update(rows_per_feature=float("inf"))),
        r"config\.json is not valid JSON \(Infinity is no JSON number\); the bridge is damaged",
    ),
    "config-key-twice": (
        lambda f: forge(f, CONFIG, twice_in_config),
        r"config\.json is refused: the key 'mapper' stands twice\.$",
    ),
    "config-no-bridge": (
        lambda f: forge_config(f, lambda c: c.update(format="llama")),
        r"says format 'llama', expected 'kvbridge-bridge': not a bridge",
    ),
    "config-newer": (
        lambda f: forge_config(f, lambda c: c.update(format_version=99)),
        r"has bridge format 99; this kvbridge reads up to 2\. Upgrade kvbridge\.$",
    ),
    "config-version-zero": (
        lambda f: forge_config(f, lambda c: c.update(format_version=True)),
        r"says format_version True, expected a whole number from 1",
    ),
    "config-no-tensors": (
        lambda f: forge_config(f, lambda c: c.pop("tensors")),
        r"config\.json has no table of tensors",
    ),
    "config-lacks-a-key": (
        lambda f: forge_config(f, lambda c: ridge(c).pop("mapper")),
        r"config\.json\S* lacks .*'mapper'; the bridge is damaged",
    ),
    "config-unknown-form": (
        lambda f: forge_config(f, lambda c: ridge(c)["forms"][0].update(form="hologram")),
        r"form 0 of map ridge is 'hologram', expected one of slot_affine, shared_basis, residual_branch\. Upgrade",
    ),
    "weights-pickle": (
        as_pickle,
        r"model\.safetensors is a pickle, which is never loaded; a bridge holds safetensors only",
    ),
    "weights-cut-in-header": (
        lambda f: forge(f, WEIGHTS, lambda data: data[:60]),
        r"model\.safetensors does not start with a safetensors header; it is truncated or another kind of file",
    ),
    "weights-cut-in-numbers": (
        lambda f: forge(f, WEIGHTS, lambda data: data[:-1]),
        r"is not a valid safetensors file \(.+\); the bridge is damaged",
    ),
    "header-no-json": (
        lambda f: forge(f, WEIGHTS, lambda data: join_weights(b"{keys}", split_weights(data)[1])),
        r"the header of \S+model\.safetensors is not valid JSON",
    ),
    "header-key-twice": (
        lambda f: forge(f, WEIGHTS, twice_in_header),
        r"the header of \S+model\.safetensors is refused: the key 'ridge/0\.bias' stands twice",
    ),
    "tensor-missing": (
        lambda f: forge_config(f, lambda c: c["tensors"].update(more=c["tensors"]["ridge/0.bias"])),
        r"model\.safetensors lacks tensor 'more', compared with config\.json",
    ),
    "tensor-undeclared": (
        lambda f: forge(f, WEIGHTS, add_tensor("more")),
        r"model\.safetensors has the undeclared tensor 'more', compared with config\.json",
    ),
    "tensor-outside-the-folder": (
        lambda f: forge(f, WEIGHTS, add_tensor("../../x")),
        r"model\.safetensors has the undeclared tensor '\.\./\.\./x'",
    ),
    "tensor-shape": (
        lambda f: forge_header(f, lambda h: h["ridge/0.bias"].update(shape=[4, 128])),
        r"tensor 'ridge/0\.bias' is .*'shape': \[4, 128\].*, config\.json says .*'shape': \[4, 4, 32\]",
    ),
    "tensor-dtype": (
        lambda f: forge_header(f, lambda h: h["ridge/0.weight"].update(dtype="I32")),
        r"tensor 'ridge/0\.weight' is .*'dtype': 'I32'.*, config\.json says .*'dtype': 'F32'",
    ),
    "tensor-nan": (
        lambda f: forge(f, WEIGHTS, not_a_number),
        r"tensor 'ridge/0\.weight' holds NaN or infinite numbers; the bridge must not be used",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_refuses(case: str, folder: Path) -> None:
    damage, sentence = DAMAGES[case]
    damage(folder)
    with pytest.raises(ArtifactError, match=sentence) as caught:
        Bridge.from_pretrained(folder)
    assert str(folder) in str(caught.value) or "kvbridge" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_that_starts_with_a_space_is_no_header(folder: Path) -> None:
    forge(folder, WEIGHTS, spaced_header)
    with pytest.raises(ArtifactError, match="does not start with a safetensors header"):
        Bridge.from_pretrained(folder)


def test_each_damage_has_its_own_sentence(saved: Path, tmp_path: Path) -> None:
    said = {}
    for case, (damage, _) in DAMAGES.items():
        damage(shutil.copytree(saved, tmp_path / case / "bridge"))
        with pytest.raises(ArtifactError) as caught:
            Bridge.from_pretrained(tmp_path / case / "bridge")
        said[case] = str(caught.value)
    also = {
        case: [other for other, (_, sentence) in DAMAGES.items() if re.search(sentence, said[case])] for case in said
    }
    assert also == {case: [case] for case in DAMAGES}


@pytest.mark.parametrize("name", [SUMS, *SUMMED])
def test_refuses_an_oversized_file_before_reading_it(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / name).stat().st_size
    monkeypatch.setitem(artifact.SIZE_CAPS, name, size - 1)
    monkeypatch.setattr(Path, "read_bytes", refuse_only(name, Path.read_bytes))
    with pytest.raises(
        ArtifactError, match=rf"{folder / name} has {size} bytes, more than the {size - 1} a bridge may have there\.$"
    ):
        Bridge.from_pretrained(folder)


def refuse_only(name: str, read: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    def reading(path: Path) -> bytes:
        assert path.name != name, "read in spite of its size"
        return read(path)

    return reading


def test_refuses_a_header_longer_than_its_cap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "HEADER_CAP", 64)
    with pytest.raises(ArtifactError, match="does not start with a safetensors header"):
        Bridge.from_pretrained(folder)


def test_nothing_is_unpacked_before_all_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "load", lambda _: pytest.fail("tensors were unpacked"))
    forge(folder, WEIGHTS, add_tensor("more"))
    with pytest.raises(ArtifactError, match="undeclared"):
        Bridge.from_pretrained(folder)


# Folders whose files agree with each other, but not with what a bridge is


def consistent_lie(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    config, tensors = read_folder(folder)
    change(tensors)
    write_folder(folder, config, tensors, "")


LIES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "no-bias": lambda t: t.pop("ridge/0.bias"),
    "no-values": lambda t: [t.pop(f"ridge/1.{name}") for name in ("slots", "weight", "bias")],
    "unknown-part": lambda t: t.update({"ridge/0.scale": torch.ones(1)}),
    "unknown-kind": lambda t: t.update({"ridge/2.weight": torch.ones(1)}),
    "outside-the-folder": lambda t: t.update({"../../x": torch.ones(1)}),
    "fractional-slots": lambda t: t.update({"ridge/0.slots": t["ridge/0.slots"].float()}),
    "whole-weights": lambda t: t.update({"ridge/0.weight": t["ridge/0.weight"].to(torch.int8)}),
    "whole-bias": lambda t: t.update({"ridge/0.bias": t["ridge/0.bias"].to(torch.int32)}),
    "flat-weights": lambda t: t.update({"ridge/0.weight": t["ridge/0.weight"].flatten(3)}),
    "no-slots": lambda t: t.update(
        {"ridge/0.slots": t["ridge/0.slots"][..., :0], "ridge/0.weight": t["ridge/0.weight"][:, :, :0]}
    ),
    "fewer-layers": lambda t: t.update({name: t[name][:3] for name in t if name.startswith("ridge/0")}),
    "fewer-heads": lambda t: t.update({name: t[name][:, :3] for name in t if name.startswith("ridge/1")}),
    "narrower-source": lambda t: t.update({"ridge/0.weight": t["ridge/0.weight"][:, :, :, :8]}),
    "wider-bias": lambda t: t.update({"ridge/0.bias": torch.ones(4, 4, 33)}),
    "slot-out-of-range": lambda t: t["ridge/1.slots"].view(-1)[3].fill_(12),
    "negative-slot": lambda t: t["ridge/1.slots"].view(-1)[3].fill_(-1),
}


@pytest.mark.parametrize("lie", LIES)
def test_refuses_tensors_that_make_no_map_of_this_pair(lie: str, folder: Path) -> None:
    consistent_lie(folder, LIES[lie])
    with pytest.raises(ArtifactError, match=r"\A[^\n]*(form|keys|values|tensor)[^\n]*\Z"):
        Bridge.from_pretrained(folder)


# Properties


@FUZZ
@given(name=st.sampled_from(SUMMED), data=st.data())
def test_a_flipped_bit_is_always_noticed(name: str, data: st.DataObject, saved: Path, scratch: Path) -> None:
    content = bytearray((restore(scratch, saved) / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (scratch / name).write_bytes(content)
    assert load_or_refuse(scratch) is None


@FUZZ
@given(name=st.sampled_from((SUMS, *SUMMED)), kept=st.floats(0, 1, exclude_max=True), sealed=st.booleans())
def test_a_truncated_file_is_always_noticed(name: str, kept: float, sealed: bool, saved: Path, scratch: Path) -> None:
    path = restore(scratch, saved) / name
    # The last byte of a text file is a line feed, which nothing needs.
    os.truncate(path, int(kept * (path.stat().st_size - 1)))
    if sealed and name != SUMS:
        seal(scratch)
    assert load_or_refuse(scratch) is None


@FUZZ
@given(name=st.sampled_from((SUMS, *SUMMED)), content=st.binary(max_size=200))
def test_random_bytes_are_never_a_bridge(name: str, content: bytes, saved: Path, scratch: Path) -> None:
    (restore(scratch, saved) / name).write_bytes(content)
    if name != SUMS:
        seal(scratch)
    assert load_or_refuse(scratch) is None


@FUZZ
@given(data=st.data())
def test_a_changed_header_changes_nothing_or_is_refused(data: st.DataObject, saved: Path, scratch: Path) -> None:
    content = bytearray((restore(scratch, saved) / WEIGHTS).read_bytes())
    at = data.draw(st.integers(0, 7 + int.from_bytes(content[:8], "little")))
    content[at] = data.draw(st.integers(0, 255))
    (scratch / WEIGHTS).write_bytes(content)
    seal(scratch)
    loaded = load_or_refuse(scratch)
    assert loaded is None or same_bridge(loaded, bridge())


@FUZZ
@given(data=st.data())
def test_any_offsets_are_the_right_ones_or_refused(data: st.DataObject, saved: Path, scratch: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        name = data.draw(st.sampled_from(sorted(header)))
        header[name]["data_offsets"] = data.draw(JSON | st.lists(st.integers(0, 1 << 65), min_size=2, max_size=2))

    forge_header(restore(scratch, saved), change)
    loaded = load_or_refuse(scratch)
    assert loaded is None or same_bridge(loaded, bridge())


def places(value: Any, depth: int = 4) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, at most `depth` steps down."""
    steps = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(step, *rest) for step in steps for rest in ([(), *places(value[step], depth - 1)] if depth > 1 else [()])]


@FUZZ
@given(data=st.data())
def test_a_config_of_another_structure_is_refused_or_useable(data: st.DataObject, saved: Path, scratch: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        *way, last = data.draw(st.sampled_from(places(config)))
        holder: Any = config
        for step in way:
            holder = holder[step]
        if data.draw(st.booleans()):
            del holder[last]
        else:
            holder[last] = data.draw(JSON)

    forge_config(restore(scratch, saved), change)
    loaded = load_or_refuse(scratch)
    if loaded is not None:
        for name, each in loaded.maps.items():
            assert all(
                torch.equal(mine, expected)
                for got, form in zip(each.forms, bridge().maps[name].forms, strict=True)
                for mine, expected in zip(got.tensors().values(), form.tensors().values(), strict=True)
            )
        assert len(loaded.fingerprint()) == 16
        with redirect_stdout(StringIO()):
            print_bridge(loaded, "here")
        loaded.save_pretrained(scratch)


# Writing


@pytest.mark.parametrize("failing", ["write_bytes", "chmod"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk-full", "interrupt"])
def test_a_failed_write_leaves_the_old_bridge(
    failing: str, error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([None, error] if failing == "write_bytes" else [error])
    original = getattr(Path, failing)

    def fail(path: Path, *arguments: Any) -> Any:
        raised = next(calls, None)
        if raised is not None:
            raise raised
        return original(path, *arguments)

    monkeypatch.setattr(Path, failing, fail)
    with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt):
        random_bridge(pair()).save_pretrained(folder)
    monkeypatch.undo()
    assert same_bridge(Bridge.from_pretrained(folder), bridge())
    assert [file.name for file in folder.parent.iterdir()] == ["bridge"]


@pytest.mark.parametrize("step", [0, 1])
def test_a_failed_replacement_leaves_the_old_bridge(step: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10))
    original = os.rename

    def fail(old: Path, new: Path) -> None:
        if next(calls) == step:
            raise OSError(errno.ENOSPC, "no space")
        original(old, new)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UsageError, match=f"^{folder} could not be written .no space.; make room"):
        random_bridge(pair()).save_pretrained(folder)
    assert same_bridge(Bridge.from_pretrained(folder), bridge())
    assert [file.name for file in folder.parent.iterdir()] == ["bridge"]


def test_a_failed_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UsageError, match="disk full"):
        bridge().save_pretrained(tmp_path / "bridge")
    assert list(tmp_path.iterdir()) == []


def test_a_bridge_is_replaced(folder: Path) -> None:
    torch.manual_seed(1)
    other = random_bridge(pair())
    other.save_pretrained(folder)
    assert same_bridge(Bridge.from_pretrained(folder), other)
    assert other.fingerprint() != bridge().fingerprint()
    assert [file.name for file in folder.parent.iterdir()] == ["bridge"]


def test_an_empty_folder_and_missing_parents_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b" / "bridge"):
        bridge().save_pretrained(place)
        assert same_bridge(Bridge.from_pretrained(place), bridge())
        assert place.stat().st_mode & 0o777 == 0o755


def test_a_bridge_folder_that_holds_more_is_never_overwritten(folder: Path) -> None:
    (folder / "notes.md").write_text("years of work\n")
    with pytest.raises(ArtifactError, match=rf"^{folder} .*notes\.md"):
        bridge().save_pretrained(folder)
    assert (folder / "notes.md").read_text() == "years of work\n"


@pytest.mark.parametrize("name", ["thesis.tex", SUMS])
def test_another_folder_is_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("years of work\n")
    with pytest.raises(
        ArtifactError, match=rf"^{tmp_path}/mine exists and is not a bridge; give an empty or new folder\.$"
    ):
        bridge().save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / name).read_text() == "years of work\n"


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work\n")
    with pytest.raises(ArtifactError, match="exists and is not a bridge"):
        bridge().save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "years of work\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    spoilt = random_bridge(pair())
    spoilt.map().forms[1].tensors()["weight"][1, 2, 0, 3, 4] = value
    with pytest.raises(
        ArtifactError, match=r"^tensor 'ridge/1\.weight' holds NaN or infinite numbers; such a bridge is not"
    ):
        spoilt.save_pretrained(tmp_path / "bridge")
    assert list(tmp_path.iterdir()) == []


def test_weights_too_large_for_the_stored_dtype_are_not_saved(tmp_path: Path) -> None:
    spoilt = random_bridge(pair())
    spoilt.map().forms[1].tensors()["weight"][1, 2, 0, 3, 4] = 1e6
    with pytest.raises(ArtifactError, match=r"'ridge/1\.weight' holds NaN or infinite numbers"):
        spoilt.save_pretrained(tmp_path / "bridge", dtype=torch.float16)


def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="float64"):
        bridge().save_pretrained(tmp_path / "bridge", dtype=torch.float64)
    assert list(tmp_path.iterdir()) == []
