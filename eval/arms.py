"""Ways to come by a cache for the same prompt. Each gives logits after the prompt and a cache to go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvbridge import compat
from kvbridge.assembly import Handoff, assemble, hand_off, timed
from kvbridge.carried import map_states
from kvbridge.eval.documents import Document
from kvbridge.flops import CostedMap, ModelCost, affordable_tail
from kvbridge.forms import KINDS, Map
from kvbridge.kernels import FormMap
from kvbridge.mappers.identity import identity_form, same_shape
from kvbridge.model import KVModel
from kvbridge.native import compute_head, exact_states
from kvbridge.pair import ModelPair
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates


@dataclass(frozen=True, slots=True)
class Reading:
    """A model with a cache for a prompt.

    Attributes:
        model: the model that goes on.
        cache: what it has for the prompt.
        logits: of the last prompt token.
        position: of the next token.
        seconds: time spent per step.
    """

    model: KVModel
    cache: DynamicCache
    logits: Float[Tensor, "1 V"]
    position: int
    seconds: dict[str, float] = field(default_factory=dict)

    def force(self, tokens: Int[Tensor, "1 T"]) -> Float[Tensor, "T V"]:
        """Logits that predict each of `tokens`, teacher-forced; the cache stays as it is."""
        tokens = tokens.to(self.model.device)
        if tokens.shape[1] == 1:
            return self.logits
        copied = compat.copy_cache(self.cache, self.model.model)
        following = self.model.extend(copied, tokens[:, :-1], self.position)
        return torch.cat((self.logits, following[0]))

    def score(self, continuations: Sequence[Int[Tensor, "_"]]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation (at least one token), and whether greedy decoding would give it.

        All continuations go through the model as one batch, so that forced choice costs one short forward pass.
        """
        device, width = self.model.device, max(map(len, continuations))
        # Tokens beyond a shorter continuation are never seen by its own.
        rows = torch.zeros(len(continuations), width, dtype=torch.long)
        for row, continuation in zip(rows, continuations, strict=True):
            row[: len(continuation)] = continuation
        rows = rows.to(device)
        logits = self.logits.expand(len(rows), -1)[:, None]
        if width > 1:
            copied = compat.copy_cache(self.cache, self.model.model, batch=len(rows))
            logits = torch.cat((logits, self.model.extend(copied, rows[:, :-1], self.position)), dim=1)
        chosen = logits.float().log_softmax(dim=-1).gather(-1, rows[..., None])[..., 0]
        greedy = logits.argmax(dim=-1) == rows
        return [
            (float(chosen[at, : len(row)].sum()), bool(greedy[at, : len(row)].all()))
            for at, row in enumerate(continuations)
        ]

    def generate(self, count: int, vocabulary: int | None = None) -> tuple[Int[Tensor, "1 T"], Float[Tensor, "T V"]]:
        """Greedy continuation of `count` tokens below `vocabulary`, and the logits that predicted each."""
        copied = compat.copy_cache(self.cache, self.model.model)
        logits, tokens = [self.logits], [self.logits[:, :vocabulary].argmax(dim=-1, keepdim=True)]
        while len(tokens) < count:
            following = self.model.extend(copied, tokens[-1], self.position + len(tokens) - 1)[:, -1]
            logits.append(following)
            tokens.append(following[:, :vocabulary].argmax(dim=-1, keepdim=True))
        return torch.cat(tokens, dim=1), torch.cat(logits)


@dataclass(slots=True)
class Context:
    """What the arms share about one document.

    Attributes:
        document: prompt and gold continuation.
        native: the target's own reading of the prompt.
        native_states: its content states.
        source: the source's own reading of the prompt.
        source_states: its content states.
        other_prompt: prompt of another document, of the same length.
        other_states: the source's content states of that prompt.
    """

    document: Document
    native: Reading
    native_states: ContentStates
    source: Reading
    source_states: ContentStates
    other_prompt: Int[Tensor, "1 P"]
    other_states: ContentStates


Arm = Callable[[Context], Reading]


def read_prompt(model: KVModel, prompt: Int[Tensor, "1 P"]) -> Reading:
    """A model's own reading of a prompt, timed."""
    prompt = prompt.to(model.device)
    seconds: dict[str, float] = {}
    with timed(seconds, "prefill", model.device):
        cache, logits = model.prefill(prompt)
    return Reading(model, cache, logits[:, -1], prompt.shape[1], seconds)


