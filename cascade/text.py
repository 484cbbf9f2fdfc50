"""Text from tokens as they come: whole characters only, and none of a stop string."""

from __future__ import annotations

from typing import cast

import transformers
from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"


def end_tokens(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens at which a model ends a text: those of its generation config, else the tokenizer's."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(int(end) for end in listed if end is not None)


class TextStream:
    """Decodes tokens one by one; what it returns, joined, is the text of all tokens up to a stop string.

    Characters whose bytes are spread over tokens are held back until they are complete, and so is a text's end that
    may turn out to begin a stop string. Special tokens have no text.

    Attributes:
        stopped: a stop string has come; nothing is returned after it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        # Tokens of the last text that was complete, and those after it: a decoder may need what comes before.
        self._before: list[int] = []
        self._after: list[int] = []
        self._held = ""
        self.stopped = False

    def copy(self) -> TextStream:
        """A stream in the same state that goes on by itself."""
        copied = TextStream(self._tokenizer, self._stops)
        copied._before, copied._after = self._before, list(self._after)
        copied._held, copied.stopped = self._held, self.stopped
        return copied

    def push(self, token: int) -> str:
        """Text that has become certain with one more token."""
        self._after.append(token)
        added = self._added()
        if added.endswith(INCOMPLETE):
            return ""
        self._before, self._after = self._after, []
        return self._release(added)

    def flush(self) -> str:
        """Text that was held back, when no token follows."""
        released = self._release(self._added())
        held, self._held, self._after = self._held, "", []
        return released + held

    def _added(self) -> str:
        before = self._decode(self._before)
        return self._decode(self._before + self._after)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return cast(str, self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _release(self, added: str) -> str:
        """What of the held and the added text can be shown."""
        if self.stopped:
            return ""
        text = self._held + added
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        # A stop string's last character would have completed it.
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        begun = (size for size in range(min(longest, len(text)), 0, -1) if _begins(self._stops, text[-size:]))
        kept = len(text) - next(begun, 0)
        self._held = text[kept:]
        return text[:kept]


def _begins(stops: tuple[str, ...], end: str) -> bool:
    return any(stop.startswith(end) for stop in stops)
