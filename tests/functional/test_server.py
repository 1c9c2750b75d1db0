"""Server rules against formulas written again in NumPy, ten rounds by hand, and the limits that they claim."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from lightning_fed.functional import (
    fedadagrad_step,
    fedadam_step,
    fedavgm_step,
    feddyn_step,
    fedyogi_step,
)

ROUNDS = 6
values = st.just(0.0) | st.floats(-1e3, 1e3, allow_subnormal=False)
means = st.integers(1, 5).flatmap(lambda size: arrays(np.float64, (ROUNDS, size), elements=values))
decays = st.sampled_from([0.0, 0.5, 0.9, 0.99])


def over_rounds(
    step: Callable[..., tuple[Tensor, ...]], means: np.ndarray, *state: float, **options: Any
) -> np.ndarray:
    """Runs a rule over the rounds' Δ from constant states; returns the step of each, shape (rounds, d)."""
    vectors: tuple[Tensor, ...] = tuple(torch.full((means.shape[1],), s, dtype=torch.float64) for s in state)
    steps = []
    for mean in torch.from_numpy(means):
        before = [vector.clone() for vector in (mean, *vectors)]
        u, *new = step(mean, *vectors, **options)
        assert all(torch.equal(a, b) for a, b in zip(before, (mean, *vectors), strict=True)), "an input was changed"
        vectors = tuple(new)
        assert all(vector.dtype == torch.float64 and vector.shape == mean.shape for vector in (u, *vectors))
        steps.append(u.numpy())
    return np.stack(steps)


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@given(means=means, beta=decays)
@settings(deadline=None)
def test_fedavgm_is_a_sum_of_faded_updates(means: np.ndarray, beta: float) -> None:
    expected = [sum(beta ** (t - s) * means[s] for s in range(t + 1)) for t in range(ROUNDS)]
    close(over_rounds(fedavgm_step, means, 0.0, beta=beta), np.stack(expected))


@given(means=means, start=st.sampled_from([0.0, 1e-6]), epsilon=st.sampled_from([1e-3, 1.0]))
@settings(deadline=None)
def test_fedadagrad_divides_by_all_squares(means: np.ndarray, start: float, epsilon: float) -> None:
    expected = means / (np.sqrt(start + np.cumsum(means**2, axis=0)) + epsilon)
    close(over_rounds(fedadagrad_step, means, start, epsilon=epsilon), expected)


@given(means=means, start=st.sampled_from([0.0, 1e-6]), beta1=decays, beta2=decays)
@settings(deadline=None)
def test_fedadam_is_two_faded_means_without_bias_correction(
    means: np.ndarray, start: float, beta1: float, beta2: float
) -> None:
    expected = []
    for t in range(ROUNDS):
        z = sum((1 - beta1) * beta1 ** (t - s) * means[s] for s in range(t + 1))
        v = beta2 ** (t + 1) * start + sum((1 - beta2) * beta2 ** (t - s) * means[s] ** 2 for s in range(t + 1))
        expected.append(z / (np.sqrt(v) + 1e-3))
    ours = over_rounds(fedadam_step, means, 0.0, start, beta1=beta1, beta2=beta2, epsilon=1e-3)
    np.testing.assert_allclose(ours, np.stack(expected), rtol=1e-10, atol=1e-12)


