"""Scoring on the tiny pair: what each arm must and must not reproduce, resuming, records against summaries."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor

from kvbridge.bridge import Bridge
from kvbridge.calibration import CalibrationConfig, Corpus, calibrate, open_corpus
from kvbridge.errors import CorpusError, UsageError
from kvbridge.eval import EvalConfig, build_results, evaluate, identity_gate
from kvbridge.eval.arms import Arm, Context, Reading, equal_cost_tail, read_prompt, standard_arms
from kvbridge.eval.documents import Document, take_documents
from kvbridge.eval.fidelity import METRICS, rollout_length
from kvbridge.eval.gate import CONTINUATION, CONTROLS
from kvbridge.eval.results import by_position, measure_cost, summarise_arms
from kvbridge.flops import ModelCost, handoff_flops
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.layout import BridgeMap
from kvbridge.mappers import FittedMap, Ridge
from kvbridge.mappers.identity import identity_form
from kvbridge.metrics import fidelity
from kvbridge.model import KVModel
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.rotary import RotaryCodec
from tiny_models import tiny_model
from tiny_pair import tiny_pair, write_corpus

PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
TIMES = ("seconds", "ready_seconds")
PROMPT, TOKENS, DOCUMENTS = 48, 60, 4
CONFIG = EvalConfig(documents=DOCUMENTS, tokens=TOKENS, prompt=PROMPT, rollout=8, samples=2, resamples=200)
IDENTITY = {"pair": {"source": "a"}, "plan": PLAN.to_dict(), "corpus": "b"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A pair with a map for it, and documents."""

    pair: ModelPair
    fitted: FittedMap
    documents: list[Document]
    corpus: Corpus

    @property
    def mapping(self) -> FormMap:
        return FormMap(self.fitted.forms)

    def arms(self) -> dict[str, Arm]:
        return standard_arms(self.pair, self.mapping, PLAN, PROMPT)

    def evaluate(self, partial: Path, config: EvalConfig = CONFIG, **changed: Any) -> list[Record]:
        given: dict[str, Any] = {"arms": self.arms(), "documents": self.documents, "identity": IDENTITY}
        return evaluate(self.pair, config=config, partial=partial, **(given | changed))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
        pair, mapper = tiny_pair(), Ridge(k=3, penalty=1e-3, scale="correlation")
        text = str(write_corpus(folder / "fit.jsonl", documents=50, words=14))
        sizes = CalibrationConfig(text, tokens=48 * 64, block=64, held_out=0.0)
        moments = calibrate(pair, sizes, mapper.blocks(), folder)
        assert moments is not None
        fitted = mapper.fit(moments, pair.source.geometry, pair.target.geometry)
        corpus = open_corpus(str(write_corpus(folder / "dev.jsonl", documents=8, words=14, seed=7)))
        taken = take_documents(corpus, pair.tokenizer, documents=DOCUMENTS, tokens=TOKENS, prompt=PROMPT)
        yield Bench(pair, fitted, taken, corpus)


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "documents.jsonl"


@pytest.fixture(scope="module")
def records(bench: Bench, partial: Path) -> list[Record]:
    """All arms on all documents; `partial` holds what was written on the way."""
    return bench.evaluate(partial)


def mean(records: list[Record], arm: str, metric: str) -> float:
    return float(np.mean([record[arm][metric] for record in records]))


def untimed(records: list[Record]) -> list[Record]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def test_documents_are_the_first_long_ones_cut_at_the_hand_off(bench: Bench) -> None:
    ids = {name: bench.pair.tokenizer(text)["input_ids"] for name, text in bench.corpus.in_order()}
    assert [document.name for document in bench.documents] == ["d0", "d1", "d2", "d3"]
    for document in bench.documents:
        assert document.prompt.tolist() == [ids[document.name][:PROMPT]]
        assert document.gold.tolist() == [ids[document.name][PROMPT:TOKENS]]


def test_short_documents_are_passed_over(bench: Bench) -> None:
    lengths = {name: len(bench.pair.tokenizer(text)["input_ids"]) for name, text in bench.corpus.in_order()}
    longest = max(lengths.values())
    taken = take_documents(bench.corpus, bench.pair.tokenizer, documents=1, tokens=longest, prompt=2)
    assert [document.name for document in taken] == [next(name for name, at in lengths.items() if at == longest)]


