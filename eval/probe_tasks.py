"""Questions whose answer stands in the context, in the manner of RULER, and the filler around their facts.

A language has the five tasks and endless filler. `plain` is everyday English for real models; `embedded` is the
invented world on which the embedded pair was trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvbridge.embedded import tasks as embedded
from kvbridge.embedded.stories import Story
from kvbridge.eval import plain_tasks as plain
from kvbridge.eval.plain_tasks import Question

TASKS = ("passkey", "needles", "pairs", "variables", "counting")


@dataclass(frozen=True, slots=True)
class Language:
    """The tasks of `TASKS` by name, and filler without end.

    Attributes:
        tasks: each draws one question.
        filler: each call begins a text of sentences that hold no answer to any question.
    """

    tasks: dict[str, Callable[[random.Random], Question]]
    filler: Callable[[random.Random], Iterator[str]]


def _one_fact(task: embedded.Task) -> Question:
    return Question((task.context,), 0, task.question, task.answer, task.choices)


def _embedded_needles(rng: random.Random) -> Question:
    facts = embedded.draw_facts(rng, 4)
    task = embedded.recall_task(rng, facts, filler_tokens=0)
    asked = [embedded.ask(fact) for fact in facts].index(task.question)
    return Question(tuple(map(embedded.state, facts)), asked, task.question, task.answer, task.choices)


def _stories(rng: random.Random) -> Iterator[str]:
    story = Story(rng)
    while True:
        yield from story.sentences()


LANGUAGES = {
    "plain": Language(
        {
            "passkey": plain.passkey,
            "needles": plain.needles,
            "pairs": plain.pairs,
            "variables": plain.variables,
            "counting": plain.counting,
        },
        plain.filler,
    ),
    "embedded": Language(
        {
            "passkey": lambda rng: _one_fact(embedded.passkey_task(rng, filler_tokens=0)),
            "needles": _embedded_needles,
            "pairs": lambda rng: _one_fact(embedded.ledger_task(rng)),
            "variables": lambda rng: _one_fact(embedded.variable_task(rng)),
            "counting": lambda rng: _one_fact(embedded.tally_task(rng, items=8)),
        },
        _stories,
    ),
}
