"""Probes of the memory axis: facts in the carried context, asked for by a question that is read natively.

prompt   [ opening, filler … | fact | filler … fact … filler | question ]      exactly `length` tokens
           sinks               carried                     … | tail            no fact in sinks or tail
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.calibration.blocks import opening
from kvbridge.errors import UsageError
from kvbridge.eval.probe_tasks import LANGUAGES, TASKS, Question
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.tokens import encode


@dataclass
class ProbesConfig:
    """Which questions about the context are asked after a hand-off.

    Attributes:
        count: probes per task, length and depth; 0 asks none.
        tasks: some of `passkey`, `needles`, `pairs`, `variables` and `counting`.
        lengths: prompt lengths in tokens, the question included.
        depths: where the fact lies, from 0 (right after the sinks) to 1 (right before the tail).
        language: `plain` English, or that of the `embedded` pair.
        seed: of questions and filler.
    """

    count: int = 0
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    lengths: list[int] = field(default_factory=lambda: [256, 512])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    language: str = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 0 or self.seed < 0:
            raise UsageError(f"eval.probes.count={self.count}, eval.probes.seed={self.seed}: expected 0 or more.")
        if self.language not in LANGUAGES:
            raise UsageError(f"eval.probes.language={self.language}: expected one of {', '.join(LANGUAGES)}.")
        for name, values, expected, allowed in (
            ("tasks", self.tasks, f"some of {', '.join(TASKS)}", set(self.tasks) <= set(TASKS)),
            ("lengths", self.lengths, "numbers of tokens, 1 or more", min(self.lengths, default=0) >= 1),
            ("depths", self.depths, "numbers from 0 to 1", all(0 <= depth <= 1 for depth in self.depths)),
        ):
            if not values or not allowed or len(set(values)) < len(values):
                given = ",".join(map(str, values))
                raise UsageError(f"eval.probes.{name}=[{given}]: expected {expected}, each once and at least one.")


@dataclass(frozen=True, slots=True)
class Probe:
    """One question about one context, as tokens.

    Attributes:
        task: one of `TASKS`.
        length: tokens of the prompt.
        depth: where the fact lies, in [0, 1].
        question: the same as text.
        prompt: context and question.
        asked_tokens: how many of them are the question.
        choices: tokens of each continuation in `question.choices`.
        other: a prompt of the same length that is filler alone, for the other-document arm.
    """

    task: str
    length: int
    depth: float
    question: Question
    prompt: Int[Tensor, "1 P"]
    asked_tokens: int
    choices: tuple[Int[Tensor, "_"], ...]
    other: Int[Tensor, "1 P"]

    @property
    def right(self) -> int:
        """Index of the answer among the choices."""
        return self.question.choices.index(self.question.answer)

    def plan(self, plan: HandoffPlan) -> HandoffPlan:
        """The plan with a tail that covers the question."""
        return replace(plan, native_tail=max(plan.native_tail, self.asked_tokens))


def following(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Tokens that ` text` adds after `before`; the space belongs to them.

    Raises:
        UsageError: the tokenizer joins the two.
    """
    start, whole = encode(tokenizer, before), encode(tokenizer, f"{before} {text}")
    if whole[: len(start)] != start:
        raise UsageError(
            f"this pair's tokenizer has one token across the space in {before[-20:]!r} + {' ' + text[:20]!r}, so the "
            "probes cannot tell context and question apart; leave them out with eval.probes.count=0."
        )
    return whole[len(start) :]


def _filler(tokenizer: PreTrainedTokenizerBase, sentences: Iterator[str], tokens: int) -> tuple[list[int], list[int]]:
    """Exactly `tokens` tokens of filler, cut at the beginning like an excerpt, and where sentences meet in it."""
    ids, ends = list[int](), [0]
    while len(ids) < tokens:
        ids += following(tokenizer, ".", next(sentences))
        ends.append(len(ids))
    cut = len(ids) - tokens
    return ids[cut:], [end - cut for end in ends if end >= cut]


class _Writer:
    """Lays out the probes of one configuration for one tokenizer and plan."""

    def __init__(self, pair: ModelPair, plan: HandoffPlan, config: ProbesConfig) -> None:
        self.pair, self.plan, self.config = pair, plan, config
        self.tokenizer, self.opening = pair.tokenizer, opening(pair.tokenizer)
        self.language = LANGUAGES[config.language]

    def other(self, length: int) -> Int[Tensor, "1 P"]:
        """A prompt of filler alone, from a seed that no probe has."""
        sentences = self.language.filler(random.Random(f"{self.config.seed} other {length}"))
        return torch.tensor([self.opening + _filler(self.tokenizer, sentences, length - len(self.opening))[0]])

    def prompt(self, question: Question, asked: list[int], depth: float, length: int, rng: random.Random) -> list[int]:
        """Tokens of facts in filler, then those of the question, `length` in all."""
        facts = [following(self.tokenizer, ".", fact) for fact in question.facts]
        needed = len(self.opening) + sum(map(len, facts)) + len(asked)
        filler, gaps = _filler(self.tokenizer, self.language.filler(rng), max(length - needed, 0))
        first = max(self.plan.sinks - len(self.opening), 0)
        last = length - needed - max(self.plan.native_tail - len(asked), 0)
        gaps = [gap for gap in gaps if first <= gap <= last]
        if not gaps:
            raise UsageError(
                f"eval.probes.lengths={length} is too short for {question.text!r}: facts and question take {needed} "
                f"tokens, and the facts must lie between {self.plan.sinks} sinks and a tail of "
                f"{max(self.plan.native_tail, len(asked))}; give longer prompts, or leave the task out."
            )
        places = [rng.choice(gaps) for _ in facts]
        places[question.asked] = min(gaps, key=lambda gap: abs(gap - first - depth * (last - first)))
        ids, written = list(self.opening), 0
        for place, fact in sorted(zip(places, facts, strict=True), key=lambda placed: placed[0]):
            ids += filler[written:place] + fact
            written = place
        return ids + filler[written:] + asked

    def probe(self, task: str, length: int, depth: float, number: int, other: Int[Tensor, "1 P"]) -> Probe:
        """The probe of a cell with this number, whatever else is asked."""
        rng = random.Random(f"{self.config.seed} {task} {length} {depth} {number}")
        question = self.language.tasks[task](rng)
        choices = [following(self.tokenizer, question.text, choice) for choice in question.choices]
        self.pair.require_length(length + max(map(len, choices)), "eval.probes.lengths with an answer")
        asked = following(self.tokenizer, ".", question.text)
        prompt = torch.tensor([self.prompt(question, asked, depth, length, rng)])
        return Probe(task, length, depth, question, prompt, len(asked), tuple(map(torch.tensor, choices)), other)


def build_probes(pair: ModelPair, plan: HandoffPlan, config: ProbesConfig) -> list[Probe]:
    """All probes of a configuration, the same for every arm and every map; shorter prompts first.

    Args:
        pair: whose tokenizer writes them.
        plan: facts lie outside its sinks and tail.
        config: tasks, lengths, depths, and how many of each.

    Raises:
        UsageError: a length is too short for its task, or longer than the pair was made for.
    """
    writer, probes = _Writer(pair, plan, config), list[Probe]()
    for length in sorted(config.lengths) if config.count else ():
        pair.require_length(length, "eval.probes.lengths")
        other = writer.other(length)
        for task, depth, number in product(config.tasks, config.depths, range(config.count)):
            probes.append(writer.probe(task, length, depth, number, other))
    return probes
