"""Counters of what a cascade has done."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from threading import Lock
from typing import Any

from kvbridge.cascade.outcome import OUTCOMES
from kvbridge.cascade.result import Result
from kvbridge.cascade.verify import Tally

ROUTES = ("source", "target")
DRAFTS = ("mapped", "source")


class Metrics:
    """Counts answers; every count only grows."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stopped: Counter[str] = Counter()
        self._drafts = {name: Tally() for name in DRAFTS}

    def record(self, result: Result) -> None:
        """Count an answer."""
        report = result.handoff
        with self._lock:
            self._counts[f"route {result.route}"] += 1
            self._counts["source tokens read"] += result.source_read
            self._counts["tokens written"] += len(result.tokens)
            for step in ("first_token", "total"):
                self._seconds[step] += result.seconds[step]
            for name, tally in result.drafts.items():
                self._drafts[name].include(tally)
            if report is not None:
                self._counts[f"outcome {report.outcome}"] += 1
                self._counts["tokens carried"] += report.carried
                self._counts["target tokens read"] += report.native + report.verified
                if report.readings:
                    self._counts["gate judged"] += 1
                if report.readings and not report.readings[-1].passed:
                    self._stopped[report.check] += 1
                if report.reason:
                    self._reasons[report.reason] += 1

    def to_dict(self) -> dict[str, Any]:
        """All counts as JSON values: answers by route, hand-offs by outcome, tokens, and seconds summed up.

        `gate` has how many hand-offs were judged and which check stopped how many, `drafts` what the target verified.
        `reasons` holds those of hand-offs that were not applied, the most frequent first.
        """
        with self._lock:
            counts = self._counts
            return {
                "answers": {route: counts[f"route {route}"] for route in ROUTES},
                "handoffs": {outcome: counts[f"outcome {outcome}"] for outcome in OUTCOMES},
                "tokens": {
                    name: counts[name]
                    for name in ("source tokens read", "target tokens read", "tokens carried", "tokens written")
                },
                "seconds": {step: self._seconds[step] for step in ("first_token", "total")},
                "gate": {"judged": counts["gate judged"], "stopped": dict(self._stopped)},
                "drafts": {name: asdict(tally) for name, tally in self._drafts.items()},
                "reasons": dict(self._reasons.most_common()),
            }
