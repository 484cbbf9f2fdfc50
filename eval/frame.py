"""The chat in which a document is scored: a user asks the assistant to go on with it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kvbridge.frame import Frame, user_turn

REQUEST = "Go on with this text, and write nothing but its continuation:\n\n"


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """The frame in which a user asks the assistant to go on with a text.

    Raises:
        UsageError: the tokenizer has no chat template, or one that changes the text.
    """
    return user_turn(tokenizer, REQUEST, "eval.format=chat", "eval.format=raw")
