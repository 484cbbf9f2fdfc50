"""Ask every arm every probe; resumable. Accuracies with intervals over probes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from kvbridge.eval.arms import Arm, Context, Reading, read_context, read_prompt, standard_arms, strip_prompt
from kvbridge.eval.config import EvalConfig
from kvbridge.eval.documents import Document
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.probes import Probe
from kvbridge.eval.statistics import mean_interval, resample
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

ARMS = ("native", "mapped", "source", "tail_only", "other_document", "no_context")
SCORES = ("choice", "generated")
COMPARED = (("mapped", "source"), ("mapped", "tail_only"))

Record = dict[str, Any]


def _contexts(pair: ModelPair, probes: list[Probe]) -> Iterator[tuple[Probe, Context]]:
    """What the arms share about each probe; the filler of a length is read once."""
    for _, group in groupby(probes, key=lambda probe: probe.length):
        states = None
        for probe in group:
            if states is None:
                states = strip_prompt(read_prompt(pair.source, probe.other))
            document = Document(probe.task, probe.prompt, probe.choices[probe.right][None])
            yield probe, read_context(pair, document, probe.other, states)


def _readings(arms: dict[str, Arm], context: Context) -> Iterator[tuple[str, Reading]]:
    yield "native", context.native
    for name in ARMS[1:]:
        yield name, arms[name](context)


def score_probe(pair: ModelPair, probe: Probe, reading: Reading, vocabulary: int) -> dict[str, int]:
    """1 where the answer is the likeliest of the choices, and where greedy decoding says it; else 0."""
    likelihoods = [likelihood for likelihood, _ in reading.score(probe.choices)]
    tokens, _ = reading.generate(len(probe.choices[probe.right]), vocabulary)
    said = str(pair.tokenizer.decode(tokens[0].tolist())).strip()
    return {
        "choice": int(likelihoods.index(max(likelihoods)) == probe.right),
        "generated": int(said == probe.question.answer),
    }


def ask_probes(
    pair: ModelPair,
    mapping: FormMap,
    plan: HandoffPlan,
    probes: list[Probe],
    *,
    partial: Path,
    identity: dict[str, Any],
) -> list[Record]:
    """Ask every arm every probe.

    Args:
        pair: source and target.
        mapping: the map under test.
        plan: its hand-off plan; each probe's tail covers at least its question.
        probes: from `build_probes`.
        partial: file that holds finished probes while this runs.
        identity: JSON values that decide whether `partial` may be resumed.

    Returns:
        One record per probe: task, length, depth, and arm → `choice` and `generated`, 0 or 1 each.

    Raises:
        UsageError: `partial` belongs to other settings.
    """

    @functools.cache
    def arms_of(plan: HandoffPlan, length: int) -> dict[str, Arm]:
        return standard_arms(pair, mapping, plan, length)

    def make(done: int) -> Iterator[Record]:
        for probe, context in _contexts(pair, probes[done:]):
            vocabulary = min(context.native.logits.shape[-1], context.source.logits.shape[-1])
            record: Record = {"task": probe.task, "length": probe.length, "depth": probe.depth}
            record["arms"] = {
                name: score_probe(pair, probe, reading, vocabulary)
                for name, reading in _readings(arms_of(probe.plan(plan), probe.length), context)
            }
            yield record

    return PartialResults(partial, identity).finish(len(probes), make, unit="probe", desc="probe")


def _accuracies(records: list[Record], config: EvalConfig) -> dict[str, Any]:
    """Arm → score → mean, interval, n."""
    draws = resample(len(records), config.resamples, config.seed)

    def accuracy(arm: str, score: str) -> dict[str, Any]:
        return mean_interval([float(record["arms"][arm][score]) for record in records], draws)

    return {arm: {score: accuracy(arm, score) for score in SCORES} for arm in ARMS}


def _differences(records: list[Record], config: EvalConfig) -> list[dict[str, Any]]:
    """Paired differences of accuracy over all probes."""
    draws = resample(len(records), config.resamples, config.seed)

    def difference(arm: str, other: str, score: str) -> dict[str, Any]:
        won = [float(record["arms"][arm][score] - record["arms"][other][score]) for record in records]
        return mean_interval(won, draws)

    return [
        {"arm": arm, "against": other} | {score: difference(arm, other, score) for score in SCORES}
        for arm, other in COMPARED
    ]


def _grouped(records: list[Record], config: EvalConfig, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One entry per combination of the named values, in the order in which they occur."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return [
        dict(zip(names, values, strict=True)) | {"arms": _accuracies(group, config)} for values, group in groups.items()
    ]


def summarise_probes(records: list[Record], config: EvalConfig) -> dict[str, Any]:
    """The `probes` entry of results: settings, records, and accuracies pooled in every way that a report shows.

    `cells` has an entry per task, length and depth, `places` per length and depth, `tasks` and `lengths` one each;
    `arms` pools all probes and `differences` compares them pair by pair.
    """
    return {
        "settings": asdict(config.probes),
        "records": records,
        "arms": _accuracies(records, config),
        "differences": _differences(records, config),
        "tasks": _grouped(records, config, ("task",)),
        "lengths": _grouped(records, config, ("length",)),
        "places": _grouped(records, config, ("length", "depth")),
        "cells": _grouped(records, config, ("task", "length", "depth")),
    }
