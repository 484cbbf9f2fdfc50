"""Many turns of one conversation: each model keeps its cache, and only what it has not seen is read or mapped.

turn 1   [ prompt | answer ]                      the source reads, a hand-off maps, the target answers
turn 2   [ prompt | answer | prompt | answer ]    the source reads answer and prompt; a hand-off maps what the target
                                                  does not hold
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge.cascade.memory import Memory
from kvbridge.cascade.modes import Mode
from kvbridge.cascade.prompts import Given, Prompt, read_prompt
from kvbridge.cascade.result import Result
from kvbridge.cascade.sampling import SamplingParams
from kvbridge.cascade.turn import Parts, Turn
from kvbridge.errors import UsageError
from kvbridge.pair import ModelPair


class Session:
    """One conversation; `Cascade.session` begins it.

    Attributes:
        messages: of a chat, answers included; empty where the conversation is plain text or tokens.
        tokens: of a conversation in plain text or tokens, answers included; empty in a chat.
    """

    def __init__(self, parts: Parts) -> None:
        pair: ModelPair = parts.carrier.pair
        self._parts, self._tokenizer = parts, pair.tokenizer
        self._source, self._target = Memory(pair.source), Memory(pair.target)
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self._open = False

    def generate(self, prompt: Given, *, task: str | None = None, **asked: Any) -> Result:
        """Answer what comes next in the conversation.

        Args:
            prompt: text or token ids that follow, or the chat messages that are new.
            task: what the prompt is, for policies that ask.
            asked: fields of `SamplingParams` and of `Mode`.

        Raises:
            UsageError: the prompt is empty, chat and text are mixed, or a setting cannot work.
            CacheError: no model gives usable logits.
        """
        return self.stream(prompt, task=task, **asked).finish()

    def stream(self, prompt: Given, *, task: str | None = None, **asked: Any) -> Turn:
        """The same as events; all of them must be taken before the next prompt.

        Raises:
            UsageError: as `generate`, or the answer before is not finished.
        """
        if self._open:
            raise UsageError("the answer before is not finished; take all of its events, or begin another session.")
        params, mode = read_asked(asked)
        chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        if (chat and self.tokens) or (self.messages and not chat):
            raise UsageError("this session goes on as it began: give messages to a chat, text or tokens to a text.")
        added = [dict(part) for part in prompt if isinstance(part, Mapping)] if chat else []
        whole = read_prompt(self._tokenizer, [*self.messages, *added]) if chat else self._following(prompt)

        def finished(result: Result | None) -> None:
            self._open = False
            if result is None:
                return
            if chat:
                self.messages += [*added, {"role": "assistant", "content": result.text}]
            else:
                self.tokens = [*whole.tokens, *self._without_end(result)]

        turn = Turn(self._parts, self._source, self._target, whole, params, mode, task, finished)
        self._open = True
        return turn

    def _following(self, prompt: Given) -> Prompt:
        added = read_prompt(self._tokenizer, prompt, first=not self.tokens)
        return Prompt((*self.tokens, *added.tokens), added.text)

    def _without_end(self, result: Result) -> tuple[int, ...]:
        ended = result.finish == "stop" and result.tokens[-1] in self._tokenizer.all_special_ids
        return result.tokens[:-1] if ended else result.tokens


def read_asked(given: dict[str, Any]) -> tuple[SamplingParams, Mode]:
    """What a caller asks of an answer, from keyword arguments.

    Raises:
        UsageError: one is unknown or out of range.
    """
    sampling, mode = (tuple(part.__dataclass_fields__) for part in (SamplingParams, Mode))
    unknown = sorted(given.keys() - {*sampling, *mode})
    if unknown:
        raise UsageError(f"{unknown[0]} is no setting; expected {', '.join([*sampling, *mode])}.")
    stop = given.get("stop") or ()
    whole: dict[str, Any] = given | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    parts = ({name: whole[name] for name in names if name in whole} for names in (sampling, mode))
    return SamplingParams(**next(parts)), Mode(**next(parts))
