"""One answer: the source reads and drafts, a policy decides, and one of the two models writes.

source   reads the prompt ─▶ drafts token by token while the policy cannot tell ─▶ no: goes on
                                                                              └─▶ yes: hand-off of prompt and kept draft
target                                                                             goes on from it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.cascade.answering import Answering
from kvbridge.cascade.carry import Carrier
from kvbridge.cascade.events import Event
from kvbridge.cascade.memory import Memory
from kvbridge.cascade.metrics import Metrics
from kvbridge.cascade.modes import Mode
from kvbridge.cascade.outcome import FALLBACK, Route
from kvbridge.cascade.policies import Policy
from kvbridge.cascade.prompts import Prompt
from kvbridge.cascade.result import HandoffReport, Result
from kvbridge.cascade.sampling import SamplingParams, draw
from kvbridge.cascade.scores import Progress
from kvbridge.cascade.store import ExactKey
from kvbridge.cascade.writing import Writing
from kvbridge.errors import CacheError, UsageError


@dataclass(frozen=True, slots=True)
class Parts:
    """What all answers of a cascade share.

    Attributes:
        carrier: hands conversations over.
        policy: decides which model answers.
        draft: what becomes of the source's draft at a hand-off: `keep` it, and go on from it, or `restart`.
        metrics: counts answers.
    """

    carrier: Carrier
    policy: Policy
    draft: str
    metrics: Metrics


class Turn:
    """An answer in the making: iterate over its events, then read its result.

    Args:
        parts: of the cascade.
        source: what the source holds of the conversation.
        target: what the target holds of it.
        prompt: the conversation.
        params: what the caller asks of the answer.
        mode: how the target writes.
        task: what the caller says the prompt is.
        finished: called with the result, or with `None` after an error.

    Raises:
        UsageError: prompt and answer are longer than the target was made for, or a token is not one of the pair's.
    """

    def __init__(
        self,
        parts: Parts,
        source: Memory,
        target: Memory,
        prompt: Prompt,
        params: SamplingParams,
        mode: Mode,
        task: str | None = None,
        finished: Callable[[Result | None], None] | None = None,
    ) -> None:
        pair = parts.carrier.pair
        self.parts, self.source, self.target = parts, source, target
        self.prompt, self.task, self._finished = prompt, task, finished
        vocabulary = min(model.model.config.vocab_size for model in (source.model, target.model))
        beyond = [token for token in prompt.tokens if not 0 <= token < vocabulary]
        if beyond:
            raise UsageError(f"token id {beyond[0]} is none of the pair's {vocabulary}; give ids of its tokenizer.")
        self.writing = Writing(
            target.model, torch.tensor([prompt.tokens]), params, pair.tokenizer, vocabulary=vocabulary
        )
        self._start, self._seconds = 0.0, dict[str, float]()
        self._text, self._drafted, self._kept = "", 0, 0
        # The source's logits after the prompt, while nothing follows it.
        self._following: Float[Tensor, "V"] | None = None
        self._target = Answering(parts.carrier, source, target, self.writing, mode, self._note)
        self._result: Result | None = None
        self._stream = self._tell()

    @property
    def result(self) -> Result:
        """The finished answer.

        Raises:
            UsageError: not all events have been taken yet.
        """
        if self._result is None:
            raise UsageError("the answer is not finished; take all of its events first.")
        return self._result

    def __iter__(self) -> Iterator[Event]:
        """The events that have not been taken yet; all of them are one stream, wherever it is taken from."""
        return self._stream

    def _tell(self) -> Iterator[Event]:
        try:
            yield from self._answer()
        except Exception:
            if self._finished is not None:
                self._finished(None)
            raise

    def _answer(self) -> Iterator[Event]:
        self._start, read = time.perf_counter(), self.source.read_tokens
        for event in self._events():
            if event.kind == "draft":
                self._note("provisional")
            if event.kind == "commit":
                self._text += event.text
                self._note("first_token")
            yield event
        self._seconds["total"] = time.perf_counter() - self._start
        self._keep()
        finish = self.writing.finish
        if finish is None:
            raise UsageError("the answer ended without a reason; report this.")
        report = self._target.report
        route: Route = "source" if report is None else "target"
        self._result = Result(
            self._text,
            tuple(self.writing.committed),
            route,
            finish,
            report,
            len(self.prompt.tokens),
            self._drafted,
            len(self.writing.committed) if route == "source" else self._kept,
            self.source.read_tokens - read,
            self._seconds,
            self._target.drafts,
        )
        self.parts.metrics.record(self._result)
        if self._finished is not None:
            self._finished(self._result)

    def finish(self) -> Result:
        """Take all events, and give the result."""
        for _ in self:
            pass
        return self.result

    def _note(self, step: str) -> None:
        self._seconds.setdefault(step, time.perf_counter() - self._start)

    def _events(self) -> Iterator[Event]:
        writing = self.writing
        try:
            escalated = yield from self._decide()
        except CacheError as error:
            # The source's own cache is broken, so nothing of it may be carried.
            self._carrier.refuse(self.source)
            self.source.reset()
            yield from self._retract()
            why = HandoffReport(FALLBACK, f"the source failed: {error}")
            yield from self._target.go_on(self._carrier.reread(self.target, self.prompt.tokens, why))
            return
        if escalated:
            yield from self._hand_over()
            return
        if writing.drafted:
            yield from writing.commit(writing.drafted)
        logits = self._following
        while writing.finish is None:
            logits = self.source.read(self._target.written) if logits is None else logits
            yield from writing.commit([writing.choose(logits)])
            logits = None

    @property
    def _carrier(self) -> Carrier:
        return self.parts.carrier

    def _decide(self) -> Generator[Event, None, bool]:
        """Read the prompt with the source, draft while the policy cannot tell, and say what it decides."""
        writing, prompt = self.writing, list(self.prompt.tokens)
        if len(prompt) + writing.params.max_new_tokens > self.source.model.geometry.max_positions:
            return True
        if self._carrier.states is not None:
            self._carrier.states.resume(ExactKey.of(self.source.model), prompt, self.source)
        logits = self._carrier.read(self.source, prompt)
        self._note("source")
        progress = Progress(len(prompt), logits, self.prompt.text, self.task)
        decision = self.parts.policy.decide(progress)
        while decision is None and writing.may_draft:
            if writing.drafted:
                logits = self.source.read([*prompt, *writing.drafted])
            token = draw(writing.distribution(logits, writing.drafted), writing.generator)
            progress.tokens.append(token)
            progress.log_probabilities.append(float(logits.float().log_softmax(dim=-1)[token]))
            yield writing.draft(token)
            self._drafted += 1
            progress.finished = not writing.may_draft
            decision = self.parts.policy.decide(progress)
        self._following = None if writing.drafted else logits
        return bool(decision)

    def _hand_over(self) -> Iterator[Event]:
        """Give the conversation, and the draft that is kept, to the target, which ends the answer."""
        writing = self.writing
        # A draft that has ended leaves nothing to go on from, and exact text is the target's from its first token on.
        keeps = self.parts.draft == "keep" and not self._target.mode.exact
        kept = writing.drafted if keeps and writing.may_draft else []
        if kept:
            self._kept = len(kept)
            yield from writing.commit(kept)
        else:
            yield from self._retract()
        scaffold = self.prompt.scaffold
        yield from self._target.take_over(scaffold + self._kept if scaffold else 1)

    def _retract(self) -> Iterator[Event]:
        yield from (event for event in self.writing.commit([]) if event.tokens)

    def _keep(self) -> None:
        """Leave what both models hold to later requests."""
        carrier = self._carrier
        if carrier.states is None:
            return
        carrier.states.keep(ExactKey.of(self.source.model), self.source)
        if not self.target.approximate:
            carrier.states.keep(ExactKey.of(self.target.model), self.target)
        elif carrier.key is not None:
            carrier.states.keep(carrier.key, self.target)
