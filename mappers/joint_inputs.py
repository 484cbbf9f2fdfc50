"""What a joint map reads and makes, and ridge over all of it with every penalty chosen on held-out moments.

Keys and values of all source layers are read together, beside what the target computes natively at a hand-off: with a
native head of m layers the residual stream at the inputs of layers 0 and m, each divided by its root mean square, of
which the exact keys and values of those layers are linear functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.calibration import CalibrationMoments, MomentBlock, Moments, Sketch, joint_blocks
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
        places, at = {}, 0
        for span in self.outputs:
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
        return self.fit.gram(self.features) / self.spread[:, None] / self.spread

    @cached_property
    def held_correlation(self) -> Float[Tensor, "p p"]:
        """Held-out products of the features in the units of `correlation`, in fp32."""
        return (self.held_out.gram(self.features) / self.spread[:, None] / self.spread).float()

    @property
    def width(self) -> int:
        """Numbers of all outputs together, `q`."""
        return next(reversed(self.columns.values())).stop

    def sample(self, span: Span) -> Int[Tensor, "n"]:
        """Coordinates of an output on which penalties are compared."""
        width = span.width(self.target)
        return torch.arange(0, width, max(1, width // COMPARED))

    def products(self, moments: Moments, columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "p q"]:
        """Products of the features, in the units of `correlation`, and some coordinates of outputs."""
        cross = torch.cat([moments.cross_products(self.features, [span])[:, at] for span, at in columns.items()], dim=1)
        return cross / self.spread[:, None]

    def held_residual(self, weight: Float[Tensor, "p q"], columns: dict[Span, Int[Tensor, "n"]]) -> Float[Tensor, "q"]:
        """Held-out centred sum of squares that weights leave of some coordinates of outputs."""
        total = torch.cat([self.held_out.squares([span])[at] for span, at in columns.items()])
        # fp32 has twice the digits of what is compared, at half the cost of fp64.
        quadratic = (weight * (self.held_correlation @ weight.float())).sum(dim=0)
        return total - 2 * (weight * self.products(self.held_out, columns)).sum(dim=0) + quadratic

    def bias(self, weight: Float[Tensor, "p q"], spans: Iterable[Span]) -> Float[Tensor, "q"]:
        """Intercepts that belong to weights of some outputs."""
        return (self.fit.means(spans) - (self.fit.means(self.features) / self.spread) @ weight.double()).float()

    def r2(self, weight: Float[Tensor, "p q"]) -> dict[Span, list[float]]:
        """Held-out R² of each head of each output (of a residual stream as a whole), intercepts included."""
        bias, found = self.bias(weight, self.outputs).double(), {}
        means = self.held_out.means(self.features) / self.spread
        for span, columns in self.columns.items():
            mine = weight[:, columns].double()
            residual = self.held_residual(mine, {span: torch.arange(mine.shape[1])})
            shift = self.held_out.means([span]) - means @ mine - bias[columns]
            residual = residual + self.held_out.rows * shift.square()
            head = self.target.head_dim if span.states in KINDS else mine.shape[1]
            found[span] = head_r2(residual, self.held_out.squares([span]), head).tolist()
        return found


def _factors(
    problem: JointProblem, penalty: Penalty, spans: Iterable[Span]
) -> Iterator[tuple[list[Span], Float[Tensor, "p p"]]]:
    """Outputs that are penalised alike, and the Cholesky factor that they share."""
    left = {span: penalty.diagonal(problem, span) for span in spans}
    while left:
        diagonal = next(iter(left.values()))
        alike = [span for span, each in left.items() if torch.equal(each, diagonal)]
        yield alike, factor_gram(problem.correlation, diagonal, "correlation")
        left = {span: each for span, each in left.items() if span not in alike}


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


def solve_joint(problem: JointProblem, chosen: dict[Span, Penalty]) -> Float[Tensor, "p q"]:
    """Weights of all outputs in the units of `JointProblem.correlation`, each with its own penalty."""
    columns = problem.columns
    weight = torch.empty(len(problem.spread), problem.width, dtype=torch.float32)
    for penalty in dict.fromkeys(chosen.values()):
        mine = [span for span in problem.outputs if chosen[span] == penalty]
        for spans, factor in _factors(problem, penalty, mine):
            for span in spans:
                every = {span: torch.arange(span.width(problem.target))}
                weight[:, columns[span]] = torch.cholesky_solve(problem.products(problem.fit, every), factor).float()
    return weight


def finished_map(
    problem: JointProblem, forms: tuple[Form, ...], weight: Float[Tensor, "p q"], chosen: dict[Span, Penalty]
) -> FittedMap:
    """Forms with the evidence for them, from the weights that they amount to and the penalties of these."""
    layers = problem.target.layers
    r2 = problem.r2(weight) if problem.held_out.rows else {}
    heads = {kind: [r2.get(Span(f"target.{kind}", at, at + 1), []) for at in range(layers)] for kind in KINDS if r2}
    made = {span.start for span in problem.outputs if span.states in KINDS}
    selected = [list(range(problem.source.layers)) if at in made else [] for at in range(layers)]
    rows_per_feature = problem.fit.rows / len(problem.spread)
    penalties = {str(span): asdict(penalty) for span, penalty in chosen.items()}
    return FittedMap(forms, dict.fromkeys(KINDS, selected), heads, rows_per_feature, penalties)
