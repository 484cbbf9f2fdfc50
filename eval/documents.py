"""The documents that every arm is scored on.

tokens   [ 0 ………………… P−1 | P ……………… N−1 ]
           prompt            gold continuation
logits           of P−1 … N−2   predict   P … N−1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import CorpusError, UsageError
from kvbridge.eval.frame import chat_frame
from kvbridge.frame import Frame, bare
from kvbridge.plan import HandoffPlan
from kvbridge.tokens import encode


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
            ids = ids + bare(tokenizer, "\n\n" + text)
        else:
            name, ids = following, bare(tokenizer, text) if framed else encode(tokenizer, text)
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
    setting: str = "eval.documents",
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
        setting: that says how many, for messages.

    Raises:
        UsageError: a number is out of range, or a chat is impossible.
        CorpusError: too few documents are long enough.
    """
    if documents < 1 or not 2 <= prompt < tokens:
        raise UsageError(
            f"{setting}={documents}, eval.prompt={prompt}, eval.tokens={tokens}: "
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
        f"corpus {corpus.name} has {len(taken)} documents of {wanted} tokens or more; {setting}={documents}. "
        "Ask for fewer or shorter documents, or give more text."
    )
