"""Beyond one raw document at one length: chats, joined documents, other prompt lengths, several hand-offs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from kvbridge.calibration import Corpus, open_corpus
from kvbridge.errors import CorpusError, PlanError, UsageError
from kvbridge.eval import EvalConfig
from kvbridge.eval.arms import standard_arms
from kvbridge.eval.course_report import length_section, turn_section
from kvbridge.eval.documents import Document, take_documents
from kvbridge.eval.fidelity import evaluate
from kvbridge.eval.frame import REQUEST, chat_frame
from kvbridge.eval.lengths import evaluate_lengths
from kvbridge.eval.results import summarise_arms
from kvbridge.eval.suite import Subject, Task, measure, prepare
from kvbridge.eval.turns import TurnsConfig, evaluate_turns, summarise_turns
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from tiny_bridge import random_bridge
from tiny_pair import tiny_pair, write_corpus

PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
TURNS = TurnsConfig(count=3, documents=2, prompt=20, gold=6)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def twins(pair: ModelPair) -> ModelPair:
    """The source as its own target, so that a map that copies is a perfect one."""
    return dataclasses.replace(pair, target=pair.source)


def copying(pair: ModelPair) -> FormMap:
    return FormMap(tuple(identity_form(kind, pair.target.geometry) for kind in KINDS))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
        yield open_corpus(str(write_corpus(folder / "dev.jsonl", documents=8, words=18, seed=7)))


def ids_of(pair: ModelPair, text: str) -> list[int]:
    return pair.tokenizer(text, add_special_tokens=False)["input_ids"]


class TestDocuments:
    def test_a_chat_frames_the_text_and_ends_in_scaffolding(
        self, pair: ModelPair, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pair.tokenizer, "chat_template", TEMPLATE)
        text = dict(corpus.in_order())["d0"]
        before, after = ids_of(pair, f"<user>{REQUEST}"), ids_of(pair, "<end><answer>")
        prompt = len(before) + 30 + len(after)
        taken = take_documents(corpus, pair.tokenizer, documents=2, tokens=prompt + 8, prompt=prompt, chat=True)
        words = ids_of(pair, text)
        assert taken[0].prompt.tolist() == [[*before, *words[:30], *after]]
        assert taken[0].gold.tolist() == [words[30:38]]
        assert taken[0].scaffolding == len(after)
        assert taken[0].plan(PLAN) == dataclasses.replace(PLAN, native_tail=len(after))
        wide = HandoffPlan(native_tail=100)
        assert taken[0].plan(wide) == wide

    def test_refuses_a_chat_without_template_or_room(
        self, pair: ModelPair, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(UsageError, match=r"has no chat template; give eval\.format=raw"):
            chat_frame(pair.tokenizer)
        monkeypatch.setattr(pair.tokenizer, "chat_template", TEMPLATE)
        with pytest.raises(UsageError, match="the chat template alone takes"):
            take_documents(corpus, pair.tokenizer, documents=1, tokens=40, prompt=20, chat=True)
        monkeypatch.setattr(pair.tokenizer, "chat_template", "{{ messages[0].content | upper }}")
        with pytest.raises(UsageError, match="changes the text"):
            chat_frame(pair.tokenizer)

    def test_short_documents_are_joined_with_those_that_follow(self, pair: ModelPair, corpus: Corpus) -> None:
        texts = list(corpus.in_order())
        first = ids_of(pair, texts[0][1])
        joined = [*first, *ids_of(pair, "\n\n" + texts[1][1])]
        tokens = len(first) + 10
        taken = take_documents(corpus, pair.tokenizer, documents=2, tokens=tokens, prompt=10, join=True)
        assert [document.name for document in taken] == ["d0", "d2"]
        assert torch.cat((taken[0].prompt, taken[0].gold), dim=1).tolist() == [joined[:tokens]]
        with pytest.raises(CorpusError, match="Ask for fewer or shorter"):
            take_documents(corpus, pair.tokenizer, documents=2, tokens=tokens * 9, prompt=10, join=True)


class TestTurns:
    @pytest.fixture
    def documents(self, pair: ModelPair, corpus: Corpus) -> list[Document]:
        return take_documents(
            corpus, pair.tokenizer, documents=2, tokens=TURNS.tokens, prompt=TURNS.tokens - TURNS.gold
        )

    def run(self, pair: ModelPair, mapping: FormMap, documents: list[Document], path: Path) -> list[dict[str, Any]]:
        return evaluate_turns(pair, mapping, PLAN, documents, TURNS, partial=path, identity={"of": "test"})

    def test_a_perfect_map_never_drifts(self, twins: ModelPair, documents: list[Document], tmp_path: Path) -> None:
        records = self.run(twins, copying(twins), documents, tmp_path / "turns.jsonl")
        assert [len(record["turns"]) for record in records] == [3, 3]
        for turn in (turn for record in records for turn in record["turns"]):
            assert turn.pop("no_context")["kl"] > 1e-3
            for scores in turn.values():
                assert scores["kl"] == pytest.approx(0, abs=1e-6)
                assert scores["top1"] == 1

    def test_the_target_goes_on_from_its_own_cache(
        self, pair: ModelPair, documents: list[Document], tmp_path: Path
    ) -> None:
        mapping = FormMap.of(random_bridge(pair))
        records = self.run(pair, mapping, documents, tmp_path / "turns.jsonl")
        for record in records:
            first, *later = record["turns"]
            # Nothing was held before the first hand-off.
            assert first["carried_on"] == pytest.approx(first["carried_anew"])
            assert all(turn["carried_on"]["kl"] != pytest.approx(turn["carried_anew"]["kl"]) for turn in later)

    def test_goes_on_after_a_kill(self, pair: ModelPair, documents: list[Document], tmp_path: Path) -> None:
        mapping, path = FormMap.of(random_bridge(pair)), tmp_path / "turns.jsonl"
        records = self.run(pair, mapping, documents, path)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
        assert self.run(pair, mapping, documents, path) == records

    def test_summary_has_every_turn_of_every_arm(
        self, pair: ModelPair, documents: list[Document], tmp_path: Path
    ) -> None:
        records = self.run(pair, FormMap.of(random_bridge(pair)), documents, tmp_path / "turns.jsonl")
        summary = summarise_turns(records, TURNS, resamples=100, seed=0)
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        second = [record["turns"][1]["source"]["kl"] for record in records]
        assert summary["arms"]["source"]["kl"][1]["mean"] == pytest.approx(sum(second) / 2)
        section = turn_section({"turns": summary})
        assert section is not None
        assert [row[0] for row in section["rows"]] == [1, 2, 3]
        assert section["figure"].startswith("<svg")

    @pytest.mark.parametrize("changed", [{"count": 1}, {"count": -1}, {"gold": 0}, {"prompt": 0}, {"documents": 0}])
    def test_refuses_impossible_conversations(self, changed: dict[str, int]) -> None:
        with pytest.raises(UsageError, match="expected a count of 0 or at least 2"):
            TurnsConfig(**changed)


class TestLengths:
    def test_the_main_length_gives_the_main_figures(self, pair: ModelPair, corpus: Corpus, tmp_path: Path) -> None:
        mapping, config = FormMap.of(random_bridge(pair)), EvalConfig(documents=2, rollout=4, resamples=100)
        taken = {
            length: take_documents(corpus, pair.tokenizer, documents=2, tokens=length + 6, prompt=length)
            for length in (40, 20)
        }
        found = evaluate_lengths(pair, mapping, PLAN, taken, config, folder=tmp_path, identity={"of": "test"})
        assert list(found) == ["20", "40"]
        arms = standard_arms(pair, mapping, PLAN, 40)
        records = evaluate(pair, arms, taken[40], config, partial=tmp_path / "main.jsonl", identity={})
        main = summarise_arms(records, config)
        for arm, metrics in found["40"]["arms"].items():
            assert metrics["kl"]["mean"] == pytest.approx(main[arm]["kl"]["mean"])
        cost = {"target_prefill_flops_share": found["40"]["share"], "equal_cost_tail": 5, "prompt_tokens": 40}
        section = length_section({"arms": main, "cost": cost, "by_length": {"20": found["20"]}})
        assert section is not None
        assert [row[0] for row in section["rows"]] == [20, 40]

    def test_lengths_of_a_chat_are_chats(
        self, pair: ModelPair, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pair.tokenizer, "chat_template", TEMPLATE)
        config = EvalConfig(documents=2, tokens=112, prompt=104, format="chat", lengths=[96])
        prepared = prepare(Task(pair, PLAN, config, corpus, tmp_path))
        framed = prepared["by_length"][96][0]
        assert framed.scaffolding == prepared["documents"][0].scaffolding > 0
        assert framed.prompt[0, : len(chat_frame(pair.tokenizer).before)].tolist() == chat_frame(pair.tokenizer).before

    @pytest.mark.parametrize("lengths", [[1], [8, 8]])
    def test_refuses_lengths_that_are_none(self, lengths: list[int]) -> None:
        with pytest.raises(UsageError, match="expected prompt lengths of 2 tokens or more"):
            EvalConfig(lengths=lengths)


class TestSuite:
    def task(self, pair: ModelPair, corpus: Corpus, folder: Path, **changed: Any) -> Task:
        usual: dict[str, Any] = {"documents": 2, "tokens": 60, "prompt": 50, "rollout": 4, "resamples": 100}
        return Task(pair, PLAN, EvalConfig(**(usual | changed)), corpus, folder)

    def test_measures_what_is_asked_for_and_nothing_else(self, pair: ModelPair, corpus: Corpus, tmp_path: Path) -> None:
        task, bridge = self.task(pair, corpus, tmp_path, lengths=[20], turns=TURNS), random_bridge(pair)
        seconds: dict[str, float] = {}
        measured = measure(Subject(task, bridge, FormMap.of(bridge)), prepare(task), seconds)
        assert {name for name, value in measured.items() if value is not None} == {"documents", "by_length", "turns"}
        assert set(seconds) == {"documents", "by_length", "turns"}
        assert list(measured) == ["documents", "by_length", "probes", "turns", "retention"]

    def test_mistakes_are_told_before_anything_is_measured(
        self, pair: ModelPair, corpus: Corpus, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=r"eval\.lengths=5: sinks and tail of 2 and 4 tokens leave nothing"):
            prepare(self.task(pair, corpus, tmp_path, lengths=[5]))
        with pytest.raises(UsageError, match="has no chat template"):
            prepare(self.task(pair, corpus, tmp_path, format="chat"))
        with pytest.raises(UsageError, match=r"eval\.turns, all turns together"):
            prepare(self.task(pair, corpus, tmp_path, turns=TurnsConfig(count=9, prompt=10_000)))
        with pytest.raises(
            UsageError, match=r"eval\.turns\.prompt=4: sinks and tail of 2 and 4 tokens leave nothing of a"
        ):
            prepare(self.task(pair, corpus, tmp_path, turns=TurnsConfig(count=2, prompt=4, gold=6)))
        with pytest.raises(PlanError):
            Task.of(pair, HandoffPlan(native_head=3), EvalConfig(), tmp_path)
