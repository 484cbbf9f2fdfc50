"""All that a bridge is scored on, in one order: everything is checked before the first long run, then measured.

Each part keeps what it has finished in `OUT/*.partial.*`, so that a killed evaluation goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvbridge import __version__
from kvbridge.bridge import Bridge
from kvbridge.calibration import Corpus
from kvbridge.errors import UsageError
from kvbridge.eval.arms import standard_arms
from kvbridge.eval.config import EvalConfig
from kvbridge.eval.documents import Document, take_documents
from kvbridge.eval.fidelity import evaluate
from kvbridge.eval.lengths import evaluate_lengths
from kvbridge.eval.probe_results import ask_probes, summarise_probes
from kvbridge.eval.probes import build_probes
from kvbridge.eval.retention import RetentionConfig, prepare_retention, score_retention
from kvbridge.eval.turns import evaluate_turns, summarise_turns
from kvbridge.kernels import FormMap
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan

# Settings that change no document's record; the corpus is known by its fingerprint.
UNREAD_BY_DOCUMENTS = ("corpus", "resamples", "seed", "lengths", "probes", "turns", "retention")


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be scored, as far as it is known before there is a bridge.

    Attributes:
        pair: source and target.
        plan: what the target computes natively.
        config: what is measured, on how much.
        corpus: the text.
        folder: of the run.
    """

    pair: ModelPair
    plan: HandoffPlan
    config: EvalConfig
    corpus: Corpus
    folder: Path

    @classmethod
    def of(cls, pair: ModelPair, plan: HandoffPlan, config: EvalConfig, folder: Path) -> Task:
        """Open the corpus.

        Raises:
            UsageError: plan and lengths leave nothing to carry, or are beyond what the pair can read.
        """
        plan.mapped_layers(pair.target.geometry.layers)
        if config.documents == 1:
            raise UsageError("eval.documents=1: the other-document arm needs at least two documents.")
        if plan.split(max(config.prompt, 1)).carried == 0:
            raise UsageError(
                f"plan.sinks={plan.sinks} and plan.native_tail={plan.native_tail} leave nothing of eval.prompt="
                f"{config.prompt} tokens to carry; give fewer, or a longer prompt."
            )
        longest = max(config.tokens, config.prompt + config.rollout)
        pair.require_length(longest, "the larger of eval.tokens and eval.prompt + eval.rollout,")
        return cls(pair, plan, config, config.open("eval"), folder)

    def documents(
        self, prompt: int, tokens: int, count: int, *, chat: bool = False, setting: str = "eval.documents"
    ) -> list[Document]:
        """The first documents of the corpus that are long enough; `setting` says how many."""
        return take_documents(
            self.corpus,
            self.pair.tokenizer,
            documents=count,
            tokens=tokens,
            prompt=prompt,
            chat=chat,
            join=self.config.join,
            setting=setting,
        )

    def first_documents(self, count: int, setting: str) -> list[Document]:
        """The first documents, cut and framed as the evaluation's are; `setting` says how many."""
        config = self.config
        return self.documents(config.prompt, config.tokens, count, chat=config.format == "chat", setting=setting)


@dataclass(frozen=True, slots=True)
class Subject:
    """A bridge that is scored on a task, with the one of its maps that is executed.

    Attributes:
        task: what is scored.
        bridge: whose map it is.
        mapping: what is executed.
        name: of the map; may be left out where the bridge has one alone.
    """

    task: Task
    bridge: Bridge
    mapping: FormMap
    name: str | None = None

    def identity(self, **settings: Any) -> dict[str, Any]:
        """What finished records depend on: pair, bridge, plan, text, and the settings that they read."""
        task = self.task
        return {
            "pair": task.pair.identity(),
            "dtype": f"{task.pair.source.dtype}/{task.pair.target.dtype}",
            "device": str(task.pair.target.device),
            "bridge": self.bridge.fingerprint(),
            "map": self.bridge.map_name(self.name),
            "plan": task.plan.to_dict(),
            "corpus": task.corpus.fingerprint,
            "text_field": task.config.text_field,
            "kvbridge": __version__,
            **settings,
        }

    def partial(self, name: str) -> Path:
        """File of finished records of one part."""
        return self.task.folder / f"{name}.partial.jsonl"


class Part(NamedTuple):
    """One kind of measurement.

    Attributes:
        prepare: draws and checks what will be measured; `None` where it is not asked for.
        measure: measures it on a bridge, as JSON values.
    """

    prepare: Callable[[Task], Any]
    measure: Callable[[Subject, Any], Any]


def _prepare_documents(task: Task) -> list[Document]:
    return task.first_documents(task.config.documents, "eval.documents")


def _measure_documents(subject: Subject, documents: list[Document]) -> list[dict[str, Any]]:
    task = subject.task
    arms = standard_arms(task.pair, subject.mapping, documents[0].plan(task.plan), task.config.prompt)
    read = {name: value for name, value in asdict(task.config).items() if name not in UNREAD_BY_DOCUMENTS}
    identity = subject.identity(eval=read)
    return evaluate(task.pair, arms, documents, task.config, partial=subject.partial("documents"), identity=identity)


