"""What stands around a text in a prompt: nothing for a raw document, the target's template for a chat."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kvbridge.errors import UsageError

_TEXT = "\x00text\x00"


class Frame(NamedTuple):
    """Tokens around a text: none for raw documents, those of the target's template for a chat.

    Attributes:
        before: in front of the text.
        after: between the text and the answer.
    """

    before: list[int]
    after: list[int]


def bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a piece of text that does not begin a prompt."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def user_turn(tokenizer: PreTrainedTokenizerBase, request: str, given: str, instead: str) -> Frame:
    """The frame in which a user says a text and the assistant's answer begins.

    Args:
        tokenizer: of the target.
        request: what the user says before the text.
        given: the setting that asks for a chat, for errors.
        instead: what to set it to where there is none.

    Raises:
        UsageError: the tokenizer has no chat template, or one that changes the text.
    """
    if not tokenizer.chat_template:
        raise UsageError(f"{given}: the target's tokenizer has no chat template; give {instead}.")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": request + _TEXT}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = str(rendered).partition(_TEXT)
    if not found:
        raise UsageError(f"{given}: the chat template changes the text; give {instead}.")
    return Frame(bare(tokenizer, before), bare(tokenizer, after))
