"""The operators that a map is executed with, under `torch.ops.kvbridge`.

    gather_layers   per-layer cache tensors -> rows, the rotation taken off            x
    project_rows    the narrow first half of a basis or of a residual branch           z = φ(x A + a)
    write_heads     products and bias, the target's rotation, into the target's cache  y = Σ z B + b

Each has a kernel in plain torch for every device and one for shapes alone, so that `torch.compile` takes them into one
graph. Rows are `[B · T, width]`, batch first. Products are made in the rows' dtype; biases are added and rotations done
in fp32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.library import custom_op

from kvbridge.kernels.reference import activated
from kvbridge.kernels.steps import step


def _pairs(states: Float[Tensor, "... D"], width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second numbers of all rotary pairs, as views."""
    if interleaved:
        return states[..., :width:2], states[..., 1:width:2]
    return states[..., : width // 2], states[..., width // 2 : width]


def rotate_into(
    destination: Float[Tensor, "B H T D"],
    states: Float[Tensor, "B H T D"],
    cos: Float[Tensor, "T R"],
    sin: Float[Tensor, "T R"],
    interleaved: bool,
) -> None:
    """Rotate states by the given tables, in fp32, and round them once, into a destination of any dtype and strides."""
    width = cos.shape[-1]
    first, second = (part.float() for part in _pairs(states, width, interleaved))
    first_cos, second_cos = _pairs(cos, width, interleaved)
    first_sin, second_sin = _pairs(sin, width, interleaved)
    first_made, second_made = _pairs(destination, width, interleaved)
    first_made.copy_((first * first_cos).addcmul_(second, first_sin, value=-1))
    second_made.copy_((second * second_cos).addcmul_(first, second_sin))
    if width < states.shape[-1]:
        destination[..., width:].copy_(states[..., width:])


@custom_op(
    "kvbridge::gather_layers",
    mutates_args={"rows"},
    schema="(Tensor[] layers, Tensor? cos, Tensor? sin, bool interleaved, Tensor(a!) rows) -> ()",
)
def gather_layers(
    layers: list[Tensor], cos: Tensor | None, sin: Tensor | None, interleaved: bool, rows: Float[Tensor, "N w"]
) -> None:
    """Lay cached tensors `[B, H, T, D]` of some layers side by side as rows `[B · T, layers · H · D]`.

    Args:
        layers: one tensor per layer; any dtype and strides.
        cos: cosines `[T, R]` that undo the rotation; `None` for values and content keys.
        sin: sines.
        interleaved: whether rotary pairs are neighbours.
        rows: to be written; any dtype and strides.
    """
    with step("strip"):
        batch, heads, _, width = layers[0].shape
        for layer, places in zip(layers, rows.chunk(len(layers), dim=1), strict=True):
            place = places.unflatten(1, (heads, width)).unflatten(0, (batch, -1)).transpose(1, 2)
            if cos is None or sin is None:
                place.copy_(layer)
            else:
                rotate_into(place, layer, cos, sin, interleaved)


@gather_layers.register_fake
def _(layers: list[Tensor], cos: Tensor | None, sin: Tensor | None, interleaved: bool, rows: Tensor) -> None:
    """Nothing is made; `rows` keeps its shape."""


@custom_op(
    "kvbridge::project_rows",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor? offset, str activation, ScalarType dtype) -> Tensor",
)
def project_rows(
    rows: Float[Tensor, "N p"],
    weight: Float[Tensor, "p W"],
    offset: Float[Tensor, "W"] | None,
    activation: str,
    dtype: torch.dtype,
) -> Float[Tensor, "N R"]:
    """`φ(x A + a)`, with offset and activation in fp32, rounded once more to `dtype`."""
    with step("product"):
        made = rows @ weight
    if offset is not None:
        made = made.float() + offset
    # An operator must not return its input, and `to` may.
    return activated(activation, made).to(dtype)


@project_rows.register_fake
def _(rows: Tensor, weight: Tensor, offset: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    width = weight.shape[1] // 2 if activation == "quadratic" else weight.shape[1]
    return rows.new_empty((rows.shape[0], width), dtype=dtype)


@custom_op(
    "kvbridge::write_heads",
    mutates_args={"destination"},
    schema="(Tensor[] rows, Tensor[] weights, Tensor bias, Tensor? cos, Tensor? sin, bool interleaved, "
    "Tensor(a!) destination) -> Tensor",
)
def write_heads(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Float[Tensor, "q"],
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    destination: Float[Tensor, "B H T D"],
) -> Bool[Tensor, ""]:
    """`y = Σ z B + b` for some heads of one layer, rotated where tables are given, written into the target's cache.

    Args:
        rows: what each product reads, `[B · T, r]`.
        weights: what each is multiplied by, `[r, H · D]`.
        bias: added to the sum.
        cos: cosines `[T, R]` of the target's rotation; `None` for values and content keys.
        sin: sines.
        interleaved: whether rotary pairs are neighbours.
        destination: to be written; any dtype and strides.

    Returns:
        Whether all that was written is finite.
    """
    with step("product"):
        made = (rows[0] @ weights[0]).float()
        for more, weight in zip(rows[1:], weights[1:], strict=True):
            made += more @ weight
    batch, heads, _, width = destination.shape
    states = made.add_(bias).unflatten(1, (heads, width)).unflatten(0, (batch, -1)).transpose(1, 2)
    if cos is None or sin is None:
        with step("inject"):
            destination.copy_(states)
    else:
        with step("rotate"):
            rotate_into(destination, states, cos, sin, interleaved)
    # A sum in fp32 is not finite where a summand is not, and is read once.
    return destination.sum(dtype=torch.float32).isfinite()


@write_heads.register_fake
def _(
    rows: list[Tensor],
    weights: list[Tensor],
    bias: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    destination: Tensor,
) -> Tensor:
    return destination.new_empty((), dtype=torch.bool)
