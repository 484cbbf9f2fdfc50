"""Pairs, maps and caches on which the Triton kernels are compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbridge.forms import Form, ResidualBranch, SharedBasis, SlotAffine
from kvbridge.kernels import FormMap
from kvbridge.kernels.triton import Pages, Side, Tables
from kvbridge.rotary import RotaryCodec
from kvbridge.states import ContentStates
from kvbridge.variables import Span

ACTIVATION_WIDTH = {"linear": 1, "gelu": 1, "quadratic": 2}


class Frequencies(nn.Module):
    """Rotary tables of a width, scaled as YaRN scales them."""

    def __init__(self, width: int, scale: float, interleaved: bool) -> None:
        super().__init__()
        self.width, self.scale, self.interleaved = width, scale, interleaved

    def forward(self, reference: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        speeds = 100.0 ** (-torch.arange(self.width // 2, device=positions.device) / max(1, self.width // 2))
        angles = positions[..., None].float() * speeds
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return self.scale * angles.cos().to(reference.dtype), self.scale * angles.sin().to(reference.dtype)


@dataclass(frozen=True)
class Case:
    """A pair of shapes with rotary codecs, and the sizes of a hand-off."""

    source: Side
    target: Side
    tokens: int = 7
    batch: int = 1
    device: str = "cpu"

    @property
    def positions(self) -> Tensor:
        return torch.arange(5, 5 + self.tokens, device=self.device)

    def codec(self, side: Side) -> RotaryCodec:
        module = Frequencies(side.rotary, 1.1 if side is self.source else 0.9, side.interleaved)
        return RotaryCodec(module, torch.float32, side.interleaved)

    @property
    def tables(self) -> Tables:
        return Tables.of(self.codec(self.source), self.codec(self.target), self.positions)

    def cache(self, side: Side, layers: int, dtype: torch.dtype) -> Tensor:
        """A rotated cache `[2, L, B, H, T, D]`, with a distance between tokens that is not the head's width."""
        wide = torch.randn(2, layers, self.batch, side.heads, self.tokens, side.head_dim + 16, device=self.device)
        return wide.to(dtype)[..., : side.head_dim]

    def content(self, side: Side, cache: Tensor, residual: dict[int, Tensor]) -> ContentStates:
        keys = self.codec(side).strip(cache[0], self.positions)
        return ContentStates(keys, cache[1].float(), self.positions, residual)

    def expected(
        self, forms: tuple[Form, ...], layers: range, source: Tensor, native: Tensor | None, streams: dict[int, Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the reference makes: keys with RoPE and values `[2, L, B, H, T, D]`, and residual streams."""
        head = None if native is None else self.content(self.target, native, streams)
        made = FormMap(forms).apply(self.content(self.source, source, {}), layers, head)
        keys = self.codec(self.target).apply(made.keys, self.positions)
        return torch.stack((keys, made.values)), made.residual


def side(layers: int, heads: int, head_dim: int, rotary: int | None = None, interleaved: bool = False) -> Side:
    return Side(layers, heads, head_dim, head_dim if rotary is None else rotary, interleaved, hidden=40)


def pages(cache: Tensor) -> Pages:
    """Pages of a contiguous cache `[2, L, B, H, T, D]`."""
    return Pages.of(list(cache[0]), list(cache[1]))


def _weight(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-2] ** 0.5


def slot_forms(case: Case, k: int) -> tuple[Form, ...]:
    """Keys and values, every head with `k · H_s` slots of its own in no order."""
    source, target = case.source, case.target
    forms = []
    for kind in ("keys", "values"):
        count = k * source.heads
        slots = torch.stack(
            [torch.randperm(2 * source.layers * source.heads)[:count] for _ in range(target.layers * target.heads)]
        ).int()
        slots = slots.unflatten(0, (target.layers, target.heads))
        weight = _weight(target.layers, target.heads, count, source.head_dim, target.head_dim) / count**0.5
        bias = torch.randn(target.layers, target.heads, target.head_dim)
        forms.append(SlotAffine(kind, slots, weight, bias))
    return tuple(forms)


def inputs_of(case: Case, native: int | None) -> tuple[tuple[Span, ...], int]:
    """All of the source and, below layer `native`, what the target knows; and the width of their row."""
    source, target = case.source, case.target
    spans = [Span("source.keys", 0, source.layers), Span("source.values", 1, source.layers)]
    width = (2 * source.layers - 1) * source.heads * source.head_dim
    if native is not None:
        spans += [Span(f"target.{kind}", 0, native + 1) for kind in ("keys", "values")]
        spans += [Span("target.residual", native, native + 1), Span("target.normed_residual", 0, 1)]
        width += 2 * (native + 1) * target.heads * target.head_dim + 2 * target.hidden
    return tuple(spans), width


def outputs_of(case: Case, stream: bool) -> tuple[tuple[Span, ...], int]:
    """All keys and values of the target, the residual stream before its last layer too, and the width of their row."""
    target = case.target
    width = 2 * target.layers * target.heads * target.head_dim
    spans = [Span("target.keys", 0, target.layers), Span("target.values", 0, target.layers)]
    if stream:
        spans.append(Span("target.residual", target.layers - 1, target.layers))
    return tuple(spans), width + (target.hidden if stream else 0)


def basis_form(case: Case, rank: int | None, native: int | None = None, stream: bool = False) -> SharedBasis:
    """A shared basis of a rank, or without one the full-rank joint map."""
    (inputs, p), (outputs, q) = inputs_of(case, native), outputs_of(case, stream)
    reduce = None if rank is None else _weight(p, rank)
    shape = case.target.heads, case.target.head_dim
    return SharedBasis(inputs, outputs, reduce, _weight(rank or p, q), torch.randn(q), *shape)


def branch_form(case: Case, activation: str, rank: int, native: int | None = None) -> ResidualBranch:
    """A branch that adds to all keys and values."""
    (inputs, p), (outputs, q) = inputs_of(case, native), outputs_of(case, False)
    wide = rank * ACTIVATION_WIDTH[activation]
    parts = _weight(p, wide), torch.randn(wide), _weight(rank, q), torch.randn(q)
    return ResidualBranch(inputs, outputs, activation, *parts, case.target.heads, case.target.head_dim)
