"""The documents that every arm is scored on.

tokens   [ 0 ………………… P−1 | P ……………… N−1 ]
           prompt            gold continuation
logits           of P−1 … N−2   predict   P … N−1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import encode
from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import CorpusError, UsageError
from kvbridge.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class Document:
    """One document, cut into the prompt that is handed off and the gold continuation that is scored.

    Attributes:
        name: its id in the corpus.
        prompt: tokens before the hand-off.
        gold: tokens after it.
        scaffolding: last tokens of the prompt that belong to no text but open the answer; never carried.
    """

    name: str
    prompt: Int[Tensor, "1 P"]
    gold: Int[Tensor, "1 G"]
    scaffolding: int = 0

    def plan(self, plan: HandoffPlan) -> HandoffPlan:
        """The plan with a native tail that covers the scaffolding."""
        return replace(plan, native_tail=max(plan.native_tail, self.scaffolding))


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


def _bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
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
    return Frame(_bare(tokenizer, before), _bare(tokenizer, after))


def long_enough(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, tokens: int, *, join: bool, framed: bool
) -> Iterator[tuple[str, list[int]]]:
    """Names and tokens of documents of at least `tokens` tokens, in file order.

    With `join` a shorter document is continued, after a blank line, by those that follow it in the file until the
    whole is long enough, and takes the name of the first; otherwise it is left out. Inside a frame a document does
    not begin with the tokenizer's special tokens.
    """
    name, ids = "", []
    for following, text in corpus.in_order():
        if join and ids:
            ids = ids + _bare(tokenizer, "\n\n" + text)
        else:
            name, ids = following, _bare(tokenizer, text) if framed else encode(tokenizer, text)
        if len(ids) >= tokens:
            yield name, ids
            ids = []


def take_documents(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    documents: int,
    tokens: int,
    prompt: int,
    chat: bool = False,
    join: bool = False,
) -> list[Document]:
    """The first documents in file order that are long enough, and their first tokens.

    Args:
        corpus: the text.
        tokenizer: the pair's.
        documents: how many.
        tokens: tokens taken of each, a chat's frame included.
        prompt: how many of them are the prompt.
        chat: the prompt asks, in the target's chat template, to go on with the text.
        join: continue a document that is too short with those that follow it in the corpus.

    Raises:
        UsageError: a number is out of range, or a chat is impossible.
        CorpusError: too few documents are long enough.
    """
    if documents < 1 or not 2 <= prompt < tokens:
        raise UsageError(
            f"eval.documents={documents}, eval.prompt={prompt}, eval.tokens={tokens}: "
            "expected at least one document and 2 ≤ prompt < tokens."
        )
    frame = chat_frame(tokenizer) if chat else Frame([], [])
    text = prompt - len(frame.before) - len(frame.after)
    if text < 1:
        raise UsageError(f"eval.prompt={prompt}: the chat template alone takes {prompt - text} tokens; give more.")
    wanted = text + tokens - prompt
    taken: list[Document] = []
    for name, ids in long_enough(corpus, tokenizer, wanted, join=join, framed=chat):
        whole = torch.tensor([[*frame.before, *ids[:text], *frame.after, *ids[text:wanted]]])
        taken.append(Document(name, whole[:, :prompt], whole[:, prompt:], len(frame.after)))
        if len(taken) == documents:
            return taken
    raise CorpusError(
        f"corpus {corpus.name} has {len(taken)} documents of {wanted} tokens or more; eval.documents={documents}. "
        "Ask for fewer or shorter documents, or give more text."
    )
