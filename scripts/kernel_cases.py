"""One map of random weights, ready to be checked and timed on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_shapes import Model, make_map
from torch import Tensor, nn

from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine
from kvbridge.kernels import FormMap
from kvbridge.kernels.triton import Pages, Program, Tables, compile_map, run
from kvbridge.rotary import RotaryCodec
from kvbridge.states import ContentStates

# Rounding inputs, z and outputs to bf16 leaves about 0.4 %.
LARGEST_ERROR = 0.015


class Rotary(nn.Module):
    """Rotary tables of a head, base 1,000,000."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, reference: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        speeds = 1e6 ** (-torch.arange(0, self.width, 2, device=positions.device) / self.width)
        angles = (positions[..., None] * speeds).repeat(1, 1, 2)
        return angles.cos().to(reference.dtype), angles.sin().to(reference.dtype)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A compiled map of a pair of shapes.

    Attributes:
        pair: source and target.
        forms: random weights.
        program: the same for the kernels.
        device: where all of it lies.
        dtype: of caches, weights and products.
    """

    pair: tuple[Model, Model]
    forms: tuple[Form, ...]
    program: Program
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def make(cls, name: str, pair: tuple[Model, Model], device: torch.device, dtype: torch.dtype) -> Prepared:
        """A map of a kind in `kernel_shapes.MAPS`."""
        source, target = pair[0].side, pair[1].side
        forms = make_map(name, source, target, device, dtype)
        program = compile_map(forms, range(target.layers), source, target, dtype=dtype, device=device)
        return cls(pair, forms, program, device, dtype)

    def cache(self, model: Model, tokens: int) -> Tensor:
        """A random cache `[2, L, 1, H, T, D]`."""
        shape = 2, model.layers, 1, model.kv_heads, tokens, model.head_dim
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def codecs(self) -> list[RotaryCodec]:
        return [RotaryCodec(Rotary(model.head_dim), torch.float32, False) for model in self.pair]

    def error(self, tokens: int) -> float:
        """Relative error of the kernels against the fp32 reference; infinite where something was not written."""
        positions = torch.arange(tokens, device=self.device)
        source, target = self.codecs()
        given, made = self.cache(self.pair[0], tokens), self.cache(self.pair[1], tokens).fill_(float("nan"))
        run(self.program, _pages(given), _pages(made), Tables.of(source, target, positions))
        states = ContentStates(source.strip(given[0], positions), given[1].float(), positions)
        expected = FormMap(self.forms).apply(states, self.program.layers)
        wanted = torch.stack((target.apply(expected.keys, positions), expected.values))
        error = float((made.float() - wanted).norm() / wanted.norm())
        return error if error == error else float("inf")

    def call(self, tokens: int) -> Callable[[], object]:
        """The whole mapping: tables of addresses, and the launches."""
        given, made = self.cache(self.pair[0], tokens), self.cache(self.pair[1], tokens)
        source, destination = _pages(given), _pages(made)
        tables = Tables.of(*self.codecs(), torch.arange(tokens, device=self.device))
        return lambda: run(self.program, source, destination, tables)

    def products(self, tokens: int) -> Callable[[], object]:
        """The bare products in plain torch, from rows that are gathered already: no rotation, no scatter."""
        width = 2 * self.pair[0].layers * self.pair[0].kv_heads * self.pair[0].head_dim
        rows = torch.randn(tokens, width, device=self.device, dtype=self.dtype)
        return lambda: [_plain(form, rows) for form in self.forms]


def _plain(form: Form, rows: Tensor) -> Tensor:
    if isinstance(form, SharedBasis):
        return (rows if form.reduce is None else rows @ form.reduce) @ form.expand
    if isinstance(form, ResidualBranch):
        return nn.functional.gelu(rows @ form.reduce) @ form.expand
    return _slots(form, rows)


def _slots(form: SlotAffine, rows: Tensor) -> Tensor:
    """One batched product over heads for each layer."""
    width = form.weight.shape[3]
    slots = rows.unflatten(1, (-1, width)).transpose(0, 1)  # [slots, N, D_s]
    made = []
    for layer, table in enumerate(form.slots.to(rows.device)):
        gathered = slots[table].transpose(1, 2).flatten(2)  # [H_t, N, S D_s]
        made.append(torch.bmm(gathered, form.weight[layer].flatten(1, 2)))
    return torch.stack(made)


def _pages(cache: Tensor) -> Pages:
    return Pages.of(list(cache[0]), list(cache[1]))
