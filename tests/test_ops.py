"""The operators of `torch.ops.kvbridge`: torch's own checks, and one graph under `torch.compile`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

# Importing it registers the operators.
from kvbridge.kernels import ops
from tiny_maps import make_rotary

OPS = torch.ops.kvbridge


def tables(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    return make_rotary(width).tables(torch.arange(tokens))


def gather(turned: bool = True) -> tuple[Any, ...]:
    layers = [torch.randn(2, 7, 3, 8).transpose(1, 2) for _ in range(4)]
    cos, sin = tables(7, 4) if turned else (None, None)
    return layers, cos, sin, False, torch.zeros(14, 100)[:, 4:]


def project(activation: str = "quadratic") -> tuple[Any, ...]:
    return torch.randn(14, 9), torch.randn(9, 6), torch.randn(6), activation, torch.bfloat16


def write(turned: bool = True) -> tuple[Any, ...]:
    rows, weights = [torch.randn(14, 5), torch.randn(14, 2)], [torch.randn(5, 24), torch.randn(2, 24)]
    cos, sin = tables(7, 8) if turned else (None, None)
    return rows, weights, torch.randn(24), cos, sin, True, torch.zeros(2, 3, 12, 8)[:, :, 2:9]


SAMPLES = {
    "gather-keys": (ops.gather_layers, gather),
    "gather-values": (ops.gather_layers, lambda: gather(False)),
    "project-quadratic": (ops.project_rows, project),
    "project-linear": (ops.project_rows, lambda: (*project()[:2], None, "linear", torch.float32)),
    "project-gelu": (ops.project_rows, lambda: project("gelu")),
    "write-keys": (ops.write_heads, write),
    "write-values": (ops.write_heads, lambda: write(False)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_torch_finds_nothing_wrong(name: str) -> None:
    operator, sample = SAMPLES[name]
    torch.library.opcheck(operator, sample())


def test_compiles_into_one_graph() -> None:
    def handed(layers: list[Tensor], cos: Tensor, sin: Tensor, reduce: Tensor, expand: Tensor, place: Tensor) -> Tensor:
        rows = reduce.new_empty((14, reduce.shape[0]))
        OPS.gather_layers(layers, cos, sin, False, rows)
        basis = OPS.project_rows(rows, reduce, None, "linear", torch.float32)
        return OPS.write_heads([basis], [expand], expand.new_zeros(24), cos, sin, False, place)

    layers, cos, sin, _, _ = gather()
    reduce, expand = torch.randn(96, 5), torch.randn(5, 24)
    made, expected = torch.zeros(2, 3, 12, 8), torch.zeros(2, 3, 12, 8)
    compiled = torch.compile(handed, fullgraph=True, backend="aot_eager")
    assert compiled(layers, cos, sin, reduce, expand, made[:, :, 2:9])
    assert handed(layers, cos, sin, reduce, expand, expected[:, :, 2:9])
    assert torch.equal(made, expected)
    assert made.abs().sum() > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_says_whether_all_is_finite(bad: float) -> None:
    given = write()
    assert ops.write_heads(*given)
    given[0][0][3, 2] = bad
    assert not ops.write_heads(*given)
