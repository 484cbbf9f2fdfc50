"""The fitted result for one pair: forms, what they were made from, and the evidence for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvbridge.artifact import (
    CARD,
    CONFIG,
    FORMAT_VERSION,
    SUMS,
    WEIGHTS,
    folder_bytes,
    read_folder,
    rewrite_config,
    write_folder,
)
from kvbridge.errors import ArtifactError, UsageError
from kvbridge.fingerprint import digest
from kvbridge.forms import branches_of
from kvbridge.layout import BridgeMap, exact_tensors, pack, unpack
from kvbridge.novelty import PREFIX, Novelty, read_novelty
from kvbridge.pair import Pair, require_identity
from kvbridge.storage import pack_weights, storage_dtype
from kvbridge.structure import require_measured

CARD_TEMPLATE = """---
library_name: kvbridge
tags: [kv-cache, kvbridge]
base_model: [{source}, {target}]
---

# {source} → {target}

A kvbridge bridge: it maps the KV cache of `{source}` into the KV cache of `{target}`, so that the target goes on
without reading the prompt again. Mapped caches are approximate and must never enter an exact prefix cache.

| | |
|---|---|
{maps}
| calibration | {calibration} |
| source fingerprint | `{source_fingerprint}` |
| target fingerprint | `{target_fingerprint}` |
{points}
```python
from kvbridge import Bridge, load_pair
pair = load_pair("{source}", "{target}")
bridge = Bridge.from_pretrained("path/or/hub-id", pair=pair)
```
"""


@dataclass(frozen=True, slots=True)
class Bridge:
    """Fitted maps for one pair.

    Attributes:
        maps: by name.
        identity: the pair's fingerprints, as `pair_identity` gives them.
        pair: description of both models.
        calibration: what the moments were collected from.
        points: what maps under plans were measured to cost and to reach, one JSON object each: `map`, `plan`, `share`
            of prefill FLOPs, `kl`, `kl_first`, `source_kl`, `gap_recovered`, `documents`, and `text`, the fingerprint
            of what they were measured on.
        novelty: how far a source cache lies from the text of the fit, where the moments allowed to say.
        gates: limits from which on a hand-off is refused, one JSON object for each map and plan they were calibrated
            for, as `kvbridge.cascade.GateLimits` reads them.
    """

    maps: dict[str, BridgeMap]
    identity: dict[str, str]
    pair: dict[str, Any]
    calibration: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    novelty: Novelty | None = None
    gates: list[dict[str, Any]] = field(default_factory=list)

    def map(self, name: str | None = None) -> BridgeMap:
        """The map called `name`, or the only one.

        Raises:
            UsageError: there is none of that name, or no name was given and there are several.
        """
        return self.maps[self.map_name(name)]

    def map_name(self, name: str | None = None) -> str:
        """The name that `map` would take.

        Raises:
            UsageError: there is no such map, or no name was given and there are several.
        """
        listed = ", ".join(self.maps)
        if name is None and len(self.maps) != 1:
            raise UsageError(f"the bridge has the maps {listed}; say which one, map=NAME.")
        if name is not None and name not in self.maps:
            raise UsageError(f"the bridge has no map {name!r}; it has {listed}.")
        return name if name is not None else next(iter(self.maps))

    def parameters(self) -> int:
        """Numbers in the maps' weights and biases."""
        return sum(each.parameters() for each in self.maps.values())

    def fingerprint(self) -> str:
        """Digest of the forms' numbers, of what they read and make, and of the pair they belong to."""
        described, tensors = pack(self.maps)
        forms = {name: each["forms"] for name, each in described.items()}
        hasher = hashlib.sha256(digest([self.identity, forms]).encode())
        for name, tensor in tensors.items():
            hasher.update(f"{name}{tuple(tensor.shape)}".encode())
            hasher.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()[:16]

    def require_pair(self, pair: Pair) -> None:
        """Refuse a pair that this bridge was not made for.

        Raises:
            PairMismatchError: naming both fingerprints.
        """
        require_identity(pair, self.identity, "this bridge")

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | str = torch.float32) -> None:
        """Write the bridge folder, atomically.

        Args:
            folder: where; a bridge that is there is replaced.
            dtype: of the stored weights, as a dtype or by name; `int8` keeps scales of inputs and outputs and is loaded
                as fp32. Biases, scales and what residual branches read with stay in fp32.

        Raises:
            ArtifactError: the folder holds something else, a weight is not finite, or a point is of no map.
            UsageError: there is no storage of that name.
        """
        stored = storage_dtype(dtype)
        whole = stored == torch.int8
        described, tensors = pack({n: each if whole else each.to(dtype=stored) for n, each in self.maps.items()})
        tensors = pack_weights(tensors, exact_tensors(self.maps)) if whole else tensors
        layers = self.pair["target"]["geometry"]["layers"]
        require_measured(self.points, self.gates, list(self.maps), layers, "this bridge")
        novelty = self.novelty.options() if self.novelty else None
        tensors |= self.novelty.tensors() if self.novelty else {}
        config = {
            "kvbridge_version": version("kvbridge"),
            "identity": self.identity,
            "pair": self.pair,
            "maps": described,
            "calibration": self.calibration,
            "points": self.points,
            "novelty": novelty,
            "gates": self.gates,
            "storage": str(stored).removeprefix("torch."),
        }
        write_folder(Path(folder), config, tensors, self._card())

    def with_map(self, name: str, added: BridgeMap) -> Bridge:
        """The same bridge with another map; points and gates of one that it replaces are left out."""
        points, gates = ([each for each in listed if each["map"] != name] for listed in (self.points, self.gates))
        return replace(self, maps=self.maps | {name: added}, points=points, gates=gates)

    def save_points(self, folder: str | Path) -> None:
        """Write points and gates into the folder that this bridge was loaded from; weights and card stay as they are.

        Raises:
            ArtifactError: the folder is damaged, or holds another bridge by now.
        """
        place = Path(folder)
        config, maps, _ = _contents(place)
        stored = replace(self, maps=maps, identity=config["identity"])
        if stored.fingerprint() != self.fingerprint():
            raise ArtifactError(f"{folder} holds another bridge than the one that was measured; measure again.")
        if config["format_version"] < FORMAT_VERSION:
            self.save_pretrained(place)
        else:
            rewrite_config(place, {"points": self.points, "gates": self.gates})

    @classmethod
    def from_pretrained(cls, location: str | Path, *, pair: Pair | None = None, revision: str | None = None) -> Bridge:
        """Load a bridge from a folder or a hub id.

        Args:
            location: folder, or hub id of a model repository.
            pair: the pair it is to be used with; checked where given.
            revision: hub revision.

        Raises:
            ArtifactError: the folder is damaged, incomplete, too new or not a bridge.
            PairMismatchError: it was made for another pair.
        """
        folder = Path(location).expanduser()
        if not folder.is_dir():
            folder = _download(str(location), revision)
        config, maps, novelty = _contents(folder)
        parts = {name: config[name] for name in ("identity", "pair", "calibration")}
        measured = {name: config.get(name, []) for name in ("points", "gates")}
        bridge = cls(maps, **parts, **measured, novelty=novelty)
        if pair is not None:
            bridge.require_pair(pair)
        return bridge

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        revision: str | None = None,
        dtype: torch.dtype | str = torch.float32,
    ) -> str:
        """Upload the folder that `save_pretrained` writes to a hub model repository, and return its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "bridge"
            self.save_pretrained(folder, dtype=dtype)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision))

    def _card(self) -> str:
        rows = []
        for name, each in self.maps.items():
            r2 = [_mean(grid) for grid in each.evidence.get("r2", {}).values()]
            shown = ", ".join(f"{value:.3f}" for value in r2 if value is not None) or "not measured"
            branches = "".join(
                f" with a {branch.activation} branch of rank {branch.rank}" for branch in branches_of(each.forms)
            )
            rows.append(f"| map {name} | {each.method()}{branches}; held-out R² of keys, values: {shown} |")
        return CARD_TEMPLATE.format(
            source=self.pair["source"]["name"],
            target=self.pair["target"]["name"],
            maps="\n".join(rows),
            points=_points_table(self.points),
            calibration=f"{self.calibration.get('rows', 'no')} rows, fingerprint {self.calibration.get('fingerprint')}",
            source_fingerprint=self.identity["source"],
            target_fingerprint=self.identity["target"],
        )


def _contents(folder: Path) -> tuple[dict[str, Any], dict[str, BridgeMap], Novelty | None]:
    """Config, maps and novelty factor of a bridge folder, completely verified."""
    config, tensors = read_folder(folder)
    aside = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith(PREFIX)}
    maps = unpack(config, tensors, folder)
    return config, maps, read_novelty(config, aside, folder)


def _points_table(points: list[dict[str, Any]]) -> str:
    """Measured points as Markdown, the cheapest first; one empty line where there are none."""
    if not points:
        return ""
    rows = ["", "| map | plan | share of prefill | KL to native |", "|---|---|---|---|"]
    for point in sorted(points, key=lambda point: point["share"]):
        plan = ", ".join(f"{name}={'null' if value is None else value}" for name, value in point["plan"].items())
        low, high = (*point["kl"]["ci95"], None, None)[:2]
        interval = f" ({low:.3f} … {high:.3f})" if low is not None and high is not None else ""
        rows.append(f"| {point['map']} | {plan} | {point['share']:.1%} | {point['kl']['mean']:.3f}{interval} |")
    return "\n".join([*rows, ""])


def _mean(grid: list[list[float]]) -> float | None:
    """Mean over heads and layers; `None` where nothing was measured."""
    values = [value for row in grid for value in row]
    return sum(values) / len(values) if values else None


def _download(location: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(location, revision=revision, allow_patterns=[CONFIG, WEIGHTS, SUMS, CARD]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArtifactError(
            f"{location}: neither a bridge folder nor a hub repository that answers: {first_line}"
        ) from error


def bridge_bytes(folder: str | Path) -> int:
    """Size of a saved bridge on disk, in bytes."""
    return folder_bytes(Path(folder))
