"""Prompts as tokens: text, chat messages or ids.

chat     [ … | user's words | scaffold ]       the end of the turn and the beginning of the answer, as the template has
                                               them; after a hand-off the target always reads these itself, else its
                                               answer may never end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvbridge.errors import UsageError
from kvbridge.tokens import encode

Message = Mapping[str, str]
Given = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered.

    Attributes:
        tokens: of the whole conversation so far.
        text: the prompt, or the last message; empty where tokens were given.
        scaffold: last tokens that belong to the chat template.
    """

    tokens: tuple[int, ...]
    text: str = ""
    scaffold: int = 0


def read_prompt(tokenizer: PreTrainedTokenizerBase, given: Given, *, first: bool = True) -> Prompt:
    """Tokens of a text, of messages by the tokenizer's chat template, or of ids as they are.

    A text has the tokens that every prompt begins with where it is the first of a conversation.

    Raises:
        UsageError: it is empty or none of these, or there is no chat template for messages.
    """
    if not isinstance(given, str | Sequence):
        raise UsageError(f"the prompt is a {type(given).__name__}; give text, messages or a list of token ids.")
    if not given:
        raise UsageError("the prompt is empty; give text, messages or token ids.")
    if isinstance(given, str):
        ids = encode(tokenizer, given) if first else _plain_ids(tokenizer, given)
        return Prompt(tuple(ids), given)
    if all(isinstance(part, Mapping) for part in given):
        return _chat(tokenizer, [dict(part) for part in given if isinstance(part, Mapping)])
    ids = tuple(part for part in given if isinstance(part, int))
    if len(ids) < len(given):
        raise UsageError("the prompt is neither text, nor messages, nor whole token ids; give one of these.")
    return Prompt(ids)


def _chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Prompt:
    if tokenizer.chat_template is None:
        raise UsageError("the target's tokenizer has no chat template; give the prompt as text.")
    if any("role" not in message or "content" not in message for message in messages):
        raise UsageError("a message needs role and content, such as {'role': 'user', 'content': 'Hello'}.")
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    content = messages[-1]["content"].strip()
    end = rendered.rindex(content) + len(content) if content in rendered else 0
    # A template writes its special tokens itself.
    ids = [_plain_ids(tokenizer, text) for text in (rendered, rendered[:end])]
    common = next((at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
    return Prompt(tuple(ids[0]), content, len(ids[0]) - common)


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
