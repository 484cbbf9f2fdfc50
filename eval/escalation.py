"""At which doubt should the target take over? Both answers to every task, and what each threshold would give.

tasks    [ even: the threshold is chosen here | odd: what it gives is measured here ]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.cascade import Above, Cascade, Progress, Result, SamplingParams
from kvbridge.cascade.policy_file import measure_named
from kvbridge.cascade.prompts import read_prompt
from kvbridge.cascade.scores import SCORES, Score
from kvbridge.errors import UsageError
from kvbridge.eval.answer_tasks import AnswerTask, embedded_tasks, read_tasks
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.statistics import mean_interval, resample
from kvbridge.fingerprint import digest
from kvbridge.flops import ModelCost, handoff_flops
from kvbridge.pair import EMBEDDED, ModelPair

# Tasks, half of which choose a threshold and half of which check it.
FEWEST = 4


@dataclass
class EscalationConfig:
    """Where a threshold of doubt is sought, and for what.

    Attributes:
        tasks: a file of JSON lines with `prompt` and `answer`, or `towns`, `recall` or `passkey` of the embedded pair.
        count: how many tasks.
        measure: of doubt: `first_token_entropy`, `first_token_margin` or `mean_surprise`.
        rate: share of prompts that the target is to answer, at most.
        accuracy: share of right answers to reach, with as few answers of the target as possible.
        resamples: of tasks, for intervals.
        seed: of generated tasks and of resampling.
    """

    tasks: str = "towns"
    count: int = 200
    measure: str = "first_token_entropy"
    rate: float | None = None
    accuracy: float | None = None
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.measure not in SCORES:
            raise UsageError(f"escalation.measure={self.measure}: expected one of {', '.join(SCORES)}.")
        if self.count < FEWEST or self.resamples < 1 or self.seed < 0:
            raise UsageError(
                f"escalation.count={self.count}, resamples={self.resamples}, seed={self.seed}: expected at least "
                f"{FEWEST} tasks, 1 resample and a seed of 0."
            )
        for name in ("rate", "accuracy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"escalation.{name}={value}: give a share from 0 to 1.")

    def open(self, pair: ModelPair) -> list[AnswerTask]:
        """The tasks.

        Raises:
            UsageError: there are no such tasks, fewer than 4, or neither rate nor accuracy is asked for, or both are.
        """
        if (self.rate is None) == (self.accuracy is None):
            raise UsageError("give escalation.rate=… or escalation.accuracy=…, one of the two.")
        file = Path(self.tasks).expanduser()
        is_embedded = pair.describe()["source"]["name"].startswith(EMBEDDED)
        if file.is_file() or not is_embedded:
            tasks = read_tasks(file)[: self.count]
        else:
            tasks = embedded_tasks(self.tasks, self.count, seed=self.seed)
        if len(tasks) < FEWEST:
            raise UsageError(f"escalation.tasks={self.tasks} has {len(tasks)} tasks; give {FEWEST} or more.")
        return tasks


def target_flops(cascade: Cascade, result: Result) -> int:
    """Operations of the target for one answer: its reading of the prompt or the hand-off, and its own tokens."""
    if result.handoff is None:
        return 0
    cost, prompt = ModelCost.of(cascade.pair.target), result.prompt_tokens + result.kept
    read = cost.prefill(prompt)
    if result.outcome == "applied":
        read = sum(handoff_flops(cost, cascade.plan, prompt, cascade.mapping).values())
    # The last token is written and not read.
    written = len(result.tokens) - result.kept - 1
    return read + cost.read(0, written, prompt, cost.layers) + written * cost.head


class Doubt:
    """A policy that never escalates and remembers what a measure says of the last answer."""

    def __init__(self, measure: Score) -> None:
        self.measure, self.said = measure, math.nan

    def decide(self, progress: Progress) -> bool | None:
        doubt = self.measure.score(progress)
        self.said = math.nan if doubt is None else doubt
        return None if doubt is None else False


def measure_tasks(
    arms: dict[str, Cascade], doubt: Doubt, tasks: list[AnswerTask], params: SamplingParams, partial: Path
) -> list[dict[str, Any]]:
    """What every arm answers to every task; resumable.

    Args:
        arms: by name; `source` answers under `doubt`, and comes first.
        doubt: policy of that arm.
        tasks: that are asked.
        params: of every answer.
        partial: file that holds finished tasks while others are asked.

    Returns:
        One record per task: the `doubt`, and per arm whether it is `right`, its `outcome`, the target's `flops`, and
        seconds to the `first_token`, of which `source` until the source had read the prompt. Of a task that the source
        gave no answer to, only why, as `left_out`.

    Raises:
        UsageError: a task is longer than the source was made for, or `partial` belongs to other settings.
    """
    sampling = asdict(params)
    for number, task in enumerate(tasks, 1):
        _require_length(arms["source"].pair, number, task, params.max_new_tokens)

    def make(done: int) -> Iterator[dict[str, Any]]:
        for task in tasks[done:]:
            answers = {arm: each.generate(task.prompt, task=task.task, **sampling) for arm, each in arms.items()}
            if answers["source"].route != "source":
                yield {"left_out": _why_unanswered(answers["source"])}
                continue
            yield {"doubt": doubt.said} | {arm: _record(arms[arm], task, answers[arm]) for arm in arms}

    identity = {
        "arms": {arm: each.describe() for arm, each in arms.items()},
        "measure": repr(doubt.measure),
        "sampling": {**sampling, "stop": list(params.stop)},
        "tasks": digest([[task.prompt, task.answer] for task in tasks]),
    }
    return PartialResults(partial, identity).finish(len(tasks), make, unit="task", desc="tasks")


def _require_length(pair: ModelPair, number: int, task: AnswerTask, new: int) -> None:
    length, longest = len(read_prompt(pair.tokenizer, task.prompt).tokens), pair.source.geometry.max_positions
    if length + new > longest:
        raise UsageError(
            f"task {number} of escalation.tasks has {length} tokens and cascade.max_new_tokens={new}; the source was "
            f"made for {longest} together. Leave the task out, or ask for fewer tokens."
        )


def _why_unanswered(answer: Result) -> str:
    reason = answer.handoff.reason if answer.handoff is not None else ""
    return reason.rstrip(".") or "its policy hands over"


def answered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of `measure_tasks` that hold answers, which can be compared.

    Raises:
        UsageError: they are fewer than 4.
    """
    found = [record for record in records if "left_out" not in record]
    if len(found) < FEWEST:
        why = next((f" ({record['left_out']})" for record in records if "left_out" in record), "")
        raise UsageError(
            f"the source answers {len(found)} of {len(records)} tasks{why}; give escalation.tasks of which it answers "
            f"{FEWEST} or more."
        )
    return found


