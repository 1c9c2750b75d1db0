"""Corrective gradient weights against NumPy, and on quadratic clients solved by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.functional import corrective_weights, gram_matrix, weighted_gradients

CONSTRAINTS = ["per_client", "shared"]
# Clients ½ ‖w - b_i‖², where they end: gradients of lengths 3, 4 and 1, of which the third pulls against the others.
GRADIENTS = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-1.0, 0.0]], dtype=torch.float64)
LOSSES = torch.tensor([4.5, 8.0, 0.5], dtype=torch.float64)


def weights_of(gradients: Tensor, losses: Any, alpha: float = 0.3, constraint: Any = "per_client") -> Tensor:
    return corrective_weights(gram_matrix(gradients), torch.as_tensor(losses), alpha, constraint)


def numpy_weights(gradients: np.ndarray, losses: np.ndarray, alpha: float, constraint: str) -> np.ndarray:
    total = gradients.sum(axis=0)
    lengths = np.linalg.norm(gradients, axis=1)
    bound = min(alpha * loss / length for loss, length in zip(losses, lengths, strict=True))
    if constraint == "shared":
        return np.full(len(gradients), bound / np.linalg.norm(total))
    products = np.array([g @ total for g in gradients])
    return bound / math.sqrt(sum((products / lengths) ** 2)) * products / lengths**2


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize(("clients", "size"), [(1, 1), (1, 6), (2, 5), (7, 3), (10, 300)])
def test_agrees_with_numpy(clients: int, size: int, constraint: str) -> None:
    rng = np.random.default_rng(clients)
    gradients, losses = rng.normal(size=(clients, size)), rng.uniform(0.1, 3, clients)
    expected = numpy_weights(gradients, losses, 0.3, constraint)
    found = weights_of(torch.tensor(gradients), losses, 0.3, constraint)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    step = weighted_gradients(torch.tensor(gradients), found)
    np.testing.assert_allclose(step, expected @ gradients, rtol=0, atol=1e-12)


def test_three_quadratic_clients_in_closed_form() -> None:
    # D = (2, 4), m = (6, 16, -2), m / ‖D_i‖ = (2, 4, -2), root √24, c = α min(4.5/3, 8/4, 0.5/1) = α/2.
    expected = 0.3 / 2 / math.sqrt(24) * np.array([6 / 9, 16 / 16, -2 / 1])
    np.testing.assert_allclose(weights_of(GRADIENTS, LOSSES), expected, rtol=0, atol=1e-15)
    np.testing.assert_allclose(weights_of(GRADIENTS, LOSSES, constraint="shared"), 0.15 / math.sqrt(20), atol=1e-15)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_solution_fills_its_constraint_and_no_other_weights_do_better(constraint: str) -> None:
    """Both are maxima of Σ x_i m_i on their constraint (eq. 15 and 24)."""
    products, lengths = GRADIENTS @ GRADIENTS.sum(0), GRADIENTS.norm(dim=1)
    best = weights_of(GRADIENTS, LOSSES, constraint=constraint)

    def size(weights: Tensor) -> Tensor:
        return ((weights * lengths) if constraint == "per_client" else weights @ GRADIENTS).norm()

    assert size(best) == pytest.approx(0.15, abs=1e-15)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        other = torch.randn(3, generator=generator, dtype=torch.float64)
        other *= 0.15 / size(other)
        assert other @ products <= best @ products + 1e-12


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_linear_in_alpha_and_nothing_at_zero(constraint: str) -> None:
    whole = weights_of(GRADIENTS, LOSSES, 1.0, constraint)
    assert whole.abs().min() > 0
    for alpha in (1e-9, 0.25, 0.7, 3.0):
        torch.testing.assert_close(
            weights_of(GRADIENTS, LOSSES, alpha, constraint), alpha * whole, rtol=1e-15, atol=0.0
        )
    assert torch.equal(weights_of(GRADIENTS, LOSSES, 0.0, constraint), torch.zeros(3, dtype=torch.float64))


def test_signs_are_those_of_the_product_with_the_sum() -> None:
    gradients = torch.tensor(np.random.default_rng(3).normal(size=(9, 4)))
    found = weights_of(gradients, torch.ones(9))
    assert torch.equal(found.sign(), (gradients @ gradients.sum(0)).sign())
    assert (found < 0).any()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("kind", ["zero", "nan gradient", "infinite gradient", "nan loss", "infinite loss"])
def test_what_is_zero_or_not_finite_is_left_out(kind: str, constraint: str) -> None:
    bad = torch.tensor([[5.0, 5.0]], dtype=torch.float64)
    loss = 1e-9  # would decide c if it entered
    if kind.endswith("gradient"):
        bad[0, 1] = float(kind.split()[0].replace("infinite", "inf"))
    elif kind.endswith("loss"):
        loss = float(kind.split()[0].replace("infinite", "inf"))
    else:
        bad *= 0
    gradients = torch.cat([GRADIENTS[:1], bad, GRADIENTS[1:]])
    losses = torch.tensor([4.5, loss, 8.0, 0.5], dtype=torch.float64)
    found = weights_of(gradients, losses, constraint=constraint)
    assert found[1] == 0
    assert torch.equal(found[[0, 2, 3]], weights_of(GRADIENTS, LOSSES, constraint=constraint))
    step = weighted_gradients(gradients, found)
    assert torch.equal(step, weighted_gradients(GRADIENTS, found[[0, 2, 3]]))
    assert step.isfinite().all()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_gradients_that_cancel_give_no_correction(constraint: str) -> None:
    opposed = torch.cat([GRADIENTS[:1], -GRADIENTS[:1]])
    assert weights_of(opposed, [1.0, 1.0], constraint=constraint).tolist() == [0.0, 0.0]
    # Sums that are zero but for rounding: normalised, the rounding would get the full length.
    totals = []
    for seed in range(20):
        two = torch.tensor(np.random.default_rng(seed).normal(size=(2, 500)))
        cancelling = torch.cat([two, -two.sum(0, keepdim=True)])
        totals.append(gram_matrix(cancelling).sum().item())
        assert weights_of(cancelling, torch.ones(3), constraint=constraint).tolist() == [0.0] * 3
    assert max(totals) > 0, "the sums must not vanish exactly everywhere"


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_nobody_left_and_no_loss_left(constraint: str) -> None:
    assert weights_of(torch.zeros(2, 3), [1.0, 1.0], constraint=constraint).tolist() == [0.0, 0.0]
    assert weights_of(GRADIENTS, [1.0, 0.0, 1.0], constraint=constraint).tolist() == [0.0] * 3  # c = 0


def test_a_single_client_is_corrected_along_its_gradient() -> None:
    # m = ‖D‖², so x = c / ‖D‖ = α L / ‖D‖² under either constraint.
    for constraint in CONSTRAINTS:
        found = weights_of(GRADIENTS[1:2], [8.0], 0.3, constraint)
        assert found.item() == pytest.approx(0.3 * 8 / 16, abs=1e-15)


def test_order_of_clients_does_not_matter() -> None:
    gradients, losses = torch.tensor(np.random.default_rng(5).normal(size=(8, 30))), torch.linspace(0.5, 2, 8)
    order = torch.tensor([3, 7, 0, 1, 6, 2, 5, 4])
    found = weights_of(gradients[order], losses[order])
    torch.testing.assert_close(found, weights_of(gradients, losses)[order], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_gradients_and_views_with_gaps(dtype: torch.dtype) -> None:
    whole = torch.tensor(np.random.default_rng(6).normal(size=(8, 9)), dtype=dtype)
    gaps = whole[::2, ::3]
    found = weights_of(gaps, torch.ones(4))
    assert found.dtype == torch.float64
    assert torch.equal(found, weights_of(gaps.clone(memory_format=torch.contiguous_format), torch.ones(4)))
    assert weighted_gradients(gaps, found).dtype == dtype


def test_negative_losses_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"at least 0.*-0\.5.*--aggregator"):
        weights_of(GRADIENTS, [1.0, -0.5, 1.0])
