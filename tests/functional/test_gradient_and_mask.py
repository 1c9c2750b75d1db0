"""The and-mask of FedGMA against exact fractions, in both readings of its threshold."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.errors import FederatedError
from lightning_fed.functional import gradient_and_mask

TENTHS = [Fraction(i, 10) for i in range(11)]


def mask_of(gradients: Any, p: float, p_means: Any) -> torch.Tensor:
    gradients = torch.as_tensor(gradients)
    votes = (gradients != 0).sum(0)
    return gradient_and_mask(gradients.sign().sum(0), len(gradients), p, p_means, votes)


def numpy_mask(gradients: np.ndarray, p: float, p_means: str) -> np.ndarray:
    """Votes counted one at a time, compared as fractions of the number as it is written."""
    clients, coordinates = gradients.shape
    mask = np.empty(coordinates)
    for k in range(coordinates):
        up = sum(1 for value in gradients[:, k] if value > 0)
        down = sum(1 for value in gradients[:, k] if value < 0)
        agreeing = abs(up - down) if p_means == "formula" else max(up, down)
        mask[k] = float(agreeing >= Fraction(str(p)) * clients)
    return mask


@pytest.mark.parametrize("p_means", ["formula", "prose"])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 5, 10])
def test_agrees_with_numpy(clients: int, p: float, p_means: str) -> None:
    rng = np.random.default_rng(clients)
    gradients = (rng.normal(size=(clients, 60)) + 0.5) * (rng.random((clients, 60)) > 0.2)
    found = mask_of(gradients, p, p_means)
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), numpy_mask(gradients, p, p_means))


@pytest.mark.parametrize("p", TENTHS, ids=str)
def test_comparison_is_exact_for_every_cohort_up_to_64(p: Fraction) -> None:
    for clients in range(1, 65):
        ups = torch.arange(clients + 1, dtype=torch.float32)
        sums, votes = 2 * ups - clients, torch.full_like(ups, clients)
        formula = gradient_and_mask(sums, clients, float(p))
        prose = gradient_and_mask(sums, clients, float(p), "prose", votes)
        for up in range(clients + 1):
            assert formula[up] == (abs(2 * up - clients) >= p * clients), (up, clients)
            assert prose[up] == (max(up, clients - up) >= p * clients), (up, clients)


def test_eight_of_ten_pass_the_prose_and_nine_the_formula() -> None:
    gradients = np.ones((10, 2))
    gradients[:2, 0], gradients[:1, 1] = -1, -1
    assert mask_of(gradients, 0.8, "prose").tolist() == [1.0, 1.0]
    assert mask_of(gradients, 0.8, "formula").tolist() == [0.0, 1.0]


def test_zeros_are_no_votes() -> None:
    gradients = np.array([[1.0], [1.0], [0.0], [0.0]])  # as a sum of signs the same as (+, +, +, -)
    assert mask_of(gradients, 0.75, "prose").tolist() == [0.0]
    assert mask_of([[1.0], [1.0], [1.0], [-1.0]], 0.75, "prose").tolist() == [1.0]
    assert mask_of(gradients, 0.5, "formula").tolist() == [1.0]
    assert mask_of(np.zeros((3, 2)), 0.8, "formula").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("p_means", ["formula", "prose"])
def test_views_with_gaps_and_a_share_of_zero(p_means: str) -> None:
    gradients = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))[:, ::2]
    assert torch.equal(mask_of(gradients, 0.6, p_means), mask_of(gradients.contiguous(), 0.6, p_means))
    assert torch.equal(mask_of(gradients, 0.0, p_means), torch.ones(4))


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_shares_out_of_range_are_refused(p: float) -> None:
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.p"):
        gradient_and_mask(torch.ones(2), 3, p)


def test_prose_without_votes_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"p_means"):
        gradient_and_mask(torch.ones(2), 3, 0.8, "prose")
