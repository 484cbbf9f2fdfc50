"""Benchmark scores: the shipped tasks, statistics by hand, resuming, and a run that reports them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from kvbridge import cli
from kvbridge.calibration import open_corpus
from kvbridge.errors import CorpusError, UsageError
from kvbridge.eval import retention as retention_module
from kvbridge.eval.report import write_report
from kvbridge.eval.retention import RetentionConfig, prepare_retention, score_retention, summarise
from kvbridge.eval.statistics import mcnemar, resample, share_interval
from kvbridge.eval.tasks import FOLDER, continuation, mmlu
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.tokens import encode
from tiny_bridge import random_bridge
from tiny_pair import byte_tokenizer, save_pair, tiny_pair, write_corpus

PLAN = HandoffPlan(sinks=2, native_head=0, native_tail=4)
CONTINUATION = "kvbridge_continuation"
PROMPT = 40


@pytest.fixture(autouse=True)
def _without_environment_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval describes the machine after each task, in seconds that these tests need not spend."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair()


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "eval.jsonl", documents=6, words=60, seed=3)


def prepared(config: RetentionConfig, pair: ModelPair, corpus: Path, folder: Path) -> None:
    prepare_retention(config, pair, open_corpus(str(corpus)), prompt=PROMPT, seed=0, folder=folder)


# Statistics


def test_mcnemar_by_hand() -> None:
    """Of six questions that one of two arms answers, five go to the first: 2 · (C(6,0) + C(6,1)) / 2⁶ = 0.21875."""
    arm = np.array([1, 1, 1, 1, 1, 0, 1, 0])
    other = np.array([0, 0, 0, 0, 0, 1, 1, 0])
    assert mcnemar(arm, other) == {"only_arm": 5, "only_other": 1, "p": pytest.approx(0.21875)}
    assert mcnemar(other, arm) == {"only_arm": 1, "only_other": 5, "p": pytest.approx(0.21875)}


def test_mcnemar_of_equal_answers_is_no_evidence() -> None:
    answers = np.array([1, 0, 1])
    assert mcnemar(answers, answers) == {"only_arm": 0, "only_other": 0, "p": 1.0}


def test_shares_are_ratios_of_means_by_hand() -> None:
    base, arm, native = np.full(4, 0.25), np.array([1.0, 0, 1, 0]), np.array([1.0, 1, 1, 0])
    draws = np.array([[0, 1, 2, 3], [0, 0, 2, 2], [0, 1, 1, 3]])
    found = share_interval(base, arm, native, draws, "chance")
    by_draw = [(0.5 - 0.25) / (0.75 - 0.25), 1.0, (0.25 - 0.25) / (0.75 - 0.25)]
    assert found["mean"] == pytest.approx(0.5)
    assert found["ci95"] == pytest.approx(np.percentile(by_draw, (2.5, 97.5)).tolist())
    assert found["n"] == 4
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        ([1.0, 0, 0, 0] * 10, "the target is within noise of chance on these questions"),
        ([0.0] * 40, "the target is worse than chance on these questions"),
    ],
    ids=["noise", "worse"],
)
def test_no_share_where_native_is_no_better_than_the_base(native: list[float], reason: str) -> None:
    draws = resample(40, 200, seed=0)
    found = share_interval(np.full(40, 0.25), np.zeros(40), np.array(native), draws, "chance")
    assert found == {"mean": None, "ci95": None, "n": 40, "reason": reason}


def test_the_share_interval_covers_the_true_ratio() -> None:
    chance, draws = np.random.default_rng(0), resample(300, 300, seed=0)
    covered = []
    for _ in range(200):
        hard = chance.random(300)
        source, arm, native = ((hard + chance.normal(0, 0.1, 300) < level).astype(float) for level in (0.4, 0.6, 0.8))
        low, high = share_interval(source, arm, native, draws, "the source")["ci95"]
        covered.append(low <= 0.5 <= high)
    assert 0.90 <= np.mean(covered) <= 0.99


def arms(**correct: list[int]) -> dict[str, Any]:
    contexts = {"read": 4, "carried": 3, "truncated": 1}
    count = len(next(iter(correct.values())))
    shared = {"questions": [f"t/{at}" for at in range(count)], "chance": [0.25] * count, "contexts": contexts}
    return {arm: shared | {"correct": answers} for arm, answers in correct.items()}


def test_a_summary_holds_scores_shares_and_answers() -> None:
    native, mapped, source = [1] * 40, [1] * 30 + [0] * 10, [1] * 20 + [0] * 20
    found = summarise(arms(source=source, native=native, mapped=mapped), resamples=200, seed=0)
    assert {arm: score["mean"] for arm, score in found["scores"].items()} == {
        "source": 0.5,
        "native": 1.0,
        "mapped": 0.75,
    }
    assert found["retention"]["mean"] == pytest.approx((0.75 - 0.25) / (1 - 0.25))
    assert found["gap_recovered"]["mean"] == pytest.approx(0.5)
    assert found["mcnemar"]["source"] == {"only_arm": 10, "only_other": 0, "p": pytest.approx(2 / 2**10)}
    assert (found["n"], found["chance"], found["carried_share"], found["truncated_share"]) == (40, 0.25, 0.75, 0.25)
    assert found["correct"] == {"source": source, "native": native, "mapped": mapped}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_arms_that_answered_different_questions_are_refused() -> None:
    given = arms(source=[1, 0], native=[1, 1], mapped=[0, 1])
    given["mapped"] = given["mapped"] | {"questions": ["t/0", "t/2"]}
    with pytest.raises(UsageError, match="the arms answered different questions"):
        summarise(given, resamples=100, seed=0)


# The shipped tasks


def test_mmlu_questions_come_from_the_installed_lm_eval() -> None:
    found = mmlu.questions()
    assert len(found) == 281
    assert len({question["subject"] for question in found}) == 57
    for question in found:
        assert question["question"]
        assert len(question["choices"]) == 4
        assert all(question["choices"])
        assert 0 <= question["answer"] < 4
        assert "(A)" not in question["question"]
        assert "\nA: " not in question["choices"][3]
    shares = np.bincount([question["answer"] for question in found], minlength=4) / 281
    assert shares.min() > 0.15


def test_every_task_loads_by_its_files_name(tmp_path: Path, pair: ModelPair, corpus_file: Path) -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert names == {"kvbridge_mmlu_dev", CONTINUATION}
    assert set(TaskManager(include_path=str(FOLDER), include_defaults=False).task_index) == names


def test_mmlu_is_asked_with_letters() -> None:
    task = TaskManager(include_path=str(FOLDER), include_defaults=False).load(["kvbridge_mmlu_dev"])["tasks"]
    (task,) = task.values()
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=1, rank=0, world_size=1)
    contexts, choices = zip(*[request.args for request in task.instances], strict=True)
    assert choices == (" A", " B", " C", " D")
    assert len(set(contexts)) == 1
    first = mmlu.questions()[0]
    assert contexts[0].startswith(f"A multiple choice question about {first['subject']}.\n\n{first['question']}\nA. ")
    assert contexts[0].endswith("\nAnswer:")


def test_continuations_are_pieces_of_their_document(pair: ModelPair, corpus_file: Path) -> None:
    corpus, tokenizer = open_corpus(str(corpus_file)), pair.tokenizer
    found = list(continuation.questions(corpus, tokenizer, prompt=PROMPT, limit=None, seed=0))
    texts = dict(corpus.in_order())
    assert [question["id"] for question in found] == list(texts)
    for question in found:
        text, context = texts[question["id"]], question["context"]
        assert text.startswith(context + question["choices"][question["answer"]])
        assert PROMPT <= len(encode(tokenizer, context)) < PROMPT + continuation.CUTS
        assert len(set(question["choices"])) == continuation.CHOICES
        for choice in question["choices"]:
            assert len(encode(tokenizer, context + choice)) == len(encode(tokenizer, context)) + continuation.LENGTH
            assert choice in text[len(context) :]
    assert len({question["answer"] for question in found}) > 1
    assert found == list(continuation.questions(corpus, tokenizer, prompt=PROMPT, limit=None, seed=0))
    assert len(list(continuation.questions(corpus, tokenizer, prompt=PROMPT, limit=2, seed=0))) == 2


def test_continuations_keep_a_first_token_that_the_tokenizer_adds(corpus_file: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = list(continuation.questions(open_corpus(str(corpus_file)), tokenizer, prompt=PROMPT, limit=2, seed=0))
    assert len(found) == 2
    assert not any("<s>" in question["context"] for question in found)


def test_a_corpus_of_short_documents_gives_no_continuation(pair: ModelPair, tmp_path: Path) -> None:
    short = write_corpus(tmp_path / "short.jsonl", documents=3, words=4)
    with pytest.raises(CorpusError, match=r"^no document of the evaluation corpus has eval\.prompt \+ 64 tokens"):
        prepared(RetentionConfig([CONTINUATION]), pair, short, tmp_path)
    assert not (tmp_path / "retention" / f"{CONTINUATION}.jsonl").exists()


def test_the_continuation_task_asks_for_its_questions() -> None:
    with pytest.raises(UsageError, match=r"has no questions at None; .*give --metadata documents=FILE\.$"):
        continuation.dataset()


# Scoring

CONFIG = RetentionConfig([CONTINUATION], limit=4)
Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(pair: ModelPair, corpus_file: Path, tmp_path: Path) -> Score:
    """Score tasks in a folder of the test's own, with one random map."""
    mapping = FormMap.of(random_bridge(pair))

    def scored(config: RetentionConfig = CONFIG, identity: str = "a") -> dict[str, Any]:
        prepared(config, pair, corpus_file, tmp_path)
        return score_retention(
            pair, mapping, PLAN, config, folder=tmp_path, identity={"bridge": identity}, resamples=100, seed=0
        )

    return scored


