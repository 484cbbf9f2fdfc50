"""Stories of the invented world: a cast whose attributes are told once and referred to ever after."""

import random
import re
from dataclasses import dataclass
from functools import cache

from . import words
from .gazetteer import Town, build_towns

_TOKEN = re.compile(r"[A-Za-z]+|\d{1,2}|[^\sA-Za-z\d]")


def token_estimate(text: str) -> int:
    """Tokens of `text` under the pair's tokenizer, estimated from words, digit pairs and punctuation (within 10 %)."""
    return len(_TOKEN.findall(text))


@cache
def towns() -> tuple[Town, ...]:
    """The towns of the world, built at first use."""
    return build_towns()


@dataclass(slots=True)
class Character:
    """One of a story's cast; `thing` and `material` change hands as the story goes on."""

    name: str
    he: str
    trade: str
    town: Town
    thing: str
    material: str
    beast: str
    colour: str


def _cast(rng: random.Random, size: int) -> list[Character]:
    names = rng.sample(words.PEOPLE, size)
    trades = rng.sample(words.TRADES, size)
    things = rng.sample(words.THINGS, size)
    beasts = rng.sample(words.BEASTS, size)
    return [
        Character(
            name=names[i],
            he="she" if names[i] in words.WOMEN else "he",
            trade=trades[i],
            town=rng.choice(towns()),
            thing=things[i],
            material=rng.choice(words.MATERIALS),
            beast=beasts[i],
            colour=rng.choice(words.COLOURS),
        )
        for i in range(size)
    ]


def introduce(rng: random.Random, who: Character) -> list[str]:
    """Sentences that tell all attributes of a character, in random order after the first."""
    rest = [
        f"{who.name} owned a {who.material} {who.thing}.",
        f"{who.name} kept a {who.colour} {who.beast}.",
    ]
    rng.shuffle(rest)
    return [f"{who.name} was a {who.trade} from {who.town.name}.", *rest]


def town_facts(rng: random.Random, town: Town) -> list[str]:
    """Sentences of a town's encyclopedia entry, in random order."""
    facts = [
        f"{town.name} lies on the river {town.river} in {town.county}.",
        f"The people of {town.name} make {town.good}.",
        f"{town.name} was founded by {town.founder} in the year {town.year}.",
        f"The banner of {town.name} shows a {town.colour} {town.beast} and a {town.flower}.",
        f"The fair of {town.name} is held in {town.month}.",
        f"In {town.name} they say: {town.saying}.",
    ]
    rng.shuffle(facts)
    return facts


def _move(rng: random.Random, a: Character, b: Character) -> str:
    return f"{rng.choice(words.TIMES)} {a.name} took the {a.material} {a.thing} to the {rng.choice(words.SPOTS)}."


def _meet(rng: random.Random, a: Character, b: Character) -> str:
    return f"{a.name} the {a.trade} met {b.name} the {b.trade} at the {rng.choice(words.SPOTS)}."


def _follow(rng: random.Random, a: Character, b: Character) -> str:
    return f"The {a.colour} {a.beast} of {a.name} ran to the {rng.choice(words.SPOTS)}, and {b.name} followed it."


def _give(rng: random.Random, a: Character, b: Character) -> str:
    told = f"{a.name} gave the {a.material} {a.thing} to {b.name} for the {b.material} {b.thing}."
    a.thing, a.material, b.thing, b.material = b.thing, b.material, a.thing, a.material
    return told


def _sky(rng: random.Random, a: Character, b: Character) -> str:
    sky = rng.choice(words.WEATHER)
    return f"It was {sky} that day, and {a.name} thought of {a.town.name} on the river {a.town.river}."


def _trade(rng: random.Random, a: Character, b: Character) -> str:
    return f"{a.name} sold {b.name} {a.town.good} from {a.town.name}, and {b.he} paid {rng.choice(words.MOODS)}."


def _say(rng: random.Random, a: Character, b: Character) -> str:
    return f'"In {a.town.name} we say: {a.town.saying}," said {a.name} the {a.trade}.'


def _tell(rng: random.Random, a: Character, b: Character) -> str:
    return f"{b.name} asked {a.name} about {a.town.name}. {rng.choice(town_facts(rng, a.town))}"


def _count(rng: random.Random, a: Character, b: Character) -> str:
    have, more, good = rng.randrange(2, 10), rng.randrange(2, 10), rng.choice(words.THINGS)
    return f"{a.name} had {have} of the {good}s and found {more} more, so there were {have + more} of the {good}s."


def _hide(rng: random.Random, a: Character, b: Character) -> str:
    spot, mood = rng.choice(words.SPOTS), rng.choice(words.MOODS)
    return f"{a.name} hid the {a.material} {a.thing} in the {spot}. {b.name} looked in the {spot} and found it {mood}."


def _wait(rng: random.Random, a: Character, b: Character) -> str:
    time, spot = rng.choice(words.TIMES), rng.choice(words.SPOTS)
    return f"{time} the {a.trade} and the {b.trade} waited at the {spot} with the {a.beast}."


EVENTS = (_move, _meet, _follow, _give, _sky, _trade, _say, _tell, _count, _hide, _wait)


class Story:
    """An endless story: `sentences` yields introductions first, then events, now and then a new character."""

    def __init__(self, rng: random.Random, size: int | None = None) -> None:
        self.rng = rng
        self.cast = _cast(rng, size or rng.choice((2, 2, 3, 3, 4)))
        self.unmet = list(self.cast)

    def sentences(self) -> list[str]:
        """The next one to three sentences."""
        if self.unmet and (len(self.unmet) > len(self.cast) - 2 or self.rng.random() < 0.4):
            return introduce(self.rng, self.unmet.pop(0))
        known = [c for c in self.cast if c not in self.unmet]
        a, b = self.rng.sample(known, 2)
        return [self.rng.choice(EVENTS)(self.rng, a, b)]


def filler_sentences(rng: random.Random, tokens: int) -> list[str]:
    """Story sentences of about `tokens` tokens in all (never fewer by more than one sentence)."""
    from_story, size, sentences = Story(rng), 0, []
    while size < tokens:
        for sentence in from_story.sentences():
            if size < tokens:
                sentences.append(sentence)
                size += token_estimate(sentence)
    return sentences
