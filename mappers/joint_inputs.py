"""What a joint map reads and makes, as one regression on moments.

Keys and values of all source layers are read together, beside what the target computes natively at a hand-off: with a
native head of m layers the residual stream at the inputs of layers 0 and m, each divided by its root mean square, of
which the exact keys and values of those layers are linear functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, MomentBlock, Moments, Sketch, joint_blocks
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.forms import KINDS
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.regression import head_r2
from kvbridge.variables import Span

# Penalties are compared on so many coordinates of each layer and kind; all of them say the same at many times the cost.
COMPARED = 16
# Products of the features are put in their units so many rows at once.
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Penalty:
    """A ridge penalty on the correlation scale, by what an input is to an output.

    Attributes:
        own: λ of the inputs of the output's own kind, and of all where inputs or outputs are neither keys nor values.
        other: of the inputs of the other kind.
        native: of what the target has computed itself.
        distance: by how much of itself λ grows with each layer between a source layer and the one at the output's
            relative depth.
    """

    own: float
    other: float
    native: float
    distance: float

    def diagonal(self, problem: JointProblem, output: Span) -> Float[Tensor, "p"]:
        """λ of each input for one output."""
        depth = problem.source.layers
        matching = (output.start + 0.5) / problem.target.layers * depth - 0.5
        away = 1 + self.distance * (torch.arange(depth, dtype=torch.float64) - matching).abs()
        parts = []
        for name, width in problem.feature_widths.items():
            role, kind = name.partition("[")[0].split(".")
            mixed = {kind, output.states} == set(KINDS)
            if role == "source":
                parts.append((self.other if mixed else self.own) * away.repeat_interleave(width // depth))
            else:
                parts.append(torch.full((width,), self.native, dtype=torch.float64))
        return torch.cat(parts)


def head_inputs(native_head: int | None) -> list[str]:
    """Names of what a joint map reads under a plan with this native head."""
    layers = [] if native_head is None else sorted({0, native_head})
    native = [f"target.normed_residual[{layer}:{layer + 1}]" for layer in layers]
    return ["source.keys", "source.values", *native]


def read_spans(native_head: int | None, source: KVGeometry, target: KVGeometry) -> tuple[Span, ...]:
    """What a joint map reads, of models of these layers."""
    depth = {"source": source.layers, "target": target.layers}
    return tuple(Span.parse(name, depth[name.partition(".")[0]]) for name in head_inputs(native_head))


def made_layers(native_head: int | None, boundary: int | None, target: KVGeometry) -> range:
    """Target layers whose keys and values a joint map makes: those between head and boundary."""
    return range(0 if native_head is None else native_head + 1, target.layers if boundary is None else boundary)


def needed_blocks(native_head: int | None, boundary: int | None) -> frozenset[MomentBlock]:
    """The products that fitting a joint map reads."""
    made = ["target.keys", "target.values"] + ([f"target.residual[{boundary}:{boundary + 1}]"] if boundary else [])
    return joint_blocks(head_inputs(native_head), made)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same layers in the same order, neighbouring ones of a variable as one span."""
    found: list[Span] = []
    for span in spans:
        if found and (found[-1].variable, found[-1].stop) == (span.variable, span.start):
            found[-1] = Span(span.variable, found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


@dataclass(frozen=True)
class JointProblem:
    """One regression of all outputs on all inputs, as centred moments.

    Attributes:
        inputs: what the map reads.
        outputs: what it makes, one span for each layer and kind.
        source: geometry of the source.
        target: geometry of the target.
        fit: moments that weights are solved from.
        held_out: moments that choices are made on; without rows the first choice is taken.
        sketch: what stands for the source's keys and values in the moments, if anything does.
    """

    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    source: KVGeometry
    target: KVGeometry
    fit: Moments
    held_out: Moments
    sketch: Sketch | None = None

    @classmethod
    def of(
        cls,
        moments: CalibrationMoments,
        source: KVGeometry,
        target: KVGeometry,
        native_head: int | None,
        boundary: int | None,
    ) -> JointProblem:
        """The problem of a plan's native head and of the layer from which a tail recompute starts.

        Raises:
            UsageError: head and boundary leave no layer between them.
            CalibrationError: there are no more rows than inputs.
        """
        layers = made_layers(native_head, boundary, target)
        if not layers or layers.stop > target.layers:
            raise UsageError(
                f"mapper.native_head={native_head}, mapper.boundary={boundary}: no layer lies between them; the target "
                f"has {target.layers} layers."
            )
        inputs = read_spans(native_head, source, target)
        outputs = [Span(f"target.{kind}", at, at + 1) for kind in KINDS for at in layers]
        if boundary is not None:
            outputs.append(Span("target.residual", boundary, boundary + 1))
        fit, held_out = moments.select("fit", first=False), moments.select("held_out", first=False)
        problem = cls(inputs, tuple(outputs), source, target, fit, held_out, moments.sketch)
        features = sum(problem.feature_widths.values())
        if fit.rows <= features:
            raise CalibrationError(
                f"{fit.rows} calibration rows for {features} features: a joint fit needs more rows than features (ten "
                "times as many to be trusted). Raise calibration.tokens."
            )
        return problem

    @cached_property
    def features(self) -> list[str]:
        """Variables of the moments that are regressed on: the inputs, or what stands for them."""
        return [str(span) for span in self.inputs] if self.sketch is None else self.sketch.features(self.inputs)

    @cached_property
    def feature_widths(self) -> dict[str, int]:
        return {name: len(self.fit.means([name])) for name in self.features}

    def on_inputs(self, weight: Float[Tensor, "p R"]) -> Float[Tensor, "i R"]:
        """Weights of the inputs as they are, from those of the features in the units of `correlation`."""
        plain = weight / self.spread[:, None].to(weight.dtype)
        return plain if self.sketch is None else self.sketch.unsketched(plain)

    @cached_property
    def columns(self) -> dict[Span, slice]:
        """Where each output stands among all of them."""
        return self.places(self.outputs)

    def places(self, spans: Iterable[Span]) -> dict[Span, slice]:
        """Where each of some outputs stands among these."""
        places, at = {}, 0
        for span in spans:
            width = span.width(self.target)
            places[span] = slice(at, at + width)
            at += width
        return places

    @cached_property
    def spread(self) -> Float[Tensor, "p"]:
        """Root of each feature's centred sum of squares; 1 for a constant."""
        spread = self.fit.squares(self.features).sqrt()
        return torch.where(spread > 0, spread, torch.ones_like(spread))

    @cached_property
    def correlation(self) -> Float[Tensor, "p p"]:
        """Products of the features on the correlation scale."""
        return self._products_of_features(self.fit, torch.float64)

    @cached_property
    def held_correlation(self) -> Float[Tensor, "p p"]:
        """Held-out products of the features in the units of `correlation`, in fp32."""
        return self._products_of_features(self.held_out, torch.float32)

    def _products_of_features(self, moments: Moments, dtype: torch.dtype) -> Float[Tensor, "p p"]:
        """Products of the features in the units of `correlation`, with no second matrix of this size beside them."""
        ends = list(itertools.accumulate(self.feature_widths.values()))
        places = list(zip(self.features, [0, *ends], ends, strict=False))
        out = torch.empty(ends[-1], ends[-1], dtype=dtype)
        for (a, top, bottom), (b, left, right) in itertools.combinations_with_replacement(places, 2):
            block, columns = moments.cross_products([a], [b]), slice(left, right)
            for start in range(top, bottom, ROWS_AT_ONCE):
                rows = slice(start, min(start + ROWS_AT_ONCE, bottom))
                scaled = block[start - top : rows.stop - top] / self.spread[rows, None] / self.spread[columns]
                out[rows, columns], out[columns, rows] = scaled, scaled.T
        return out

    @property
    def width(self) -> int:
        """Numbers of all outputs together, `q`."""
        return next(reversed(self.columns.values())).stop

    @property
    def input_width(self) -> int:
        """Numbers of all inputs together, `i`."""
        sides = {"source": self.source, "target": self.target}
        return sum(span.width(sides[span.role]) for span in self.inputs)

    def sample(self, span: Span) -> Int[Tensor, "n"]:
        """Coordinates of an output on which penalties are compared."""
        width = span.width(self.target)
        return torch.arange(0, width, max(1, width // COMPARED))

    def products(self, moments: Moments, columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "p q"]:
        """Products of the features, in the units of `correlation`, and some coordinates of outputs."""
        cross = torch.cat([moments.cross_products(self.features, [span])[:, at] for span, at in columns.items()], dim=1)
        return cross.div_(self.spread[:, None])

    def every(self, span: Span) -> dict[Span, Int[Tensor, "n"]]:
        """All coordinates of an output."""
        return {span: torch.arange(span.width(self.target))}

    def held_residual(self, weight: Float[Tensor, "p q"], columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "q"]:
        """Held-out centred sum of squares that weights leave of some coordinates of outputs."""
        total = torch.cat([self.held_out.squares([span])[at] for span, at in columns.items()])
        # fp32 has twice the digits of what is compared, at half the cost of fp64.
        quadratic = (weight * (self.held_correlation @ weight.float())).sum(dim=0)
        return total - 2 * (weight * self.products(self.held_out, columns)).sum(dim=0) + quadratic

    def bias(self, weight: Float[Tensor, "p q"], span: Span) -> Float[Tensor, "q"]:
        """Intercepts that belong to the weights of an output."""
        return (self.fit.means([span]) - (self.fit.means(self.features) / self.spread) @ weight.double()).float()

    def r2(self, weight: Float[Tensor, "p q"], span: Span) -> list[float]:
        """Held-out R² of each head of an output (of a residual stream as a whole), its intercepts included.

        It is empty without held-out rows.
        """
        if not self.held_out.rows:
            return []
        mine, means = weight.double(), self.held_out.means(self.features) / self.spread
        residual = self.held_residual(mine, self.every(span))
        shift = self.held_out.means([span]) - means @ mine - self.bias(weight, span).double()
        residual = residual + self.held_out.rows * shift.square()
        head = self.target.head_dim if span.states in KINDS else len(shift)
        return head_r2(residual, self.held_out.squares([span]), head).tolist()
