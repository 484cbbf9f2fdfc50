"""What fits hold in memory at once, beside moments, which stay in their file.

With p features, i inputs, q outputs of at most w numbers each, a sample of n numbers of all of them, and a basis of
rank R for each of g groups of layers, in bytes:

* solving: the features' products and their Cholesky factor in fp64 and the products of the held-out split in fp32,
  `(8 + 8 + 4) p²`, and right sides, solutions and residuals of one output in fp64, `5 · 8 p w`, or of the sample that
  penalties are compared on, `5 · 8 p n`;
* a full-rank map: solving, and all weights in fp32, `4 i q`;
* a shared basis: the full-rank weights of one group in fp32, `4 p q / g`, and beside them solving or, once that is
  done, the products in both precisions, outputs and features by directions, twice `4 (q / g + p) R`, and directions by
  directions in fp64, three times `8 R²`.
"""

from __future__ import annotations

from kvbridge.calibration.sizes import DOUBLE, SINGLE, FitShape
from kvbridge.mappers.joint_inputs import COMPARED

# How many matrices of features by outputs, and of outputs or features by directions, are alive at once.
SOLVED, PROJECTED = 5, 2


def _solving_bytes(shape: FitShape, at_once: int) -> int:
    square = (2 * DOUBLE + SINGLE) * shape.features**2
    return square + SOLVED * DOUBLE * shape.features * at_once


def _choosing_bytes(shape: FitShape) -> int:
    return _solving_bytes(shape, COMPARED * len(shape.outputs))


def joint_bytes(shape: FitShape) -> int:
    """Of the fit of a full-rank map."""
    widest = max(shape.outputs)
    weights = SINGLE * shape.inputs * sum(shape.outputs)
    # One output's weights on inputs that a sketch stands for.
    unsketched = 3 * SINGLE * shape.inputs * widest if shape.inputs > shape.features else 0
    return max(_choosing_bytes(shape), _solving_bytes(shape, widest) + weights + unsketched)


def basis_bytes(shape: FitShape, directions: int, groups: int) -> int:
    """Of the fit of a shared basis, found among so many directions, for each of some groups of layers."""
    outputs = -(-sum(shape.outputs) // groups)
    found = min(directions, shape.features, outputs)
    full = SINGLE * shape.features * outputs
    products = (DOUBLE + 2 * SINGLE) * shape.features**2
    finding = products + PROJECTED * SINGLE * (outputs + shape.features) * found + 3 * DOUBLE * found**2
    finished = SINGLE * found * (groups - 1) * (shape.inputs + outputs)
    return max(_choosing_bytes(shape), full + finished + max(_solving_bytes(shape, max(shape.outputs)), finding))
