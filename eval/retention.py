"""Benchmark scores of a carried cache: source, native and mapped on the same questions, through lm-eval.

lm-eval is an optional extra and is imported only where a task is scored.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.calibration.corpus import Corpus
from kvbridge.errors import UsageError
from kvbridge.eval.partial import PartialResults
from kvbridge.eval.statistics import mcnemar, mean_interval, resample, share_interval
from kvbridge.eval.tasks import FOLDER
from kvbridge.forms import Map
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

ARMS = ("source", "native", "mapped")
METRICS = ("acc", "exact_match")
CONTINUATION = "kvbridge_continuation"


@dataclass
class RetentionConfig:
    """Which benchmark tasks are scored.

    Attributes:
        tasks: names of lm-eval tasks or groups; none by default.
        limit: the first so many questions of each task; all by default.
        fewshot: examples before each question; what the task says by default.
    """

    tasks: list[str] = field(default_factory=list)
    limit: int | None = None
    fewshot: int | None = None

    def __post_init__(self) -> None:
        if (self.limit or 1) < 1 or self.limit == 0 or (self.fewshot or 0) < 0:
            raise UsageError(
                f"eval.retention.limit={self.limit}, eval.retention.fewshot={self.fewshot}: expected at least one "
                "question and no negative number of examples."
            )
        if len(set(self.tasks)) < len(self.tasks):
            raise UsageError(f"eval.retention.tasks={self.tasks} names a task twice; name each once.")


def require_lm_eval() -> None:
    """Refuse to go on without lm-eval.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UsageError("benchmark tasks need lm-eval, which is not installed: pip install 'kvbridge[lm-eval]'.")


@functools.cache
def _task_manager(everything: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(FOLDER), include_defaults=everything)


def _manager_of(tasks: list[str]) -> Any:
    """The index of tasks; lm-eval's own thousands take ten seconds to read, so only where one of them is named."""
    return _task_manager(any(not (FOLDER / f"{task}.yaml").is_file() for task in tasks))


def _questions_file(folder: Path) -> Path:
    return folder / "retention" / f"{CONTINUATION}.jsonl"


def prepare_retention(
    config: RetentionConfig, pair: ModelPair, corpus: Corpus, *, prompt: int, seed: int, folder: Path
) -> None:
    """Everything that can be checked before a long run; writes the questions of the continuation task.

    Args:
        config: tasks and limit.
        pair: its tokenizer cuts the text.
        corpus: the evaluation's.
        prompt: tokens of a continuation question's context.
        seed: of its wrong choices.
        folder: of the run.

    Raises:
        UsageError: lm-eval is missing or a task is unknown.
        CorpusError: the corpus gives no continuation question.
    """
    if not config.tasks:
        return
    require_lm_eval()
    known = _manager_of(config.tasks).task_index
    unknown = [task for task in config.tasks if task not in known]
    if unknown:
        raise UsageError(
            f"eval.retention.tasks: {', '.join(unknown)} is no task of lm-eval {version('lm_eval')} or of kvbridge; "
            "`kvbridge lm-eval ls tasks` lists lm-eval's."
        )
    if CONTINUATION in config.tasks:
        from kvbridge.eval.tasks.continuation import questions, write_questions

        found = questions(corpus, pair.tokenizer, prompt=prompt, limit=config.limit, seed=seed)
        write_questions(_questions_file(folder), found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's log to errors: it tells its defaults as warnings."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _answers(
    task: str, samples: list[dict[str, Any]], multiple_choice: bool
) -> tuple[list[str], list[int], list[float]]:
    """Ids, correctness and chance level of each question of one task.

    Where a task reads its answers in several ways, the first one counts.

    Raises:
        UsageError: the task does not say per question whether the answer was right.
    """
    metric = next((name for name in METRICS if name in samples[0]), None)
    kept = sorted((s for s in samples if s["filter"] == samples[0]["filter"]), key=lambda sample: sample["doc_id"])
    if metric is None or any(float(sample[metric]) not in (0, 1) for sample in kept):
        raise UsageError(
            f"task {task} does not say per question whether the answer is right (expected {' or '.join(METRICS)} of "
            f"0 or 1, found {', '.join(samples[0]['metrics'])}); score it with `kvbridge lm-eval`."
        )
    chance = [1 / len(sample["resps"]) if multiple_choice else 0.0 for sample in kept]
    return [f"{task}/{sample['doc_id']}" for sample in kept], [int(sample[metric]) for sample in kept], chance


