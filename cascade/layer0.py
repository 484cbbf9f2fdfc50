"""Does a source cache belong to this prompt? Layer 0 says so exactly: its keys and values depend on the token alone."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from kvbridge.layer_pass import run_head
from kvbridge.model import KVModel
from kvbridge.states import ContentStates

# Rounding alone stays far below; a wrong token or position changes a key by its own size.
LIMITS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def layer0_deviation(source: KVModel, states: ContentStates, input_ids: Int[Tensor, "B T"]) -> float:
    """Largest relative deviation of a token's layer-0 keys or values from those of the prompt's own token.

    Costs the source its embedding and the projections of its first layer. Positions are `0 … T − 1`.

    Args:
        source: whose cache it is said to be.
        states: content states of the whole prompt.
        input_ids: the prompt.
    """
    made, _ = run_head(source.model, input_ids.to(source.device), 0)
    keys, values = made[0]
    positions = torch.arange(input_ids.shape[1], device=keys.device)
    expected = torch.stack((source.rotary.strip(keys, positions), values.float()))
    found = torch.stack((states.keys[0], states.values[0])).to(expected.device, torch.float32)
    deviation = (found - expected).square().sum(dim=(2, 4)).sqrt()
    size = expected.square().sum(dim=(2, 4)).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return float((deviation / size).max())
