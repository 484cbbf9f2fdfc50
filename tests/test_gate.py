"""The identity gate: native states, stripped, re-rotated and injected, change nothing, and the gate would notice.

At `initializer_range=0.12` keys shifted by one position cost GPT-NeoX, where a quarter of the head rotates, 0.03 nats;
at 0.25 every control costs 0.6 or more, so that one plan and two limits serve all architectures and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbridge.assembly import assemble
from kvbridge.model import KVModel
from kvbridge.plan import HandoffPlan
from kvbridge.states import ContentStates
from tiny_models import ARCHITECTURES, kv_model, random_ids

PROMPT, GOLD = 48, 16
EVERYTHING = HandoffPlan(sinks=0, native_head=None, native_tail=1)
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2e-3}
Corruption = Callable[[KVModel, ContentStates], ContentStates]
CONTROLS: dict[str, Corruption] = {
    "shifted-positions": lambda model, states: replace(
        states, keys=model.rotary.apply(states.keys, torch.ones_like(states.positions))
    ),
    "swapped-heads": lambda _, states: replace(states, keys=states.keys.flip(2), values=states.values.flip(2)),
    "swapped-kinds": lambda _, states: replace(states, keys=states.values, values=states.keys),
}


def divergence(native: Tensor, arm: Tensor) -> float:
    """Mean KL(native ‖ arm) in nats over all rows of logits."""
    native, arm = native.double().log_softmax(-1), arm.double().log_softmax(-1)
    return float((native.exp() * (native - arm)).sum(-1).mean())


def identity_gate(
    model: KVModel, ids: Tensor, prompt: int, plan: HandoffPlan, corrupt: Corruption = lambda _, states: states
) -> float:
    """KL over the continuation of a prompt whose own native states were carried, spoilt by `corrupt`."""
    _, native = model.prefill(ids, logits_to_keep=ids.shape[1] - prompt + 1)
    split, layers = plan.split(prompt), plan.mapped_layers(model.geometry.layers)
    states = corrupt(model, model.content(model.read(ids[:, :prompt])).span(split.carried_start, split.carried_stop))
    carried = replace(states, keys=states.keys[layers.start :], values=states.values[layers.start :])
    handoff = assemble(model, plan, ids[:, :prompt], carried)
    rest = model.extend(handoff.cache, ids[:, prompt:], prompt)
    return divergence(native, torch.cat((handoff.logits[:, None], rest), dim=1))


def gated_model(architecture: str, dtype: torch.dtype) -> KVModel:
    return kv_model(architecture, dtype, initializer_range=0.25)


@pytest.mark.parametrize("plan", [EVERYTHING, HandoffPlan(4, 0, 16)], ids=["everything", "usual"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_native_states_pass(architecture: str, dtype: torch.dtype, plan: HandoffPlan) -> None:
    kl = identity_gate(gated_model(architecture, dtype), random_ids(PROMPT + GOLD, batch=2), PROMPT, plan)
    assert kl < LIMITS[dtype]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_controls_fail_a_hundredfold(architecture: str, dtype: torch.dtype, control: str) -> None:
    model, ids = gated_model(architecture, dtype), random_ids(PROMPT + GOLD, batch=2)
    assert identity_gate(model, ids, PROMPT, EVERYTHING, CONTROLS[control]) > 100 * LIMITS[dtype]
