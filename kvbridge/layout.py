"""How the maps of a bridge lie in its config and its tensors.

config.json        maps → name → forms (name and options of each), mapper, evidence
model.safetensors  `{map}/{form}.{tensor}`; of a basis that several forms of a map share, the first form's alone;
                   beside a weight that is stored in int8 its scales, `….{tensor}_scale` and `….{tensor}_octave`
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbridge.artifact import CONFIG, WEIGHTS
from kvbridge.consistency import check_map
from kvbridge.dotted import flatten
from kvbridge.errors import ArtifactError, CacheError, UsageError
from kvbridge.forms import (
    FORMS,
    KINDS,
    Form,
    ResidualBranch,
    SharedBasis,
    SlotAffine,
    flops_per_token,
    require_distinct,
)
from kvbridge.storage import unpack_weights
from kvbridge.structure import STRUCTURE, STRUCTURE_1, require_measured, require_structure
from kvbridge.variables import Span

MAP_NAME = r"[A-Za-z0-9][A-Za-z0-9_.=,+-]*"


def moved(
    forms: tuple[Form, ...], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Form, ...]:
    """Forms with weights in another dtype or on another device; what they share they go on sharing."""
    made: list[Form] = []
    for at, form in enumerate(forms):
        one, holder = form.to(dtype=dtype, device=device), reduce_holder(forms, at)
        shared = made[holder] if holder is not None and holder != at else None
        if isinstance(one, SharedBasis) and isinstance(shared, SharedBasis):
            one = replace(one, reduce=shared.reduce)
        made.append(one)
    return tuple(made)


@dataclass(frozen=True, slots=True)
class BridgeMap:
    """One map of a bridge.

    Attributes:
        forms: what is executed.
        mapper: fitting method and its hyper-parameters.
        evidence: held-out R², selected layers, and what evaluation found.

    Raises:
        CacheError: two forms make the same layer, or a branch adds to one that none makes.
    """

    forms: tuple[Form, ...]
    mapper: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_distinct(self.forms)

    def method(self) -> str:
        """Fitting method and its hyper-parameters, for people."""
        options = ", ".join(f"{name}={value}" for name, value in flatten(self.mapper).items() if name != "name")
        return f"{self.mapper.get('name')} ({options})"

    def parameters(self) -> int:
        """Numbers in weights and biases."""
        return sum(tensor.numel() for tensor in self.distinct_tensors().values() if tensor.is_floating_point())

    def flops_per_token(self, layers: range) -> int:
        """Operations that mapping one token into the target `layers` takes; a basis that forms share counts once."""
        return flops_per_token(self.forms, layers)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> BridgeMap:
        """The same map with weights in another dtype or on another device."""
        return BridgeMap(moved(self.forms, dtype=dtype, device=device), self.mapper, self.evidence)

    def distinct_tensors(self) -> dict[str, Tensor]:
        """Tensors by `{form}.{tensor}`; of a basis that forms share, the first form's alone."""
        tensors: dict[str, Tensor] = {}
        for at, form in enumerate(self.forms):
            shared = reduce_holder(self.forms, at) not in (None, at)
            tensors |= {
                f"{at}.{name}": tensor for name, tensor in form.tensors().items() if not (shared and name == "reduce")
            }
        return tensors


def reduce_holder(forms: tuple[Form, ...], at: int) -> int | None:
    """The first form whose basis is that of form `at`; `None` where it has none."""
    form = forms[at]
    if not isinstance(form, SharedBasis) or form.reduce is None:
        return None
    return next(i for i, each in enumerate(forms) if isinstance(each, SharedBasis) and each.reduce is form.reduce)