def score_task(name: str, arm: Any, config: RetentionConfig, folder: Path) -> dict[str, Any]:
    """Answers of one arm, a `PairLM`, to all questions of one task or group.

    Returns:
        `questions`, `correct` and `chance` per question, and how many contexts were read, carried and truncated.

    Raises:
        UsageError: the task cannot be scored per question.
    """
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    # A decorator hides its parameters from the type checker.
    simple_evaluate: Any = lm_eval.simple_evaluate
    spec: Any = name
    if name == CONTINUATION:
        spec = load_yaml(FOLDER / f"{name}.yaml") | {"dataset_kwargs": {"documents": str(_questions_file(folder))}}
    with _quiet():
        found = simple_evaluate(
            model=arm,
            tasks=[spec],
            num_fewshot=config.fewshot,
            limit=config.limit,
            bootstrap_iters=0,
            task_manager=_manager_of([name]),
        )
    questions, correct, chance = list[str](), list[int](), list[float]()
    for task, samples in sorted(found["samples"].items()):
        of_task = _answers(task, samples, found["configs"][task]["output_type"] == "multiple_choice")
        questions += of_task[0]
        correct += of_task[1]
        chance += of_task[2]
    counts = dataclasses.asdict(arm.counts)
    return {"questions": questions, "correct": correct, "chance": chance, "contexts": counts}


def summarise(arms: dict[str, dict[str, Any]], resamples: int, seed: int) -> dict[str, Any]:
    """Scores and shares of one task from each arm's answers.

    Args:
        arms: what `score_task` gave for source, native and mapped.
        resamples: bootstrap resamples of questions.
        seed: of the bootstrap.

    Raises:
        UsageError: the arms did not answer the same questions.
    """
    if any(arms[arm]["questions"] != arms["native"]["questions"] for arm in ARMS):
        raise UsageError("the arms answered different questions; delete retention.partial.jsonl and score again.")
    correct = {arm: np.asarray(arms[arm]["correct"], dtype=float) for arm in ARMS}
    chance, draws = np.asarray(arms["native"]["chance"]), resample(len(correct["native"]), resamples, seed)
    contexts = arms["mapped"]["contexts"]
    mapped, native, source = (correct[arm] for arm in ("mapped", "native", "source"))
    return {
        "n": len(native),
        "chance": float(chance.mean()),
        "scores": {arm: mean_interval(correct[arm].tolist(), draws) for arm in ARMS},
        "gap_recovered": share_interval(source, mapped, native, draws, "the source"),
        "retention": share_interval(chance, mapped, native, draws, "chance"),
        "mcnemar": {other: mcnemar(mapped, correct[other]) for other in ("native", "source")},
        "carried_share": contexts["carried"] / contexts["read"],
        "truncated_share": contexts["truncated"] / contexts["read"],
        "questions": arms["native"]["questions"],
        "correct": {arm: arms[arm]["correct"] for arm in ARMS},
    }


def score_retention(
    pair: ModelPair,
    mapping: Map,
    plan: HandoffPlan,
    config: RetentionConfig,
    *,
    folder: Path,
    identity: dict[str, Any],
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Score the tasks for source, native and mapped; finished arms are kept in `retention.partial.jsonl`.

    Args:
        pair: source and target.
        mapping: from source to target content states.
        plan: what the target computes natively.
        config: tasks, limit and examples; `prepare_retention` has checked them.
        folder: of the run.
        identity: JSON values that, beside limit and examples, decide whether finished arms may be kept.
        resamples: bootstrap resamples of questions.
        seed: of the bootstrap.

    Returns:
        Per task what `summarise` gives.

    Raises:
        UsageError: finished arms belong to other settings, or a task cannot be scored per question.
    """
    if not config.tasks:
        return {}
    from kvbridge.eval.harness import PairLM

    settings = {"limit": config.limit, "fewshot": config.fewshot, "lm_eval": version("lm_eval")}
    partial = PartialResults(folder / "retention.partial.jsonl", identity | settings)
    # Tasks may be added and named in another order, so finished arms are known by their names.
    finished = {(record["task"], record["arm"]) for record in partial.load()}
    missing = [each for each in itertools.product(config.tasks, ARMS) if each not in finished]

    def make(_: int) -> Iterator[dict[str, Any]]:
        for task, arm in missing:
            model = PairLM(pair, arm, plan, mapping)
            model.bar_title = f"{task} {arm}"
            yield {"task": task, "arm": arm} | score_task(task, model, config, folder)

    records = partial.finish(len(finished) + len(missing), make, unit="arm", desc="retention")
    found = {(record["task"], record["arm"]): record for record in records}
    return {task: summarise({arm: found[task, arm] for arm in ARMS}, resamples, seed) for task in config.tasks}
