"""Whether a mask lets through what most clients mean (Tenison et al., TMLR 2023, proposition A.1)."""

from math import erf, exp, sqrt

import numpy as np
import pytest
import torch

from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.masks import SignAgreement

CLIENTS, TAU, DRAWS = 10, 0.4, 20_000


def let_through(positive: int, mean: float, sigma: float = 1.0) -> float:
    """How often m is 1 if so many clients' updates are N(mean, σ²), and those of the others N(-mean, σ²)."""
    rng = np.random.default_rng(positive)
    means = mean * np.where(np.arange(CLIENTS) < positive, 1.0, -1.0)
    signs = np.sign(means[:, None] + sigma * rng.normal(size=(CLIENTS, DRAWS))).sum(axis=0)
    update = ReducedUpdate(1, tuple(Client(i, 1, 1) for i in range(CLIENTS)), sign_sum=torch.tensor(signs))
    return float((SignAgreement(TAU).compute(update) == 1).double().mean())


def by_hand(positive: int, mean: float) -> float:
    """The same, from the distribution of the number of positive signs: 7 or more of 10, or 3 or fewer."""
    right, counts = (1 + erf(mean / sqrt(2))) / 2, np.ones(1)
    for i in range(CLIENTS):
        chance = right if i < positive else 1 - right
        counts = np.convolve(counts, [1 - chance, chance])
    return float(counts[7:].sum() + counts[:4].sum())


@pytest.mark.parametrize("positive", range(11))
@pytest.mark.parametrize("mean", [0.5, 1.0, 3.0])
def test_how_often_a_coordinate_goes_through(positive: int, mean: float) -> None:
    assert let_through(positive, mean) == pytest.approx(by_hand(positive, mean), abs=0.015)


@pytest.mark.parametrize("positive", [5, 6])
def test_proposition_a1_fails_as_printed(positive: int) -> None:
    """A share of positive means of 0.5 or 0.6 is above τ = 0.4, but the less the noise, the surer the mask."""
    assert positive / CLIENTS > TAU
    chances = [by_hand(positive, mean) for mean in (1.0, 2.0, 3.0, 5.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 1e-5
    assert let_through(positive, 5.0) == 0.0


@pytest.mark.parametrize("positive", [7, 8, 9, 10])
def test_a_share_of_half_of_one_plus_tau_is_enough(positive: int) -> None:
    """From (1 + τ) / 2 on m is 1 with a probability of at least 1 - Σ exp(-μ² / (2 σ²)) over the positive means."""
    assert positive / CLIENTS >= (1 + TAU) / 2
    for mean in (1.0, 2.0, 3.0, 5.0):
        assert by_hand(positive, mean) >= 1 - positive * exp(-(mean**2) / 2)
    assert by_hand(positive, 5.0) > 0.99999