def test_refuses_too_few_long_documents_with_the_counts(bench: Bench) -> None:
    with pytest.raises(CorpusError, match=r"has 8 documents of 60 tokens or more; eval\.documents=9\. Ask for fewer"):
        take_documents(bench.corpus, bench.pair.tokenizer, documents=9, tokens=60, prompt=48)


@pytest.mark.parametrize(("documents", "tokens", "prompt"), [(0, 60, 48), (2, 48, 48), (2, 60, 1)])
def test_refuses_impossible_cuts(bench: Bench, documents: int, tokens: int, prompt: int) -> None:
    sentence = rf"^eval\.documents={documents}, eval\.prompt={prompt}, eval\.tokens={tokens}: expected at least one"
    with pytest.raises(UsageError, match=sentence):
        take_documents(bench.corpus, bench.pair.tokenizer, documents=documents, tokens=tokens, prompt=prompt)


def test_injected_equals_native(records: list[Record]) -> None:
    for record in records:
        assert max(abs(record["injected"][name]) for name in ("kl", "kl_first", "rollout_kl")) < 1e-6
        assert record["injected"]["top1"] == 1
        assert record["injected"]["nll"] == pytest.approx(record["native"]["nll"], abs=1e-4)


def test_native_has_no_distance_from_itself(records: list[Record]) -> None:
    for record in records:
        assert max(abs(record["native"][name]) for name in ("kl", "kl_first", "rollout_kl")) < 1e-6
        assert (record["native"]["top1"], record["native"]["acceptance"]) == (1, pytest.approx(1))
        assert not any(record["native"]["kl_by_position"])


def test_what_is_carried_matters(records: list[Record]) -> None:
    """The map was fitted on this kind of text: it beats every arm that lacks the prompt."""
    for arm in ("other_document", "no_context", "tail_only"):
        assert mean(records, "mapped", "kl") < 0.8 * mean(records, arm, "kl"), arm
    assert len({round(mean(records, arm, "kl"), 6) for arm in ("other_document", "no_context", "tail_only")}) == 3


def test_metrics_are_those_of_teacher_forcing(bench: Bench, records: list[Record]) -> None:
    """Without caches: one forward pass of each whole document through target and source."""
    for document, record in zip(bench.documents, records, strict=True):
        whole = torch.cat((document.prompt, document.gold), dim=1)
        with torch.no_grad():
            both = [model.model(input_ids=whole).logits for model in (bench.pair.target, bench.pair.source)]
        target, source = (logits[0, PROMPT - 1 : -1] for logits in both)
        expected = fidelity(target, source, document.gold[0])
        found = record["source"]
        assert found["kl"] == pytest.approx(expected.kl.mean().item(), abs=1e-4)
        assert found["kl_first"] == pytest.approx(expected.kl[0].item(), abs=1e-4)
        assert found["kl_by_position"] == pytest.approx(expected.kl.tolist(), abs=1e-4)
        assert found["nll"] == pytest.approx(expected.nll.mean().item(), abs=1e-4)
        assert found["acceptance"] == pytest.approx(expected.acceptance.mean().item(), abs=1e-4)
        assert found["top1"] == pytest.approx(expected.top1.mean().item())
        native = fidelity(target, target, document.gold[0]).nll.mean().item()
        assert record["native"]["nll"] == pytest.approx(native, abs=1e-4)


def test_the_rollout_is_natives_own_greedy_continuation(bench: Bench) -> None:
    native = read_prompt(bench.pair.target, bench.documents[0].prompt)
    tokens, logits = native.generate(6)
    whole = bench.documents[0].prompt
    for at in range(6):
        with torch.no_grad():
            following = bench.pair.target.model(input_ids=whole).logits[:, -1]
        torch.testing.assert_close(logits[at], following[0], rtol=0, atol=1e-4)
        whole = torch.cat((whole, following.argmax(-1, keepdim=True)), dim=1)
    assert tokens.tolist() == whole[:, PROMPT:].tolist()
    torch.testing.assert_close(native.force(tokens), logits, rtol=0, atol=1e-4)
    assert native.cache.get_seq_length() == PROMPT, "forcing and generating leave the cache as it was"


