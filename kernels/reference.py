"""Forms in plain torch and fp32: slow, obvious, and what every faster path is compared with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvbridge.forms import SlotAffine
from kvbridge.states import ContentStates


def input_slots(states: ContentStates) -> Float[Tensor, "slots B T D_s"]:
    """All (kind, layer, head) slots of a source in the order of `kvbridge.forms.input_slot`."""
    return torch.cat((states.keys.transpose(1, 2).flatten(0, 1), states.values.transpose(1, 2).flatten(0, 1)))


def slot_affine(
    form: SlotAffine, slots: Float[Tensor, "slots B T D_s"], layers: range
) -> Float[Tensor, "L B H_t T D_t"]:
    """Execute a slot-affine form for the target `layers`: `y = Σ_j x[slot_j] W_j + b`."""
    made = []
    for layer in layers:
        heads = []
        for head in range(form.slots.shape[1]):
            inputs = slots[form.slots[layer, head].long()].float()  # [S, B, T, D_s]
            weight = form.weight[layer, head].float()  # [S, D_s, D_t]
            heads.append(torch.einsum("sbtd,sde->bte", inputs, weight) + form.bias[layer, head].float())
        made.append(torch.stack(heads, dim=1))
    return torch.stack(made)
