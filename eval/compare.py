"""Two runs on the documents that both scored: paired differences, intervals, and what so many documents can tell.

Differences are B − A, per document where a metric is a mean over documents. The gap recovered is a ratio of means g, so
its spread is that of `((s − m) − g (s − n)) / mean(s − n)`, the influence of a document on it (delta method).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbridge.errors import UsageError
from kvbridge.eval.fidelity import METRIC_NAMES, METRICS
from kvbridge.eval.statistics import gap_interval, resample
from kvbridge.metrics import gap_recovered

# Power of the note on what could have been found, and the level of its two-sided test.
POWER, LEVEL = 0.80, 0.05
# Settings of an evaluation that decide which tokens are scored after which.
POSITIONS = ("prompt", "tokens", "rollout", "format", "join", "text_field")
# Below so many documents a percentile interval is too narrow to be trusted.
FEW = 20
HIGHER_IS_BETTER = ("gap_recovered", "top1", "acceptance")


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric in two runs.

    Attributes:
        metric: its name in `results.json`.
        a: mean of the first run over the shared documents; `None` where it cannot be said.
        b: mean of the second one.
        difference: b − a.
        ci95: its interval over resampled documents.
        detectable: smallest difference that so many documents would show with 80 % power.
        better: `A`, `B`, or `None` where they cannot be told apart.
        sentence: the finding in words.
    """

    metric: str
    a: float | None
    b: float | None
    difference: float | None
    ci95: tuple[float, float] | None
    detectable: float | None
    better: str | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, metric by metric.

    Attributes:
        a: name of the first run.
        b: name of the second one.
        documents: how many both scored.
        shares: the prefill FLOPs of both.
        differences: the headline metrics first.
        notes: what limits the comparison.
    """

    a: str
    b: str
    documents: int
    shares: tuple[float, float]
    differences: list[Difference]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def detectable_difference(spread: float, count: int) -> float:
    """Smallest difference found with 80 % power at the 5 % level: `(z₀.₉₇₅ + z₀.₈) s / √n`.

    Args:
        spread: standard deviation s of the paired differences.
        count: documents n.
    """
    normal = NormalDist()
    return (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(count)


def documents_needed(spread: float, difference: float) -> int:
    """How many documents would show a difference with 80 % power."""
    return math.ceil((detectable_difference(spread, 1) / abs(difference)) ** 2)


def _by_id(results: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Documents by id; of several with one id each is told apart by its order."""
    seen: Counter[str] = Counter()
    found = {}
    for document in results["documents"]:
        found[document["id"], seen[document["id"]]] = document
        seen[document["id"]] += 1
    return found


def _notes(a: tuple[str, dict[str, Any]], b: tuple[str, dict[str, Any]], shared: int) -> list[str]:
    (_, first), (_, second) = a, b
    notes = []
    for name, results in (a, b):
        if shared < len(results["documents"]):
            notes.append(f"Only {shared} of the {len(results['documents'])} documents of {name} are in both runs.")
    if first["pair"]["target"]["fingerprint"] != second["pair"]["target"]["fingerprint"]:
        notes.append("The large models differ, so KL is not to the same reference.")
    if first["run"].get("text") != second["run"].get("text"):
        notes.append("The evaluation texts differ: documents of one id may not be the same.")
    settings = [results["run"]["settings"]["eval"] for results in (first, second)]
    differing = [name for name in POSITIONS if settings[0].get(name) != settings[1].get(name)]
    if differing:
        notes.append(
            f"The runs differ in {', '.join(f'eval.{name}' for name in differing)}: other positions are scored."
        )
    if shared < FEW:
        notes.append(f"{shared} documents are few: intervals are likely too narrow below {FEW}.")
    return notes


def format_value(metric: str, value: float | None, signed: bool = False) -> str:
    """A metric as text."""
    if value is None:
        return "—"
    sign = "+" if signed else ""
    # These are shares; the others are in nats.
    if metric in HIGHER_IS_BETTER:
        return f"{100 * value:{sign}.1f} %"
    return f"{value + 0.0:{sign}.4f}"


@dataclass(frozen=True, slots=True)
class _Paired:
    """One metric on the shared documents: both means, the spread of the paired differences, resampled differences."""

    a: float
    b: float
    spread: float
    resampled: np.ndarray