@given(means=means, start=st.sampled_from([0.0, 1e-6]), beta1=decays, beta2=decays)
@settings(deadline=None)
def test_fedyogi_moves_v_towards_the_square_by_the_square(
    means: np.ndarray, start: float, beta1: float, beta2: float
) -> None:
    expected = np.empty_like(means)
    for k in range(means.shape[1]):
        z, v = 0.0, start
        for t, delta in enumerate(means[:, k].tolist()):
            z = beta1 * z + (1 - beta1) * delta
            v += (1 - beta2) * delta**2 * (1 if delta**2 > v else -1 if delta**2 < v else 0)
            assert v >= 0
            expected[t, k] = z / (v**0.5 + 1e-3)
    ours = over_rounds(fedyogi_step, means, 0.0, start, beta1=beta1, beta2=beta2, epsilon=1e-3)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_yogis_v_grows_shrinks_or_stays_by_a_fixed_amount() -> None:
    """Where Adam's v would jump by a share of the gap, Yogi's moves by (1 - β2) Δ² whatever the gap."""
    delta = torch.tensor([2.0, 2.0, 2.0, 0.0])
    v = torch.tensor([1.0, 400.0, 4.0, 5.0])
    _, _, after = fedyogi_step(delta, torch.zeros(4), v, 0.9, 0.75, 1e-3)
    assert after.tolist() == [2.0, 399.0, 4.0, 5.0]
    _, _, adam = fedadam_step(delta, torch.zeros(4), v, 0.9, 0.75, 1e-3)
    assert adam.tolist() == [1.75, 301.0, 4.0, 3.75]


def quadratic(w: float) -> float:
    """Δ of two clients with 3 and 1 samples on (w - 1)² / 2 and (w + 3)², one gradient step of rate 0.1 each."""
    deltas = [-0.1 * (w - 1), -0.1 * 2 * (w + 3)]
    return 0.75 * deltas[0] + 0.25 * deltas[1]


def by_hand(rule: str, rounds: int, lr: float = 0.5, epsilon: float = 1e-3) -> list[float]:
    """The rules in scalars, as Algorithm 2 of the paper prints them."""
    w, m, v, path = 4.0, 0.0, epsilon**2, []
    beta1, beta2 = (0.0, 0.0) if rule == "adagrad" else (0.9, 0.99)
    for _ in range(rounds):
        delta = quadratic(w)
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adagrad":
            v = v + delta**2
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        w = w + lr * m / (v**0.5 + epsilon)
        path.append(w)
    return path


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_ten_rounds_of_two_clients_on_a_quadratic(rule: str) -> None:
    w, z, v = (torch.tensor([s], dtype=torch.float64) for s in (4.0, 0.0, 1e-3**2))
    path = []
    for _ in range(10):
        delta = torch.tensor([quadratic(w.item())], dtype=torch.float64)
        if rule == "adagrad":
            u, v = fedadagrad_step(delta, v, 1e-3)
        else:
            u, z, v = (fedadam_step if rule == "adam" else fedyogi_step)(delta, z, v, 0.9, 0.99, 1e-3)
        w = w + 0.5 * u
        path.append(w.item())
    assert path == pytest.approx(by_hand(rule, 10), rel=1e-12)
    # The first round on paper: Δ = 0.75 (-0.3) + 0.25 (-1.4) = -0.575.
    first = {
        "adagrad": -0.575 / ((1e-6 + 0.330625) ** 0.5 + 1e-3),
        "adam": -0.0575 / ((0.99e-6 + 0.00330625) ** 0.5 + 1e-3),
        "yogi": -0.0575 / ((1e-6 + 0.00330625) ** 0.5 + 1e-3),
    }
    assert path[0] == pytest.approx(4 + 0.5 * first[rule], rel=1e-12)
    corrected = 4 - 0.5 * 0.575 / (0.575 + 1e-3)
    assert rule == "adagrad" or abs(path[0] - corrected) > 1e-3, "this would be bias correction"


@pytest.mark.parametrize("rule", [fedadam_step, fedyogi_step])
def test_a_large_epsilon_gives_fedavg(rule: Callable[..., tuple[Tensor, ...]]) -> None:
    delta, zero = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.zeros(7)
    u = rule(delta, zero, zero, 0.0, 0.99, 1e15)[0] * 1e15
    torch.testing.assert_close(u, delta, rtol=1e-12, atol=0)
    torch.testing.assert_close(fedadagrad_step(delta, zero, 1e15)[0] * 1e15, delta, rtol=1e-12, atol=0)


