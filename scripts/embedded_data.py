"""Text of the embedded pair as tokens: the tokenizer, training batches that depend on the step only, held-out files."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvbridge.embedded.language import Document, document, recall_document, repetition_document

VOCABULARY = 2048
BOS, EOS = "<s>", "</s>"
TOKENIZER_DOCUMENTS = 8000
HELD_OUT_TOKENS = 512
IGNORED = -100


class Batch(NamedTuple):
    """Packed rows: inputs and labels `[B, T]`, the loss weight of every label `[B, T]`, and where answers stand.

    `looks [N, 3]` holds (row, position whose label belongs to an answer, position of the same token where the answer's
    text stands first).
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    looks: Tensor


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits in pairs; a call prepends the BOS token and appends nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d{1,2}| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"tokenizer:{seed}")
    texts = (_draw(rng, rng.randrange(60, 400), Mixture(0.4, 0.0)).text for _ in range(TOKENIZER_DOCUMENTS))
    tokenizer.train_from_iterator(texts, trainer, length=TOKENIZER_DOCUMENTS)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS, model_max_length=1024
    )


class Mixture(NamedTuple):
    """Shares of training documents that are dense recall practice and plain repetition; the rest are chronicles."""

    recall: float
    repetition: float


def _draw(rng: random.Random, tokens: int, mixture: Mixture) -> Document:
    drawn = rng.random()
    if drawn < mixture.recall:
        return recall_document(rng, tokens)
    return repetition_document(rng, tokens) if drawn < mixture.recall + mixture.repetition else document(rng, tokens)


def _row_documents(rng: random.Random, length: int, mixture: Mixture) -> list[Document]:
    """Documents that together fill a row of `length` tokens."""
    documents, room = [], length
    while room > 0:
        tokens = room if room < 60 or rng.random() < 0.6 else rng.randrange(40, room)
        documents.append(_draw(rng, max(tokens, 30), mixture))
        room -= tokens + 2
    return documents


def batch(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    step: int,
    rows: int,
    length: int,
    mixture: Mixture,
    answer_weight: float,
) -> Batch:
    """The training batch of a step, a function of its arguments only.

    Args:
        tokenizer: the pair's tokenizer.
        seed, step: name the random stream.
        rows, length: B and T.
        mixture: shares of the kinds of documents.
        answer_weight: loss weight of tokens that answer a question, against 1 for all others.
    """
    rng = random.Random(f"train:{seed}:{step}")
    per_row = [_row_documents(rng, length + 1, mixture) for _ in range(rows)]
    flat = [doc for docs in per_row for doc in docs]
    encodings = iter(tokenizer.backend_tokenizer.encode_batch([doc.text for doc in flat]))
    ids = torch.full((rows, length + 1), tokenizer.eos_token_id)
    weights = torch.ones(rows, length + 1)
    looks: list[tuple[int, int, int]] = []
    for row, docs in enumerate(per_row):
        row_ids: list[int] = []
        row_weights: list[float] = []
        for doc, encoding in zip(docs, encodings, strict=False):
            start = len(row_ids)
            looks += [(row, start + at - 1, start + said) for at, said in _looks(doc, encoding.offsets)]
            row_ids += [*encoding.ids, tokenizer.eos_token_id]
            row_weights += [*_weights(doc, encoding.offsets, answer_weight), 1.0]
        count = min(len(row_ids), length + 1)
        ids[row, :count] = torch.tensor(row_ids[:count])
        weights[row, :count] = torch.tensor(row_weights[:count])
        weights[row, count:] = 0.0
    within = torch.tensor([look for look in looks if look[1] < length]).view(-1, 3)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous(), within)


def _weights(doc: Document, offsets: list[tuple[int, int]], answer_weight: float) -> list[float]:
    """Loss weight per token: `answer_weight` inside the document's answer spans."""
    inside = [False] * (len(doc.text) + 1)
    for start, end in doc.answers:
        inside[start:end] = [True] * (end - start)
    return [answer_weight if end > start and inside[start] else 1.0 for start, end in offsets]


def _looks(doc: Document, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(token of an answer, the token of its first mention) for every answer that the document states before."""

    def tokens(start: int, end: int) -> list[int]:
        return [at for at, (begin, stop) in enumerate(offsets) if stop > begin and start <= begin and stop <= end]

    pairs: list[tuple[int, int]] = []
    for start, end in doc.answers:
        said = doc.text.find(doc.text[start:end])
        if said < start:
            answer, first = tokens(start, end), tokens(said, said + end - start)
            pairs += zip(answer, first, strict=True) if len(answer) == len(first) else ()
    return pairs


def held_out_documents(
    tokenizer: PreTrainedTokenizerFast, split: str, seed: int, count: int
) -> Iterator[dict[str, str]]:
    """`count` chronicles of at least `HELD_OUT_TOKENS` tokens from a random stream that training never draws from."""
    rng = random.Random(f"{split}:{seed}")
    for index in range(count):
        text = ""
        while len(tokenizer(text).input_ids) < HELD_OUT_TOKENS:
            doc = document(rng, rng.randrange(HELD_OUT_TOKENS + 10, HELD_OUT_TOKENS + 160))
            text = doc.text
        yield {"id": f"{split}-{index:04d}", "kind": doc.kind, "text": text}


def write_jsonl(path: Path, records: Iterator[dict[str, str]]) -> None:
    """Gzipped JSON lines with a fixed header, so that equal records give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(body, mtime=0))


def read_texts(path: Path) -> list[str]:
    """The texts of a gzipped JSON-lines file."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line)["text"] for line in lines]
