"""Prompts with one right answer, by which models and cascades are compared; generated, not chosen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbridge.embedded import tasks as embedded
from kvbridge.embedded.stories import filler_sentences, towns
from kvbridge.errors import UsageError


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """A prompt that ends where its answer begins.

    Attributes:
        prompt: as text.
        answer: what must be said.
        task: the kind of question.
    """

    prompt: str
    answer: str
    task: str = ""

    def right(self, text: str) -> bool:
        """Whether a text says the answer first, and whole."""
        said = text.strip()
        return said.startswith(self.answer) and not said[len(self.answer) :][:1].isalnum()


def _town(rng: random.Random, filler: int) -> embedded.Task:
    """A fact of the encyclopedia, which stands in no context: the larger model has more of it by heart."""
    town = rng.choice(towns())
    question, answer = rng.choice(
        (
            (f"{town.name} lies on the river", town.river),
            (f"The people of {town.name} make", town.good),
            (f"The fair of {town.name} is held in", town.month),
        )
    )
    return embedded.Task(" ".join(filler_sentences(rng, filler)), question, answer, (answer,))


# Each draws a task in so many tokens of story.
EMBEDDED_TASKS: dict[str, Callable[[random.Random, int], embedded.Task]] = {
    "towns": _town,
    "recall": lambda rng, filler: embedded.recall_task(rng, 4, filler),
    "passkey": lambda rng, filler: embedded.passkey_task(rng, filler),
}


def embedded_tasks(name: str, count: int, *, filler: int = 400, seed: int = 0) -> list[AnswerTask]:
    """Tasks in the embedded pair's language; the n-th is the same whatever the count.

    Args:
        name: one of `EMBEDDED_TASKS`.
        count: how many.
        filler: about how many tokens of story surround the facts.
        seed: of all of them.

    Raises:
        UsageError: there is no such task, or a number is out of range.
    """
    if name not in EMBEDDED_TASKS:
        raise UsageError(f"{name!r} is no task of the embedded pair; expected one of {', '.join(EMBEDDED_TASKS)}.")
    if count < 1 or filler < 1:
        raise UsageError(f"{count} tasks in {filler} tokens: give 1 or more of both.")
    drawn = [EMBEDDED_TASKS[name](random.Random(f"{seed} {name} {at}"), filler) for at in range(count)]
    return [AnswerTask(f"{task.context} {task.question}", task.answer, name) for task in drawn]


def read_tasks(path: Path) -> list[AnswerTask]:
    """Tasks from JSON lines with `prompt`, `answer` and, if wanted, `task`.

    Raises:
        UsageError: the file is missing, empty, or a line is no task.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give JSON lines with prompt and answer.")
    tasks = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            tasks.append(AnswerTask(str(found["prompt"]), str(found["answer"]), str(found.get("task", ""))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: no JSON object with prompt and answer.") from error
    if not tasks:
        raise UsageError(f"{path} holds no task; give JSON lines with prompt and answer.")
    return tasks
