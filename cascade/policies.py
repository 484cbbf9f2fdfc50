"""When the target takes over: small rules, put together with `|` and `&`.

A rule is asked before the answer and after every token that the source has drafted. It says yes, no, or that it cannot
tell yet; yes and no are final for an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvbridge.cascade.scores import Progress, Score
from kvbridge.errors import UsageError


@runtime_checkable
class Policy(Protocol):
    """A rule for one answer."""

    def decide(self, progress: Progress) -> bool | None:
        """True hands over to the target, False leaves the answer to the source, `None` waits for another token."""
        ...


class Rule:
    """What `|` and `&` work on: the first hands over where one of two rules does, the second where both do."""

    def decide(self, progress: Progress) -> bool | None:
        raise NotImplementedError

    def __or__(self, other: Policy) -> AnyOf:
        return AnyOf((self, other))

    def __and__(self, other: Policy) -> AllOf:
        return AllOf((self, other))


@dataclass(frozen=True)
class Never(Rule):
    """The source answers."""

    def decide(self, progress: Progress) -> bool | None:
        return False


@dataclass(frozen=True)
class Always(Rule):
    """The target answers."""

    def decide(self, progress: Progress) -> bool | None:
        return True


@dataclass(frozen=True)
class Above(Rule):
    """The target answers where a measure of doubt is above a threshold, which `kvbridge calibrate-policy` finds.

    Attributes:
        measure: of doubt.
        threshold: in its unit.

    Raises:
        UsageError: the threshold is no number.
    """

    measure: Score
    threshold: float

    def __post_init__(self) -> None:
        if self.threshold != self.threshold:
            raise UsageError("Above(threshold=nan): give a number in the unit of the measure.")

    def decide(self, progress: Progress) -> bool | None:
        doubt = self.measure.score(progress)
        return None if doubt is None else doubt > self.threshold


@dataclass(frozen=True)
class LongPrompt(Rule):
    """The target answers prompts of `tokens` tokens or more."""

    tokens: int

    def decide(self, progress: Progress) -> bool | None:
        return progress.prompt_tokens >= self.tokens


@dataclass(frozen=True)
class OfTask(Rule):
    """The target answers prompts that the caller says are of one of these tasks."""

    names: frozenset[str]

    def decide(self, progress: Progress) -> bool | None:
        return progress.task in self.names


@dataclass(frozen=True)
class Custom(Rule):
    """A user's own function of the progress."""

    function: Callable[[Progress], bool | None]

    def decide(self, progress: Progress) -> bool | None:
        return self.function(progress)


@dataclass(frozen=True)
class AnyOf(Rule):
    """The target answers where one of the rules says so; the source where all say no."""

    rules: tuple[Policy, ...]

    def decide(self, progress: Progress) -> bool | None:
        said = [rule.decide(progress) for rule in self.rules]
        return True if True in said else None if None in said else False


@dataclass(frozen=True)
class AllOf(Rule):
    """The target answers where all rules say so; the source where one says no."""

    rules: tuple[Policy, ...]

    def decide(self, progress: Progress) -> bool | None:
        said = [rule.decide(progress) for rule in self.rules]
        return False if False in said else None if None in said else True
