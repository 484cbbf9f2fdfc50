"""The fitted result for one pair: forms, what they were made from, and the evidence for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvbridge.artifact import CARD, CONFIG, SUMS, WEIGHTS, folder_bytes, read_folder, write_folder
from kvbridge.errors import ArtifactError, CacheError
from kvbridge.fingerprint import digest
from kvbridge.forms import FORMS, KINDS, Form
from kvbridge.pair import ModelPair

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
| mapper | {mapper} |
| calibration | {calibration} |
| held-out R² of keys, values | {r2} |
| source fingerprint | `{source_fingerprint}` |
| target fingerprint | `{target_fingerprint}` |

```python
from kvbridge import Bridge, load_pair
pair = load_pair("{source}", "{target}")
bridge = Bridge.from_pretrained("path/or/hub-id", pair=pair)
```
"""

# What a config must hold for a bridge to be used, described and saved again; a name with ? may be missing.
_MODEL = {"name": str, "geometry": {"layers": int, "kv_heads": int, "head_dim": int, "rope_kind": str}}
STRUCTURE: dict[str, Any] = {
    "identity": {"source": str, "target": str},
    "pair": {"source": _MODEL, "target": _MODEL},
    "forms": dict.fromkeys(KINDS, str),
    "mapper": {"name": str},
    "calibration": {"rows?": int},
    "evidence": {
        "r2?": {f"{kind}?": [[float]] for kind in KINDS},
        "selected_layers?": {f"{kind}?": [[int]] for kind in KINDS},
    },
}


def _require_structure(value: Any, structure: Any, place: str) -> None:
    """Refuse a JSON value that lacks a name or has another type somewhere.

    Raises:
        ArtifactError: naming the place.
    """
    kind = type(structure) if isinstance(structure, (dict, list)) else structure
    if type(value) is not kind:
        raise ArtifactError(
            f"{place} is of type {type(value).__name__}, expected {kind.__name__}; the bridge is damaged."
        )
    if isinstance(structure, list):
        for inner in value:
            _require_structure(inner, structure[0], place)
    elif isinstance(structure, dict):
        for name, inner in structure.items():
            key = name.removesuffix("?")
            if key in value:
                _require_structure(value[key], inner, f"{place}.{key}")
            elif key == name:
                raise ArtifactError(f"{place} lacks {key!r}; the bridge is damaged.")