def _sentence(metric: str, names: tuple[str, str], found: _Paired, count: int, better: str | None) -> str:
    difference, name = found.b - found.a, METRIC_NAMES[metric]
    size = format_value(metric, abs(difference))
    if better is not None:
        direction = "higher" if metric in HIGHER_IS_BETTER else "lower"
        return f"{names[better == 'B']} is better: its {name} is {direction} by {size}."
    if count == 1:
        return f"The {name} of the two cannot be told apart with one document."
    if found.spread == 0:
        return f"The {name} of the two is the same on every document."
    least = format_value(metric, detectable_difference(found.spread, count))
    seen = ""
    if difference:
        seen = f"; one of {size}, as seen, takes about {documents_needed(found.spread, difference):,} documents"
    return (
        f"The {name} of the two cannot be told apart: {count} documents find a difference of {least} or more with "
        f"80 % power{seen}."
    )


def _judge(metric: str, names: tuple[str, str], found: _Paired, count: int) -> Difference:
    low, high = (float(end) for end in np.percentile(found.resampled, (2.5, 97.5)))
    difference, better = found.b - found.a, None
    if count > 1 and (low > 0 or high < 0):
        better = "B" if (difference > 0) == (metric in HIGHER_IS_BETTER) else "A"
    detectable = detectable_difference(found.spread, count) if count > 1 else None
    sentence = _sentence(metric, names, found, count, better)
    return Difference(metric, found.a, found.b, difference, (low, high), detectable, better, sentence)


def _spread(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _mean(metric: str, sides: list[list[dict[str, Any]]], draws: np.ndarray) -> _Paired:
    a, b = (np.asarray([document["mapped"][metric] for document in side]) for side in sides)
    return _Paired(float(a.mean()), float(b.mean()), _spread(b - a), (b - a)[draws].mean(axis=1))


def _gap(sides: list[list[dict[str, Any]]], draws: np.ndarray) -> _Paired | str:
    """The gap recovered of both, or why it cannot be had."""
    means, influences, resampled = [], [], []
    for side in sides:
        s, m, n = (np.asarray([document[name]["nll"] for document in side]) for name in ("source", "mapped", "native"))
        found = gap_interval(list(s), list(m), list(n), draws)
        if found["mean"] is None:
            return str(found["reason"])
        means.append(found["mean"])
        influences.append(((s - m) - found["mean"] * (s - n)) / (s - n).mean())
        resampled.append(gap_recovered(*(values[draws].mean(axis=1) for values in (s, m, n))))
    return _Paired(means[0], means[1], _spread(influences[1] - influences[0]), resampled[1] - resampled[0])


def compare_runs(a: tuple[str, dict[str, Any]], b: tuple[str, dict[str, Any]]) -> Comparison:
    """Compare the mapped arms of two runs on the documents that both scored, matched by id.

    Documents are resampled as often as the run that did so more often.

    Args:
        a: name and results of the first run.
        b: name and results of the second one.

    Raises:
        UsageError: they share no document.
    """
    documents = [_by_id(results) for _, results in (a, b)]
    shared = [key for key in documents[0] if key in documents[1]]
    if not shared:
        raise UsageError(f"{a[0]} and {b[0]} scored no document in common; evaluate both on one eval.corpus.")
    count, names = len(shared), (a[0], b[0])
    draws = resample(count, max(results["run"]["settings"]["eval"]["resamples"] for _, results in (a, b)), 0)
    sides = [[side[key] for key in shared] for side in documents]
    gap = _gap(sides, draws)
    if isinstance(gap, str):
        unknown = f"The gap recovered cannot be compared: {gap}."
        differences = [Difference("gap_recovered", None, None, None, None, None, None, unknown)]
    else:
        differences = [_judge("gap_recovered", names, gap, count)]
    differences += [_judge(metric, names, _mean(metric, sides, draws), count) for metric in METRICS]
    shares = [results["cost"]["target_prefill_flops_share"] for _, results in (a, b)]
    return Comparison(*names, count, (shares[0], shares[1]), differences, _notes(a, b, count))


def print_comparison(comparison: Comparison) -> None:
    """Print the table, the findings in words, and what limits them."""
    table = Table("metric", "A", "B", "B − A", "95 % interval", "found with 80 % power")
    for found in comparison.differences:
        interval = " … ".join(format_value(found.metric, end, signed=True) for end in found.ci95 or ())
        values = [format_value(found.metric, value) for value in (found.a, found.b)]
        difference = format_value(found.metric, found.difference, signed=True)
        table.add_row(
            METRIC_NAMES[found.metric],
            *values,
            difference,
            interval or "—",
            format_value(found.metric, found.detectable),
        )
    console = Console(width=110)
    # Names of folders may hold what rich would read as markup.
    for name, run, share in zip("AB", (comparison.a, comparison.b), comparison.shares, strict=True):
        console.print(Text(f"{name}  {run}  ({share:.1%} of the target's prefill FLOPs)"), soft_wrap=True)
    console.print(table)
    for sentence in (*(found.sentence for found in comparison.differences), *comparison.notes):
        console.print(Text(sentence), soft_wrap=True)
