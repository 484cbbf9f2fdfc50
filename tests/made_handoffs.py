"""Hand-offs whose drafts are as good as a test wants them, what a target writes by itself, and what a stream shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbridge.assembly import Handoff, assemble
from kvbridge.cascade.events import Event
from kvbridge.cascade.sampling import SamplingParams
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


def own_tokens(
    target: KVModel, input_ids: Tensor, params: SamplingParams, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """What `generate` writes greedily after a prompt."""
    given: dict[str, Any] = {"stop_strings": list(params.stop), "tokenizer": tokenizer} if params.stop else {}
    output = target.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=params.max_new_tokens,
        repetition_penalty=params.repetition_penalty,
        do_sample=False,
        pad_token_id=0,
        **given,
    )
    return output[0, input_ids.shape[1] :].tolist()


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
