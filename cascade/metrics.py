"""Counters of what a cascade has done."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

from kvbridge.cascade.outcome import OUTCOMES
from kvbridge.cascade.result import Result

ROUTES = ("source", "target")


class Metrics:
    """Counts answers; every count only grows."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def record(self, result: Result) -> None:
        """Count an answer."""
        report = result.handoff
        with self._lock:
            self._counts[f"route {result.route}"] += 1
            self._counts["source tokens read"] += result.source_read
            self._counts["tokens written"] += len(result.tokens)
            for step in ("first_token", "total"):
                self._seconds[step] += result.seconds[step]
            if report is not None:
                self._counts[f"outcome {report.outcome}"] += 1
                self._counts["tokens carried"] += report.carried
                self._counts["target tokens read"] += report.native
                if report.reason:
                    self._reasons[report.reason] += 1

    def to_dict(self) -> dict[str, Any]:
        """All counts as JSON values: answers by route, hand-offs by outcome, tokens, and seconds summed up.

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
                "reasons": dict(self._reasons.most_common()),
            }
