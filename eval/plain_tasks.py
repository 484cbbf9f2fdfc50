"""The five tasks in plain English, and prose without numbers to hide their facts in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Question(NamedTuple):
    """What is asked about a context, and the facts that the context must hold.

    Attributes:
        facts: sentences or lists that are never cut; several may lie apart.
        asked: which of them the question is about; it is the one whose depth is set.
        text: the question, ending just before the answer.
        answer: the right continuation, without the space before it.
        choices: four continuations, the answer among them; the wrong ones come from the context first.
    """

    facts: tuple[str, ...]
    asked: int
    text: str
    answer: str
    choices: tuple[str, ...]


COLOURS = "red blue green yellow black white grey brown purple orange silver pink".split()
OBJECTS = "door cabinet suitcase bicycle van boat locker gate safe trunk garage drawer".split()
GOODS = "apples bread candles rice soap tea wool paper honey nails salt beans cups rope".split()
FRUITS = "apple pear plum cherry lemon peach melon fig mango quince".split()
VARIABLES = "alpha beta gamma delta epsilon zeta theta kappa lambda sigma tau omega".split()

PEOPLE = (
    "the baker|my neighbour|an old sailor|the young teacher|the gardener|a tired cyclist|the librarian|our cousin|"
    "the night nurse|a travelling musician|the carpenter|her grandmother|the ferry pilot|a quiet student"
).split("|")
PLACES = (
    "harbour|market square|railway station|village school|river bank|town hall|old mill|public garden|bus stop|"
    "small museum|hill above the town|workshop|post office|beach"
).split("|")
THINGS = (
    "a wet umbrella|a basket of laundry|an unfinished letter|a borrowed book|a pair of boots|a wooden toy|a folded map|"
    "a bag of flour|a jar of paint|a woollen scarf|a broken chair|a bunch of flowers"
).split("|")
WEATHER = "rain wind snow fog heat frost sunshine drizzle".split()
MOODS = "slowly|without a word|in good spirits|with some care|rather late|for no clear reason|as always".split("|")
TIMES = (
    "In the early morning|After lunch|Towards evening|That winter|On the way home|During the holidays|"
    "Before the shops opened|Once the guests had left"
).split("|")
TEMPLATES = (
    "{time} {who} went down to the {place} and looked at the water {mood}.",
    "{time} there was {weather} over the {place}, and hardly anybody was about.",
    "{Who} carried {thing} to the {place} and left it there {mood}.",
    "{Who} and {other} talked about the {weather} until it was time to go.",
    "Nobody at the {place} had noticed {thing} lying under the bench.",
    "{Who} waited at the {place}, although {other} had promised to come {mood}.",
    "{time} {who} mended {thing} and gave it back to {other}.",
    "The road to the {place} was closed because of the {weather}, so {who} stayed at home.",
    "{Who} said that the {place} had looked quite different in earlier years.",
    "{time} {who} drank a cup of coffee and watched {other} paint the fence {mood}.",
)


def filler(rng: random.Random) -> Iterator[str]:
    """Endless unconnected sentences, none of which holds a number, a list or an assignment."""
    while True:
        who, other = rng.sample(PEOPLE, 2)
        yield rng.choice(TEMPLATES).format(
            who=who,
            Who=who[0].upper() + who[1:],
            other=other,
            place=rng.choice(PLACES),
            thing=rng.choice(THINGS),
            weather=rng.choice(WEATHER),
            mood=rng.choice(MOODS),
            time=rng.choice(TIMES),
        )


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1000, 10_000))


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(rng)] = None
    return list(drawn)


def _question(
    rng: random.Random, facts: Sequence[str], asked: int, text: str, answer: str, near: list[str]
) -> Question:
    """A question with three wrong choices out of `near`."""
    return Question(tuple(facts), asked, text, answer, tuple(rng.sample([answer, *rng.sample(near, 3)], 4)))


def passkey(rng: random.Random) -> Question:
    """One number in the whole context; the wrong choices are other numbers, which it does not hold."""
    answer, *near = _distinct(rng, _number, 4)
    facts = [f"The pass key is {answer}. Remember it, because it is asked for later."]
    return _question(rng, facts, 0, "What is the pass key? The pass key is", answer, near)


def needles(rng: random.Random) -> Question:
    """Four like sentences far apart, one of which is asked for."""
    owners = [f"{colour} {thing}" for colour, thing in zip(rng.sample(COLOURS, 4), rng.sample(OBJECTS, 4), strict=True)]
    codes = _distinct(rng, _number, 4)
    facts = [f"The access code of the {owner} is {code}." for owner, code in zip(owners, codes, strict=True)]
    asked = rng.randrange(4)
    what = f"the access code of the {owners[asked]}"
    near = codes[:asked] + codes[asked + 1 :]
    return _question(rng, facts, asked, f"What is {what}? {what[0].upper()}{what[1:]} is", codes[asked], near)


def pairs(rng: random.Random, entries: int = 8) -> Question:
    """A list of keys and two-digit values, one of which is asked for."""
    keys = rng.sample(GOODS, entries)
    values = [str(value) for value in rng.sample(range(10, 100), entries)]
    listed = "; ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
    asked = rng.randrange(entries)
    text = f"Which number does the shelf list give for {keys[asked]}? The shelf list says: {keys[asked]}"
    near = values[:asked] + values[asked + 1 :]
    return _question(rng, [f"The shelf list says: {listed}."], 0, text, values[asked], near)


def variables(rng: random.Random, hops: int = 2) -> Question:
    """Four numbers in variables, two of which are handed on `hops` times; the end of one such chain is asked for."""
    values, names = _distinct(rng, _number, 4), iter(rng.sample(VARIABLES, 4 + 2 * hops))
    chains = [
        [value, *(next(names) for _ in range(length))]
        for value, length in zip(values, (1 + hops,) * 2 + (1, 1), strict=True)
    ]
    turns = [at for at, chain in enumerate(chains) for _ in chain[1:]]
    rng.shuffle(turns)
    links = [pairwise(chain) for chain in chains]
    said = ["Set {1} to {0}.".format(*next(links[at])) for at in turns]
    asked = rng.randrange(2)
    text = f"Which number does {chains[asked][-1]} hold? The number in {chains[asked][-1]} is"
    return _question(rng, [" ".join(said)], 0, text, values[asked], values[:asked] + values[asked + 1 :])


def counting(rng: random.Random) -> Question:
    """Four words said one to six times each in a list; how often one of them was said is asked for."""
    words, counts = rng.sample(FRUITS, 4), rng.sample(range(1, 7), 4)
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    rng.shuffle(listed)
    text = f"How many times does the packing list name {words[0]}? The number of times is"
    near = [str(count) for count in counts[1:]]
    return _question(rng, [f"The packing list names {', '.join(listed)}."], 0, text, str(counts[0]), near)
