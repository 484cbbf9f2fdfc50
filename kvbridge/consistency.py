"""Does a loaded map fit the geometry that its own bridge names?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvbridge.artifact import CONFIG
from kvbridge.errors import ArtifactError
from kvbridge.forms import KINDS, Form, SlotAffine
from kvbridge.geometry import KVGeometry
from kvbridge.variables import Span


def check_map(name: str, forms: tuple[Form, ...], evidence: dict[str, Any], pair: dict[str, Any], folder: Path) -> None:
    """Refuse a map whose forms or evidence are of other shapes than the pair's description says.

    Args:
        name: of the map.
        forms: of the map.
        evidence: of its fit.
        pair: description of both models, of the right structure.
        folder: for messages.

    Raises:
        ArtifactError: naming the form.
    """
    source, target = (_geometry(pair[role]["geometry"]) for role in ("source", "target"))
    for at, form in enumerate(forms):
        _check_geometry(f"{folder}: form {at} of map {name}", form, source, target)
    _check_evidence(name, evidence, target, folder)


def _geometry(described: dict[str, Any]) -> KVGeometry:
    return KVGeometry(**{each.name: described[each.name] for each in fields(KVGeometry)})


def _check_geometry(place: str, form: Form, source: KVGeometry, target: KVGeometry) -> None:
    if isinstance(form, SlotAffine):
        slots = len(KINDS) * source.layers * source.kv_heads
        expected = (target.layers, target.kv_heads, source.head_dim, target.head_dim)
        found = (*form.slots.shape[:2], *form.weight.shape[3:])
        read = int(form.slots.max()) + 1
        if found != expected or read > slots:
            raise ArtifactError(
                f"{place} makes {form.kind}, has (L_t, H_t, D_s, D_t) = {found} and reads {read} slots; "
                f"its own geometry says {expected} and {slots}. The bridge is damaged."
            )
        return
    sides: dict[str, KVGeometry] = {"source": source, "target": target}
    read = sum(span.width(sides[span.role]) for span in form.inputs)
    made = sum(span.width(target) for span in form.outputs)
    spans: Iterable[Span] = (*form.inputs, *form.outputs)
    beyond = [str(span) for span in spans if span.stop > sides[span.role].layers]
    heads = (form.kv_heads, form.head_dim) == (target.kv_heads, target.head_dim)
    if beyond or not heads or (read, made) != (form.input_width, form.expand.shape[1]):
        raise ArtifactError(
            f"{place} reads {form.input_width} and makes {form.expand.shape[1]} numbers in {form.kv_heads} KV heads × "
            f"{form.head_dim}; its own geometry says {read} and {made} in {target.kv_heads} × {target.head_dim}"
            f"{', and has no ' + beyond[0] if beyond else ''}. The bridge is damaged."
        )


def _check_evidence(name: str, evidence: dict[str, Any], target: KVGeometry, folder: Path) -> None:
    """R² has one row per target layer, empty where the map makes no such layer, and selected layers likewise."""
    grids, chosen = (evidence.get(part, {}) for part in ("r2", "selected_layers"))
    fits = {*grids, *chosen} <= {*KINDS} and all(
        len(rows) == target.layers for rows in (*grids.values(), *chosen.values())
    )
    if not (fits and all(len(row) in (0, target.kv_heads) for grid in grids.values() for row in grid)):
        raise ArtifactError(
            f"{folder / CONFIG}: r2 and selected_layers of map {name} are not those of {target.layers} layers of "
            f"{target.kv_heads} heads; the bridge is damaged."
        )
    per_feature = evidence.get("rows_per_feature")
    if not isinstance(per_feature, (float, type(None))):
        raise ArtifactError(f"{folder / CONFIG}: rows_per_feature is {per_feature!r}, expected a number.")
