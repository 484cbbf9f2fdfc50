"""The branch while it is trained: `(φ(z A + a) B + b) · unit` on features z in units of their spread, zero at first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvbridge.branch import ACTIVATIONS, ResidualBranch
from kvbridge.geometry import KVGeometry
from kvbridge.kernels.reference import activated
from kvbridge.mappers.residual.units import Units
from kvbridge.variables import Span


class ResidualModule(nn.Module):
    """A residual branch in fp32, in the units that it is trained in.

    `B` and `b` are zero at first, so that training starts from exactly the frozen map; `A` is random, and features of
    unit variance give arguments of φ of unit variance.

    Attributes:
        reduce: `A`, `[d, W]`.
        offset: `a`, `[W]`.
        expand: `B`, `[R, q]`.
        bias: `b`, `[q]`.
    """

    def __init__(self, kind: str, rank: int, units: Units, seed: int = 0) -> None:
        """Make a branch that adds nothing.

        Args:
            kind: its activation, one of `kvbridge.branch.ACTIVATIONS`.
            rank: `R`.
            units: of its inputs and outputs.
            seed: of `A`.
        """
        super().__init__()
        self.kind, self.units = kind, units
        made, wide, device = len(units.output), rank * ACTIVATIONS[kind], units.output.device
        drawn = torch.randn(units.width, wide, generator=torch.Generator().manual_seed(seed))
        self.reduce = nn.Parameter(drawn.to(device) / units.width**0.5)
        self.offset = nn.Parameter(torch.zeros(wide, device=device))
        self.expand = nn.Parameter(torch.zeros(rank, made, device=device))
        self.bias = nn.Parameter(torch.zeros(made, device=device))

    def forward(self, rows: Float[Tensor, "*batch p"]) -> Float[Tensor, "*batch q"]:
        """What is added to the map's outputs, for rows of the inputs."""
        argument = self.units.features(rows) @ self.reduce + self.offset
        return (activated(self.kind, argument) @ self.expand + self.bias) * self.units.output

    def branch(self, inputs: Sequence[Span], outputs: Sequence[Span], target: KVGeometry) -> ResidualBranch:
        """The form, with all units folded into its weights.

        Args:
            inputs: what the rows hold.
            outputs: what is made.
            target: geometry of the target.
        """
        with torch.no_grad():
            reduce = self.units.on_inputs(self.reduce)
            offset = self.offset.double() - self.units.mean.double() @ reduce.double()
            parts = (reduce, offset.float(), self.expand * self.units.output, self.bias * self.units.output)
            reduce, offset, expand, bias = (part.detach().cpu().contiguous() for part in parts)
        weights = reduce, offset, expand, bias
        return ResidualBranch(tuple(inputs), tuple(outputs), self.kind, *weights, target.kv_heads, target.head_dim)
