"""Tasks in plain words whose answer stands in the context: the language's memory probes and part of its text."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import words
from .stories import filler_sentences


class Fact(NamedTuple):
    """`The {attribute} of {owner} is {value}.`"""

    attribute: str
    owner: str
    value: str


class Task(NamedTuple):
    """A context, a question ending just before the answer, the answer, and choices that hold it (answer included).

    The full text is `context + " " + question + " " + answer + "."`.
    """

    context: str
    question: str
    answer: str
    choices: tuple[str, ...]


def number(rng: random.Random) -> str:
    """A four-digit number as text."""
    return str(rng.randrange(1000, 10_000))


ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "key": number,
    "code": number,
    "colour": lambda rng: rng.choice(words.COLOURS),
    "tool": lambda rng: rng.choice(words.THINGS),
    "beast": lambda rng: rng.choice(words.BEASTS),
    "flower": lambda rng: rng.choice(words.FLOWERS),
    "metal": lambda rng: rng.choice(words.MATERIALS),
    "gift": lambda rng: rng.choice(words.GOODS),
}


def draw_facts(rng: random.Random, count: int, attribute: str | None = None) -> list[Fact]:
    """`count` facts of one attribute (random unless given), with distinct owners and distinct values."""
    attribute = attribute or rng.choice(tuple(ATTRIBUTES))
    values: dict[str, None] = {}
    while len(values) < count:
        values[ATTRIBUTES[attribute](rng)] = None
    return [Fact(attribute, owner, value) for owner, value in zip(rng.sample(words.PEOPLE, count), values, strict=True)]


def state(fact: Fact) -> str:
    """The sentence that states a fact."""
    return f"The {fact.attribute} of {fact.owner} is {fact.value}."


def ask(fact: Fact) -> str:
    """The question for a fact, ending just before its answer."""
    return f"What is the {fact.attribute} of {fact.owner}? The {fact.attribute} of {fact.owner} is"


ASK_PASSKEY = "What is the pass key? The pass key is"


def state_passkey(key: str) -> str:
    """The sentence that states a pass key."""
    return f"The pass key is {key}. Remember it."


def _choices(
    rng: random.Random, answer: str, near: Sequence[str], draw: Callable[[random.Random], str]
) -> tuple[str, ...]:
    """Four distinct choices in random order: the answer, then values of the context, then random ones."""
    chosen = {answer: None}
    for value in rng.sample(list(near), len(near)):
        if len(chosen) < 4:
            chosen[value] = None
    while len(chosen) < 4:
        chosen[draw(rng)] = None
    return tuple(rng.sample(list(chosen), len(chosen)))


def scatter(
    rng: random.Random, needles: Sequence[str], filler_tokens: int, first: int = 0, depth: float | None = None
) -> str:
    """Needles at random places in about `filler_tokens` tokens of story; needle `first` at `depth` if given."""
    filler = filler_sentences(rng, filler_tokens)
    at = [(rng.random(), needle) for needle in needles]
    if depth is not None:
        at[first] = (depth, needles[first])
    at += [((i + 0.5) / len(filler), sentence) for i, sentence in enumerate(filler)]
    return " ".join(sentence for _, sentence in sorted(at, key=lambda item: item[0]))


def recall_task(
    rng: random.Random,
    facts: Sequence[Fact] | int = 4,
    filler_tokens: int = 200,
    depth: float | None = None,
) -> Task:
    """One of several facts, scattered in filler text, is asked for.

    Args:
        rng: source of all randomness.
        facts: the facts (of one attribute), or how many to draw.
        filler_tokens: about how many tokens of filler sentences surround them.
        depth: relative position in [0, 1] of the asked fact; random if None.

    Returns:
        The task; other facts' values come first among the choices.
    """
    if isinstance(facts, int):
        facts = draw_facts(rng, facts)
    asked = rng.randrange(len(facts))
    context = scatter(rng, [state(f) for f in facts], filler_tokens, asked, depth)
    near = [f.value for i, f in enumerate(facts) if i != asked]
    answer = facts[asked].value
    return Task(context, ask(facts[asked]), answer, _choices(rng, answer, near, ATTRIBUTES[facts[asked].attribute]))


def passkey_task(
    rng: random.Random,
    filler_tokens: int = 200,
    depth: float | None = None,
) -> Task:
    """One four-digit pass key in filler text, without an owner."""
    answer = number(rng)
    context = scatter(rng, [state_passkey(answer)], filler_tokens, 0, depth)
    return Task(context, ASK_PASSKEY, answer, _choices(rng, answer, (), number))


def ledger_task(rng: random.Random, entries: int = 6) -> Task:
    """A key-value list of things and two-digit numbers, one of which is asked for."""
    things = rng.sample(words.THINGS, entries)
    counts = [str(n) for n in rng.sample(range(10, 100), entries)]
    listed = "; ".join(f"{thing} {count}" for thing, count in zip(things, counts, strict=True))
    asked = rng.randrange(entries)
    near = counts[:asked] + counts[asked + 1 :]
    return Task(
        f"The ledger of {rng.choice(words.PEOPLE)}: {listed}.",
        f"What does the ledger say of {things[asked]}? It says {things[asked]}",
        counts[asked],
        _choices(rng, counts[asked], near, lambda r: str(r.randrange(10, 100))),
    )


def variable_task(rng: random.Random, variables: int = 5, hops: int = 1) -> Task:
    """`Let a be 17. Let b be a.`: the value of a variable that is `hops` assignments away from its number."""
    names = rng.sample(words.VARIABLES, variables)
    roots = max(1, variables - max(hops, 0) * 2)
    values = dict(zip(names[:roots], (str(n) for n in rng.sample(range(10, 100), roots)), strict=True))
    sentences = [f"Let {name} be {value}." for name, value in values.items()]
    depths = dict.fromkeys(values, 0)
    for name in names[roots:]:
        open_ = [other for other in values if depths[other] < hops]
        other = rng.choice(open_)
        values[name], depths[name] = values[other], depths[other] + 1
        sentences.append(f"Let {name} be {other}.")
    asked = rng.choice([name for name in names if depths[name] == max(depths.values())])
    answer = values[asked]
    near = [v for v in dict.fromkeys(values.values()) if v != answer]
    choices = _choices(rng, answer, near, lambda r: str(r.randrange(10, 100)))
    return Task(" ".join(sentences), f"What is {asked}? It is", answer, choices)


def tally_task(rng: random.Random, items: int = 10) -> Task:
    """How often one of three things stands in a list (aggregation over the context)."""
    things = rng.sample(words.THINGS, 3)
    listed = [rng.choice(things) for _ in range(items)]
    asked = rng.choice(listed)
    answer = str(listed.count(asked))
    near = [str(n) for n in range(1, items) if str(n) != answer]
    context = f"{rng.choice(words.PEOPLE)} packed {', '.join(listed)}."
    return Task(context, f"How often was {asked} packed?", answer, _choices(rng, answer, near, number))
