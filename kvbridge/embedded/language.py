"""The text of the invented world: seeded documents of any length, and the memory tasks written in the same words.

`document` writes stories, encyclopedia entries, and facts that are stated once and asked for later. Answers to
questions are marked by character spans, so that training can weight them.
"""

import random
from typing import NamedTuple

from . import tasks, words
from .stories import Story, token_estimate, town_facts, towns
from .tasks import Fact, Task, draw_facts, ledger_task, passkey_task, recall_task, tally_task, variable_task

__all__ = [
    "Document",
    "Fact",
    "Task",
    "document",
    "draw_facts",
    "ledger_task",
    "passkey_task",
    "recall_document",
    "recall_task",
    "repetition_document",
    "tally_task",
    "token_estimate",
    "variable_task",
]


class Document(NamedTuple):
    """Text, its kind, and the character spans `(start, end)` of answers to questions about it."""

    text: str
    kind: str
    answers: tuple[tuple[int, int], ...]


class _Writer:
    """Collects sentences and answer spans; `size` is the estimated number of tokens so far."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.answers: list[tuple[int, int]] = []
        self.length = 0
        self.size = 0

    def write(self, text: str) -> None:
        self.length += len(text) + bool(self.parts)
        self.parts.append(text)
        self.size += token_estimate(text)

    def question(self, question: str, answer: str) -> None:
        start = self.length + bool(self.parts) + len(question)
        self.write(f"{question} {answer}.")
        self.answers.append((start, start + 1 + len(answer)))

    def task(self, task: Task) -> None:
        self.write(task.context)
        self.question(task.question, task.answer)

    def document(self, kind: str) -> Document:
        return Document(" ".join(self.parts), kind, tuple(self.answers))


def _entry(rng: random.Random, writer: _Writer) -> None:
    for sentence in town_facts(rng, rng.choice(towns()))[: rng.randrange(2, 7)]:
        writer.write(sentence)


def _small_task(rng: random.Random, writer: _Writer) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        writer.task(ledger_task(rng, rng.randrange(3, 9)))
    elif kind == 1:
        writer.task(variable_task(rng, rng.randrange(2, 6), rng.randrange(3)))
    else:
        writer.task(tally_task(rng, rng.randrange(3, 10)))


def _open_needles(rng: random.Random) -> list[tuple[str, str, str]]:
    """Up to nine facts of up to three attributes, now and then a pass key, as (statement, question, answer)."""
    attributes = rng.sample(tuple(tasks.ATTRIBUTES), rng.randrange(4))
    facts = [fact for name in attributes for fact in draw_facts(rng, rng.randrange(1, 4), name)]
    needles = [(tasks.state(fact), tasks.ask(fact), fact.value) for fact in facts]
    if rng.random() < 0.2:
        key = tasks.number(rng)
        needles.append((tasks.state_passkey(key), tasks.ASK_PASSKEY, key))
    rng.shuffle(needles)
    return needles


def document(rng: random.Random, tokens: int | None = None) -> Document:
    """A chronicle: one story, with entries, small tasks, and facts that are asked for later, sometimes twice.

    Args:
        rng: source of all randomness.
        tokens: estimated length; the document ends with the first sentence beyond it. 100 to 700 at random if None.
    """
    tokens = tokens or rng.randrange(100, 700)
    writer, story = _Writer(), Story(rng)
    untold, told = _open_needles(rng), []
    while writer.size < tokens:
        draw = rng.random()
        if draw < 0.10 and untold:
            told.append(untold.pop())
            writer.write(told[-1][0])
        elif draw < 0.18 and told:
            writer.question(*rng.choice(told)[1:])
        elif draw < 0.25:
            _entry(rng, writer)
        elif draw < 0.29:
            _small_task(rng, writer)
        else:
            for sentence in story.sentences():
                writer.write(sentence)
    return writer.document("chronicle")


def recall_document(rng: random.Random, tokens: int | None = None) -> Document:
    """Facts in filler text, then questions for all of them in random order: dense practice in recall.

    Args:
        rng: source of all randomness.
        tokens: estimated length; 40 to 500 at random if None.
    """
    tokens = tokens or rng.randrange(40, 500)
    writer = _Writer()
    count = rng.randrange(1, 3 + min(4, tokens // 24))
    attributes = rng.sample(tuple(tasks.ATTRIBUTES), 2)
    facts = draw_facts(rng, count, attributes[0])
    if rng.random() < 0.3:
        facts += draw_facts(rng, rng.randrange(1, 1 + count), attributes[1])
    needles = [(tasks.state(fact), tasks.ask(fact), fact.value) for fact in facts]
    if rng.random() < 0.1:
        key = tasks.number(rng)
        needles.append((tasks.state_passkey(key), tasks.ASK_PASSKEY, key))
    spare = tokens - 25 * len(needles)
    share = rng.choice((0.0, 0.5, 1.0, 1.0))
    writer.write(tasks.scatter(rng, [needle[0] for needle in needles], int(max(0, spare) * share)))
    for _, question, answer in rng.sample(needles, len(needles)):
        writer.question(question, answer)
    while writer.size < tokens - 12:
        writer.question(*rng.choice(needles)[1:])
    return writer.document("recall")


def _word(rng: random.Random) -> str:
    return tasks.number(rng)[:2] if rng.random() < 0.4 else rng.choice(words.EVERYTHING)


def _write_list(rng: random.Random, writer: _Writer, count: int) -> None:
    """Words that are said again in the same order."""
    said = " ".join(_word(rng) for _ in range(count))
    writer.write(f"Say: {said}.")
    for _ in range(rng.randrange(1, 3)):
        writer.question("Again:", said)


def _write_pairs(rng: random.Random, writer: _Writer, count: int) -> None:
    """Pairs of words that are said again in another order: the second follows from the first alone."""
    link = rng.choice((" is", ":", " of"))
    pairs = [(key, _word(rng)) for key in rng.sample(words.EVERYTHING, max(2, count // 3))]
    writer.write("Say: " + "; ".join(f"{key}{link} {value}" for key, value in pairs) + ".")
    for key, value in rng.sample(pairs, len(pairs)):
        writer.question(f"Again: {key}{link}", value)


def repetition_document(rng: random.Random, tokens: int | None = None) -> Document:
    """Lists and pairs without any sense that are said again word for word: practice in looking back.

    Args:
        rng: source of all randomness.
        tokens: estimated length; 40 to 300 at random if None.
    """
    tokens = tokens or rng.randrange(40, 300)
    writer = _Writer()
    while writer.size < tokens - 12:
        count = rng.randrange(4, 5 + max(1, min(16, (tokens - writer.size) // 5)))
        (_write_pairs if rng.random() < 0.5 else _write_list)(rng, writer, count)
    return writer.document("repetition")
