"""The target's part of an answer.

plain         [ hand-off ]─▶ token after token
speculative   [ hand-off ]─▶ token ─▶ the source drafts, the target verifies ─▶ …
exact         [ hand-off ]─▶ draft while the target reads the prompt itself ─▶ verify ─▶ go on over its own cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from kvbridge.assembly import Handoff
from kvbridge.cascade.carry import Carried, Carrier
from kvbridge.cascade.events import Event
from kvbridge.cascade.exact import write_exactly
from kvbridge.cascade.memory import Memory
from kvbridge.cascade.modes import Mode
from kvbridge.cascade.outcome import FALLBACK
from kvbridge.cascade.reader import Reader
from kvbridge.cascade.result import HandoffReport
from kvbridge.cascade.speculative import SourceDrafter, speculate
from kvbridge.cascade.verify import Tally
from kvbridge.cascade.writing import Writing
from kvbridge.errors import CacheError


@dataclass(slots=True)
class Answering:
    """The target, writing an answer or the rest of one.

    Attributes:
        carrier: hands the conversation over.
        source: what the source holds of it.
        target: what the target holds of it; in the end prompt and answer, and exact after exact mode.
        writing: the answer.
        mode: how it is written.
        note: called with the name of a step when it is done.
        report: how the target came by its cache, once it has one.
        drafts: what was verified, as in `Result`.
    """

    carrier: Carrier
    source: Memory
    target: Memory
    writing: Writing
    mode: Mode
    note: Callable[[str], None]
    report: HandoffReport | None = None
    drafts: dict[str, Tally] = field(default_factory=dict)

    @property
    def written(self) -> list[int]:
        """Prompt and committed tokens."""
        return [*self.writing.prompt, *self.writing.committed]

    def take_over(self, tail: int) -> Iterator[Event]:
        """Give what is written to the target, and write on; it reads the last `tail` tokens itself.

        Raises:
            CacheError: even the target's own reading gives no usable logits.
        """
        if not self.mode.exact:
            yield from self.go_on(self.carrier.carry(self.source, self.target, self.written, tail))
            return
        native = self.carrier.native(self.target, self.written)
        handoff, report = self.carrier.offer(self.source, self.target, self.written, tail)
        if handoff is None:
            self.target.adopt(native.tokens, native.cache, approximate=False, origin=native.origin)
            yield from self.go_on(self.carrier.reread(self.target, self.written, report))
            return
        self.report = replace(report, verified=len(self.written) - len(native.tokens))
        yield from self._exactly(handoff, native)

    def go_on(self, carried: Carried) -> Iterator[Event]:
        """Write over the cache that the target has.

        Raises:
            CacheError: as `take_over`.
        """
        self.note("handed_over")
        self.report = carried.report
        drafter = self._drafter()
        yield from self._commit(carried.logits)
        if drafter is not None:
            yield from self._draft_with(drafter)
        while self.writing.finish is None:
            yield from self._commit(self._next())

    def _exactly(self, handoff: Handoff, native: Memory) -> Iterator[Event]:
        self.note("handed_over")
        drafter, reader = self._drafter(), Reader(native.model, native.cache, len(native.tokens))
        try:
            ending = yield from write_exactly(self.writing, handoff, reader, self.mode.schedule, drafter)
        except CacheError as error:
            yield from self._without_stored(native, error)
            return
        self.drafts["mapped"] = ending.mapped
        native.follow(reader, self.written)
        self.target.adopt(native.tokens, native.cache, approximate=False, origin=native.origin)
        self.target.read_tokens += native.read_tokens
        if drafter is not None:
            self.drafts["source"] = ending.source
            self.source.follow(drafter.reader, self.written)

    def _without_stored(self, native: Memory, error: CacheError) -> Iterator[Event]:
        """Write from the target's own reading of everything, if what failed goes on from a stored cache of it."""
        report = self.report
        if report is None or self.writing.committed or not self.carrier.refuse(native):
            raise error
        yield from (event for event in self.writing.commit([]) if event.tokens)
        why = replace(report, outcome=FALLBACK, reason=str(error), carried=0, verified=0)
        yield from self.go_on(self.carrier.reread(self.target, self.written, why))

    def _drafter(self) -> SourceDrafter | None:
        """The source over what is written; `None` where it shall not draft, or cannot."""
        writing, model = self.writing, self.source.model
        longest = len(writing.prompt) + writing.params.max_new_tokens
        if not self.mode.speculate or longest > model.geometry.max_positions:
            return None
        try:
            self.source.hold(self.written)
        except CacheError:
            self.carrier.refuse(self.source)
            self.source.reset()
            return None
        return SourceDrafter(model, self.source.cache, self.mode.speculate, writing.committed)

    def _draft_with(self, drafter: SourceDrafter) -> Iterator[Event]:
        target, tally = self.target, self.drafts.setdefault("source", Tally())
        reader = Reader(target.model, target.cache, len(target.tokens))
        try:
            yield from speculate(reader, drafter, self.writing, tally)
            target.follow(reader, self.written)
        except CacheError as error:
            yield from self._commit(self._recover(error))
            drafter.follow(self.writing.committed)
        self.source.follow(drafter.reader, self.written)

    def _commit(self, logits: Float[Tensor, "V"]) -> Iterator[Event]:
        yield from self.writing.commit([self.writing.choose(logits)])

    def _next(self) -> Float[Tensor, "V"]:
        """The target's next logits; from its own reading where those over a carried cache are unusable."""
        try:
            return self.target.read(self.written)
        except CacheError as error:
            return self._recover(error)

    def _recover(self, error: CacheError) -> Float[Tensor, "V"]:
        report = self.report
        if report is None or not self.target.approximate:
            raise error
        self.carrier.refuse(self.target)
        why = replace(report, outcome=FALLBACK, reason=str(error))
        carried = self.carrier.reread(self.target, self.written, why)
        self.report = carried.report
        return carried.logits
