"""Drawing blocks: which tokens, from which documents, into which split."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvbridge.calibration import Corpus, open_corpus
from kvbridge.calibration.blocks import BlockSet
from kvbridge.calibration.draw import Draw
from kvbridge.errors import CorpusError, UsageError
from kvbridge.tokens import encode
from tiny_pair import byte_tokenizer

BLOCK = 16
DOCUMENTS = 24


def document(number: int, length: int) -> str:
    """Text that says at every fourth byte whose it is and where: `e000e001…`."""
    return "".join(f"{chr(ord('A') + number)}{at:03d}" for at in range(math.ceil(length / 4)))[:length]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents of 2½ blocks, and between them some that are too short for one."""
    path = tmp_path_factory.mktemp("blocks") / "corpus.jsonl"
    lengths = [BLOCK - 2 if number % 6 == 5 else 5 * BLOCK // 2 for number in range(DOCUMENTS)]
    path.write_text("".join(json.dumps({"text": document(at, length)}) + "\n" for at, length in enumerate(lengths)))
    return open_corpus(str(path))


def special_tokenizer(template: str, *, bos: str = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A byte tokenizer that puts special tokens around every text."""
    tokenizer = byte_tokenizer(bos_token=bos, eos_token=eos)
    added = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {bos, eos}]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=added)
    return tokenizer


def draw(
    corpus: Corpus, blocks: int, held_out: float = 0.0, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None
) -> BlockSet:
    wanted = Draw(tokens=blocks * BLOCK, block=BLOCK, held_out=held_out, seed=seed)
    return wanted.blocks(corpus, tokenizer or byte_tokenizer())


def decoded(drawn: BlockSet) -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(row.tolist()) for row in drawn.batch(list(range(len(drawn))))]


def test_one_block_per_document_before_any_gives_a_second(corpus: Corpus) -> None:
    drawn = draw(corpus, 30)
    found = decoded(drawn)
    assert [text[1:4] for text in found] == ["000"] * 20 + ["004"] * 10
    assert len({text[0] for text in found[:20]}) == len({text[0] for text in found[20:]}) + 10 == 20
    assert [text[0] for text in found[20:]] == [text[0] for text in found[:10]], "the second turn has its own order"
    assert drawn.documents == 20


def test_blocks_hold_consecutive_tokens_of_one_document(corpus: Corpus) -> None:
    whole = {text[0]: text for _, text in corpus.in_order()}
    for text in decoded(draw(corpus, 40)):
        assert len(text) == BLOCK
        assert whole[text[0]].index(text) in (0, BLOCK)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=st.integers(1, 28), held_out=st.sampled_from([0.0, 0.1, 0.25, 0.5]), seed=st.integers(0, 5))
def test_splits_have_exact_sizes_and_share_no_document(corpus: Corpus, blocks: int, held_out: float, seed: int) -> None:
    try:
        drawn = draw(corpus, blocks, held_out, seed)
    except CorpusError:
        # Chance may leave the held-out split too few long documents.
        assume(blocks <= 10)
        raise
    assert Counter(drawn.split.tolist()) == Counter({0: blocks}) + Counter({1: math.ceil(blocks * held_out)})
    owners = [
        {text[0] for text, at in zip(decoded(drawn), drawn.split, strict=True) if at == split} for split in (0, 1)
    ]
    assert not owners[0] & owners[1]
    assert drawn.documents == len(owners[0] | owners[1])


def test_tokens_are_rounded_down_to_whole_blocks(corpus: Corpus) -> None:
    drawn = Draw(3 * BLOCK + BLOCK - 1, BLOCK, held_out=0.0, seed=0).blocks(corpus, byte_tokenizer())
    assert len(drawn) == 3


def test_a_seed_gives_one_draw_and_another_seed_another(corpus: Corpus) -> None:
    first, again, other = (decoded(draw(corpus, 10, 0.2, seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_blocks_lie_on_disk_and_come_back_as_token_ids(corpus: Corpus) -> None:
    drawn = draw(corpus, 6)
    assert isinstance(drawn.tokens, np.memmap)
    assert drawn.tokens.shape == (6, BLOCK)
    batch = drawn.batch([4, 1])
    assert batch.dtype == torch.int64
    assert batch.tolist() == [drawn.tokens[4].tolist(), drawn.tokens[1].tolist()]


@pytest.mark.parametrize("eos", ["</s>", "<s>"], ids=["own-eos", "bos-is-eos"])
def test_every_block_starts_with_the_bos_token_of_a_tokenizer_that_adds_one(corpus: Corpus, eos: str) -> None:
    tokenizer = special_tokenizer("<s> $A", eos=eos)
    drawn = draw(corpus, 40, tokenizer=tokenizer)
    assert set(drawn.tokens[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert tokenizer.bos_token_id not in drawn.tokens[:, 1:]
    plain = byte_tokenizer()
    whole = {text[0]: text for _, text in corpus.in_order()}
    firsts = [plain.decode(row[1:].tolist()) for row in drawn.batch(list(range(20)))]
    assert all(whole[text[0]].startswith(text) for text in firsts)
    seconds = [plain.decode(row[1:].tolist()) for row in drawn.batch(list(range(20, 40)))]
    starts = [whole[first[0]].find(second) for first, second in zip(firsts, seconds, strict=True)]
    assert starts == [BLOCK - 1] * 20, "the second block goes on where the first ended"


def test_an_appended_eos_token_is_left_out(corpus: Corpus) -> None:
    tokenizer = special_tokenizer("<s> $A </s>")
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "ab") == [bos, *byte_tokenizer()("ab")["input_ids"]]
    drawn = draw(corpus, 40, tokenizer=tokenizer)
    assert tokenizer.eos_token_id not in drawn.tokens
    assert set(drawn.tokens[:, 0].tolist()) == {bos}


def test_refuses_too_little_text_with_the_counts(corpus: Corpus) -> None:
    sentence = (
        rf"^corpus {corpus.name} gives (\d+) fit and (\d) held-out blocks of 16 tokens; calibration\.tokens=800 needs "
        r"50 and 3\. Give more text \(a \.txt file is one document\), fewer tokens or a shorter block\.$"
    )
    with pytest.raises(CorpusError, match=sentence) as caught:
        Draw(tokens=800, block=BLOCK, held_out=0.05, seed=1).blocks(corpus, byte_tokenizer())
    counts = re.search(sentence, str(caught.value))
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 40, "every block there is was counted"


def test_refuses_documents_that_are_all_too_short(corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match=r"gives 0 fit and 0 held-out blocks of 512 tokens"):
        Draw(tokens=512, block=512, held_out=0.5, seed=0).blocks(corpus, byte_tokenizer())


@pytest.mark.parametrize("held_out", [-0.1, 1.0])
def test_refuses_an_impossible_share(held_out: float) -> None:
    with pytest.raises(UsageError, match=rf"calibration\.held_out={held_out}: expected 0, or a share from 0\.0001"):
        Draw(2 * BLOCK, BLOCK, held_out, seed=0)


@pytest.mark.parametrize(("tokens", "block"), [(15, 15), (31, 32)])
def test_refuses_blocks_that_are_too_short_or_do_not_fit(tokens: int, block: int) -> None:
    with pytest.raises(UsageError, match=rf"calibration\.tokens={tokens} with calibration\.block={block}: expected"):
        Draw(tokens, block, held_out=0.0, seed=0)
