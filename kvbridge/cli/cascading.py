"""Commands that let a pair answer together."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbridge.bridge import Bridge
from kvbridge.cli.planning import chosen, require_one_process
from kvbridge.cli.settings import Settings
from kvbridge.errors import UsageError
from kvbridge.fingerprint import digest
from kvbridge.processes import alone


def _prompts(path: str | None) -> Iterator[tuple[Any, str | None]]:
    """What is to be answered, and what it is said to be.

    Raises:
        UsageError: there is no file, or a line is no prompt.
    """
    file = Path(path or "").expanduser()
    if path is None or not file.is_file():
        raise UsageError(f"cascade.prompts={path}: give a file with one prompt a line, or JSON lines with prompt.")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text; give a file with one prompt a line.") from error
    if not any(map(str.strip, lines)):
        raise UsageError(f"{file} holds no prompt; give one a line.")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            yield line, None
            continue
        try:
            found = json.loads(line)
            wanted = "messages" if "messages" in found else "prompt"
            given, task = found[wanted], found.get("task")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{file}, line {number}: no JSON object with prompt or messages.") from error
        if not isinstance(given, list if wanted == "messages" else str):
            kind = "list of messages" if wanted == "messages" else "text"
            raise UsageError(f"{file}, line {number}: {wanted} is a {type(given).__name__}; give a {kind}.")
        yield given, task


def cascade_command(config: DictConfig) -> None:
    """Answer prompts: one JSON line each on standard output, and a summary on standard error."""
    from kvbridge.cascade import Cascade, StateStore
    from kvbridge.cascade.policy_file import policy_named

    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("cascade")
    asked = settings.cascade
    prompts = list(_prompts(asked.prompts))
    pair = settings.pair.load()
    policy = policy_named(asked.policy, asked.threshold, asked.tokens, pair)
    bridge = Bridge.from_pretrained(settings.bridge_location(), pair=pair)
    # Standard output is for answers alone.
    with contextlib.redirect_stdout(sys.stderr):
        choice = chosen(settings, pair, bridge)
    states = StateStore(asked.store_bytes) if asked.store_bytes else None
    gate = None if asked.gate == "off" else asked.gate
    cascade = Cascade(
        pair, bridge, plan=choice.plan, map=choice.map, policy=policy, draft=asked.draft, gate=gate, states=states
    )
    mode = asked.mode()
    options = asdict(asked.params()) | {"exact": mode.exact, "speculate": mode.speculate, "schedule": mode.schedule}
    for at, (prompt, task) in enumerate(prompts):
        result = cascade.generate(prompt, task=task, **options | {"seed": asked.seed + at})
        print(json.dumps({"prompt": at} | result.to_dict(), ensure_ascii=False), flush=True)
    kept = {"states": states.counts()} if states is not None else {}
    summary = cascade.metrics.to_dict() | kept | {"cascade": cascade.describe()}
    print(json.dumps(summary, ensure_ascii=False), file=sys.stderr)


def calibrate_policy_command(config: DictConfig) -> None:
    """Find the threshold of a measure of doubt; writes OUT/policy.json, escalation.md and escalation.svg."""
    settings = Settings.of(config)
    settings.refuse("moments")
    require_one_process("calibrate-policy")
    with alone(settings.out, main=True):
        _calibrate_policy(settings)


def _calibrate_policy(settings: Settings) -> None:
    from kvbridge.cascade import Cascade
    from kvbridge.cascade.policy_file import measure_named, save_policy
    from kvbridge.eval.escalation import Doubt, calibrate_policy, measure_tasks
    from kvbridge.eval.escalation_figures import escalation_figure, escalation_table

    pair, asked = settings.pair.load(), settings.escalation
    tasks = asked.open(pair)
    bridge = Bridge.from_pretrained(settings.bridge_location(), pair=pair)
    choice = chosen(settings, pair, bridge)
    doubt = Doubt(measure_named(asked.measure, settings.cascade.tokens))
    gate = None if settings.cascade.gate == "off" else settings.cascade.gate
    shared: dict[str, Any] = {"plan": choice.plan, "map": choice.map, "gate": gate}
    arms = {"source": Cascade(pair, bridge, policy=doubt, **shared), "target": Cascade(pair, bridge, **shared)}
    partial = settings.out / f"escalation.{digest(repr(doubt.measure))}.jsonl"
    records = measure_tasks(arms, doubt, tasks, settings.cascade.params(), partial)
    policy, evidence = calibrate_policy(records, asked, settings.cascade.tokens)
    evidence |= {"bridge": bridge.fingerprint(), "map": choice.map, "plan": choice.plan.to_dict()}
    save_policy(settings.out / "policy.json", policy, pair.identity(), evidence)
    table = escalation_table(evidence)
    (settings.out / "escalation.md").write_text(table)
    (settings.out / "escalation.svg").write_text(escalation_figure(evidence))
    print(f"{table}\nthreshold {policy.threshold:.6g} of {asked.measure}: {settings.out / 'policy.json'}")
