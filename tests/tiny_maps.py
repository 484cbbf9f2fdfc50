"""Maps of random weights of every form, states for them, and a rotation of any width."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvbridge.forms import KINDS, Form, ResidualBranch, SharedBasis, SlotAffine
from kvbridge.rotary import RotaryCodec
from kvbridge.states import CachedStates, ContentStates
from kvbridge.variables import Span

LAYERS, TARGET_LAYERS, BATCH = 8, 3, 2
SHAPES = {
    "equal": (2, 16, 2, 16),
    "wider-target": (2, 16, 3, 24),
    "narrower-target": (4, 24, 1, 8),
    "one": (1, 1, 1, 1),
}
Shape = tuple[int, int, int, int]
# What the target has computed itself: layer 0, and the residual stream at its input.
HIDDEN = 40
JOINT = (Span("source.keys", 0, LAYERS), Span("source.values", 2, LAYERS))
NATIVE = (Span("target.keys", 0, 1), Span("target.normed_residual", 0, 1))
MADE = (Span("target.keys", 0, TARGET_LAYERS), Span("target.values", 0, TARGET_LAYERS))
STREAM = (Span("target.residual", TARGET_LAYERS, TARGET_LAYERS + 1),)


def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Memory that nobody wrote to is NaN."""

    def made(*arguments: Any, **options: Any) -> Tensor:
        tensor = make(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(2**7))

    return made


def make_states(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32) -> ContentStates:
    heads, width, _, _ = shape
    keys, values = torch.randn(2, LAYERS, BATCH, heads, tokens, width).to(dtype)
    return ContentStates(keys, values, torch.arange(7, 7 + tokens))


def make_form(
    shape: Shape, k: int, dtype: torch.dtype = torch.float32, seed: int = 0, kind: str = "keys"
) -> SlotAffine:
    """A form whose every output head reads k · H_s slots of its own, keys and values mixed, in no order."""
    heads, width, target_heads, target_width = shape
    chooser = random.Random(seed)
    every = range(len(KINDS) * LAYERS * heads)
    slots = [[chooser.sample(every, k * heads) for _ in range(target_heads)] for _ in range(TARGET_LAYERS)]
    table = torch.tensor(slots, dtype=torch.int32)
    weight = torch.randn(*table.shape, width, target_width) / (k * heads * width) ** 0.5
    return SlotAffine(kind, table, weight.to(dtype), torch.randn(TARGET_LAYERS, target_heads, target_width))


class Turning(nn.Module):
    """A rotary module of some width, with a scaling factor on its tables."""

    def __init__(self, width: int, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.frequencies = torch.logspace(0, -3, width // 2)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.frequencies
        whole = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return (1.2 * whole.cos()).to(x.dtype), (1.2 * whole.sin()).to(x.dtype)


def make_rotary(width: int, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> RotaryCodec:
    return RotaryCodec(Turning(width, interleaved), dtype, interleaved)


def make_cached(shape: Shape, tokens: int, rotary: RotaryCodec, dtype: torch.dtype) -> CachedStates:
    """What a source has cached, layer by layer, with tokens before heads in memory."""
    heads, width, _, _ = shape
    tensors = torch.randn(2, LAYERS, BATCH, tokens, heads, width).to(dtype).transpose(3, 4)
    keys, values = (tuple(kind) for kind in tensors)
    return CachedStates(keys, values, torch.arange(7, 7 + tokens), rotary)


def make_native(shape: Shape, tokens: int) -> ContentStates:
    keys, values = torch.randn(2, 1, BATCH, shape[2], tokens, shape[3])
    return ContentStates(keys, values, torch.arange(7, 7 + tokens), {0: 3 * torch.randn(BATCH, tokens, HIDDEN)})


def _width(shape: Shape, spans: tuple[Span, ...]) -> int:
    heads, width, target_heads, target_width = shape
    one = {"source": heads * width, "target": target_heads * target_width}
    return sum(len(s.layers) * (one[s.role] if s.states in KINDS else HIDDEN) for s in spans)


def make_basis(
    shape: Shape, inputs: tuple[Span, ...], outputs: tuple[Span, ...], rank: int | None, reduce: Tensor | None = None
) -> SharedBasis:
    """A basis of some rank, or a full-rank joint map; `reduce` shares one with another form."""
    p, q = _width(shape, inputs), _width(shape, outputs)
    if reduce is None and rank is not None:
        reduce = torch.randn(p, rank) / p**0.5
    narrow = p if reduce is None else reduce.shape[1]
    return SharedBasis(inputs, outputs, reduce, torch.randn(narrow, q) / narrow**0.5, torch.randn(q), *shape[2:])


def make_branch(shape: Shape, activation: str, outputs: tuple[Span, ...], rank: int = 3) -> ResidualBranch:
    p, q, wide = _width(shape, JOINT), _width(shape, outputs), rank * (2 if activation == "quadratic" else 1)
    reduce, expand = torch.randn(p, wide) / p**0.5, torch.randn(rank, q)
    return ResidualBranch(
        JOINT, outputs, activation, reduce, torch.randn(wide), expand, torch.randn(q), shape[2], shape[3]
    )


def _slots(shape: Shape, k: int, *, alike: bool) -> tuple[Form, ...]:
    forms = []
    for seed, kind in enumerate(KINDS):
        form = make_form(shape, k, seed=seed, kind=kind)
        table = form.slots[:, :1].expand_as(form.slots).contiguous() if alike else form.slots
        forms.append(SlotAffine(kind, table, form.weight, form.bias))
    return tuple(forms)


def make_forms(name: str, shape: Shape) -> tuple[Form, ...]:
    """One of the `MAPS`."""
    basis = make_basis(shape, JOINT, MADE[:1], 5)
    one_basis = (basis, make_basis(shape, JOINT, MADE[1:], None, basis.reduce))
    made: dict[str, Callable[[], tuple[Form, ...]]] = {
        "k-1": lambda: _slots(shape, 1, alike=False),
        "k-8": lambda: _slots(shape, 8, alike=True),
        "joint": lambda: (make_basis(shape, JOINT + NATIVE, MADE, None),),
        "basis": lambda: (make_basis(shape, JOINT, MADE + STREAM, 5),),
        "one-basis": lambda: one_basis,
        "slots-and-branch": lambda: (*_slots(shape, 1, alike=False), make_branch(shape, "gelu", MADE)),
        "joint-and-branch": lambda: (
            make_basis(shape, JOINT + NATIVE, MADE + STREAM, None),
            make_branch(shape, "quadratic", (Span("target.values", 1, 3), *STREAM)),
        ),
        "basis-and-branch": lambda: (*one_basis, make_branch(shape, "linear", MADE[:1])),
    }
    return made[name]()


MAPS = ("k-1", "k-8", "joint", "basis", "one-basis", "slots-and-branch", "joint-and-branch", "basis-and-branch")