def pack(maps: dict[str, BridgeMap]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Maps as JSON values and tensors."""
    described = {
        name: {
            "forms": [
                {"form": form.name, **form.options(), **_reduce_entry(each.forms, at)}
                for at, form in enumerate(each.forms)
            ],
            "mapper": each.mapper,
            "evidence": each.evidence,
        }
        for name, each in maps.items()
    }
    tensors = {f"{name}/{key}": value for name, each in maps.items() for key, value in each.distinct_tensors().items()}
    return described, tensors


def exact_tensors(maps: dict[str, BridgeMap]) -> set[str]:
    """Names of the weights that every storage keeps in fp32: those with which residual branches read."""
    return {
        f"{name}/{at}.reduce"
        for name, each in maps.items()
        for at, form in enumerate(each.forms)
        if isinstance(form, ResidualBranch)
    }


def _reduce_entry(forms: tuple[Form, ...], at: int) -> dict[str, int]:
    holder = reduce_holder(forms, at)
    return {} if holder is None else {"reduce": holder}


def unpack(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> dict[str, BridgeMap]:
    """The maps of a bridge, checked against the geometry that it names itself.

    Args:
        config: of any format version that `artifact.read_folder` lets through.
        tensors: by name.
        folder: for messages.

    Raises:
        ArtifactError: something is missing, left over, of another type or does not fit.
    """
    first = config["format_version"] == 1
    require_structure(config, STRUCTURE_1 if first else STRUCTURE, str(folder / CONFIG))
    if first:
        config, tensors = _from_version_1(config, tensors)
    else:
        layers = config["pair"]["target"]["geometry"]["layers"]
        gates = config.get("gates", [])
        require_measured(config["points"], gates, list(config["maps"]), layers, str(folder / CONFIG))
    if not config["maps"]:
        raise ArtifactError(f"{folder / CONFIG} has no maps; the bridge is damaged.")
    left = dict(tensors)
    maps = {name: _unpack_map(name, described, left) for name, described in config["maps"].items()}
    if left:
        raise ArtifactError(f"{folder / WEIGHTS} has tensor {min(left)!r}, which belongs to no form.")
    for name, each in maps.items():
        check_map(name, each.forms, each.evidence, config["pair"], folder)
    return maps


def _from_version_1(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A folder of format 1 held one map of two slot-affine forms, named after what they make."""
    name = config["mapper"]["name"] if re.fullmatch(MAP_NAME, config["mapper"]["name"]) else "map"
    forms = [{"form": config["forms"][kind], "kind": kind} for kind in KINDS]
    places = {kind: f"{name}/{at}" for at, kind in enumerate(KINDS)}
    renamed = {}
    for key, tensor in tensors.items():
        kind, _, part = key.partition(".")
        renamed[f"{places[kind]}.{part}" if kind in places else key] = tensor
    described = {"forms": forms, "mapper": config["mapper"], "evidence": config["evidence"]}
    return config | {"maps": {name: described}}, renamed


def _unpack_map(name: str, described: dict[str, Any], left: dict[str, Tensor]) -> BridgeMap:
    """Build one map, taking its tensors out of `left`."""
    if not re.fullmatch(MAP_NAME, name):
        raise ArtifactError(f"the bridge has a map called {name!r}, expected letters, digits and _ . = , + -.")
    forms: list[Form] = []
    for at, entry in enumerate(described["forms"]):
        prefix = f"{name}/{at}."
        parts = {key.removeprefix(prefix): left.pop(key) for key in sorted(left) if key.startswith(prefix)}
        place = f"form {at} of map {name}"
        forms.append(_build_form(place, at, dict(entry), unpack_weights(parts, place), forms))
    if not forms:
        raise ArtifactError(f"the bridge's map {name} has no forms; the bridge is damaged.")
    try:
        return BridgeMap(tuple(forms), described["mapper"], described["evidence"])
    except CacheError as error:
        raise ArtifactError(f"the bridge's map {name} is inconsistent: {error}") from error


def _build_form(place: str, at: int, entry: dict[str, Any], parts: dict[str, Tensor], before: list[Form]) -> Form:
    form = entry.pop("form")
    if form not in FORMS:
        raise ArtifactError(f"{place} is {form!r}, expected one of {', '.join(FORMS)}. Upgrade kvbridge.")
    holder = entry.pop("reduce", None)
    try:
        if form == SlotAffine.name:
            require_structure(entry, {"kind": str}, place)
            return SlotAffine(entry["kind"], **parts)
        wide = {"inputs": [str], "outputs": [str], "kv_heads": int, "head_dim": int}
        branch = form == ResidualBranch.name
        require_structure(entry, wide | ({"activation": str} if branch else {}), place)
        inputs, outputs = (tuple(map(_span, entry[side])) for side in ("inputs", "outputs"))
        heads = {"kv_heads": entry["kv_heads"], "head_dim": entry["head_dim"]}
        if branch:
            return ResidualBranch(inputs, outputs, entry["activation"], **parts, **heads)
        if holder is not None and holder != at:
            shared = before[holder] if type(holder) is int and 0 <= holder < at else None
            if not isinstance(shared, SharedBasis) or shared.reduce is None or "reduce" in parts:
                raise ArtifactError(f"{place} shares the basis of form {holder!r}, which has none; it is damaged.")
            parts = parts | {"reduce": shared.reduce}
        reduce = parts.pop("reduce", None)
        if (reduce is None) != (holder is None):
            raise ArtifactError(f"{place} {'lacks' if reduce is None else 'has'} a basis, and {CONFIG} says otherwise.")
        return SharedBasis(inputs, outputs, reduce, **parts, **heads)
    except (CacheError, UsageError, TypeError, KeyError) as error:
        raise ArtifactError(f"{place} is inconsistent: {error}") from error


def _span(text: str) -> Span:
    # Without brackets there is no number of layers to fill in.
    return Span.parse(text if "[" in text else f"{text}[:]", 1 << 20)
