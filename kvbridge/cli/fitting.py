"""Fitting a map, and several maps of one calibration in one bridge."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvbridge.artifact import CONFIG
from kvbridge.bridge import Bridge
from kvbridge.cli.mapper_schema import RESIDUAL
from kvbridge.cli.planning import provisional
from kvbridge.cli.settings import Settings
from kvbridge.errors import UsageError
from kvbridge.fingerprint import digest
from kvbridge.folding import fold_if_not_dearer
from kvbridge.forms import Form
from kvbridge.layout import BridgeMap
from kvbridge.pair import ModelPair, Pair, describe_pair, pair_identity
from kvbridge.processes import process_state


def fit_map(settings: Settings, pair: Pair, moments: Any) -> Bridge:
    """Fit the settings' map and store it in the bridge of `out`, beside the maps that are there.

    Only the training of a branch needs the two models; processes share it, and the first one writes.

    Returns:
        The bridge as it was stored, since that is what is scored.

    Raises:
        UsageError: the other maps are of another pair or calibration.
    """
    from kvbridge.calibration import fit_novelty

    folder, name = settings.out / "bridge", settings.map or settings.mapper.name
    former = Bridge.from_pretrained(folder) if (folder / CONFIG).is_file() else None
    if former is not None and former.maps.keys() <= {name}:
        former = None
    sides = pair.geometry("source"), pair.geometry("target")
    empty = Bridge(
        {}, pair_identity(pair), describe_pair(pair), _calibration(moments), novelty=fit_novelty(moments, *sides)
    )
    if former is not None:
        _require_same(former, empty, folder)
    fitted = settings.mapper.fit(moments, *sides)
    mapper = {"name": settings.mapper.name} | dataclasses.asdict(settings.mapper)
    forms: tuple[Form, ...] = fitted.forms
    if settings.residual.wanted:
        mapper[RESIDUAL] = dataclasses.asdict(settings.residual)
        forms = _with_branch(settings, pair, forms, moments)
    before = former and dataclasses.replace(former, novelty=former.novelty or empty.novelty)
    bridge = (before or empty).with_map(name, BridgeMap(forms, mapper, fitted.evidence()))
    state = process_state()
    # What was there before is read by now.
    _wait(settings)
    if state.is_main_process:
        bridge.save_pretrained(folder, dtype=settings.storage)
    _wait(settings)
    stored = Bridge.from_pretrained(folder, pair=pair)
    _wait(settings)
    measured = {each["map"] for each in (*stored.points, *stored.gates)}
    if former is None or _same_maps(former, stored, measured):
        return stored
    # Another storage has changed the numbers of maps that were measured.
    bare = dataclasses.replace(stored, points=[], gates=[])
    if state.is_main_process:
        bare.save_points(folder)
    return bare


def _wait(settings: Settings) -> None:
    """Until all processes are here, where all of them train; where none does, the others are gone."""
    if settings.residual.wanted:
        process_state().wait_for_everyone()


def _with_branch(settings: Settings, pair: Pair, forms: tuple[Form, ...], moments: Any) -> tuple[Form, ...]:
    """A fitted map with the branch that the settings ask for, folded into it where that costs nothing."""
    from kvbridge.mappers.residual import train_residual

    plan, folder = provisional(settings), settings.out / RESIDUAL
    trained = train_residual(ModelPair.of(pair), forms, moments, settings.calibration, settings.residual, folder, plan)
    if trained is None:
        print("residual: training found nothing that beats the map alone; no branch is added")
        return forms
    return fold_if_not_dearer(trained, pair.geometry("source"), pair.geometry("target"))


def _calibration(moments: Any) -> dict[str, Any]:
    """What a bridge says of the moments that its maps were fitted on."""
    identity = moments.info["identity"]
    return {
        "fingerprint": digest(identity),
        "rows": moments.sets["fit", "rest"].rows + moments.sets["fit", "first"].rows,
        "identity": identity,
        "seconds": moments.info.get("seconds"),
        "tokens_per_second": moments.info.get("tokens_per_second"),
        "peak_memory_bytes": moments.info.get("peak_memory_bytes"),
    }


def _require_same(former: Bridge, fitted: Bridge, folder: Path) -> None:
    """Refuse to add to the maps of another pair or calibration."""
    from kvbridge.calibration import differing_settings

    wanted, known = (each.calibration.get("identity", {}) for each in (fitted, former))
    differing = differing_settings(wanted, known)
    if former.identity != fitted.identity or differing:
        what = "pair" if former.identity != fitted.identity else f"calibration ({', '.join(differing)})"
        raise UsageError(
            f"{folder} has the maps {', '.join(sorted(former.maps))} of another {what}, and one bridge holds maps of "
            "one calibration; give another out=."
        )


def _same_maps(former: Bridge, stored: Bridge, names: set[str]) -> bool:
    """Whether two bridges have the same numbers in some of their maps."""
    one, other = (
        dataclasses.replace(each, maps={name: each.maps[name] for name in sorted(names)}) for each in (former, stored)
    )
    return one.fingerprint() == other.fingerprint()


def maps_in(folder: Path) -> list[str]:
    """Names of the maps of the bridge in a folder; none where there is no bridge."""
    return list(Bridge.from_pretrained(folder).maps) if (folder / CONFIG).is_file() else []
