"""Finding the doubt at which the target takes over, and the commands that do it and use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from command_line import Run, sentence
from kvbridge.cascade import Above, Always, Cascade, FirstTokenEntropy, MeanSurprise, Never, SamplingParams
from kvbridge.cascade.memory import Memory
from kvbridge.cascade.policy_file import load_policy, policy_named, save_policy
from kvbridge.errors import CacheError, PairMismatchError, UsageError
from kvbridge.eval.answer_tasks import AnswerTask, embedded_tasks, read_tasks
from kvbridge.eval.escalation import (
    Doubt,
    EscalationConfig,
    answered,
    at_threshold,
    calibrate_policy,
    choose_threshold,
    curve,
    measure_tasks,
    target_flops,
)
from kvbridge.eval.escalation_figures import escalation_figure, escalation_table
from kvbridge.flops import ModelCost, handoff_flops
from kvbridge.pair import ModelPair, load_pair
from kvbridge.plan import HandoffPlan
from kvbridge.processes import alone
from tiny_bridge import random_bridge
from tiny_pair import WORDS, tiny_pair
from twin_pair import twin_bridge, twin_pair

PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)


def records(count: int = 40) -> list[dict[str, Any]]:
    """The source is right where its doubt is below a half, the target always; the doubts are spread evenly."""

    def answer(right: bool, flops: int) -> dict[str, Any]:
        return {"right": right, "outcome": None, "flops": flops, "source": 1.0, "first_token": 2.0}

    doubts = [(at + 0.5) / count for at in range(count)]
    return [{"doubt": d, "source": answer(d < 0.5, 0), "target": answer(True, 10)} for d in doubts]


def test_a_threshold_for_a_rate_and_for_an_accuracy() -> None:
    for rate, escalated in ((0.0, 0.0), (0.25, 0.25), (0.26, 0.25), (1.0, 1.0)):
        threshold = choose_threshold(records(), EscalationConfig(rate=rate))
        assert at_threshold(records(), threshold)["escalated"].mean() == escalated
    threshold = choose_threshold(records(), EscalationConfig(accuracy=0.75))
    reached = at_threshold(records(), threshold)
    assert (reached["escalated"].mean(), reached["right"].mean(), reached["flops"].mean()) == (0.25, 0.75, 2.5)


def test_the_curve_goes_from_no_answer_of_the_target_to_all() -> None:
    points = curve(records(8))
    assert [point["escalated"] for point in points] == [at / 8 for at in range(9)]
    assert [point["right"] for point in points] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_what_cannot_be_reached_is_an_error() -> None:
    hopeless = [each | {"target": each["source"]} for each in records()]
    with pytest.raises(UsageError, match=r"accuracy=0\.9 is not reached; the best threshold gives 0\.500"):
        choose_threshold(hopeless, EscalationConfig(accuracy=0.9))
    untold = [records()[0] | {"doubt": float("nan")}, *records()]
    with pytest.raises(UsageError, match="says nothing of some task"):
        calibrate_policy(untold, EscalationConfig(rate=0.5), 8)


def test_a_policy_is_chosen_on_half_and_checked_on_the_rest(tmp_path: Path) -> None:
    policy, evidence = calibrate_policy(records(), EscalationConfig(rate=0.5, resamples=200), 8)
    assert policy.measure == FirstTokenEntropy()
    assert evidence["chosen_on"] == 20
    # The chosen threshold is a doubt of its own half, and the next one of the other half lies above it.
    assert evidence["checked"]["escalated"]["mean"] == pytest.approx(0.55)
    low, high = evidence["checked"]["escalated"]["ci95"]
    assert low < 0.5 < high
    means = {name: evidence[name]["right"]["mean"] for name in ("source_alone", "checked", "target_always")}
    assert means == {"source_alone": 0.5, "checked": 1.0, "target_always": 1.0}
    table = escalation_table(evidence)
    assert [line.split("|")[1:3] for line in table.splitlines()[2:]] == [
        [" source alone ", " 0.0% "],
        [" chosen threshold ", " 55.0% "],
        [" target always ", " 100.0% "],
    ]
    assert escalation_figure(evidence).startswith("<svg")
    pair = tiny_pair()
    save_policy(tmp_path / "policy.json", policy, pair.identity(), evidence)
    assert load_policy(tmp_path / "policy.json", pair) == policy
    with pytest.raises(PairMismatchError, match=r"the threshold in .* was made for another pair"):
        load_policy(tmp_path / "policy.json", twin_pair())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("first_token_entropy", None), "needs a threshold, and None was given"),
        (("always", 0.5), "reads no threshold"),
        (("sometimes", None), "neither a file nor one of always, never, first_token_entropy"),
    ],
)
def test_policies_that_are_none(given: tuple[str, float | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policy_named(*given, 8)


def test_policies_by_name(tmp_path: Path) -> None:
    assert [policy_named(name, None, 8) for name in ("always", "never")] == [Always(), Never()]
    assert policy_named("mean_surprise", 1.5, 3) == Above(MeanSurprise(tokens=3), 1.5)
    (tmp_path / "policy.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no policy that this version reads"):
        policy_named(str(tmp_path / "policy.json"), None, 8)


@pytest.fixture(scope="module")
def twins() -> ModelPair:
    return twin_pair()


def test_arms_are_measured_and_resumed(twins: ModelPair, tmp_path: Path) -> None:
    bridge, params = twin_bridge(twins), SamplingParams(max_new_tokens=3)
    tasks = [AnswerTask(f"{' '.join(WORDS[:5])} {word}", "x") for word in WORDS[:4]]

    def measured() -> list[dict[str, Any]]:
        doubt = Doubt(FirstTokenEntropy())
        arms = {"source": Cascade(twins, bridge, plan=PLAN, policy=doubt), "target": Cascade(twins, bridge, plan=PLAN)}
        return measure_tasks(arms, doubt, tasks, params, tmp_path / "partial.jsonl")

    found = measured()
    assert len(found) == 4
    assert all(each["doubt"] > 0 and each["target"]["outcome"] == "applied" for each in found)
    assert all(each["source"]["flops"] == 0 < each["target"]["flops"] for each in found)
    lines = (tmp_path / "partial.jsonl").read_text().splitlines()
    (tmp_path / "partial.jsonl").write_text("\n".join(lines[:3]))
    again = measured()
    assert again[:2] == found[:2]
    assert [each["doubt"] for each in again] == [each["doubt"] for each in found]


def test_a_task_that_is_too_long_is_refused_before_any_is_asked(twins: ModelPair, tmp_path: Path) -> None:
    longest, partial = twins.source.geometry.max_positions, tmp_path / "partial.jsonl"
    doubt, texts = Doubt(FirstTokenEntropy()), (" ".join(WORDS[:5]), "a" * (longest - 2))
    alone, tasks = Cascade(twins, None, policy=doubt), [AnswerTask(text, "x") for text in texts]
    length = len(twins.tokenizer(texts[1])["input_ids"])
    with pytest.raises(UsageError, match=rf"^task 2 of escalation\.tasks has {length} tokens and .* for {longest} tog"):
        measure_tasks({"source": alone, "target": alone}, doubt, tasks, SamplingParams(max_new_tokens=3), partial)
    assert not partial.exists()


def test_a_task_that_the_source_has_no_answer_to_is_counted(
    twins: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = Doubt(FirstTokenEntropy())
    arms = {"source": Cascade(twins, None, policy=doubt), "target": Cascade(twins, None)}
    tasks = [AnswerTask(f"{' '.join(WORDS[:5])} {word}", "x") for word in WORDS[:6]]
    params, read = SamplingParams(max_new_tokens=2), Memory.read

    def broken(memory: Memory, tokens: Sequence[int]) -> Tensor:
        if memory.model is twins.source and list(tokens) == twins.tokenizer(tasks[1].prompt)["input_ids"]:
            raise CacheError("its logits are not finite.")
        return read(memory, tokens)

    monkeypatch.setattr(Memory, "read", broken)
    records = measure_tasks(arms, doubt, tasks, params, tmp_path / "partial.jsonl")
    assert records[1] == {"left_out": "the source failed: its logits are not finite"}
    _, evidence = calibrate_policy(records, EscalationConfig(rate=0.5, resamples=50), 8)
    assert evidence["left_out"] == [{"task": 2, "reason": records[1]["left_out"]}]
    assert (evidence["chosen_on"], evidence["checked"]["right"]["n"]) == (3, 2)
    *_, empty, said = escalation_table(evidence).splitlines()
    assert (empty, said) == (
        "",
        f"Left out, because the source has no answer to them: 1 (task 2: {records[1]['left_out']}).",
    )
    with pytest.raises(UsageError, match=r"^the source answers 3 of 4 tasks \(the source failed: its logits"):
        answered(records[:4])


def test_operations_of_an_answer(twins: ModelPair) -> None:
    cost, prompt = ModelCost.of(twins.target), " ".join(WORDS[:5])
    length = len(twins.tokenizer(prompt)["input_ids"])
    carried, read = Cascade(twins, twin_bridge(twins), plan=PLAN), Cascade(twins, None)
    one = [each.generate(prompt, max_new_tokens=1) for each in (carried, read)]
    expected = sum(handoff_flops(cost, PLAN, length, carried.mapping).values())
    assert [target_flops(*pair) for pair in zip((carried, read), one, strict=True)] == [expected, cost.prefill(length)]
    three = target_flops(read, read.generate(prompt, max_new_tokens=3))
    assert three == cost.read(0, length + 2, 0, cost.layers) + 3 * cost.head


def test_tasks_of_the_embedded_pair_fit_its_tokenizer() -> None:
    tokenizer = load_pair("embedded", dtype="float32").tokenizer
    for name in ("towns", "recall", "passkey"):
        tasks = embedded_tasks(name, 3, filler=100)
        assert embedded_tasks(name, 2, filler=100) == tasks[:2]
        for task in tasks:
            assert task.right(f" {task.answer}. ")
            assert not task.right(f" {task.answer}s")
            assert tokenizer.unk_token_id not in tokenizer(f"{task.prompt} {task.answer}.")["input_ids"]
    with pytest.raises(UsageError, match="'sums' is no task"):
        embedded_tasks("sums", 1)


def test_tasks_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a", "answer": "b", "task": "c"}\n\n{"prompt": "d", "answer": "e"}\n')
    assert read_tasks(file) == [AnswerTask("a", "b", "c"), AnswerTask("d", "e")]
    for text, message in (('{"prompt": "a"}', "line 1: no JSON object"), ("[1]", "line 1"), ("", "holds no task")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_tasks(file)
    with pytest.raises(UsageError, match="no such file"):
        read_tasks(tmp_path / "none")


@pytest.fixture
def bridge(settings: dict[str, Any], tmp_path: Path) -> str:
    pair = load_pair(str(settings["pair.source"]), str(settings["pair.target"]), dtype="float32")
    random_bridge(pair).save_pretrained(tmp_path / "bridge")
    return f"bridge={tmp_path / 'bridge'}"


def test_the_commands(kvbridge: Run, bridge: str, tmp_path: Path) -> None:
    asked = [{"prompt": " ".join(WORDS[:8]) + f" {word}", "answer": "x", "task": "words"} for word in WORDS[:6]]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in asked))
    short = ("cascade.max_new_tokens=2", "escalation.resamples=50")
    ran = kvbridge("calibrate-policy", bridge, *short, "escalation.tasks=tasks.jsonl", "escalation.rate=0.5", "out=out")
    assert ran.code == 0, ran.errors
    assert "| chosen threshold | " in ran.out
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"policy.json", "escalation.md", "escalation.svg"}
    given = (
        "cascade.prompts=tasks.jsonl",
        "cascade.policy=out/policy.json",
        "cascade.exact=true",
        "cascade.speculate=2",
    )
    ran = kvbridge("cascade", bridge, *short, *given)
    assert ran.code == 0, ran.errors
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == list(range(6))
    assert {answer["route"] for answer in answers} == {"source", "target"}
    assert all(answer["outcome"] == ("applied" if answer["route"] == "target" else None) for answer in answers)
    assert all(answer["drafts"].keys() == ({"mapped", "source"} if answer["outcome"] else set()) for answer in answers)
    counted = json.loads(ran.errors[-1])
    assert sum(counted["answers"].values()) == 6
    assert (counted["cascade"]["gate"], counted["gate"]["judged"]) == (None, 0)


def test_commands_refuse_what_cannot_work(kvbridge: Run, bridge: str, tmp_path: Path) -> None:
    with alone(tmp_path / "busy", main=True):
        assert "another process is at work in busy" in sentence(kvbridge("calibrate-policy", bridge, "out=busy"))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "prompts.txt").write_text("amber basil\n")
    for overrides, message in (
        ((), "cascade.prompts=None: give a file"),
        (("cascade.prompts=bad.jsonl",), "bad.jsonl, line 1: no JSON object"),
        (("cascade.prompts=prompts.txt", "cascade.policy=mean_surprise"), "needs a threshold"),
        (("cascade.prompts=prompts.txt", "cascade.draft=drop"), "cascade.draft=drop: give keep or restart"),
    ):
        assert message in sentence(kvbridge("cascade", bridge, *overrides))
    for overrides, message in (
        (("escalation.tasks=prompts.txt",), "one of the two"),
        (("escalation.rate=0.5", "escalation.tasks=prompts.txt"), "prompts.txt, line 1"),
        (("escalation.rate=2",), "escalation.rate=2.0: give a share"),
        (("escalation.measure=mood",), "escalation.measure=mood: expected one of"),
    ):
        assert message in sentence(kvbridge("calibrate-policy", bridge, *overrides))
