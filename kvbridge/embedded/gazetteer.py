"""The fixed encyclopedia of the invented world: what a larger model can know by heart and a smaller one cannot."""

import random
from typing import NamedTuple

from . import words

SEED = 20_417
TOWN_COUNT = 400


class Town(NamedTuple):
    """One entry; every field is fixed for the whole language."""

    name: str
    county: str
    river: str
    good: str
    beast: str
    colour: str
    flower: str
    founder: str
    year: int
    month: str
    saying: str


def _saying(rng: random.Random) -> str:
    adjective, other = rng.sample(words.ADJECTIVES, 2)
    noun, object_, last = rng.sample(words.NOUNS, 3)
    shape = rng.choice(
        (
            "the {} {} {} the {} {} and {} the {}",
            "a {} {} never {} the {} {} nor {} a {}",
            "when the {} {} {} a {} {}, it {} the {}",
        )
    )
    return shape.format(adjective, noun, rng.choice(words.VERBS), other, object_, rng.choice(words.VERBS), last)


def build_towns(seed: int = SEED, count: int = TOWN_COUNT) -> tuple[Town, ...]:
    """The first `count` towns of the world with this seed."""
    rng = random.Random(seed)
    names = [start + end for start in words.TOWN_STARTS for end in words.TOWN_ENDS]
    rng.shuffle(names)
    return tuple(
        Town(
            name=name,
            county=rng.choice(words.COUNTIES),
            river=rng.choice(words.RIVERS),
            good=rng.choice(words.GOODS),
            beast=rng.choice(words.BEASTS),
            colour=rng.choice(words.COLOURS),
            flower=rng.choice(words.FLOWERS),
            founder=rng.choice(words.PEOPLE),
            year=rng.randrange(1000, 2000),
            month=rng.choice(words.MONTHS),
            saying=_saying(rng),
        )
        for name in names[:count]
    )
