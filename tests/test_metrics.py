"""Fidelity of next-token distributions, by hand and against torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from kvbridge.metrics import fidelity, gap_recovered


def logits(*rows: list[float]) -> Tensor:
    """Logits of given probabilities, each row off by a constant of its own, as logits may be."""
    return torch.tensor(rows).log() + torch.arange(len(rows))[:, None]


def random_logits(positions: int, vocabulary: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    native = logits([0.5, 0.5, 1e-30], [0.2, 0.3, 0.5])
    arm = logits([0.9, 0.1, 1e-30], [0.2, 0.3, 0.5])
    found = fidelity(native, arm, torch.tensor([1, 2]))
    assert found.kl.tolist() == pytest.approx([0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 0], abs=1e-6)
    assert found.nll.tolist() == pytest.approx([-math.log(0.1), -math.log(0.5)], rel=1e-5)
    assert found.acceptance.tolist() == pytest.approx([0.6, 1.0], rel=1e-5)
    assert found.top1.tolist() == [1.0, 1.0]


def test_top1_asks_for_the_same_arg_max() -> None:
    native = logits([0.6, 0.4], [0.6, 0.4], [0.1, 0.9])
    arm = logits([0.9, 0.1], [0.49, 0.51], [0.8, 0.2])
    assert fidelity(native, arm, torch.tensor([0, 0, 0])).top1.tolist() == [1.0, 0.0, 0.0]


def test_kl_starts_at_the_native_distribution() -> None:
    """KL(native ‖ arm) punishes what the arm leaves out, not what it adds."""
    sure, unsure = logits([1 - 1e-6, 1e-6]), logits([0.5, 0.5])
    following = torch.tensor([0])
    assert fidelity(sure, unsure, following).kl.item() == pytest.approx(math.log(2), abs=1e-4)
    assert fidelity(unsure, sure, following).kl.item() == pytest.approx(0.5 * math.log(0.25 / 1e-6), rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(positions=st.integers(1, 5), vocabulary=st.integers(2, 40), seed=st.integers(0, 1000))
def test_agrees_with_torch_distributions(positions: int, vocabulary: int, seed: int) -> None:
    native, arm = (random_logits(positions, vocabulary, seed + at).double() for at in (0, 1))
    following = torch.randint(vocabulary, (positions,), generator=torch.Generator().manual_seed(seed))
    p, q = Categorical(logits=native), Categorical(logits=arm)
    found = fidelity(native, arm, following)
    torch.testing.assert_close(found.kl, kl_divergence(p, q))
    torch.testing.assert_close(found.nll, -q.log_prob(following))
    torch.testing.assert_close(found.acceptance, torch.minimum(p.probs, q.probs).sum(-1))
    assert found.top1.tolist() == (native.argmax(-1) == arm.argmax(-1)).tolist()
    total_variation = (p.probs - q.probs).abs().sum(-1) / 2
    torch.testing.assert_close(found.acceptance, 1 - total_variation)


def test_a_distribution_equals_itself() -> None:
    native = random_logits(7, 50, seed=0)
    found = fidelity(native, native + 5.0, torch.zeros(7, dtype=torch.int64))
    assert found.kl.abs().max() < 1e-6
    assert found.acceptance.tolist() == pytest.approx([1.0] * 7, abs=1e-6)
    assert found.top1.all()


@pytest.mark.parametrize(("native_size", "arm_size"), [(40, 48), (48, 40)], ids=["arm-padded", "native-padded"])
def test_vocabularies_are_cut_to_the_shared_part_and_renormalised(native_size: int, arm_size: int) -> None:
    native, arm = random_logits(3, native_size, seed=1), random_logits(3, arm_size, seed=2)
    # A padded entry above all others would be the arg max and take most of the mass.
    (native if native_size > arm_size else arm)[:, -1] = 50.0
    following = torch.tensor([0, 5, 39])
    found = fidelity(native, arm, following)
    cut = fidelity(native[:, :40].clone(), arm[:, :40].clone(), following)
    for name in ("kl", "top1", "nll", "acceptance"):
        assert torch.equal(getattr(found, name), getattr(cut, name)), name
    p, q = (Categorical(logits=given[:, :40]) for given in (native, arm))
    torch.testing.assert_close(found.kl, kl_divergence(p, q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_compared_in_fp32(dtype: torch.dtype) -> None:
    native, arm = (random_logits(4, 100, seed).to(dtype) for seed in (3, 4))
    following = torch.tensor([1, 2, 3, 4])
    found, expected = fidelity(native, arm, following), fidelity(native.double(), arm.double(), following)
    assert found.kl.dtype == torch.float32
    torch.testing.assert_close(found.kl.double(), expected.kl, rtol=1e-5, atol=1e-6)


def test_a_token_that_both_rule_out_adds_nothing() -> None:
    native, arm = random_logits(2, 5, seed=5), random_logits(2, 5, seed=6)
    native[:, 3] = arm[:, 3] = -torch.inf
    kept = [0, 1, 2, 4]
    expected = fidelity(native[:, kept], arm[:, kept], torch.tensor([0, 1]))
    found = fidelity(native, arm, torch.tensor([0, 1]))
    torch.testing.assert_close(found.kl, expected.kl)
    torch.testing.assert_close(found.acceptance, expected.acceptance)


@pytest.mark.parametrize(("arm", "share"), [(2.0, 0.0), (1.0, 1.0), (1.25, 0.75), (2.5, -0.5), (0.5, 1.5)], ids=str)
def test_gap_recovered_is_a_share_of_the_way(arm: float, share: float) -> None:
    assert gap_recovered(2.0, arm, 1.0) == pytest.approx(share)


def test_gap_recovered_takes_resampled_means_at_once() -> None:
    source, arm, native = np.array([2.0, 3.0]), np.array([1.5, 1.0]), np.array([1.0, 1.0])
    assert gap_recovered(source, arm, native).tolist() == [0.5, 1.0]
