"""Floating-point operations of a prefill and of a hand-off; a multiply-add counts as two.

The share of prefill FLOPs is (sinks + native head + map + tail recompute + scouts + attended tokens + tail) / native
prefill of the same prompt, attention and one row of the language-model head included on both sides. Sinks count once:
where a tail recompute needs their keys and values, they are read before it and not again with the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from kvbridge import compat
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


@runtime_checkable
class CostedMap(Protocol):
    """A map that knows its own cost."""

    def flops_per_token(self, layers: range) -> int:
        """Operations that mapping one token into the target `layers` takes."""
        ...


def _weights_per_token(layer: nn.Module, config: Any) -> int:
    """Weights that one token meets: all linear ones, and those of as many stacked experts `[E, …]` as it is sent to."""
    dense = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
    experts = [weight for weight in layer.parameters() if weight.ndim == 3]
    return dense + sum(weight[0].numel() * config.num_experts_per_tok for weight in experts)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Operation counts of one model.

    Attributes:
        layers: decoder layers.
        per_token: all products with weights of one decoder layer, for one token.
        projections: those of its query, key and value projections alone.
        per_pair: attention of one layer for one (query token, key token) pair.
        head: the language-model head for one row.
    """

    layers: int
    per_token: int
    projections: int
    per_pair: int
    head: int

    @classmethod
    def of(cls, model: KVModel) -> ModelCost:
        layer = compat.decoder_layers(model.model)[0]
        projections = sum(
            part.weight.numel()
            for name, part in layer.named_modules()
            if isinstance(part, nn.Linear) and name.rsplit(".", 1)[-1] in PROJECTIONS
        )
        embedding = model.model.get_output_embeddings()
        return cls(
            layers=model.geometry.layers,
            per_token=2 * _weights_per_token(layer, model.model.config.get_text_config(decoder=True)),
            projections=2 * projections,
            per_pair=4 * model.geometry.query_heads * model.geometry.head_dim,
            head=2 * embedding.weight.numel() if embedding is not None else 0,
        )

    def read(self, start: int, stop: int, visible_before: int, layers: int) -> int:
        """Reading tokens `start … stop − 1` through `layers` layers; each sees `visible_before` tokens more."""
        tokens = stop - start
        pairs = tokens * visible_before + tokens * (tokens + 1) // 2
        return layers * (tokens * self.per_token + pairs * self.per_pair)

    def prefill(self, prompt_length: int) -> int:
        """Reading a prompt natively, one row of logits included."""
        return self.read(0, prompt_length, 0, self.layers) + self.head


def handoff_flops(cost: ModelCost, plan: HandoffPlan, prompt_length: int, mapping: CostedMap | None) -> dict[str, int]:
    """Operations of a hand-off, part by part; without a map nothing is carried and nothing mapped.

    Returns:
        `sinks`, `head`, `map`, `recompute`, `scout` (the pass that chooses the attended tokens), `attended` (reading
        them, an upper bound, as if each saw everything before the tail) and `tail` (one row of logits included).
    """
    split = plan.split(prompt_length)
    tail_tokens = prompt_length - split.carried_stop
    seen = split.carried_stop if mapping is not None else split.carried_start
    parts = {
        "sinks": cost.read(0, split.carried_start, 0, cost.layers),
        "head": 0,
        "map": 0,
        "recompute": 0,
        "scout": 0,
        "attended": 0,
        "tail": cost.read(0, tail_tokens, seen, cost.layers) + cost.head,
    }
    if mapping is not None and split.carried:
        if plan.native_head is not None:
            parts["head"] = (
                cost.read(0, split.carried_stop, 0, plan.native_head) + split.carried_stop * cost.projections
            )
        if plan.tail_recompute:
            whole = cost.read(split.carried_start, split.carried_stop, split.carried_start, plan.tail_recompute - 1)
            parts["recompute"] = whole + split.carried * cost.projections
        parts["map"] = split.carried * mapping.flops_per_token(plan.mapped_layers(cost.layers))
        attended = plan.attended(split.carried)
        if attended:
            parts["scout"] = cost.read(0, min(plan.scouts, tail_tokens), seen, cost.layers)
            parts["attended"] = cost.layers * attended * (cost.per_token + seen * cost.per_pair)
    return parts


def prefill_share(cost: ModelCost, plan: HandoffPlan, prompt_length: int, mapping: CostedMap | None) -> float:
    """Share of native prefill FLOPs that a hand-off costs."""
    return sum(handoff_flops(cost, plan, prompt_length, mapping).values()) / cost.prefill(prompt_length)


def affordable_tail(cost: ModelCost, plan: HandoffPlan, prompt_length: int, mapping: CostedMap) -> int:
    """The longest native tail that costs no more than the hand-off, with nothing carried."""
    budget = sum(handoff_flops(cost, plan, prompt_length, mapping).values())
    tail = plan.native_tail
    while tail < prompt_length - plan.sinks:
        longer = HandoffPlan(sinks=plan.sinks, native_head=None, native_tail=tail + 1)
        if sum(handoff_flops(cost, longer, prompt_length, None).values()) > budget:
            break
        tail += 1
    return tail
