"""Hand-offs whose drafts are as good as a test wants them, and what a stream of events shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from kvbridge.assembly import Handoff, assemble
from kvbridge.cascade.events import Event
from kvbridge.model import KVModel
from kvbridge.native import exact_states
from kvbridge.plan import HandoffPlan


def noisy_handoff(target: KVModel, input_ids: Tensor, noise: float, plan: HandoffPlan | None = None) -> Handoff:
    """The target's own states of a prompt, of which `noise` of their norm is random; 0 is exact."""
    plan = plan or HandoffPlan(sinks=2, native_head=None, native_tail=2)
    states = exact_states(target, plan, input_ids, target.content(target.read(input_ids)))
    spoilt = {
        name: getattr(states, name) + noise * getattr(states, name).std() * torch.randn_like(getattr(states, name))
        for name in ("keys", "values")
    }
    return assemble(target, plan, input_ids, replace(states, **spoilt))


def committed(events: Iterable[Event]) -> tuple[list[int], str]:
    """Tokens and text of the commits, after checking that every event fits what is on show."""
    tokens, provisional = list[int](), list[int]()
    text, shown, finished = "", "", False
    for event in events:
        assert not finished
        if event.kind == "draft":
            assert event.start == len(tokens) + len(provisional)
            provisional += event.tokens
            shown += event.text
        elif event.kind == "retract":
            assert provisional[event.start - len(tokens) :] == list(event.tokens) != []
            assert shown.endswith(event.text)
            provisional = provisional[: event.start - len(tokens)]
            shown = shown[: len(shown) - len(event.text)]
        else:
            assert event.start == len(tokens)
            assert list(event.tokens[: len(provisional)]) == provisional
            assert event.text.startswith(shown)
            tokens, provisional, text, shown = tokens + list(event.tokens), [], text + event.text, ""
            finished = event.finish is not None
    assert finished
    return tokens, text