def _prepare_lengths(task: Task) -> dict[int, list[Document]] | None:
    config, gold = task.config, task.config.tokens - task.config.prompt
    for length in config.lengths:
        task.pair.require_length(length + max(gold, config.rollout), "eval.lengths with what follows the prompt")
        if task.plan.split(length).carried == 0:
            raise UsageError(
                f"eval.lengths={length}: sinks and tail of {task.plan.sinks} and {task.plan.native_tail} tokens leave "
                "nothing to carry; give longer prompts."
            )
    chat = config.format == "chat"
    return {
        length: task.documents(length, length + gold, config.documents, chat=chat) for length in config.lengths
    } or None


def _measure_lengths(subject: Subject, documents: dict[int, list[Document]]) -> dict[str, Any]:
    task = subject.task
    read = {name: getattr(task.config, name) for name in ("documents", "rollout", "join", "format")}
    return evaluate_lengths(
        task.pair,
        subject.mapping,
        task.plan,
        documents,
        task.config,
        folder=task.folder,
        identity=subject.identity(eval=read | {"gold": task.config.tokens - task.config.prompt}),
    )


def _prepare_probes(task: Task) -> Any:
    return build_probes(task.pair, task.plan, task.config.probes) or None


def _measure_probes(subject: Subject, probes: Any) -> dict[str, Any]:
    task = subject.task
    identity = subject.identity(probes=asdict(task.config.probes))
    records = ask_probes(
        task.pair, subject.mapping, task.plan, probes, partial=subject.partial("probes"), identity=identity
    )
    return summarise_probes(records, task.config)


def _prepare_turns(task: Task) -> list[Document] | None:
    turns = task.config.turns
    if not turns.count:
        return None
    task.pair.require_length(turns.tokens, "eval.turns, all turns together,")
    held = turns.prompt + turns.gold
    if not (task.plan.split(turns.prompt).carried and task.plan.split(held + turns.prompt, held).carried):
        raise UsageError(
            f"eval.turns.prompt={turns.prompt}: sinks and tail of {task.plan.sinks} and {task.plan.native_tail} tokens "
            "leave nothing of a turn to carry; give longer turns."
        )
    return task.documents(turns.tokens - turns.gold, turns.tokens, turns.documents)


def _measure_turns(subject: Subject, documents: list[Document]) -> dict[str, Any]:
    task = subject.task
    config = task.config.turns
    records = evaluate_turns(
        task.pair,
        subject.mapping,
        task.plan,
        documents,
        config,
        partial=subject.partial("turns"),
        identity=subject.identity(turns=asdict(config), join=task.config.join),
    )
    return summarise_turns(records, config, task.config.resamples, task.config.seed)


def _prepare_retention(task: Task) -> RetentionConfig | None:
    config = task.config
    prepare_retention(
        config.retention, task.pair, task.corpus, prompt=config.prompt, seed=config.seed, folder=task.folder
    )
    return config.retention if config.retention.tasks else None


def _measure_retention(subject: Subject, retention: RetentionConfig) -> dict[str, Any]:
    task = subject.task
    return score_retention(
        task.pair,
        subject.mapping,
        task.plan,
        retention,
        folder=task.folder,
        identity=subject.identity(prompt=task.config.prompt, seed=task.config.seed),
        resamples=task.config.resamples,
        seed=task.config.seed,
    )


# In the order in which they run; the names are those of `results.json`.
PARTS = {
    "documents": Part(_prepare_documents, _measure_documents),
    "by_length": Part(_prepare_lengths, _measure_lengths),
    "probes": Part(_prepare_probes, _measure_probes),
    "turns": Part(_prepare_turns, _measure_turns),
    "retention": Part(_prepare_retention, _measure_retention),
}


def prepare(task: Task) -> dict[str, Any]:
    """Draw and check everything that will be measured, so that no long run ends in a mistake that was there before.

    Raises:
        UsageError, CorpusError: settings or text that cannot work.
    """
    return {name: part.prepare(task) for name, part in PARTS.items()}


def measure(subject: Subject, prepared: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """Measure what was prepared; `None` for what was not asked for.

    Args:
        subject: the bridge and its task.
        prepared: from `prepare`.
        seconds: takes the wall time of each part.

    Raises:
        CacheError: the map reads what the plan does not give, or does not make what the plan needs.
    """
    subject.mapping.require_plan(subject.task.plan, subject.task.pair.target.geometry.layers)
    measured: dict[str, Any] = {}
    for name, part in PARTS.items():
        start = time.perf_counter()
        measured[name] = None if prepared[name] is None else part.measure(subject, prepared[name])
        if prepared[name] is not None:
            seconds[name] = time.perf_counter() - start
    return measured


def clear_partials(folder: Path) -> None:
    """Remove the files of finished records, once the results hold them."""
    for path in folder.glob("*.partial.json*"):
        path.unlink()