def _record(cascade: Cascade, task: AnswerTask, result: Result) -> dict[str, Any]:
    return {
        "right": task.right(result.text),
        "outcome": result.outcome,
        "flops": target_flops(cascade, result),
        "source": result.seconds["source"],
        "first_token": result.seconds["first_token"],
    }


def at_threshold(records: list[dict[str, Any]], threshold: float, arm: str = "target") -> dict[str, np.ndarray]:
    """What a threshold gives, one number per task: `escalated`, `right`, `flops` and `first_token`.

    Args:
        records: from `answered`.
        threshold: of doubt, above which `arm` answers, and the source elsewhere.
        arm: name of one of the arms.
    """
    escalated = np.array([record["doubt"] > threshold for record in records])
    taken = [record[arm if up else "source"] for record, up in zip(records, escalated, strict=True)]
    columns = {name: np.array([float(each[name]) for each in taken]) for name in ("right", "flops", "first_token")}
    return {"escalated": escalated.astype(float)} | columns


def curve(records: list[dict[str, Any]], arm: str = "target") -> list[dict[str, float]]:
    """Means at every threshold that makes a difference, from no answer of the target to all."""
    doubts = sorted({record["doubt"] for record in records}, reverse=True)
    thresholds = [*doubts, float(np.nextafter(doubts[-1], -np.inf))]
    return [
        {"threshold": at} | {name: float(column.mean()) for name, column in at_threshold(records, at, arm).items()}
        for at in thresholds
    ]


def choose_threshold(records: list[dict[str, Any]], config: EscalationConfig, arm: str = "target") -> float:
    """The threshold above which `arm` answers, so that what is asked for is reached on these records.

    Raises:
        UsageError: no threshold reaches the accuracy.
    """
    points = curve(records, arm)
    if config.rate is not None:
        return max((p for p in points if p["escalated"] <= config.rate), key=lambda p: p["escalated"])["threshold"]
    wanted = config.accuracy or 0.0
    good = [point for point in points if point["right"] >= wanted]
    if not good:
        best = max(point["right"] for point in points)
        raise UsageError(f"escalation.accuracy={wanted} is not reached; the best threshold gives {best:.3f}.")
    return good[0]["threshold"]


def calibrate_policy(
    records: list[dict[str, Any]], config: EscalationConfig, tokens: int
) -> tuple[Above, dict[str, Any]]:
    """A threshold chosen on every other task, and what it gives on the rest.

    Args:
        records: from `measure_tasks`.
        config: what is asked for.
        tokens: that are drafted for a measure that looks at a draft.

    Returns:
        The policy, and its evidence: `chosen_on` so many tasks, `checked` with means and intervals (share of the
        target's answers, accuracy, target FLOPs), the same for the source and the target alone, the `curve` of
        all tasks, and of those that were `left_out` number and reason.

    Raises:
        UsageError: no threshold reaches the accuracy, a task has no doubt, or fewer than 4 were answered.
    """
    left_out = [
        {"task": at, "reason": record["left_out"]} for at, record in enumerate(records, 1) if "left_out" in record
    ]
    records = answered(records)
    if any(not math.isfinite(record["doubt"]) for record in records):
        raise UsageError(f"escalation.measure={config.measure} says nothing of some task; take another measure.")
    chosen, checked = records[::2], records[1::2]
    threshold = choose_threshold(chosen, config)
    draws = resample(len(checked), config.resamples, config.seed)

    def summary(at: float) -> dict[str, Any]:
        columns = at_threshold(checked, at)
        return {name: mean_interval(columns[name].tolist(), draws) for name in ("escalated", "right", "flops")}

    lowest = min(record["doubt"] for record in records)
    evidence = {
        "asked": {"rate": config.rate, "accuracy": config.accuracy, "tasks": config.tasks},
        "chosen_on": len(chosen),
        "checked": summary(threshold),
        "source_alone": summary(max(record["doubt"] for record in records)),
        "target_always": summary(float(np.nextafter(lowest, -np.inf))),
        "curve": curve(records),
        "left_out": left_out,
    }
    return Above(measure_named(config.measure, tokens), threshold), evidence