@dataclass(frozen=True, slots=True)
class Bridge:
    """A fitted map for one pair.

    Attributes:
        keys: form that makes the target's content keys.
        values: form that makes its values.
        identity: the pair's fingerprints, as `ModelPair.identity` gives them.
        pair: description of both models.
        mapper: fitting method and its hyper-parameters.
        calibration: what the moments were collected from.
        evidence: held-out R², selected layers, and what evaluation found.
    """

    keys: Form
    values: Form
    identity: dict[str, str]
    pair: dict[str, Any]
    mapper: dict[str, Any]
    calibration: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def forms(self) -> dict[str, Form]:
        return dict(zip(KINDS, (self.keys, self.values), strict=True))

    def parameters(self) -> int:
        """Numbers in the maps' weights and biases."""
        return sum(form.weight.numel() + form.bias.numel() for form in self.forms().values())

    def fingerprint(self) -> str:
        """Digest of the forms' numbers and of the pair they belong to."""
        hasher = hashlib.sha256(digest(self.identity).encode())
        for kind, form in self.forms().items():
            for name, tensor in form.tensors().items():
                hasher.update(f"{kind}.{name}{tuple(tensor.shape)}".encode())
                hasher.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()[:16]

    def require_pair(self, pair: ModelPair) -> None:
        """Refuse a pair that this bridge was not made for.

        Raises:
            PairMismatchError: naming both fingerprints.
        """
        pair.require(self.identity, "this bridge")

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
        """Write the bridge folder, atomically.

        Args:
            folder: where; a bridge that is there is replaced.
            dtype: of the stored weights; biases stay in fp32.

        Raises:
            ArtifactError: the folder holds something else, or a weight is not finite.
        """
        forms = {kind: form.to(dtype=dtype) for kind, form in self.forms().items()}
        tensors = {f"{kind}.{name}": tensor for kind, form in forms.items() for name, tensor in form.tensors().items()}
        config = {
            "kvbridge_version": version("kvbridge"),
            "identity": self.identity,
            "pair": self.pair,
            "forms": {kind: form.name for kind, form in forms.items()},
            "mapper": self.mapper,
            "calibration": self.calibration,
            "evidence": self.evidence,
        }
        write_folder(Path(folder), config, tensors, self._card())

    @classmethod
    def from_pretrained(
        cls, location: str | Path, *, pair: ModelPair | None = None, revision: str | None = None
    ) -> Bridge:
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
        config, tensors = read_folder(folder)
        _require_structure(config, STRUCTURE, str(folder / CONFIG))
        unknown = sorted(name for name in tensors if name.split(".")[0] not in KINDS)
        if unknown:
            raise ArtifactError(f"{folder / WEIGHTS} has tensor {unknown[0]!r}, which belongs to no form.")
        forms = {kind: _build_form(kind, config["forms"][kind], tensors) for kind in KINDS}
        bridge = cls(
            **forms, **{name: config[name] for name in ("identity", "pair", "mapper", "calibration", "evidence")}
        )
        bridge._check_slots(folder)
        bridge._check_evidence(folder)
        if pair is not None:
            bridge.require_pair(pair)
        return bridge

    def push_to_hub(self, repo_id: str, *, private: bool = True, revision: str | None = None) -> str:
        """Upload the bridge folder to a hub model repository and return its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "bridge"
            self.save_pretrained(folder)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision))

    def _check_slots(self, folder: Path) -> None:
        source, target = (self.pair[role]["geometry"] for role in ("source", "target"))
        slots = len(KINDS) * source["layers"] * source["kv_heads"]
        for kind, form in self.forms().items():
            expected = (target["layers"], target["kv_heads"], source["head_dim"], target["head_dim"])
            found = (*form.slots.shape[:2], *form.weight.shape[3:])
            read = int(form.slots.max()) + 1 if form.slots.numel() else 0
            if found != expected or not 0 < read <= slots:
                raise ArtifactError(
                    f"{folder}: the {kind} form has (L_t, H_t, D_s, D_t) = {found} and reads {read} slots; "
                    f"its own geometry says {expected} and {slots}. The bridge is damaged."
                )

    def _check_evidence(self, folder: Path) -> None:
        layers, heads = self.keys.slots.shape[:2]
        grids, chosen = (self.evidence.get(name, {}) for name in ("r2", "selected_layers"))
        fits = {*grids, *chosen} <= {*KINDS} and all(
            len(rows) == layers for rows in (*grids.values(), *chosen.values())
        )
        if not (fits and all(len(row) == heads for grid in grids.values() for row in grid)):
            raise ArtifactError(
                f"{folder / CONFIG}: r2 and selected_layers are not those of {layers} layers of {heads} heads; "
                "the bridge is damaged."
            )
        per_feature = self.evidence.get("rows_per_feature")
        if not isinstance(per_feature, (float, type(None))):
            raise ArtifactError(f"{folder / CONFIG}: rows_per_feature is {per_feature!r}, expected a number.")

    def _card(self) -> str:
        r2 = [torch.tensor(grid).mean().item() for grid in self.evidence.get("r2", {}).values()]
        options = ", ".join(f"{name}={value}" for name, value in self.mapper.items() if name != "name")
        return CARD_TEMPLATE.format(
            source=self.pair["source"]["name"],
            target=self.pair["target"]["name"],
            mapper=f"{self.mapper.get('name')} ({options})",
            calibration=f"{self.calibration.get('rows', 'no')} rows, fingerprint {self.calibration.get('fingerprint')}",
            r2=", ".join(f"{value:.3f}" for value in r2) or "not measured",
            source_fingerprint=self.identity["source"],
            target_fingerprint=self.identity["target"],
        )


def _build_form(kind: str, name: str, tensors: dict[str, torch.Tensor]) -> Form:
    if name not in FORMS:
        raise ArtifactError(
            f"the bridge's {kind} form is {name!r}, expected one of {', '.join(FORMS)}. Upgrade kvbridge."
        )
    prefix = f"{kind}."
    try:
        return FORMS[name](
            **{key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        )
    except (CacheError, TypeError) as error:
        raise ArtifactError(f"the bridge's {kind} form is inconsistent: {error}") from error


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
