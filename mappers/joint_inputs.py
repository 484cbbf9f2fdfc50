"""What a joint map reads and makes, and ridge over all of it with every penalty chosen on held-out moments.

Keys and values of all source layers are read together, beside what the target computes natively at a hand-off: with a
native head of m layers the residual stream at the inputs of layers 0 and m, each divided by its root mean square, of
which the exact keys and values of those layers are linear functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, MomentBlock, Moments, joint_blocks
from kvbridge.errors import CalibrationError, UsageError
from kvbridge.forms import KINDS, Form
from kvbridge.geometry import KVGeometry
from kvbridge.mappers.base import FittedMap
from kvbridge.mappers.regression import factor_gram, head_r2
from kvbridge.variables import Span

# Penalties are compared on so many coordinates of each layer and kind; all of them say the same at many times the cost.
COMPARED = 16


@dataclass(frozen=True, slots=True)
class Penalty:
    """A ridge penalty on the correlation scale, by what an input is to an output.

    Attributes:
        own: λ of the inputs of the output's own kind, and of all inputs of an output that is neither keys nor values.
        other: of the inputs of the other kind.
        native: of what the target has computed itself.
    """

    own: float
    other: float
    native: float

    def diagonal(self, problem: JointProblem, kind: str) -> Float[Tensor, "p"]:
        """λ of each input for outputs of a kind."""
        parts = []
        for span, width in problem.input_widths.items():
            mixed = kind in KINDS and span.states != kind
            weight = self.native if span.role == "target" else self.other if mixed else self.own
            parts.append(torch.full((width,), weight, dtype=torch.float64))
        return torch.cat(parts)


def head_inputs(native_head: int | None) -> list[str]:
    """Names of what a joint map reads under a plan with this native head."""
    layers = [] if native_head is None else sorted({0, native_head})
    native = [f"target.normed_residual[{layer}:{layer + 1}]" for layer in layers]
    return ["source.keys", "source.values", *native]


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
    """

    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    source: KVGeometry
    target: KVGeometry
    fit: Moments
    held_out: Moments

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
        first, stop = 0 if native_head is None else native_head + 1, target.layers if boundary is None else boundary
        if not first < stop <= target.layers:
            raise UsageError(
                f"mapper.native_head={native_head}, mapper.boundary={boundary}: no layer lies between them; the target "
                f"has {target.layers} layers."
            )
        layers = {"source": source.layers, "target": target.layers}
        inputs = tuple(Span.parse(name, layers[name.split(".")[0]]) for name in head_inputs(native_head))
        outputs = [Span(f"target.{kind}", at, at + 1) for kind in KINDS for at in range(first, stop)]
        if boundary is not None:
            outputs.append(Span("target.residual", boundary, boundary + 1))
        fit, held_out = moments.select("fit", first=False), moments.select("held_out", first=False)
        problem = cls(inputs, tuple(outputs), source, target, fit, held_out)
        features = sum(problem.input_widths.values())
        if fit.rows <= features:
            raise CalibrationError(
                f"{fit.rows} calibration rows for {features} features: a joint fit needs more rows than features (ten "
                "times as many to be trusted). Raise calibration.tokens."
            )
        return problem

    @cached_property
    def input_widths(self) -> dict[Span, int]:
        return {span: span.width(self.source if span.role == "source" else self.target) for span in self.inputs}

    @cached_property
    def columns(self) -> dict[Span, slice]:
        """Where each output stands among all of them."""
        places, at = {}, 0
        for span in self.outputs:
            width = span.width(self.target)
            places[span] = slice(at, at + width)
            at += width
        return places

    @cached_property
    def spread(self) -> Float[Tensor, "p"]:
        """Root of each input's centred sum of squares; 1 for a constant."""
        spread = self.fit.squares(self.inputs).sqrt()
        return torch.where(spread > 0, spread, torch.ones_like(spread))

    @cached_property
    def correlation(self) -> Float[Tensor, "p p"]:
        """Products of the inputs on the correlation scale."""
        return self.fit.gram(self.inputs) / self.spread[:, None] / self.spread

    @cached_property
    def held_correlation(self) -> Float[Tensor, "p p"]:
        """Held-out products of the inputs in the units of `correlation`, in fp32."""
        return (self.held_out.gram(self.inputs) / self.spread[:, None] / self.spread).float()

    @property
    def width(self) -> int:
        """Numbers of all outputs together, `q`."""
        return next(reversed(self.columns.values())).stop

    def sample(self, span: Span) -> Int[Tensor, "n"]:
        """Coordinates of an output on which penalties are compared."""
        width = span.width(self.target)
        return torch.arange(0, width, max(1, width // COMPARED))

    def products(self, moments: Moments, columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "p q"]:
        """Products of the inputs, in the units of `correlation`, and some coordinates of outputs."""
        cross = torch.cat([moments.cross_products(self.inputs, [span])[:, at] for span, at in columns.items()], dim=1)
        return cross / self.spread[:, None]

    def held_residual(self, weight: Float[Tensor, "p q"], columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "q"]:
        """Held-out centred sum of squares that weights leave of some coordinates of outputs."""
        total = torch.cat([self.held_out.squares([span])[at] for span, at in columns.items()])
        # fp32 has twice the digits of what is compared, at half the cost of fp64.
        quadratic = (weight * (self.held_correlation @ weight.float())).sum(dim=0)
        return total - 2 * (weight * self.products(self.held_out, columns)).sum(dim=0) + quadratic

    def bias(self, weight: Float[Tensor, "p q"], spans: Iterable[Span]) -> Float[Tensor, "q"]:
        """Intercepts that belong to weights of some outputs."""
        return (self.fit.means(spans) - (self.fit.means(self.inputs) / self.spread) @ weight.double()).float()

    def r2(self, weight: Float[Tensor, "p q"]) -> dict[Span, list[float]]:
        """Held-out R² of each head of each output (of a residual stream as a whole), intercepts included."""
        bias, found = self.bias(weight, self.outputs).double(), {}
        means = self.held_out.means(self.inputs) / self.spread
        for span, columns in self.columns.items():
            mine = weight[:, columns].double()
            residual = self.held_residual(mine, {span: torch.arange(mine.shape[1])})
            shift = self.held_out.means([span]) - means @ mine - bias[columns]
            residual = residual + self.held_out.rows * shift.square()
            head = self.target.head_dim if span.states in KINDS else mine.shape[1]
            found[span] = head_r2(residual, self.held_out.squares([span]), head).tolist()
        return found


@dataclass(frozen=True, slots=True)
class JointFit:
    """A solved joint regression.

    Attributes:
        weight: full-rank weights, inputs in the units of `JointProblem.correlation`.
        penalties: what was chosen for each output.
    """

    weight: Float[Tensor, "p q"]
    penalties: dict[Span, Penalty]


def candidates(penalties: Iterable[float], other_kind: Iterable[float], native: Iterable[float]) -> list[Penalty]:
    """Every combination of λ and of how much dearer the other kind and native features are than the own kind."""
    return [Penalty(own, own * other, own * free) for own in penalties for other in other_kind for free in native]


def _factors(
    problem: JointProblem, penalty: Penalty, spans: Iterable[Span]
) -> Iterator[tuple[list[Span], Float[Tensor, "p p"]]]:
    """Outputs that are penalised alike, and the Cholesky factor that they share."""
    kinds: dict[str, list[Span]] = {}
    for span in spans:
        kinds.setdefault(span.states, []).append(span)
    left = {kind: penalty.diagonal(problem, kind) for kind in kinds}
    while left:
        diagonal = next(iter(left.values()))
        alike = [kind for kind, each in left.items() if torch.equal(each, diagonal)]
        yield [s for kind in alike for s in kinds[kind]], factor_gram(problem.correlation, diagonal, "correlation")
        left = {kind: each for kind, each in left.items() if kind not in alike}


def choose_penalties(problem: JointProblem, penalties: list[Penalty]) -> dict[Span, Penalty]:
    """For each output the penalty that leaves least of it on held-out moments; the first one without held-out rows."""
    if len(penalties) == 1 or not problem.held_out.rows:
        return dict.fromkeys(problem.outputs, penalties[0])
    best: dict[Span, tuple[float, Penalty]] = {}
    for penalty in penalties:
        for spans, factor in _factors(problem, penalty, problem.outputs):
            samples = {span: problem.sample(span) for span in spans}
            right = problem.products(problem.fit, samples)
            left = problem.held_residual(torch.cholesky_solve(right, factor), samples)
            parts = left.split([len(sample) for sample in samples.values()])
            for span, part in zip(spans, parts, strict=True):
                found = float(part.sum()), penalty
                best[span] = min(best.get(span, found), found, key=lambda each: each[0])
    return {span: penalty for span, (_, penalty) in best.items()}


def solve_joint(problem: JointProblem, chosen: dict[Span, Penalty]) -> JointFit:
    """Weights of all outputs, each with its own penalty."""
    columns = problem.columns
    weight = torch.empty(len(problem.spread), problem.width, dtype=torch.float32)
    for penalty in dict.fromkeys(chosen.values()):
        mine = [span for span in problem.outputs if chosen[span] == penalty]
        for spans, factor in _factors(problem, penalty, mine):
            for span in spans:
                every = {span: torch.arange(span.width(problem.target))}
                weight[:, columns[span]] = torch.cholesky_solve(problem.products(problem.fit, every), factor).float()
    return JointFit(weight, chosen)


def check_options(
    native_head: int | None, boundary: int | None, penalties: Iterable[float], factors: dict[str, Iterable[float]]
) -> None:
    """Refuse options that no pair could be fitted with.

    Raises:
        UsageError: naming the option.
    """
    for option, given in (("native_head", native_head), ("boundary", boundary)):
        if given is not None and given < 0:
            raise UsageError(f"mapper.{option}={given}: give a layer of the target, 0 or more, or null.")
    for option, values in ({"penalties": penalties} | factors).items():
        listed = list(values)
        if not listed or not all(0 < value < math.inf for value in listed):
            raise UsageError(f"mapper.{option}={listed}: give one or more positive numbers to choose from.")


def finished_map(problem: JointProblem, forms: tuple[Form, ...], weight: Float[Tensor, "p q"]) -> FittedMap:
    """Forms with the evidence for them, from the weights that they amount to."""
    layers = problem.target.layers
    r2 = problem.r2(weight) if problem.held_out.rows else {}
    heads = {kind: [r2.get(Span(f"target.{kind}", at, at + 1), []) for at in range(layers)] for kind in KINDS if r2}
    made = {span.start for span in problem.outputs if span.states in KINDS}
    selected = [list(range(problem.source.layers)) if at in made else [] for at in range(layers)]
    return FittedMap(forms, dict.fromkeys(KINDS, selected), heads, problem.fit.rows / len(problem.spread))