def strip_prompt(reading: Reading) -> ContentStates:
    """Content states of a reading; the time goes to its `strip` step."""
    with timed(reading.seconds, "strip", reading.model.device):
        return reading.model.content(reading.cache)


def read_context(
    pair: ModelPair, document: Document, other_prompt: Int[Tensor, "1 P"], other_states: ContentStates | None = None
) -> Context:
    """Both models' readings of a document, beside what the source made of another text.

    Args:
        pair: source and target.
        document: what is read.
        other_prompt: another text, of the same length as the document's prompt.
        other_states: the source's content states of it, where they are at hand.
    """
    native, source = read_prompt(pair.target, document.prompt), read_prompt(pair.source, document.prompt)
    source_states = strip_prompt(source)
    if other_states is None:
        other_states = strip_prompt(read_prompt(pair.source, other_prompt))
    native_states = native.model.content(native.cache)
    return Context(document, native, native_states, source, source_states, other_prompt, other_states)


def _reading(target: KVModel, handoff: Handoff) -> Reading:
    return Reading(target, handoff.cache, handoff.logits, handoff.next_position, handoff.seconds)


def mapped_arm(pair: ModelPair, mapping: Map, plan: HandoffPlan) -> Arm:
    """The hand-off under test."""

    def mapped(context: Context) -> Reading:
        prompt = context.document.prompt.to(pair.target.device)
        return _reading(pair.target, hand_off(pair.target, plan, mapping, context.source_states, prompt))

    return mapped


def injected_arm(pair: ModelPair, plan: HandoffPlan) -> Arm:
    """The target's own keys and values, stripped, rotated and injected: must equal native."""

    def injected(context: Context) -> Reading:
        prompt = context.document.prompt.to(pair.target.device)
        carried = exact_states(pair.target, plan, prompt, context.native_states)
        return _reading(pair.target, assemble(pair.target, plan, prompt, carried))

    return injected


def other_document_arm(pair: ModelPair, mapping: Map, plan: HandoffPlan) -> Arm:
    """Everything carried comes from another text, the native head and what the map reads of it too.

    Sinks and tail are the prompt's own.
    """

    def other_document(context: Context) -> Reading:
        split = plan.split(context.document.prompt.shape[1])
        prompt, other = (ids.to(pair.target.device) for ids in (context.document.prompt, context.other_prompt))
        head = compute_head(pair.target, plan, other)
        carried = map_states(pair.target, plan, mapping, context.other_states, split, head)
        return _reading(pair.target, assemble(pair.target, plan, prompt, carried, head=head))

    return other_document


def nothing_carried_arm(pair: ModelPair, plan: HandoffPlan) -> Arm:
    """Sinks and tail read natively at their positions, nothing carried between them."""

    def nothing_carried(context: Context) -> Reading:
        return _reading(pair.target, assemble(pair.target, plan, context.document.prompt.to(pair.target.device), None))

    return nothing_carried


def equal_cost_tail(pair: ModelPair, mapping: CostedMap, plan: HandoffPlan, prompt_length: int) -> HandoffPlan:
    """The plan that spends the hand-off's FLOPs on a longer native tail instead: what a user would do without a map."""
    tail = affordable_tail(ModelCost.of(pair.target), plan, prompt_length, mapping)
    return HandoffPlan(sinks=plan.sinks, native_head=None, native_tail=tail)


def standard_arms(pair: ModelPair, mapping: FormMap, plan: HandoffPlan, prompt_length: int) -> dict[str, Arm]:
    """The map under test and its control arms, in the order of reports; native itself is the reference."""
    arms: dict[str, Arm] = {
        "mapped": mapped_arm(pair, mapping, plan),
        "injected": injected_arm(pair, plan),
        "source": lambda context: context.source,
        "tail_only": nothing_carried_arm(pair, equal_cost_tail(pair, mapping, plan, prompt_length)),
        "other_document": other_document_arm(pair, mapping, plan),
        "no_context": nothing_carried_arm(pair, plan),
    }
    if same_shape(pair.source.geometry, pair.target.geometry):
        raw = FormMap(tuple(identity_form(kind, pair.target.geometry) for kind in KINDS))
        arms["raw_source"] = mapped_arm(pair, raw, plan)
    return arms
