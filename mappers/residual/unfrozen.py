"""The map's own weights while they are trained too.

Adam's rate means the same for every number only where all have one size, and a map's weights differ by the spread of
what they read and make. Each weight is therefore kept as `θ = W / (r c)`, with `r` and `c` for the sizes of its row and
its column, and a rate is relative to these. Both are powers of two: `θ r c` has the bits of `W`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvbridge.forms import Form

# So much smaller than the whole a row or column may count; those of nothing but zeros stay about where they are.
LEAST_SIZE = 2.0**-24


def _size(weight: Float[Tensor, "*shape"], axes: Sequence[int]) -> Float[Tensor, "*sizes"]:
    """Root mean square over some axes, which stay as axes of length 1."""
    return weight.square().mean(dim=tuple(axes), keepdim=True).sqrt()


def _power_of_two(size: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """The next one above each positive number, exactly."""
    return size / torch.frexp(size).mantissa


def scales_of(weight: Float[Tensor, "*shape"]) -> list[Tensor]:
    """Powers of two that broadcast to a weight: the size of it all, and of rows and columns in units of that."""
    whole = _size(weight, range(weight.ndim))
    if not whole.any():
        return []
    parts = [_size(weight, [axis]) / whole for axis in (-1, -2)] if weight.ndim > 1 else []
    return [_power_of_two(whole), *(_power_of_two(part.clamp(min=LEAST_SIZE)) for part in parts)]


class UnfrozenForms(nn.Module):
    """The floating-point tensors of some forms as fp32 parameters; a tensor that forms share is one parameter.

    Attributes:
        weights: `θ` of every tensor.
    """

    def __init__(self, forms: tuple[Form, ...]) -> None:
        """Take the weights as they are.

        Args:
            forms: of the map; they are not changed.
        """
        super().__init__()
        self._forms = forms
        found = {id(tensor): tensor for form in forms for tensor in form.tensors().values()}
        self._tensors = {key: tensor for key, tensor in found.items() if tensor.is_floating_point()}
        self._scales = [scales_of(tensor.float()) for tensor in self._tensors.values()]
        self.weights = nn.ParameterList()
        for tensor, scales in zip(self._tensors.values(), self._scales, strict=True):
            self.weights.append(nn.Parameter(reduce(torch.div, scales, tensor.float().clone())))

    def forms(self) -> tuple[Form, ...]:
        """The forms with the weights as they are now, in fp32, with gradients into them."""
        parts = zip(self._tensors, self.weights, self._scales, strict=True)
        return self._with({key: reduce(torch.mul, scales, weight) for key, weight, scales in parts})

    def trained(self) -> tuple[Form, ...]:
        """The forms as training leaves them; a tensor whose numbers did not change is the one that was given."""
        with torch.no_grad():
            now = [tensor for form in self.forms() for tensor in form.tensors().values()]
        before = [tensor for form in self._forms for tensor in form.tensors().values()]
        made = {
            id(old): new.detach().clone()
            for old, new in zip(before, now, strict=True)
            if old.is_floating_point() and not torch.equal(old.float(), new)
        }
        return self._with(made)

    def _with(self, made: dict[int, Tensor]) -> tuple[Form, ...]:
        """The forms with some tensors replaced, by the identity of the old ones."""
        replaced = []
        for form in self._forms:
            changed = {name: made[id(old)] for name, old in form.tensors().items() if id(old) in made}
            replaced.append(replace(form, **changed))
        return tuple(replaced)
