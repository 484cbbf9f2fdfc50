"""A map whose own weights are trained: the same bits before the first step, and the form of what was trained after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbridge.forms import Form, SharedBasis, branches_of
from kvbridge.kernels import FormMap
from kvbridge.mappers import Ridge
from kvbridge.mappers.residual.losses import mse_loss
from kvbridge.mappers.residual.unfrozen import UnfrozenForms, scales_of
from tiny_branch import JOINT, REST, make_basis, make_branch
from tiny_maps import SHAPES, make_form
from tiny_models import relative_error
from tiny_residual import PLAN, Fitted, disturbed


def shared_reduce() -> tuple[Form, ...]:
    first, second = make_basis(JOINT, REST[:1]), make_basis(JOINT, REST[1:])
    return first, replace(second, reduce=first.reduce)


MAPS: dict[str, tuple[Form, ...]] = {
    "joint": (make_basis(JOINT, REST, None),),
    "shared": shared_reduce(),
    "slots": (make_form(SHAPES["wider-target"], 2), make_form(SHAPES["wider-target"], 3, torch.bfloat16, 1, "values")),
    "branch": (make_basis(JOINT, REST), make_branch(JOINT, REST)),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_is_not_trained_keeps_its_bits(name: str) -> None:
    # Sizes as they occur: rows and columns far apart, and nothing but zeros.
    forms = MAPS[name]
    for form in forms:
        for tensor in form.tensors().values():
            if tensor.ndim > 1 and tensor.is_floating_point():
                tensor.mul_(10.0 ** torch.randint(-4, 4, tensor.shape[-1:]))
                tensor[..., 0, :] = 0
    unfrozen = UnfrozenForms(forms)
    for old, now, left in zip(forms, unfrozen.forms(), unfrozen.trained(), strict=True):
        for part, tensor in old.tensors().items():
            assert torch.equal(now.tensors()[part], tensor.float() if tensor.is_floating_point() else tensor), part
            assert left.tensors()[part] is tensor, part


def test_scales_are_powers_of_two_and_leave_weights_of_one_size() -> None:
    weight = torch.randn(3, 60, 50) * torch.logspace(-4, 3, 60)[:, None] * torch.logspace(2, -2, 50)
    scaled = weight
    for scale in scales_of(weight):
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        scaled = scaled / scale
    sizes = torch.stack([scaled.square().mean(dim=axis).sqrt().log2().abs().max() for axis in (-1, -2)])
    # Each of three roundings is worth a factor of two at most; unscaled rows are 2^23 apart.
    assert float(sizes.max()) < 3
    assert scales_of(torch.zeros(4)) == []


def test_a_tensor_that_forms_share_stays_shared() -> None:
    forms = shared_reduce()
    unfrozen = UnfrozenForms(forms)
    assert len(unfrozen.weights) == 5
    with torch.no_grad():
        unfrozen.weights[0].add_(1)
    assert unfrozen.trained()[0].tensors()["expand"] is forms[0].tensors()["expand"]
    for made in (unfrozen.forms(), unfrozen.trained()):
        first, second = (form for form in made if isinstance(form, SharedBasis))
        assert first.reduce is second.reduce


@pytest.mark.parametrize("mapper", ["joint", "ridge"])
def test_the_form_makes_what_was_trained(fitted: Fitted, mapper: str) -> None:
    if mapper == "ridge":
        sides = fitted.pair.source.geometry, fitted.pair.target.geometry
        fitted = replace(fitted, forms=Ridge(k=2).fit(fitted.moments, *sides).forms)
    mapping, readings = fitted.adapted().with_unfrozen(), fitted.readings()
    optimizer = torch.optim.Adam(mapping.parameters().values(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(mse_loss(mapping, readings, [40], 8))
        losses[-1].backward()
        optimizer.step()
    assert float(losses[-1].detach()) < 0.95 * float(losses[0].detach())
    assert mapping.unfrozen is not None
    assert all(weight.grad is not None and weight.grad.any() for weight in mapping.unfrozen.weights)
    source, native, layers = readings.source.span(4, 48), mapping.native(readings, 4, 48), PLAN.mapped_layers(4)
    made = mapping.mapped(readings, 48)
    whole = FormMap(mapping.trained()).apply(source, layers, native)
    before = FormMap((*fitted.forms, mapping.branch())).apply(source, layers, native)
    for given, wanted, unlike in zip(*((each.keys, each.values) for each in (whole, made, before)), strict=True):
        assert relative_error(given, wanted.detach()) < 1e-5
        assert relative_error(unlike, wanted.detach()) > 1e-4


def test_a_trained_branch_is_trained_on(fitted: Fitted) -> None:
    first = disturbed(fitted.adapted()).trained()
    mapping, readings = disturbed(replace(fitted, forms=first).adapted().with_unfrozen()), fitted.readings()
    made = mapping.mapped(readings, 48)
    whole = mapping.trained()
    assert [branch.rank for branch in branches_of(first)] == [6]
    assert [branch.rank for branch in branches_of(whole)] == [12]
    source, native = readings.source.span(4, 48), mapping.native(readings, 4, 48)
    given = FormMap(whole).apply(source, PLAN.mapped_layers(4), native)
    assert relative_error(given.keys, made.keys.detach()) < 1e-5
    assert relative_error(given.values, made.values.detach()) < 1e-5
