"""Ridge over all that a joint map reads, one output after the other, with every penalty chosen on held-out moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvbridge.forms import KINDS, Form
from kvbridge.mappers.base import FittedMap
from kvbridge.mappers.joint_inputs import JointProblem, Penalty
from kvbridge.mappers.regression import factor_gram, solve_factored
from kvbridge.variables import Span


def _alike(
    problem: JointProblem, penalty: Penalty, spans: Iterable[Span]
) -> Iterator[tuple[Float[Tensor, "p"], list[Span]]]:
    """Outputs that are penalised alike, and how: they share a factorisation."""
    left = {span: penalty.diagonal(problem, span) for span in spans}
    while left:
        diagonal = next(iter(left.values()))
        alike = [span for span, each in left.items() if torch.equal(each, diagonal)]
        yield diagonal, alike
        left = {span: each for span, each in left.items() if span not in alike}


def _solve(
    problem: JointProblem, diagonal: Float[Tensor, "p"], wanted: Iterable[dict[Span, Int[Tensor, "n"]]]
) -> Iterator[Float[Tensor, "p n"]]:
    """Weights of some coordinates of outputs that are penalised alike; the factor is let go after the last of them."""
    factor = factor_gram(problem.correlation, diagonal, "correlation")
    for columns in wanted:
        yield solve_factored(factor, problem.products(problem.fit, columns))


def choose_penalties(problem: JointProblem, penalties: list[Penalty]) -> dict[Span, Penalty]:
    """For each output the penalty that leaves least of it on held-out moments; the first one without held-out rows."""
    if len(penalties) == 1 or not problem.held_out.rows:
        return dict.fromkeys(problem.outputs, penalties[0])
    best: dict[Span, tuple[float, Penalty]] = {}
    for penalty in penalties:
        for diagonal, spans in _alike(problem, penalty, problem.outputs):
            samples = {span: problem.sample(span) for span in spans}
            (weight,) = _solve(problem, diagonal, [samples])
            left = problem.held_residual(weight, samples)
            parts = left.split([len(sample) for sample in samples.values()])
            for span, part in zip(spans, parts, strict=True):
                found = float(part.sum()), penalty
                best[span] = min(best.get(span, found), found, key=lambda each: each[0])
    return {span: penalty for span, (_, penalty) in best.items()}


def solve_joint(
    problem: JointProblem, chosen: dict[Span, Penalty], spans: Iterable[Span]
) -> Iterator[tuple[Span, Float[Tensor, "p q"]]]:
    """Weights of some outputs in the units of `JointProblem.correlation`, one after the other, by their own penalties.

    They come in the order of their penalties.
    """
    wanted = list(spans)
    for penalty in dict.fromkeys(chosen[span] for span in wanted):
        for diagonal, alike in _alike(problem, penalty, [span for span in wanted if chosen[span] == penalty]):
            solved = _solve(problem, diagonal, map(problem.every, alike))
            yield from ((span, weight.float()) for span, weight in zip(alike, solved, strict=True))


def finished_map(
    problem: JointProblem, forms: tuple[Form, ...], r2: dict[Span, list[float]], chosen: dict[Span, Penalty]
) -> FittedMap:
    """Forms with the evidence for them, from the R² and the penalty of each output."""
    layers = problem.target.layers
    measured = KINDS if problem.held_out.rows else ()
    heads = {kind: [r2.get(Span(f"target.{kind}", at, at + 1), []) for at in range(layers)] for kind in measured}
    made = {span.start for span in problem.outputs if span.states in KINDS}
    selected = [list(range(problem.source.layers)) if at in made else [] for at in range(layers)]
    rows_per_feature = problem.fit.rows / len(problem.spread)
    penalties = {str(span): asdict(penalty) for span, penalty in chosen.items()}
    return FittedMap(forms, dict.fromkeys(KINDS, selected), heads, rows_per_feature, penalties)
