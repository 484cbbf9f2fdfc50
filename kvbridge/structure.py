"""What the config of a bridge must hold for the bridge to be used, described and saved again."""

from __future__ import annotations

from typing import Any

from kvbridge.errors import ArtifactError, KVBridgeError
from kvbridge.forms import KINDS
from kvbridge.plan import HandoffPlan

# A name with ? may be missing, * stands for every name, and a tuple for any one of its entries.
_NUMBER = (float, int)
_NONE = type(None)
_INTERVAL = {"mean": _NUMBER, "ci95": [_NUMBER], "n": int}
_MAYBE = (*_NUMBER, _NONE, {"mean": (*_NUMBER, _NONE), "ci95?": ([_NUMBER], _NONE), "n?": int})
_GEOMETRY = {
    "model_type": str,
    "layers": int,
    "kv_heads": int,
    "head_dim": int,
    "query_heads": int,
    "hidden_size": int,
    "max_positions": int,
    "rope": {},
    "rope_kind": str,
    "key_norm": str,
}
_MODEL = {"name": str, "geometry": _GEOMETRY}
_EVIDENCE = {
    "r2?": {f"{kind}?": [[float]] for kind in KINDS},
    "selected_layers?": {f"{kind}?": [[int]] for kind in KINDS},
    "penalties?": {"*": {"*": _NUMBER}},
}
_FIT = {"mapper": {"name": str}, "evidence": _EVIDENCE}
_PAIR = {
    "identity": {"source": str, "target": str},
    "pair": {"source": _MODEL, "target": _MODEL},
    "calibration": {"rows?": int},
}
# A point is what one map under one plan was measured to cost and to reach, on documents known by their fingerprint.
POINT: dict[str, Any] = {
    "map": str,
    "plan": {
        "sinks": int,
        "native_head": (int, _NONE),
        "native_tail": int,
        "tail_recompute?": int,
        "native_attended?": _NUMBER,
        "scouts?": int,
    },
    "share": _NUMBER,
    "kl": _INTERVAL,
    "kl_first?": _MAYBE,
    "source_kl?": _MAYBE,
    "gap_recovered?": _MAYBE,
    "documents": int,
    "text": str,
}
# From which scores on hand-offs of one map and plan are refused, and on what these limits were calibrated.
GATE: dict[str, Any] = {
    "map": str,
    "plan": POINT["plan"],
    "novelty": _NUMBER,
    "tail": _NUMBER,
    "kl_limit": _NUMBER,
    "share": _NUMBER,
    "confidence": _NUMBER,
    "documents": int,
    "applied": int,
    "bad": int,
    "text": str,
}
STRUCTURE: dict[str, Any] = _PAIR | {
    "maps": {"*": {"forms": [{"form": str}], **_FIT}},
    "points": [POINT],
    "novelty?": ({"first_positions": int}, _NONE),
    "gates?": [GATE],
}
# Before a bridge could hold several maps.
STRUCTURE_1: dict[str, Any] = _PAIR | {"forms": dict.fromkeys(KINDS, str)} | _FIT


def _kind(structure: Any) -> type:
    return type(structure) if isinstance(structure, (dict, list)) else structure


def require_structure(value: Any, structure: Any, place: str) -> None:
    """Refuse a JSON value that lacks a name or has another type somewhere.

    Raises:
        ArtifactError: naming the place.
    """
    allowed = structure if isinstance(structure, tuple) else (structure,)
    fitting = [each for each in allowed if type(value) is _kind(each)]
    if not fitting:
        raise ArtifactError(
            f"{place} is of type {type(value).__name__}, expected "
            f"{' or '.join(_kind(each).__name__ for each in allowed)}; the bridge is damaged."
        )
    structure = fitting[0]
    if isinstance(structure, list):
        for inner in value:
            require_structure(inner, structure[0], place)
    elif isinstance(structure, dict):
        named = dict.fromkeys(value, structure["*"]) if "*" in structure else structure
        for name, inner in named.items():
            key = name.removesuffix("?")
            if key in value:
                require_structure(value[key], inner, f"{place}.{key}")
            elif key == name:
                raise ArtifactError(f"{place} lacks {key!r}; the bridge is damaged.")


def require_measured(points: Any, gates: Any, maps: list[str], layers: int, place: str) -> None:
    """Refuse measured points and gates that name no map of the bridge, a plan that the target cannot have, or no limit.

    Args:
        points: as JSON values.
        gates: as JSON values.
        maps: names of the bridge's maps.
        layers: of the target.
        place: for messages.

    Raises:
        ArtifactError: naming the point or gate.
    """
    for what, entries, structure in (("point", points, POINT), ("gate", gates, GATE)):
        require_structure(entries, [structure], place)
        for at, entry in enumerate(entries):
            which = f"{place}: {what} {at}"
            if entry["map"] not in maps:
                raise ArtifactError(f"{which} is of map {entry['map']!r}; the bridge has {', '.join(maps)}.")
            try:
                HandoffPlan(**entry["plan"]).mapped_layers(layers)
            except (KVBridgeError, TypeError) as error:
                raise ArtifactError(f"{which} has no plan for this target: {error}") from error
            if structure is GATE and not (entry["novelty"] > 0 and entry["tail"] > 0):
                raise ArtifactError(f"{which} has a limit of 0 or less, expected positive ones.")
