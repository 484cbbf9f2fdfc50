"""The documents that every arm is scored on.

tokens   [ 0 ………………… P−1 | P ……………… N−1 ]
           prompt            gold continuation
logits           of P−1 … N−2   predict   P … N−1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import encode
from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import CorpusError, UsageError


@dataclass(frozen=True, slots=True)
class Document:
    """One document, cut into the prompt that is handed off and the gold continuation that is scored.

    Attributes:
        name: its id in the corpus.
        prompt: tokens before the hand-off.
        gold: tokens after it.
    """

    name: str
    prompt: Int[Tensor, "1 P"]
    gold: Int[Tensor, "1 G"]


def take_documents(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, documents: int, tokens: int, prompt: int
) -> list[Document]:
    """The first documents in file order that are long enough, and their first tokens.

    Args:
        corpus: the text.
        tokenizer: the pair's.
        documents: how many.
        tokens: tokens taken of each.
        prompt: how many of them are the prompt.

    Raises:
        UsageError: a number is out of range.
        CorpusError: too few documents are long enough.
    """
    if documents < 1 or not 2 <= prompt < tokens:
        raise UsageError(
            f"eval.documents={documents}, eval.prompt={prompt}, eval.tokens={tokens}: "
            "expected at least one document and 2 ≤ prompt < tokens."
        )
    taken: list[Document] = []
    for name, text in corpus.in_order():
        ids = encode(tokenizer, text)
        if len(ids) >= tokens:
            whole = torch.tensor([ids[:tokens]])
            taken.append(Document(name, whole[:, :prompt], whole[:, prompt:]))
        if len(taken) == documents:
            return taken
    raise CorpusError(
        f"corpus {corpus.name} has {len(taken)} documents of {tokens} tokens or more; eval.documents={documents}. "
        "Ask for fewer or shorter documents, or give more text."
    )
