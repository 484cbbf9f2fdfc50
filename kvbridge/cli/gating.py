"""Calibrating the gate of a bridge's map under a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbridge.bridge import Bridge
from kvbridge.cli.planning import chosen, provisional, require_one_process
from kvbridge.cli.settings import Settings
from kvbridge.errors import UsageError
from kvbridge.pair import ModelPair
from kvbridge.processes import alone


def calibrate_gate_command(config: DictConfig) -> None:
    """Hand off documents, choose limits that keep the promise, and store them in the bridge."""
    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("calibrate-gate")
    settings.gate.require_possible()
    location = settings.bridge_location()
    folder = Path(location).expanduser()
    with alone(settings.out, main=True):
        bridge = Bridge.from_pretrained(location)
        if not folder.is_dir():
            raise UsageError(
                f"bridge={location} is no folder, and gates are stored in the bridge; download it and give its folder."
            )
        pair = settings.pair.load()
        bridge.require_pair(pair)
        gate = _calibrated(settings, pair, bridge)
        others = [each for each in bridge.gates if (each["map"], each["plan"]) != (gate["map"], gate["plan"])]
        replace(bridge, gates=[*others, gate]).save_points(folder)
        (settings.out / "gate.partial.jsonl").unlink(missing_ok=True)
    print(
        f"{folder}: map {gate['map']} applies a hand-off up to novelty {gate['novelty']:.3f} and tail discrepancy "
        f"{gate['tail']:.3f}; {gate['applied']} of {gate['documents']} tested hand-offs pass, {gate['bad']} of them "
        f"bad (KL above {gate['kl_limit']:g}), which bounds the share of bad ones by {gate['share']:g} at confidence "
        f"{gate['confidence']:g}"
    )


def _calibrated(settings: Settings, pair: ModelPair, bridge: Bridge) -> dict[str, Any]:
    """The gate as a bridge stores it."""
    from kvbridge.eval.gating import calibrate_gate, score_documents
    from kvbridge.eval.suite import Task

    choice = chosen(settings, pair, bridge) if settings.auto else None
    name = choice.map if choice else bridge.map_name(settings.map)
    task = Task.of(pair, choice.plan if choice else provisional(settings), settings.eval, settings.out)
    documents = task.first_documents(settings.gate.documents, "gate.documents")
    limits = calibrate_gate(score_documents(task, bridge, name, documents), settings.gate)
    plan = documents[0].plan(task.plan)
    return {"map": name, "plan": plan.to_dict(), **limits, "text": task.corpus.fingerprint}
