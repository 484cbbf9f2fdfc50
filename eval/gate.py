"""The gate: the target's own keys and values, stripped, re-rotated and injected, must answer as if nothing happened.

Controls show that the gate has power: keys rotated for the next position, heads in reverse order, and keys in the
place of values must each fail it clearly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvbridge.assembly import assemble
from kvbridge.errors import UsageError
from kvbridge.eval.arms import read_prompt
from kvbridge.metrics import fidelity
from kvbridge.model import KVModel
from kvbridge.native import exact_states
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}
# A control must miss the limit by this factor, or the gate proves nothing on this model.
POWER = 100
CONTINUATION = 32


def _shifted(model: KVModel, states: ContentStates) -> ContentStates:
    rotated = model.rotary.apply(states.keys, states.positions + 1)
    return replace(states, keys=model.rotary.strip(rotated, states.positions))


def _heads_swapped(_: KVModel, states: ContentStates) -> ContentStates:
    return replace(states, keys=states.keys.flip(2), values=states.values.flip(2))


def _kinds_swapped(_: KVModel, states: ContentStates) -> ContentStates:
    return replace(states, keys=states.values, values=states.keys)


CONTROLS: dict[str, Callable[[KVModel, ContentStates], ContentStates]] = {
    "shifted positions": _shifted,
    "swapped heads": _heads_swapped,
    "swapped keys and values": _kinds_swapped,
}


@dataclass(frozen=True, slots=True)
class GateReport:
    """KL of the injected cache and of each control, in nats.

    Attributes:
        injected: KL of the right injection.
        limit: what it must stay below in the model's dtype.
        controls: KL of each wrong injection.
    """

    injected: float
    limit: float
    controls: dict[str, float]

    @property
    def passed(self) -> bool:
        return self.injected < self.limit

    @property
    def powerful(self) -> bool:
        """Whether every wrong injection fails by a factor of `POWER`."""
        return all(map(self.clearly_fails, self.controls))

    def clearly_fails(self, control: str) -> bool:
        """Whether a wrong injection fails by a factor of `POWER`."""
        return self.controls[control] > POWER * self.limit


def identity_gate(model: KVModel, input_ids: Int[Tensor, "1 T"], plan: HandoffPlan | None = None) -> GateReport:
    """Run the gate on a model.

    Args:
        model: the model whose cache is stripped, re-rotated and injected.
        input_ids: a text; its last 32 tokens are the continuation that is compared.
        plan: what is computed natively; by default only the last prompt token.

    Raises:
        UsageError: the text is too short.
    """
    plan = plan or HandoffPlan(sinks=0, native_head=None, native_tail=1)
    if input_ids.shape[1] < CONTINUATION + 2:
        raise UsageError(
            f"{input_ids.shape[1]} tokens; the gate compares the last {CONTINUATION} after a prompt of two or more."
        )
    if plan.split(input_ids.shape[1] - CONTINUATION).carried == 0:
        raise UsageError(
            f"{input_ids.shape[1]} tokens leave nothing to carry under {plan}; the gate would prove nothing."
        )
    input_ids = input_ids.to(model.device)
    prompt, gold = input_ids[:, :-CONTINUATION], input_ids[:, -CONTINUATION:]
    native = read_prompt(model, prompt)
    reference = native.force(gold).double()
    states = model.content(native.cache)

    def kl(changed: ContentStates) -> float:
        handoff = assemble(model, plan, prompt, exact_states(model, plan, prompt, changed))
        following = model.extend(handoff.cache, gold[:, :-1], handoff.next_position)
        logits = torch.cat((handoff.logits, following[0])).double()
        return fidelity(reference, logits, gold[0]).kl.mean().item()

    with torch.inference_mode():
        controls = {name: kl(change(model, states)) for name, change in CONTROLS.items()}
        if model.geometry.kv_heads == 1:
            del controls["swapped heads"]
        return GateReport(kl(states), LIMITS[model.dtype], controls)
