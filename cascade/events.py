"""What a stream of generated text consists of.

tokens   [ 0 … c−1 | c … d−1 | ]        new tokens, counted from the first one after the prompt
           committed  provisional

A `draft` adds provisional tokens at d. A `retract` takes back the last provisional ones, from its `start` to d. A
`commit` starts at c; provisional tokens that are left begin it, and what follows them in it is new. So whoever shows
drafts appends the text of a `draft`, removes that of a `retract` from the end, and at a `commit` replaces what is
provisional by the commit's text. Whoever wants what is certain joins the texts of the `commit` events and skips the
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvbridge.errors import UsageError

Kind = Literal["draft", "commit", "retract"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a stream.

    Attributes:
        kind: `draft`, `commit` or `retract`.
        start: place of the first of `tokens` among the new tokens.
        tokens: that are drafted, committed or taken back.
        text: that goes with them; characters that are still incomplete, or may turn out to begin a stop string, come
            with a later event.
        finish: in the last `commit` why it is the last: `stop` at an end token or a stop string, `length` at
            `max_new_tokens`.

    Raises:
        UsageError: the kind is unknown, or something other than a commit finishes.
    """

    kind: Kind
    start: int
    tokens: tuple[int, ...]
    text: str
    finish: Finish | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"an event of kind {self.kind!r}: expected {', '.join(get_args(Kind))}.")
        if self.finish is not None and self.kind != "commit":
            raise UsageError(f"a {self.kind} event with finish={self.finish!r}: only a commit can be the last event.")