def test_other_document_carries_the_one_before(bench: Bench, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(context: Context) -> Reading:
        seen.append((context.document.prompt, context.other_prompt))
        states = bench.pair.source.content(bench.pair.source.read(context.other_prompt))
        torch.testing.assert_close(context.other_states.keys, states.keys)
        return context.native

    bench.evaluate(tmp_path / "p.jsonl", arms={"spy": spy})
    prompts = [document.prompt for document in bench.documents]
    for at, (own, other) in enumerate(seen):
        assert torch.equal(own, prompts[at])
        assert torch.equal(other, prompts[at - 1])


def test_control_arms_keep_the_prompts_own_sinks_and_tail(bench: Bench, tmp_path: Path) -> None:
    """Layer 0 depends on nothing but each token, and the plan computes it natively: it says whose token lies where."""
    seen: dict[str, list[Reading]] = {"native": [], "other_document": [], "no_context": []}

    def kept(name: str, arm: Arm) -> Arm:
        def keeping(context: Context) -> Reading:
            seen[name].append(arm(context))
            return seen[name][-1]

        return keeping

    arms = {"native": lambda context: context.native, **bench.arms()}
    bench.evaluate(tmp_path / "p.jsonl", arms={name: kept(name, arms[name]) for name in seen})
    sinks, tail = PLAN.sinks, PROMPT - PLAN.native_tail
    for at in range(DOCUMENTS):
        own, before = (seen["native"][which].cache.layers[0].keys for which in (at, at - 1))
        other, nothing = (seen[name][at].cache.layers[0].keys for name in ("other_document", "no_context"))
        expected = torch.cat((own[:, :, :sinks], before[:, :, sinks:tail], own[:, :, tail:]), dim=2)
        torch.testing.assert_close(other, expected)
        torch.testing.assert_close(nothing, torch.cat((own[:, :, :sinks], own[:, :, tail:]), dim=2))


@pytest.mark.parametrize("length", [7, 24, 48, 300])
@pytest.mark.parametrize("plan", [PLAN, HandoffPlan(0, None, 1), HandoffPlan(4, 2, 16), HandoffPlan(4, 0, 1)], ids=repr)
def test_tail_only_never_costs_more_than_the_hand_off(bench: Bench, plan: HandoffPlan, length: int) -> None:
    cost = ModelCost.of(bench.pair.target)

    def spent(at: HandoffPlan, mapping: FormMap | None) -> int:
        return sum(handoff_flops(cost, at, length, mapping).values())

    tail = equal_cost_tail(bench.pair, bench.mapping, plan, length)
    budget = spent(plan, bench.mapping)
    assert (tail.sinks, tail.native_head) == (plan.sinks, None)
    assert tail.native_tail >= plan.native_tail
    assert spent(tail, None) <= budget
    if tail.split(length).carried:
        longer = dataclasses.replace(tail, native_tail=tail.native_tail + 1)
        assert spent(longer, None) > budget, "it buys all that the budget allows"


def with_end_token(pair: ModelPair, token: int | list[int]) -> ModelPair:
    target = tiny_pair().target
    target.model.generation_config.eos_token_id = token
    return dataclasses.replace(pair, target=target)


@pytest.mark.parametrize("listed", [False, True], ids=["one-end", "several-ends"])
def test_positions_after_the_end_token_are_left_out(bench: Bench, tmp_path: Path, listed: bool) -> None:
    tokens = read_prompt(bench.pair.target, bench.documents[0].prompt).generate(8)[0][0].tolist()
    end = tokens[3]
    length = tokens.index(end) + 1
    ended = dataclasses.replace(bench, pair=with_end_token(bench.pair, [end, 1] if listed else end))
    record = ended.evaluate(tmp_path / "p.jsonl", documents=bench.documents[:2])[0]
    for name in ("native", *bench.arms()):
        assert len(record[name]["rollout_kl_by_position"]) == length
        assert record[name]["rollout_kl"] == pytest.approx(np.mean(record[name]["rollout_kl_by_position"]), abs=1e-6)
        assert len(record[name]["kl_by_position"]) == TOKENS - PROMPT
    decode = bench.pair.tokenizer.decode
    assert record["sample"]["continuations"]["native"] == decode(tokens[:length])


@pytest.mark.parametrize(
    ("tokens", "ends", "length"),
    [([5, 6, 7], set[int](), 3), ([5, 2, 7, 2], {2}, 2), ([2, 5, 6], {2, 3}, 1), ([5, 6, 3], {2, 3}, 3)],
    ids=["no-end", "first-of-two", "at-once", "at-last"],
)
def test_a_rollout_counts_up_to_its_end(tokens: list[int], ends: set[int], length: int) -> None:
    assert rollout_length(torch.tensor([tokens]), ends) == length


def test_samples_are_kept_for_the_first_documents(bench: Bench, records: list[Record]) -> None:
    assert ["sample" in record for record in records] == [True, True, False, False]
    decode = bench.pair.tokenizer.decode
    for document, record in zip(bench.documents[:2], records, strict=False):
        sample = record["sample"]
        assert sample["continuations"].keys() == {"native", *bench.arms()}
        assert sample["gold"] == decode(document.gold[0, :8].tolist())
        assert decode(document.prompt[0].tolist()).endswith(sample["prompt_end"])
        greedy = read_prompt(bench.pair.target, document.prompt).generate(8)[0][0].tolist()
        assert sample["continuations"]["native"] == sample["continuations"]["injected"] == decode(greedy)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (lambda data: data[: data.rindex(b"acceptance")], 3),
        (lambda data: data[:-1], 4),
        (lambda data: data[: data.index(b"\n") + 20], 0),
        (lambda data: data[:5], 0),
        (lambda data: b"", 0),
    ],
    ids=["mid-line", "before-newline", "first-record", "header", "empty"],
)
def test_a_killed_evaluation_goes_on_with_the_same_records(
    bench: Bench, records: list[Record], partial: Path, tmp_path: Path, cut: Callable[[bytes], bytes], kept: int
) -> None:
    left, scored = tmp_path / "documents.jsonl", []
    left.write_bytes(cut(partial.read_bytes()))

    def counted(name: str, arm: Arm) -> Arm:
        def counting(context: Context) -> Reading:
            if name == "mapped":
                scored.append(context.document.name)
            return arm(context)

        return counting

    arms = {name: counted(name, arm) for name, arm in bench.arms().items()}
    resumed = bench.evaluate(left, arms=arms)
    assert scored == [document.name for document in bench.documents[kept:]]
    assert untimed(resumed) == untimed(records)
    lines = left.read_text().splitlines()
    assert json.loads(lines[0]) == IDENTITY
    assert [json.loads(line) for line in lines[1:]] == resumed


