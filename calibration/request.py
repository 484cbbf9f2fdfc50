"""Which moments are asked for: of what pair and text, how, and added to which finished ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbridge.calibration.archive import MOMENTS, CalibrationMoments
from kvbridge.calibration.attention import ATTENTION
from kvbridge.calibration.config import CalibrationConfig, identity
from kvbridge.calibration.corpus import Corpus
from kvbridge.calibration.draw import ADDED, DRAWN, Draw
from kvbridge.calibration.products import MomentBlock, plain_blocks
from kvbridge.calibration.rows import layer_counts, widths_of
from kvbridge.calibration.sketch import sketched
from kvbridge.errors import CalibrationError
from kvbridge.geometry import KVGeometry
from kvbridge.pair import Pair

# A calibration and what it adds to may differ in how much text they read and how, and in nothing else.
OWN = (*DRAWN.values(), "calibration.batch", "calibration.precision")


@dataclass(frozen=True)
class Request:
    """Moments that are asked for.

    Attributes:
        pair: source and target; a `PairLoader` only where states are staged.
        config: text and sizes.
        blocks: products of variables, by the names under which they are stored.
        attention: whether the metric of the target's attention is asked for too.
    """

    pair: Pair
    config: CalibrationConfig
    blocks: frozenset[MomentBlock]
    attention: bool = False

    @classmethod
    def of(cls, pair: Pair, config: CalibrationConfig, blocks: Iterable[MomentBlock]) -> Request:
        """Ask for the products that a mapper reads, or for those of a sketch in their place.

        Raises:
            UsageError: a variable is none, reaches beyond its model, or is a part of what the sketch stands for.
        """
        asked = frozenset(blocks)
        plain = plain_blocks(asked - {ATTENTION}, layer_counts(pair.geometry("source"), pair.geometry("target")))
        return cls(pair, config, plain if config.sketch is None else sketched(plain), ATTENTION in asked)

    @property
    def geometries(self) -> tuple[KVGeometry, KVGeometry]:
        """Of source and target."""
        return self.pair.geometry("source"), self.pair.geometry("target")

    @property
    def layers(self) -> dict[str, int]:
        """How many layers each variable has."""
        return layer_counts(*self.geometries)

    def widths(self, names: Iterable[str]) -> dict[str, int]:
        """Width of the rows of some variables."""
        return widths_of(names, *self.geometries, self.config.sketch)

    @cached_property
    def corpus(self) -> Corpus:
        """The text.

        Raises:
            CorpusError: nothing readable is there.
        """
        return self.config.open("calibration")

    @cached_property
    def added(self) -> CalibrationMoments | None:
        """Finished moments of other documents, whose sums are added at the end.

        Raises:
            CalibrationError: they are missing, or of another pair, text or mapper.
        """
        if self.config.add is None:
            return None
        path = Path(self.config.add).expanduser() / MOMENTS
        moments = CalibrationMoments.load(path)
        own, known = self._own, moments.info["identity"]
        for key in sorted({*own, *known} - {*OWN}):
            if known.get(key) != own.get(key):
                raise CalibrationError(
                    f"{path} was collected with {key} = {known.get(key)} and cannot be added to moments with "
                    f"{own.get(key)}; calibrate both with the same pair, text and mapper."
                )
        return moments

    @cached_property
    def draw(self) -> Draw:
        """Which blocks of the corpus are drawn: none of a document that was read for what is added."""
        settings = {name: getattr(self.config, name) for name in DRAWN.keys() - {"added"}}
        return Draw(**settings, added=() if self.added is None else (Draw.of(self.added.info["identity"]),))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides the values of the moments, together with those that they are added to.

        It is put together when it is first needed: of a pair whose models are loaded one at a time it loads both.
        """
        if self.added is None:
            return self._own
        known = self.added.info["identity"]
        return self._own | {ADDED: [{key: known[key] for key in OWN if key in known}]}

    @cached_property
    def _own(self) -> dict[str, Any]:
        gathered = self.blocks | {ATTENTION} if self.attention else self.blocks
        return identity(self.pair, self.corpus, self.config, gathered)
