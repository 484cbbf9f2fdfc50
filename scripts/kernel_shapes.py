"""Pairs and maps whose cost `roofline.py` counts and `gpu_checks.py` measures: shapes alone, weights are random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.flops import ModelCost
from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine, flops_per_token
from kvbridge.kernels.triton.sides import Side
from kvbridge.variables import KINDS, Span


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder, as its published config gives it."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def side(self) -> Side:
        return Side(self.layers, self.kv_heads, self.head_dim, self.head_dim, False, self.hidden)

    @property
    def cost(self) -> ModelCost:
        projections = self.hidden * self.head_dim * (self.query_heads + 2 * self.kv_heads)
        output = self.query_heads * self.head_dim * self.hidden
        return ModelCost(
            layers=self.layers,
            per_token=2 * (projections + output + 3 * self.hidden * self.inner),
            projections=2 * projections,
            per_pair=4 * self.query_heads * self.head_dim,
            head=2 * self.hidden * self.vocabulary,
        )


QWEN3_06 = Model("Qwen3 0.6B", 28, 1024, 16, 8, 128, 3072, 151936)
QWEN3_17 = Model("Qwen3 1.7B", 28, 2048, 16, 8, 128, 6144, 151936)
QWEN3_8 = Model("Qwen3 8B", 36, 4096, 32, 8, 128, 12288, 151936)
QWEN3_32 = Model("Qwen3 32B", 64, 5120, 64, 8, 128, 25600, 151936)
CODER_05 = Model("Qwen2.5-Coder 0.5B", 24, 896, 14, 2, 64, 4864, 151936)
CODER_15 = Model("Qwen2.5-Coder 1.5B", 28, 1536, 12, 2, 128, 8960, 151936)
PAIRS = {
    "0.6B-1.7B": (QWEN3_06, QWEN3_17),
    "0.6B-8B": (QWEN3_06, QWEN3_8),
    "8B-32B": (QWEN3_8, QWEN3_32),
    "0.5B-1.5B": (CODER_05, CODER_15),
}
MAPS = ("one head, k=8", "all heads, k=8", "basis of 256", "basis of 256 and branch of 64", "joint")


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[-2] ** -0.5)


def _slot_affine(
    source: Side, target: Side, k: int, every_head: bool, **made: torch.device | torch.dtype
) -> tuple[Form, ...]:
    forms = []
    for kind in KINDS:
        first = KINDS.index(kind) * source.layers
        slots = torch.empty((target.layers, target.heads, k * (source.heads if every_head else 1)), dtype=torch.int32)
        for layer in range(target.layers):
            nearest = min(max(0, layer * source.layers // target.layers - k // 2), source.layers - k)
            for head in range(target.heads):
                heads = range(source.heads) if every_head else [head % source.heads]
                slots[layer, head] = torch.tensor(
                    [(first + nearest + back) * source.heads + one for back in range(k) for one in heads]
                )
        weight = _random(*slots.shape, source.head_dim, target.head_dim, **made)  # type: ignore[arg-type]
        bias = torch.zeros(*slots.shape[:2], target.head_dim, device=weight.device)
        forms.append(SlotAffine(kind, slots, weight, bias))
    return tuple(forms)


def make_map(name: str, source: Side, target: Side, device: torch.device, dtype: torch.dtype) -> tuple[Form, ...]:
    """Random forms of a kind in `MAPS`; on the device `meta` shapes alone, to count with."""
    made = {"device": device, "dtype": dtype}
    if name.endswith("k=8"):
        return _slot_affine(source, target, 8, name.startswith("all"), **made)
    inputs = tuple(Span(f"source.{kind}", 0, source.layers) for kind in KINDS)
    outputs = tuple(Span(f"target.{kind}", 0, target.layers) for kind in KINDS)
    p, q = (2 * each.layers * each.heads * each.head_dim for each in (source, target))
    shape = target.heads, target.head_dim
    bias = torch.zeros(q, device=device)
    if name == "joint":
        return (SharedBasis(inputs, outputs, None, _random(p, q, **made), bias, *shape),)
    basis = SharedBasis(inputs, outputs, _random(p, 256, **made), _random(256, q, **made), bias, *shape)
    if "branch" not in name:
        return (basis,)
    branch = [_random(p, 64, **made), torch.zeros(64, device=device), _random(64, q, **made), bias]
    return basis, ResidualBranch(inputs, outputs, "gelu", *branch, *shape)


@dataclass(frozen=True, slots=True)
class Work:
    """What mapping a number of tokens takes.

    Attributes:
        flops: of the products; a multiply-add counts as two.
        bytes_moved: weights, source cache and target cache once each, in the dtype given, and the workspace twice.
        share: of the target's own prefill FLOPs.
    """

    flops: int
    bytes_moved: int
    share: float


def work(name: str, pair: tuple[Model, Model], tokens: int, element: int = 2) -> Work:
    """Count one map of one pair, with elements of so many bytes."""
    source, target = pair[0].side, pair[1].side
    forms = make_map(name, source, target, torch.device("meta"), torch.bfloat16)
    layers = range(target.layers)
    weights = sum(
        tensor.numel()
        for form in forms
        for part, tensor in form.tensors().items()
        if part in ("weight", "reduce", "expand")
    )
    read, written = (2 * side.layers * side.heads * side.head_dim for side in (source, target))
    ranks = [form.expand.shape[0] for form in forms if not isinstance(form, SlotAffine) and name != "joint"]
    flops = tokens * flops_per_token(forms, layers)
    moved = element * (weights + tokens * (read + written + 2 * (read + sum(ranks))))
    return Work(flops, moved, flops / pair[1].cost.prefill(tokens))