def test_refuses_to_resume_other_settings_and_names_them(bench: Bench, tmp_path: Path) -> None:
    partial = tmp_path / "documents.jsonl"
    bench.evaluate(partial, arms={})
    before = partial.read_bytes()
    changed = IDENTITY | {"corpus": "c", "plan": HandoffPlan().to_dict()}
    with pytest.raises(UsageError, match=r"belongs to an evaluation with other settings \(corpus, plan\); use another"):
        bench.evaluate(partial, identity=changed)
    assert partial.read_bytes() == before


def test_refuses_a_single_document(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"eval\.documents=1: the other-document arm needs at least two"):
        bench.evaluate(tmp_path / "p.jsonl", documents=bench.documents[:1])


def test_refuses_prompts_of_different_lengths(bench: Bench, tmp_path: Path) -> None:
    first, second, *_ = bench.documents
    shorter = Document(second.name, second.prompt[:, 1:], second.gold)
    with pytest.raises(UsageError, match=r"prompts of 47 and 48 tokens; all documents must be handed off at one"):
        bench.evaluate(tmp_path / "p.jsonl", documents=[first, shorter])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rollout": 0}, "eval.rollout=0,"),
        ({"samples": -1}, "eval.samples=-1,"),
        ({"resamples": 99}, "eval.resamples=99:"),
    ],
    ids=str,
)
def test_refuses_impossible_settings(changed: dict[str, int], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        EvalConfig(**changed)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("role", ["source", "target"])
def test_vocabularies_may_be_padded_to_different_sizes(bench: Bench, tmp_path: Path, role: str) -> None:
    """The longer model's extra rows must not matter, even where they would be the most likely tokens."""
    shapes: dict[str, Any] = {} if role == "source" else {"layers": 4, "kv_heads": 4, "head_dim": 32}
    usual = getattr(bench.pair, role)
    longer = tiny_model(usual.geometry.model_type, vocab_size=320, **shapes)
    weights = {
        name: torch.cat((value, 40 * value[: 320 - len(value)])) if len(value) == len(bench.pair.tokenizer) else value
        for name, value in usual.model.state_dict().items()
    }
    longer.load_state_dict(weights)
    padded = dataclasses.replace(bench, pair=dataclasses.replace(bench.pair, **{role: KVModel.wrap(longer)}))
    found = padded.evaluate(tmp_path / "p.jsonl", documents=bench.documents[:2])
    expected = bench.evaluate(tmp_path / "q.jsonl", documents=bench.documents[:2])
    for ours, plain in zip(found, expected, strict=True):
        for arm in ("native", "mapped", "source", "no_context"):
            wanted = [plain[arm][name] for name in METRICS]
            assert [ours[arm][name] for name in METRICS] == pytest.approx(wanted, abs=1e-4), arm


def test_the_raw_source_cache_is_an_arm_where_shapes_are_equal(bench: Bench, tmp_path: Path) -> None:
    same = dataclasses.replace(bench.pair, target=bench.pair.source)
    exact = FormMap(tuple(identity_form(kind, same.target.geometry) for kind in KINDS))
    arms = standard_arms(same, exact, PLAN, PROMPT)
    assert "raw_source" not in bench.arms()
    found = evaluate(same, arms, bench.documents, CONFIG, partial=tmp_path / "p.jsonl", identity=IDENTITY)
    assert max(abs(record[arm]["kl"]) for record in found for arm in ("raw_source", "mapped")) < 1e-6


def test_summaries_are_means_of_the_records(bench: Bench, records: list[Record]) -> None:
    summary = summarise_arms(records, CONFIG)
    assert list(summary) == ["native", *bench.arms()]
    for arm, metrics in summary.items():
        assert metrics.keys() == {*METRICS, "gap_recovered"}
        for metric in METRICS:
            assert metrics[metric]["mean"] == pytest.approx(mean(records, arm, metric))
            assert metrics[metric]["n"] == DOCUMENTS
            assert metrics[metric]["ci95"][0] <= metrics[metric]["mean"] <= metrics[metric]["ci95"][1]
    assert summary == summarise_arms(records, CONFIG)


def test_by_position_averages_over_the_documents_that_reach_it() -> None:
    records = [
        {"mapped": {"kl_by_position": [1.0, 2.0], "rollout_kl_by_position": [1.0]}},
        {"mapped": {"kl_by_position": [3.0, 5.0], "rollout_kl_by_position": [2.0, 4.0]}},
    ]
    assert by_position(records, ["mapped"]) == {"mapped": {"kl": [2.0, 3.5], "rollout_kl": [1.5, 4.0]}}


def test_results_hold_every_record_and_are_json(bench: Bench, records: list[Record]) -> None:
    pair = bench.pair
    fit = BridgeMap(bench.fitted.forms, {"name": "ridge"}, bench.fitted.evidence())
    bridge = Bridge({"ridge": fit}, pair.identity(), pair.describe(), {"rows": 3072})
    results = build_results(pair, bridge, bench.mapping, PLAN, CONFIG, {"documents": records}, {"settings": {}})
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert [document["id"] for document in results["documents"]] == ["d0", "d1", "d2", "d3"]
    assert [sample["id"] for sample in results["samples"]] == ["d0", "d1"]
    assert results["by_position"]["mapped"]["kl"] == pytest.approx(
        np.mean([record["mapped"]["kl_by_position"] for record in records], axis=0), abs=1e-5
    )
    cost = results["cost"]
    assert cost["target_prefill_flops_share"] == pytest.approx(sum(cost["flops_share_by_part"].values()))
    assert cost["cold_ttft_s"] > cost["warm_ttft_s"] > 0


def test_a_prompt_that_is_all_tail_still_takes_time(bench: Bench, tmp_path: Path) -> None:
    """Nothing is carried, so the hand-off is the target's own prefill and its time to the first token is not zero."""
    plan = HandoffPlan(sinks=0, native_head=None, native_tail=PROMPT)
    arms = standard_arms(bench.pair, bench.mapping, plan, PROMPT)
    found = bench.evaluate(tmp_path / "p.jsonl", arms={"mapped": arms["mapped"]})
    assert mean(found, "mapped", "kl") < 1e-6
    assert all(record["seconds"]["forward"] > 0 for record in found)
    assert all(record["ready_seconds"]["mapped"] >= record["seconds"]["forward"] for record in found)
    cost = measure_cost(bench.pair, bench.mapping, plan, PROMPT, found)
    assert cost["warm_ttft_s"] > cost["seconds_by_step"]["strip"]


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("plan", [None, PLAN, HandoffPlan(0, 1, 8)], ids=repr)
def test_the_gate_passes_and_its_controls_have_power(bench: Bench, role: str, plan: HandoffPlan | None) -> None:
    ids = torch.cat((bench.documents[0].prompt, bench.documents[0].gold, bench.documents[1].prompt), dim=1)
    report = identity_gate(getattr(bench.pair, role), ids, plan)
    assert report.passed
    assert report.powerful
    assert report.controls.keys() == CONTROLS.keys()
    assert report.limit == 1e-6


class _OffByOne(RotaryCodec):
    """Puts every key one position too far."""

    def apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        return super().apply(keys, positions + 1)


def test_the_gate_fails_a_codec_that_is_off_by_one(bench: Bench) -> None:
    model, ids = bench.pair.target, torch.cat((bench.documents[0].prompt, bench.documents[1].prompt), dim=1)
    codec = _OffByOne(model.rotary.module, model.rotary.dtype, model.rotary.interleaved)
    report = identity_gate(dataclasses.replace(model, rotary=codec), ids)
    assert not report.passed
    assert report.injected > 100 * report.limit


def test_the_shifted_control_moves_positions_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must measure what an off-by-one codec would cost, not what misplaced tokens would."""
    model, ids = bench.pair.target, torch.cat((bench.documents[0].prompt, bench.documents[1].prompt), dim=1)
    codec = _OffByOne(model.rotary.module, model.rotary.dtype, model.rotary.interleaved)
    wrong = identity_gate(dataclasses.replace(model, rotary=codec), ids)
    assert identity_gate(model, ids).controls["shifted positions"] == pytest.approx(wrong.injected, rel=1e-3)


def test_the_gate_refuses_a_text_without_a_prompt(bench: Bench) -> None:
    with pytest.raises(UsageError, match=rf"{CONTINUATION + 1} tokens; the gate compares the last {CONTINUATION}"):
        identity_gate(bench.pair.target, bench.documents[0].prompt[:, : CONTINUATION + 1])


def test_the_gate_refuses_a_plan_that_carries_nothing(bench: Bench) -> None:
    ids = bench.documents[0].prompt[:, : CONTINUATION + 8]
    with pytest.raises(UsageError, match=r"leave nothing to carry .* the gate would prove nothing"):
        identity_gate(bench.pair.target, ids, HandoffPlan())


def test_continuations_are_scored_as_if_each_were_forced_alone(bench: Bench) -> None:
    reading = read_prompt(bench.pair.target, bench.documents[0].prompt)
    greedy = reading.generate(4)[0][0]
    continuations = [greedy, torch.tensor([7]), torch.tensor([9, 3, 11]), greedy[:2]]
    before = reading.cache.get_seq_length()
    scored = reading.score(continuations)
    assert reading.cache.get_seq_length() == before
    assert [is_greedy for _, is_greedy in scored] == [True, False, False, True]
    for (log_likelihood, _), tokens in zip(scored, continuations, strict=True):
        alone = reading.force(tokens[None]).log_softmax(-1).gather(-1, tokens[:, None]).sum()
        assert log_likelihood == pytest.approx(alone.item(), abs=1e-4)