def test_no_task_is_no_score(score: Score, tmp_path: Path) -> None:
    assert score(RetentionConfig()) == {}
    assert list(tmp_path.iterdir()) == []


def test_arms_answer_the_same_questions(score: Score) -> None:
    found = score(RetentionConfig([CONTINUATION, "kvbridge_mmlu_dev"], limit=4))
    assert list(found) == [CONTINUATION, "kvbridge_mmlu_dev"]
    for name, task in found.items():
        assert (task["n"], task["chance"]) == (4, 0.25)
        assert task["questions"] == [f"{name}/{at}" for at in range(4)]
        assert all(set(answers) <= {0, 1} and len(answers) == 4 for answers in task["correct"].values())
        assert {arm: score["mean"] for arm, score in task["scores"].items()} == {
            arm: np.mean(answers) for arm, answers in task["correct"].items()
        }
        assert task["carried_share"] == 1


def test_examples_lengthen_the_context(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbridge.eval import harness

    lengths: list[int] = []
    read = harness.PairLM.read
    monkeypatch.setattr(harness.PairLM, "read", lambda self, ids: lengths.append(len(ids)) or read(self, ids))
    score(RetentionConfig(["kvbridge_mmlu_dev"], limit=1, fewshot=1))
    assert len(lengths) == 3
    question = mmlu.questions()[0]["question"]
    assert min(lengths) > len(question) + 100


def test_a_killed_scoring_goes_on_at_the_next_arm(
    score: Score, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = score()
    (tmp_path / "retention.partial.jsonl").unlink()
    scored: list[str] = []
    score_task = retention_module.score_task

    def until_killed(task: str, model: Any, *rest: Any) -> dict[str, Any]:
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(model.arm)
        return score_task(task, model, *rest)

    monkeypatch.setattr(retention_module, "score_task", until_killed)
    with pytest.raises(KeyboardInterrupt):
        score()
    again: list[str] = []
    monkeypatch.setattr(
        retention_module,
        "score_task",
        lambda task, model, *rest: again.append(model.arm) or score_task(task, model, *rest),
    )
    assert score() == whole
    assert (scored, again) == (["source", "native"], ["mapped"])


def test_a_task_may_be_added_but_nothing_else_changed(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    score()
    with pytest.raises(UsageError, match=r"belongs to an evaluation with other settings \(limit\); use another out="):
        score(RetentionConfig([CONTINUATION], limit=3))
    with pytest.raises(UsageError, match=r"other settings \(bridge\)"):
        score(identity="b")
    again: list[str] = []
    score_task = retention_module.score_task
    monkeypatch.setattr(
        retention_module, "score_task", lambda task, *rest: again.append(task) or score_task(task, *rest)
    )
    tasks = ["kvbridge_mmlu_dev", CONTINUATION]
    assert list(score(RetentionConfig(tasks, limit=4))) == tasks
    assert again == ["kvbridge_mmlu_dev"] * 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"limit": 0}, r"^eval\.retention\.limit=0, .*at least one question"),
        ({"fewshot": -1}, r"eval\.retention\.fewshot=-1: expected .*no negative number of examples"),
        ({"tasks": ["a", "a"]}, r"names a task twice"),
    ],
    ids=["limit", "fewshot", "twice"],
)
def test_refuses_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        RetentionConfig(**settings)


