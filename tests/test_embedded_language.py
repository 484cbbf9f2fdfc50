"""The embedded pair's language: seeded, and its questions can be answered from the text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvbridge.embedded.language import (
    Document,
    Task,
    document,
    ledger_task,
    passkey_task,
    recall_document,
    recall_task,
    repetition_document,
    tally_task,
    variable_task,
)

TASKS: dict[str, Callable[[random.Random], Task]] = {
    "recall": lambda rng: recall_task(rng, 4, 150),
    "passkey": lambda rng: passkey_task(rng, 150),
    "ledger": lambda rng: ledger_task(rng),
    "variables": lambda rng: variable_task(rng, 5, 1),
    "tally": lambda rng: tally_task(rng, 8),
}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_a_task_is_seeded_and_its_answer_is_among_the_choices(make: Callable[[random.Random], Task]) -> None:
    task: Task = make(random.Random(3))
    assert task == make(random.Random(3))
    assert task != make(random.Random(4))
    assert task.answer in task.choices
    assert len(set(task.choices)) == len(task.choices)


def test_the_asked_fact_stands_at_the_wanted_depth() -> None:
    for depth in (0.0, 1.0):
        task = recall_task(random.Random(5), 4, 200, depth)
        fact = f"{task.question.split('? ')[1]} {task.answer}."
        place = task.context.index(fact) / len(task.context)
        assert place < 0.1 if depth == 0.0 else place > 0.8


@pytest.mark.parametrize("write", [document, recall_document, repetition_document])
def test_answer_spans_cover_the_answers(write: Callable[[random.Random, int], Document]) -> None:
    text, _, answers = write(random.Random(11), 300)
    assert (text, answers) == write(random.Random(11), 300)[::2]
    if write is recall_document:
        assert answers
        for start, end in answers:
            assert text[start] == " "
            assert text[end] == "."
            assert text[start + 1 : end] in text[:start]
