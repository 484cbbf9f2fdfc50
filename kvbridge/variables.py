"""What maps read and make for each token: some layers of the keys, the values or the residual stream of one model.

A row of a span holds its layers one after the other, in keys and values the heads within a layer: `[layer, head, dim]`.
Layer `l` of a residual stream is the stream at the input of decoder layer `l`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvbridge.errors import UsageError

KINDS = ("keys", "values")
STATES = (*KINDS, "residual", "normed_residual")
# The source's residual stream is not among them: a cache does not hold it.
VARIABLES = ("source.keys", "source.values", *(f"target.{states}" for states in STATES))


@runtime_checkable
class CacheShape(Protocol):
    """What the width of a model's states depends on."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def width(self) -> int:
        """Numbers that all heads and layers hold for one token and one kind."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers `start … stop − 1` of one variable.

    Attributes:
        variable: one of `VARIABLES`. `normed_residual` is the residual stream divided by its root mean square, of which
            keys and values are linear functions where the model's norm is an RMS norm.
        start: first layer.
        stop: one past the last layer.

    Raises:
        UsageError: no such variable, or no layers.
    """

    variable: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.variable not in VARIABLES:
            raise UsageError(f"{self.variable!r} is no variable of a map; expected one of {', '.join(VARIABLES)}.")
        if not 0 <= self.start < self.stop:
            raise UsageError(f"{self.variable}[{self.start}:{self.stop}] has no layers; give 0 ≤ start < stop.")

    @property
    def role(self) -> str:
        """`source` or `target`."""
        return self.variable.split(".")[0]

    @property
    def states(self) -> str:
        """One of `STATES`."""
        return self.variable.split(".")[1]

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    def width(self, geometry: CacheShape) -> int:
        """Numbers in one row, for the shape of the span's own model."""
        one = geometry.kv_heads * geometry.head_dim if self.states in KINDS else geometry.hidden_size
        return len(self.layers) * one

    def __str__(self) -> str:
        return f"{self.variable}[{self.start}:{self.stop}]"

    @classmethod
    def parse(cls, text: str, layers: int) -> Span:
        """Read `target.keys[0:5]`; without brackets it is all `layers` of the model.

        Raises:
            UsageError: the text is no span, or reaches beyond the model.
        """
        found = re.fullmatch(r"([a-z._]+)(?:\[(\d+):(\d+)\])?", text)
        if found is None:
            raise UsageError(f"{text!r} is no span of layers; write target.keys, or target.keys[0:5] for five.")
        span = cls(found[1], int(found[2] or 0), int(found[3] or layers))
        if span.stop > layers:
            raise UsageError(f"{text} reaches beyond the model's {layers} layers.")
        return span