def test_coordinates_that_nobody_moved_stay() -> None:
    zero = torch.zeros(3)
    for start in (0.0, 1e-6):
        v = torch.full((3,), start)
        for u in (fedadagrad_step(zero, v, 1e-3)[0], fedadam_step(zero, zero, v, 0.9, 0.99, 1e-3)[0],
                  fedyogi_step(zero, zero, v, 0.9, 0.99, 1e-3)[0], fedavgm_step(zero, zero, 0.9)[0],
                  feddyn_step(zero, zero, 0.1, 2, 5)[0]):  # fmt: skip
            assert torch.equal(u, zero)


@given(deltas=arrays(np.float32, (3, 5), elements=st.floats(-9, 9, width=32)))
@settings(deadline=None)
def test_momentum_zero_is_the_update_to_the_bit(deltas: np.ndarray) -> None:
    momentum = torch.zeros(5)
    for delta in torch.from_numpy(deltas):
        u, momentum = fedavgm_step(delta, momentum, 0.0)
        assert torch.equal(u, delta)


@given(
    sums=arrays(np.float64, (ROUNDS, 3), elements=st.integers(-999, 999).map(float)),
    counts=st.lists(st.integers(1, 7), min_size=ROUNDS),
)
@settings(deadline=None)
def test_feddyn_adds_all_former_updates(sums: np.ndarray, counts: list[int]) -> None:
    """u = (1/n) Σ δ + (1/N) ΣΣ δ over all rounds so far: α cancels on the server, and powers of two to the bit."""
    steps = {}
    for alpha in (0.25, 4.0, 0.1):
        h = torch.zeros(3, dtype=torch.float64)
        for t in range(ROUNDS):
            n = counts[t]
            u, h = feddyn_step(torch.from_numpy(sums[t] / n), h, alpha, n, 7)
            np.testing.assert_allclose(u, sums[t] / n + sums[: t + 1].sum(0) / 7, rtol=0, atol=1e-9)
            np.testing.assert_allclose(h, -alpha * sums[: t + 1].sum(0) / 7, rtol=0, atol=1e-9)
            steps[alpha, t] = u
    assert all(torch.equal(steps[0.25, t], steps[4.0, t]) for t in range(ROUNDS))


def test_feddyn_reaches_the_optimum_that_fedavg_misses() -> None:
    """Clients a_i/2 (x - b_i)², each solved exactly: FedAvg settles at the mean of the b_i, FedDyn at the optimum."""
    a, b, alpha = np.array([1.0, 10.0, 3.0]), np.array([0.0, 5.0, -2.0]), 2.0
    optimum = float(a @ b / a.sum())
    w, h, h_i = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), np.zeros(3)
    for round in range(300):
        drawn = [round % 3, (round + 1) % 3]
        x = (a * b + h_i + alpha * w.item()) / (a + alpha)
        delta = x - w.item()
        h_i[drawn] -= alpha * delta[drawn]
        u, h = feddyn_step(torch.tensor([delta[drawn].mean()], dtype=torch.float64), h, alpha, 2, 3)
        w = w + u
        assert h.item() == pytest.approx(h_i.mean(), abs=1e-9), "h is the mean of all clients' h_i"
    assert w.item() == pytest.approx(optimum, abs=1e-6)
    assert abs(b.mean() - optimum) > 1


def test_views_with_gaps_are_read_right() -> None:
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).abs()
    delta, z, v = table[:, 0], table[:, 1], table[:, 2]
    assert not delta.is_contiguous()
    for rule, arguments in ((fedadam_step, (0.9, 0.99, 1e-3)), (fedyogi_step, (0.9, 0.99, 1e-3))):
        assert all(
            torch.equal(gappy, dense)
            for gappy, dense in zip(
                rule(delta, z, v, *arguments), rule(delta.clone(), z.clone(), v.clone(), *arguments), strict=True
            )
        )