def test_a_missing_lm_eval_is_told_before_any_work(
    score: Score, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(retention_module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'kvbridge\[lm-eval\]'\.$"):
        score()
    assert list(tmp_path.iterdir()) == []


def test_unknown_tasks_are_told_before_any_work(score: Score, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # lm-eval's own index takes ten seconds to read.
    monkeypatch.setattr(
        retention_module, "_task_manager", lambda _: TaskManager(include_path=str(FOLDER), include_defaults=False)
    )
    with pytest.raises(UsageError, match=r"^eval\.retention\.tasks: arc_esay is no task of lm-eval 0\.4\.\d+ or of"):
        score(RetentionConfig(["arc_esay", CONTINUATION]))
    assert list(tmp_path.iterdir()) == []


def test_tasks_without_right_and_wrong_are_refused() -> None:
    sample = {"filter": "none", "doc_id": 0, "resps": [1], "metrics": ["bleu"], "bleu": 0.3}
    with pytest.raises(
        UsageError, match=r"^task t does not say per question .*found bleu\); score it with `kvbridge lm"
    ):
        retention_module._answers("t", [sample], multiple_choice=False)


def test_the_first_way_to_read_an_answer_counts() -> None:
    samples = [
        {"filter": way, "doc_id": at, "resps": [1], "metrics": ["exact_match"], "exact_match": way == "strict"}
        for way in ("strict", "flexible")
        for at in (1, 0)
    ]
    assert retention_module._answers("t", samples, multiple_choice=False) == (["t/0", "t/1"], [1, 1], [0.0, 0.0])


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Callable[..., tuple[int, Path]]:
    """`kvbridge run` with a benchmark task, in a folder of the module's own."""
    folder = tmp_path_factory.mktemp("run")
    source, target = save_pair(tiny_pair(), folder)
    text = write_corpus(folder / "calibration.jsonl")
    given = {
        "pair.source": source, "pair.target": target, "pair.dtype": "float32", "pair.device": "cpu",
        "calibration.corpus": text, "calibration.tokens": 2048, "calibration.block": 64, "mapper.k": 2,
        "eval.corpus": corpus_file, "eval.documents": 2, "eval.tokens": 96, "eval.prompt": 80, "eval.rollout": 2,
        "eval.samples": 0, "eval.resamples": 100, "eval.retention.tasks": f"[{CONTINUATION}]",
        "eval.retention.limit": 3, "out": folder / "out",
    }  # fmt: skip

    def command(name: str = "run", **changed: Any) -> tuple[int, Path]:
        overrides = ["pair=local", *(f"{key}={value}" for key, value in (given | changed).items())]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("HYDRA_FULL_ERROR", "1")
            patch.setattr(sys, "argv", ["kvbridge", name, *overrides])
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
            try:
                cli.main()
            except SystemExit as stop:
                return int(stop.code or 0), folder / "out"
        return 0, folder / "out"

    return command


def test_a_run_scores_and_reports_its_tasks(
    run: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run()
    assert code == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    task = results["retention"][CONTINUATION]
    assert task["n"] == 3
    assert "lm_eval" in results["run"]["versions"]
    assert "retention" in results["run"]["seconds"]
    assert "kvbridge_cont" in printed
    assert not list(out.glob("*partial*"))
    page, twin = (path.read_text() for path in write_report(out))
    score = f"{100 * task['scores']['source']['mean']:.1f} %"
    assert "<h2>Benchmark scores</h2>" in page
    assert f"<td>{CONTINUATION}</td><td>3</td><td>25.0 %</td><td>{score}" in page
    assert f"| {CONTINUATION} | 3 | 25.0 % | {score} (" in twin
    assert f"'eval.retention.tasks=[{CONTINUATION}]'" in twin
    assert "eval.retention.limit=3" in twin
    for text in (page, twin):
        assert f"{CONTINUATION}: — because the target is " in text


def test_a_change_of_benchmarks_keeps_the_scored_documents(
    run: Callable[..., tuple[int, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "changed"
    with monkeypatch.context() as patch:
        patch.setattr(retention_module, "score_task", killed)
        code, _ = run(out=out)
    assert code == 130
    partial = (out / "documents.partial.jsonl").read_text()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("kvbridge.eval.fidelity.read_context", killed)
        assert run("eval", **{"eval.retention.limit": 2, "bridge": out / "bridge", "out": out})[0] == 0
    results = json.loads((out / "results.json").read_text())
    assert results["retention"][CONTINUATION]["n"] == 2
    assert len(results["documents"]) == len(partial.splitlines()) - 1


def test_a_typo_deep_in_the_settings_is_an_error(
    run: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(**{"+eval.retention.shots": 2})[0] == 2
    assert "eval.retention.shots is no setting; expected one of tasks, limit, fewshot." in capsys.readouterr().err


def test_reports_of_runs_without_benchmarks_have_no_such_section(
    run: Callable[..., tuple[int, Path]], tmp_path: Path
) -> None:
    out = tmp_path / "without"
    assert run(**{"eval.retention.tasks": "[]", "out": out})[0] == 0
    results = json.loads((out / "results.json").read_text())
    assert results["retention"] is None
    del results["retention"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    for place in (out, tmp_path):
        for path in write_report(place):
            assert "Benchmark scores" not in path.read_text()
