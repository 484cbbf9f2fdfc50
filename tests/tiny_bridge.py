"""A bridge of random weights for a pair, and the means to forge its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from kvbridge.artifact import CONFIG, SUMMED, SUMS, WEIGHTS
from kvbridge.bridge import Bridge
from kvbridge.errors import ArtifactError
from kvbridge.forms import KINDS, Form, SlotAffine, input_slot
from kvbridge.layout import BridgeMap, pack
from kvbridge.novelty import Novelty
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def random_form(kind: str, pair: ModelPair, layers: tuple[int, ...] = (0, 2)) -> SlotAffine:
    """A form that reads all heads of some source layers."""
    source, target = pair.source.geometry, pair.target.geometry
    row = [
        input_slot(kind, at, head, source.layers, source.kv_heads) for at in layers for head in range(source.kv_heads)
    ]
    slots = torch.tensor(row, dtype=torch.int32).expand(target.layers, target.kv_heads, -1).contiguous()
    weight = torch.randn(*slots.shape, source.head_dim, target.head_dim) / len(row)
    return SlotAffine(kind, slots, weight, torch.randn(*slots.shape[:2], target.head_dim))


def random_bridge(pair: ModelPair) -> Bridge:
    """A complete bridge, as a fit would leave it; the weights follow torch's seed."""
    target = pair.target.geometry
    grid = torch.rand(target.layers, target.kv_heads).tolist()
    evidence = {
        "r2": dict.fromkeys(KINDS, grid),
        "selected_layers": dict.fromkeys(KINDS, [[0, 2]] * target.layers),
        "rows_per_feature": 64.0,
    }
    forms = tuple(random_form(kind, pair) for kind in KINDS)
    return Bridge(
        maps={"ridge": BridgeMap(forms, {"name": "ridge", "k": 2, "penalty": 0.01}, evidence)},
        identity=pair.identity(),
        pair=pair.describe(),
        calibration={"rows": 4096, "fingerprint": "0123456789abcdef"},
    )


def with_open_gate(bridge: Bridge, plan: HandoffPlan) -> Bridge:
    """The same bridge with a gate that lets every finite cache of the right prompt pass under one plan."""
    source, target = (bridge.pair[role]["geometry"] for role in ("source", "target"))
    width = source["layers"] * source["kv_heads"] * source["head_dim"]
    plain, one = torch.zeros(2, width), torch.ones(2, 1)
    directions = torch.eye(width, 1).expand(2, -1, -1).contiguous().bfloat16()
    novelty = Novelty(plain, plain + 1, directions, one, one[:, 0].clone(), torch.ones(2, target["layers"]), 4)
    promise = {"kl_limit": 1.0, "share": 0.1, "confidence": 0.95, "documents": 60, "applied": 60, "bad": 0}
    gates = [
        {"map": name, "plan": plan.to_dict(), "novelty": 1e9, "tail": 1e9, **promise, "text": "fedcba9876543210"}
        for name in bridge.maps
    ]
    return replace(bridge, novelty=novelty, gates=gates)


def with_form(bridge: Bridge, at: int, form: Form, name: str = "ridge") -> Bridge:
    """The same bridge with another form at one place of a map."""
    forms = list(bridge.map(name).forms)
    forms[at] = form
    return replace(bridge, maps=bridge.maps | {name: replace(bridge.map(name), forms=tuple(forms))})


def same_bridge(given: Bridge, expected: Bridge) -> bool:
    """Whether two bridges are equal to the last bit, in everything that they hold."""
    packed = [pack(each.maps) for each in (given, expected)]
    described = [
        (maps, b.identity, b.pair, b.calibration) for (maps, _), b in zip(packed, (given, expected), strict=True)
    ]
    mine, theirs = (tensors for _, tensors in packed)
    return (
        described[0] == described[1]
        and mine.keys() == theirs.keys()
        and all(mine[at].dtype == theirs[at].dtype and torch.equal(mine[at], theirs[at]) for at in mine)
    )


def seal(folder: Path) -> None:
    """Make SHA256SUMS match what lies in the folder."""
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in SUMMED]
    (folder / SUMS).write_text("".join(sums))


def forge(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file, with matching sums."""
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    seal(folder)


def forge_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change config.json in place, with matching sums."""

    def edit(data: bytes) -> bytes:
        config = json.loads(data)
        change(config)
        return json.dumps(config).encode()

    forge(folder, CONFIG, edit)


def split_weights(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join_weights(header: bytes, numbers: bytes) -> bytes:
    """A safetensors file with this header, whatever it says."""
    return len(header).to_bytes(8, "little") + header + numbers


def forge_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of model.safetensors in place, with matching sums."""

    def edit(data: bytes) -> bytes:
        header, numbers = split_weights(data)
        change(header)
        return join_weights(json.dumps(header).encode(), numbers)

    forge(folder, WEIGHTS, edit)


def load_or_refuse(folder: Path) -> Bridge | None:
    """The bridge, or nothing if it was refused as it should be; any other error fails the test."""
    try:
        return Bridge.from_pretrained(folder)
    except ArtifactError as error:
        if "\n" in str(error):
            pytest.fail(f"more than one line: {error}")
        return None
