"""Which piece of a document follows its first tokens: questions with four choices from any corpus.

document   [ 0 ……………… P−1 | P … P+15 | ………… others: 16 tokens each, from anywhere after ………… ]
             context         true
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.corpus import Corpus
from kvbridge.disk import write_whole
from kvbridge.errors import CorpusError, UsageError
from kvbridge.tokens import encode

CHOICES = 4
LENGTH = 16
# Places to cut that are tried per document, and pieces that are tried per wrong choice.
CUTS, TRIES = 8, 16


def _cut(tokenizer: PreTrainedTokenizerBase, context: list[int], piece: list[int]) -> tuple[str, str] | None:
    """Both texts, if their tokens come out again when lm-eval joins and splits them.

    It moves spaces at the end of a context to the continuation, so a context that ends in one is no place to cut.
    """
    first, second = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (context, piece))
    whole = [encode(tokenizer, text) for text in (first, first + second)]
    return (first, second) if whole == [context, context + piece] and first == first.rstrip() else None


def _question(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prompt: int, chance: random.Random
) -> dict[str, Any] | None:
    """A question about one document, if it is long enough and its text can be cut at its tokens."""
    for cut in range(prompt, min(prompt + CUTS, len(ids) - CHOICES * LENGTH + 1)):
        context = ids[:cut]
        true = _cut(tokenizer, context, ids[cut : cut + LENGTH])
        if true is None:
            continue
        starts = range(cut + LENGTH, len(ids) - LENGTH + 1)
        pieces = [true[1]]
        for start in chance.sample(starts, min(len(starts), CHOICES * TRIES)):
            other = _cut(tokenizer, context, ids[start : start + LENGTH])
            if other is not None and other[1] not in pieces:
                pieces.append(other[1])
            if len(pieces) == CHOICES:
                choices = chance.sample(pieces, CHOICES)
                return {"context": true[0], "choices": choices, "answer": choices.index(true[1])}
    return None


def questions(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, prompt: int, limit: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    """One question per document that is long enough, in file order, at most `limit`.

    Args:
        corpus: the text.
        tokenizer: the pair's.
        prompt: tokens of the context; a few more where the text cannot be cut there.
        limit: how many questions; all that there are by default.
        seed: of the wrong choices and their order.
    """
    made = 0
    bar = tqdm(corpus.in_order(), desc="continuation questions", unit="doc")
    for name, text in bar:
        ids = encode(tokenizer, text)
        question = _question(tokenizer, ids, prompt, random.Random(f"{seed}:{name}"))
        if question:
            yield {"id": name} | question
            made += 1
        if made == limit:
            return


def write_questions(path: Path, found: Iterator[dict[str, Any]]) -> None:
    """Write questions as JSON lines, all of them or nothing.

    Raises:
        CorpusError: there is none.
    """
    lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in found]
    if not lines:
        raise CorpusError(
            f"no document of the evaluation corpus has eval.prompt + {CHOICES * LENGTH} tokens, which "
            "kvbridge_continuation needs; give longer text or a smaller eval.prompt."
        )
    write_whole(path, "".join(lines))


def dataset(documents: str | None = None, **_: Any) -> dict[str, Dataset]:
    """What lm-eval loads for the task.

    Args:
        documents: the file that `write_questions` wrote, from `--metadata documents=FILE`.

    Raises:
        UsageError: there is no such file.
    """
    if documents is None or not Path(documents).is_file():
        raise UsageError(
            f"kvbridge_continuation has no questions at {documents}; a run with eval.retention.tasks="
            "[kvbridge_continuation] writes them to OUT/retention, give --metadata documents=FILE."
        )
    return {"test": Dataset.from_list([json.loads(line) for line in Path(documents).read_text().splitlines()])}
