"""What stands around a text in a prompt: nothing for a raw document, the target's template for a chat."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kvbridge.errors import UsageError


class Frame(NamedTuple):
    """Tokens around a text: none for raw documents, those of the target's template for a chat.

    Attributes:
        before: in front of the text.
        after: between the text and the answer.
    """

    before: list[int]
    after: list[int]


REQUEST = "Go on with this text, and write nothing but its continuation:\n\n"
_TEXT = "\x00text\x00"


def bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a piece of text that does not begin a prompt."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """The frame in which a user asks the assistant to go on with a text.

    Raises:
        UsageError: the tokenizer has no chat template, or one that changes the text.
    """
    if not tokenizer.chat_template:
        raise UsageError("eval.format=chat: the target's tokenizer has no chat template; give eval.format=raw.")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": REQUEST + _TEXT}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = str(rendered).partition(_TEXT)
    if not found:
        raise UsageError("eval.format=chat: the chat template changes the text; give eval.format=raw.")
    return Frame(bare(tokenizer, before), bare(tokenizer, after))
