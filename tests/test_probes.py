"""Questions about the context: exact layouts, scores that agree with scoring by hand, resuming, results and report."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvbridge.errors import UsageError
from kvbridge.eval import EvalConfig, ProbesConfig, ask_probes, build_probes, summarise_probes
from kvbridge.eval.arms import read_context, read_prompt, standard_arms
from kvbridge.eval.documents import Document
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.probe_results import ARMS, COMPARED, SCORES, score_probe
from kvbridge.eval.probe_tasks import LANGUAGES, TASKS
from kvbridge.eval.probes import Probe, following
from kvbridge.eval.report import reproduce, write_report
from kvbridge.eval.verdict import verdict
from kvbridge.forms import KINDS
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from test_report import results
from tiny_bridge import random_bridge
from tiny_pair import byte_tokenizer, tiny_pair

PLAN = HandoffPlan(sinks=4, native_head=0, native_tail=16)
WIDE = HandoffPlan(sinks=20, native_head=None, native_tail=120)
SMALL = ProbesConfig(count=1, tasks=["passkey", "counting"], lengths=[320, 360], depths=[0.0, 1.0])
IDENTITY = {"pair": "a", "probes": "b"}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def mapping(pair: ModelPair) -> FormMap:
    torch.manual_seed(0)
    return FormMap.of(random_bridge(pair))


@pytest.fixture(scope="module")
def probes(pair: ModelPair) -> list[Probe]:
    return build_probes(pair, PLAN, SMALL)


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "probes.partial.jsonl"


@pytest.fixture(scope="module")
def records(pair: ModelPair, mapping: FormMap, probes: list[Probe], partial: Path) -> list[dict[str, Any]]:
    """All probes asked; `partial` holds what was written on the way."""
    return ask_probes(pair, mapping, PLAN, probes, partial=partial, identity=IDENTITY)


def text(pair: ModelPair, tokens: torch.Tensor) -> str:
    return str(pair.tokenizer.decode(tokens.tolist()))


# Questions


@pytest.mark.parametrize(("language", "task"), [*product(LANGUAGES, TASKS)])
def test_a_question_is_seeded_and_answered_by_one_of_four_choices(language: str, task: str) -> None:
    draw = LANGUAGES[language].tasks[task]
    for seed in range(50):
        question = draw(random.Random(seed))
        assert question == draw(random.Random(seed))
        assert question.answer in question.choices
        assert len(set(question.choices)) == len(question.choices) == 4
        assert all(fact.endswith(".") for fact in question.facts)
        assert 0 <= question.asked < len(question.facts)
    assert draw(random.Random(0)) != draw(random.Random(1))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", ["passkey", "needles", "pairs", "variables"])
def test_the_answer_stands_in_the_context(language: str, task: str) -> None:
    for seed in range(20):
        question = LANGUAGES[language].tasks[task](random.Random(seed))
        assert re.search(rf"\b{question.answer}\b", " ".join(question.facts))
        if task in ("passkey", "needles"):
            assert question.answer in question.facts[question.asked]


@pytest.mark.parametrize("task", ["needles", "pairs", "variables"])
def test_wrong_choices_stand_in_the_context_too(task: str) -> None:
    question = LANGUAGES["plain"].tasks[task](random.Random(3))
    assert all(re.search(rf"\b{choice}\b", " ".join(question.facts)) for choice in question.choices)


def test_plain_answers_follow_from_the_facts() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        question = LANGUAGES["plain"].tasks["variables"](rng)
        held: dict[str, str] = {}
        for name, value in re.findall(r"Set (\w+) to (\w+)\.", question.facts[0]):
            held[name] = held.get(value, value)
            assert held[name].isdigit(), "nothing is read before it is set"
        name = question.text.rsplit(" ", 2)[1]
        assert held[name] == question.answer
        assert f"Set {name} to {question.answer}." not in question.facts[0], "it takes a hop"
        counted = LANGUAGES["plain"].tasks["counting"](rng)
        word = re.search(r"name (\w+)\?", counted.text)
        assert word
        assert len(re.findall(rf"\b{word[1]}\b", counted.facts[0])) == int(counted.answer)


def test_plain_filler_holds_no_number() -> None:
    sentences = list(islice(LANGUAGES["plain"].filler(random.Random(0)), 500))
    assert not re.search(r"\d|Set |\bcode|\blist|pass key", " ".join(sentences))
    assert all(re.fullmatch(r"[A-Z][^.]+\.", sentence) for sentence in sentences)
    assert len(set(sentences)) > 400


# Layout


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("plan", [PLAN, WIDE, HandoffPlan(0, None, 1)], ids=repr)
def test_prompts_have_the_wanted_length_and_carry_every_fact(pair: ModelPair, language: str, plan: HandoffPlan) -> None:
    config = ProbesConfig(count=3, lengths=[480, 500], depths=[0.0, 0.3, 1.0], language=language)
    built = build_probes(pair, plan, config)
    assert len(built) == 3 * len(TASKS) * 2 * 3
    assert [probe.length for probe in built] == sorted(probe.length for probe in built)
    for probe in built:
        assert probe.prompt.shape == probe.other.shape == (1, probe.length)
        split = probe.plan(plan).split(probe.length)
        carried = text(pair, probe.prompt[0, split.carried_start : split.carried_stop])
        assert all(f" {fact}" in carried for fact in probe.question.facts)
        assert text(pair, probe.prompt[0, -probe.asked_tokens :]) == f" {probe.question.text}"
        assert split.prompt_length - split.carried_stop == max(plan.native_tail, probe.asked_tokens)
        choices = [text(pair, choice) for choice in probe.choices]
        assert choices == [f" {choice}" for choice in probe.question.choices]
        assert choices[probe.right] == f" {probe.question.answer}"
        assert not any(fact in text(pair, probe.other[0]) for fact in probe.question.facts)


def test_the_fact_lies_where_the_depth_says(pair: ModelPair) -> None:
    built = build_probes(pair, PLAN, ProbesConfig(count=4, tasks=["passkey"], lengths=[500], depths=[0.0, 0.5, 1.0]))
    places = {depth: list[float]() for depth in (0.0, 0.5, 1.0)}
    for probe in built:
        whole = text(pair, probe.prompt[0])
        room = len(whole) - len(probe.question.facts[0]) - len(probe.question.text)
        places[probe.depth].append(whole.index(probe.question.facts[0]) / room)
    for depth, found in places.items():
        assert all(abs(place - depth) < 0.2 for place in found), (depth, found)
    assert max(places[0.0]) < min(places[0.5])
    assert max(places[0.5]) < min(places[1.0])


def test_probes_are_seeded_and_do_not_depend_on_what_else_is_asked(pair: ModelPair) -> None:
    both, again, other = (build_probes(pair, PLAN, dataclasses.replace(SMALL, seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a.prompt, b.prompt) for a, b in zip(both, again, strict=True))
    assert not any(torch.equal(a.prompt, b.prompt) for a, b in zip(both, other, strict=True))
    (alone, *_) = build_probes(pair, PLAN, dataclasses.replace(SMALL, tasks=["counting"], lengths=[360]))
    assert any(torch.equal(alone.prompt, probe.prompt) for probe in both)
    assert len({text(pair, probe.prompt[0]) for probe in both}) == len(both)


def test_a_beginning_of_sequence_token_stays_first(pair: ModelPair) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begun = dataclasses.replace(pair, tokenizer=tokenizer)
    for probe in build_probes(begun, PLAN, SMALL):
        for prompt in (probe.prompt, probe.other):
            assert prompt.shape == (1, probe.length)
            assert (prompt[0] == 0).nonzero().tolist() == [[0]]
        assert not any((choice == 0).any() for choice in probe.choices)


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    vocabulary = {token: at for at, token in enumerate(("a", " ", "b", "a ", "a b"))}
    joining = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", " "), ("a ", "b")]))
    )
    with pytest.raises(UsageError, match=r"one token across the space in 'a' . ' b', so the probes cannot"):
        following(joining, "a", "b")


def test_refuses_lengths_that_do_not_fit(pair: ModelPair) -> None:
    with pytest.raises(UsageError, match=r"^eval\.probes\.lengths=64 is too short for 'What is the pass key\?.*; give"):
        build_probes(pair, PLAN, dataclasses.replace(SMALL, lengths=[64]))
    with pytest.raises(UsageError, match=r"^eval\.probes\.lengths=99999: this pair was made for up to 512 tokens"):
        build_probes(pair, PLAN, dataclasses.replace(SMALL, lengths=[99999]))
    with pytest.raises(UsageError, match=r"^eval\.probes\.lengths with an answer=517: this pair was made for up to"):
        build_probes(pair, PLAN, dataclasses.replace(SMALL, lengths=[512]))
    assert build_probes(pair, PLAN, dataclasses.replace(SMALL, lengths=[64], count=0)) == []


# Scores


def test_forced_choice_and_generation_agree_with_scoring_by_hand(pair: ModelPair, probes: list[Probe]) -> None:
    for probe in probes:
        reading = read_prompt(pair.target, probe.prompt)
        likelihoods = []
        for choice in probe.choices:
            whole = torch.cat((probe.prompt[0], choice))[None]
            with torch.no_grad():
                logits = pair.target.model(input_ids=whole).logits[0, probe.length - 1 : -1]
            likelihoods.append(logits.log_softmax(-1).gather(-1, choice[:, None]).sum().item())
        greedy = text(pair, reading.generate(len(probe.choices[probe.right]))[0][0]).strip()
        expected = {"choice": int(max(likelihoods) == likelihoods[probe.right])}
        expected["generated"] = int(greedy == probe.question.answer)
        assert score_probe(pair, probe, reading, len(pair.tokenizer)) == expected


def test_what_is_generated_counts_as_the_answer(pair: ModelPair, probes: list[Probe]) -> None:
    """With the answer that the model gives anyway, both scores are 1."""
    reading = read_prompt(pair.target, probes[0].prompt)
    likely = reading.generate(5, len(pair.tokenizer))[0][0]
    said = text(pair, likely).strip()
    question = probes[0].question._replace(answer=said, choices=(said, "b"))
    right = dataclasses.replace(probes[0], question=question, choices=(likely, torch.tensor([5] * 5)))
    assert score_probe(pair, right, reading, len(pair.tokenizer)) == {"choice": 1, "generated": 1}


def test_records_name_their_cell_and_score_every_arm(records: list[dict[str, Any]], probes: list[Probe]) -> None:
    cells = [(record["task"], record["length"], record["depth"]) for record in records]
    assert cells == [(probe.task, probe.length, probe.depth) for probe in probes]
    for record in records:
        assert tuple(record["arms"]) == ARMS
        assert all(set(scores) == set(SCORES) and set(scores.values()) <= {0, 1} for scores in record["arms"].values())


def test_carrying_the_native_states_answers_like_native(pair: ModelPair, tmp_path: Path) -> None:
    same = dataclasses.replace(pair, source=pair.target)
    exact = FormMap(tuple(identity_form(kind, same.target.geometry) for kind in KINDS))
    built = build_probes(same, PLAN, dataclasses.replace(SMALL, lengths=[320]))
    found = ask_probes(same, exact, PLAN, built, partial=tmp_path / "p.jsonl", identity=IDENTITY)
    assert [record["arms"]["mapped"] for record in found] == [record["arms"]["native"] for record in found]
    document = Document("", built[0].prompt, built[0].choices[0][None])
    context = read_context(same, document, built[0].other)
    arms = standard_arms(same, exact, built[0].plan(PLAN), built[0].length)
    native, mapped, nothing = (
        torch.tensor([likelihood for likelihood, _ in reading.score(built[0].choices)])
        for reading in (context.native, arms["mapped"](context), arms["no_context"](context))
    )
    torch.testing.assert_close(mapped, native, rtol=0, atol=1e-3)
    assert (nothing - native).abs().min() > 0.1


@pytest.mark.parametrize(
    ("cut", "kept"),
    [(lambda data: data[: data.rindex(b"task")], 7), (lambda data: data[:-1], 8), (lambda data: data[:5], 0)],
    ids=["mid-line", "before-newline", "header"],
)
def test_killed_probes_go_on_with_the_same_records(
    pair: ModelPair,
    mapping: FormMap,
    probes: list[Probe],
    records: list[dict[str, Any]],
    partial: Path,
    tmp_path: Path,
    cut: Callable[[bytes], bytes],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[HandoffPlan, int]] = []
    monkeypatch.setattr(
        "kvbridge.eval.probe_results.standard_arms", lambda *given: made.append(given[2:]) or standard_arms(*given)
    )
    left = tmp_path / "probes.partial.jsonl"
    left.write_bytes(cut(partial.read_bytes()))
    before = len(PartialResults(left, IDENTITY).load())
    assert before == kept
    resumed = ask_probes(pair, mapping, PLAN, probes, partial=left, identity=IDENTITY)
    assert resumed == records
    # Arms depend on length and tail alone, and are made once for each.
    assert len(made) == len(set(made))
    assert left.read_bytes() == partial.read_bytes()


def test_refuses_to_resume_other_probes(
    pair: ModelPair, mapping: FormMap, probes: list[Probe], records: list[dict[str, Any]], partial: Path
) -> None:
    with pytest.raises(UsageError, match=r"belongs to an evaluation with other settings \(probes\); use another out="):
        ask_probes(pair, mapping, PLAN, probes, partial=partial, identity=IDENTITY | {"probes": "c"})


# Summary and report


def asked(mapped: float = 0.7, source: float = 0.5) -> dict[str, Any]:
    """A summary in which arms answer these shares of 400 probes."""
    shares = dict.fromkeys(ARMS, 0.25) | {"native": 1.0, "mapped": mapped, "source": source}
    records = [
        {"task": task, "length": length, "depth": depth}
        | {"arms": {arm: dict.fromkeys(SCORES, int((7 * at) % 20 < 20 * share)) for arm, share in shares.items()}}
        for task, length, depth in product(("passkey", "pairs"), (128, 256), (0.0, 0.5, 1.0))
        for at in range(20)
    ]
    return summarise_probes(records, EvalConfig(probes=ProbesConfig(count=20, lengths=[128, 256]), resamples=200))


def test_summaries_are_means_over_probes() -> None:
    found = asked()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["arms"]["mapped"]["choice"]["mean"] == pytest.approx(0.7)
    assert found["arms"]["mapped"]["choice"]["n"] == 240
    assert [(len(found[name]), found[name][0]["arms"]["source"]["choice"]["n"]) for name in ("tasks", "lengths")] == [
        (2, 120),
        (2, 120),
    ]
    assert (len(found["places"]), len(found["cells"])) == (6, 12)
    assert found["cells"][0]["arms"]["native"]["generated"] == {"mean": 1.0, "ci95": [1.0, 1.0], "n": 20}
    assert [(entry["arm"], entry["against"]) for entry in found["differences"]] == list(COMPARED)
    difference = found["differences"][0]["choice"]
    assert difference["mean"] == pytest.approx(0.2)
    assert 0.1 < difference["ci95"][0] < 0.2 < difference["ci95"][1] < 0.3


def _write(folder: Path, found: dict[str, Any]) -> tuple[str, str]:
    (folder / "results.json").write_text(json.dumps(found))
    page, twin = write_report(folder)
    return page.read_text(), twin.read_text()


def test_the_report_has_a_section_on_the_probes(tmp_path: Path) -> None:
    page, twin = _write(tmp_path, results() | {"probes": asked()})
    for written in (page, twin):
        assert "What the cache still holds" in written
        assert "mapped minus source (small model), forced choice: +20.0 points (95 % interval +" in written
    assert page.count("<svg") == 6
    assert "25 %, chance" in page
    assert "<td>pairs, 256 tokens, depth 0.5</td>" in page
    assert re.search(r"\| all tasks \| forced choice \| 100\.0 % .*\| 70\.0 % \(\d+\.\d % … \d+\.\d %\) \|", twin)


def test_there_is_no_section_without_probes(tmp_path: Path) -> None:
    for found in (results(), results() | {"probes": None}):
        page, twin = _write(tmp_path, found)
        assert "still holds" not in page + twin
        assert page.count("<svg") == 5
        assert not any("questions" in finding.text for finding in verdict(found))


@pytest.mark.parametrize(
    ("source", "tone", "than"),
    [(0.5, "good", "more than"), (0.9, "bad", "fewer than"), (0.7, "plain", "not clearly more or fewer than")],
)
def test_the_verdict_on_memory(source: float, tone: str, than: str) -> None:
    (finding,) = (f for f in verdict(results() | {"probes": asked(0.7, source)}) if "questions" in f.text)
    assert finding.tone == tone
    assert finding.text == (
        "It answers 70 % of the questions about the context where the large model answers 100 %, the small one "
        f"{100 * source:.0f} % and native tail only 25 % (four choices, 25 % by chance): {than} the small model alone."
    )


def test_the_command_that_repeats_a_run_names_the_probes_it_asked() -> None:
    found = results()
    found["run"]["settings"]["eval"]["probes"] = dataclasses.asdict(SMALL)
    assert "'eval.probes.lengths=[320,360]'" in reproduce(found)
    assert "eval.probes.count=1" in reproduce(found)
    assert "'eval.probes.tasks=[passkey,counting]'" in reproduce(found)
    found["run"]["settings"]["eval"]["probes"]["count"] = 0
    # The default pair asks probes of its own, which must not be asked of another.
    assert "eval.probes.count=0" in reproduce(found)
    assert "eval.probes.lengths" not in reproduce(found)
    assert reproduce(found).startswith("kvbridge run \\\n  pair=local")
    found["run"]["settings"]["pair"] = {"source": "embedded"}
    assert "pair=local" not in reproduce(found)


# Settings


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"count": -1}, "eval.probes.count=-1, eval.probes.seed=0: expected 0 or more."),
        ({"seed": -1}, "eval.probes.count=0, eval.probes.seed=-1: expected 0 or more."),
        ({"language": "latin"}, "eval.probes.language=latin: expected one of plain, embedded."),
        ({"tasks": ["passkey", "sums"]}, "eval.probes.tasks=[passkey,sums]: expected some of passkey, needles,"),
        ({"tasks": []}, "eval.probes.tasks=[]: expected some of"),
        ({"lengths": [0]}, "eval.probes.lengths=[0]: expected numbers of tokens, 1 or more, each once"),
        ({"lengths": [64, 64]}, "eval.probes.lengths=[64,64]: expected"),
        ({"depths": [0.5, 1.5]}, "eval.probes.depths=[0.5,1.5]: expected numbers from 0 to 1, each once"),
    ],
    ids=str,
)
def test_refuses_impossible_settings(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        ProbesConfig(**changed)
    assert str(caught.value).startswith(sentence)
