"""Aggregators with server state over several rounds of reduced updates, against the rules by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from lightning_fed.aggregators import (
    Aggregator,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDynServer,
    FedExP,
    FedNova,
    FedYogi,
    ServerOptimizer,
)
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.server_parts import REGISTERED, SIZES, Module, Server, rounds, run

EVERY: list[Callable[..., Aggregator]] = [
    FedAvgM, FedACG, FedExP, FedAdagrad, FedAdam, FedYogi, FedNova, FedDynServer,
    lambda **options: ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), **options),
]  # fmt: skip
IDS = ["FedAvgM", "FedACG", "FedExP", "FedAdagrad", "FedAdam", "FedYogi", "FedNova", "FedDynServer", "ServerOptimizer"]
every = pytest.mark.parametrize("make", EVERY, ids=IDS)


# Ten rounds of two clients, by hand


CLIENTS = [(1.0, 1.0, 3), (2.0, -3.0, 1)]  # curvature a, optimum b, samples: losses a/2 (w - b)²
WAYS = [(b1, b2, start) for b1, b2 in ((0.9, 0.99), (0.0, 0.5)) for start in ("epsilon_squared", "zero")]


def local_deltas(w: float) -> list[float]:
    """Each client takes two gradient steps of rate 0.1."""
    deltas = []
    for a, b, _ in CLIENTS:
        x = w
        for _ in range(2):
            x = x - 0.1 * a * (x - b)
        deltas.append(x - w)
    return deltas


@pytest.mark.parametrize("rule", ["FedAdagrad", "FedAdam", "FedYogi"])
@pytest.mark.parametrize(("beta1", "beta2", "initial"), WAYS)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_ten_rounds_of_a_quadratic_by_hand(rule: str, beta1: float, beta2: float, initial: Any, weighting: Any) -> None:
    lr, epsilon = 0.3, 0.05
    options: dict[str, Any] = {"lr": lr, "epsilon": epsilon, "initial_v": initial, "weighting": weighting}
    if rule == "FedAdagrad":
        aggregator: Aggregator = FedAdagrad(**options)
    else:
        aggregator = {"FedAdam": FedAdam, "FedYogi": FedYogi}[rule](beta1=beta1, beta2=beta2, **options)
    server = Server(aggregator, np.array([4.0]))
    p = [0.75, 0.25] if weighting == "samples" else [0.5, 0.5]
    w, z, v = 4.0, 0.0, epsilon * epsilon if initial == "epsilon_squared" else 0.0
    for _ in range(10):
        deltas = local_deltas(w)
        delta = p[0] * deltas[0] + p[1] * deltas[1]
        square = delta * delta
        if rule == "FedAdagrad":
            z, v = delta, v + square
        elif rule == "FedAdam":
            z, v = beta1 * z + (1 - beta1) * delta, beta2 * v + (1 - beta2) * square
        else:
            z = beta1 * z + (1 - beta1) * delta
            v = v + (1 - beta2) * square if square > v else v - (1 - beta2) * square
        w = w + lr * z / (v**0.5 + epsilon)
        (after,) = server.round(np.array(local_deltas(server.weights.item()))[:, None], [3, 1])
        assert after == pytest.approx(w, rel=1e-12)
    assert abs(w - 4.0) > 0.5


def test_defaults_are_the_papers() -> None:
    for aggregator in (FedAdam(), FedYogi()):
        assert (aggregator.beta1, aggregator.beta2, aggregator.epsilon) == (0.9, 0.99, 1e-3)
    for aggregator in (FedAdam(), FedYogi(), FedAdagrad()):
        assert aggregator.initial_v == "epsilon_squared"
        v = aggregator.recall_v(torch.zeros(2, dtype=torch.float64))
        assert v.tolist() == pytest.approx([1e-6, 1e-6], rel=1e-12)
    assert FedAvgM().beta == 0.9


# Limits


@given(
    deltas=arrays(np.float32, st.tuples(st.just(3), st.integers(1, 4), st.integers(1, 6)),
                  elements=st.floats(-9, 9, width=32)),
    lr=st.sampled_from([1.0, 0.3]),
    threshold=st.sampled_from([None, 0.4]),
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_fedavgm_without_momentum_is_fedavg_to_the_bit(deltas: np.ndarray, lr: float, threshold: float | None) -> None:
    start = np.linspace(-1, 1, deltas.shape[2], dtype=np.float32)
    mask = None if threshold is None else SignAgreement(threshold)
    ours, theirs = Server(FedAvgM(beta=0.0, lr=lr, mask=mask), start), Server(FedAvg(lr=lr, mask=mask), start)
    for each in deltas:
        sizes = range(3, 3 + len(each))
        assert np.array_equal(ours.round(each, sizes), theirs.round(each, sizes))


def test_fedavgm_sums_faded_updates() -> None:
    start, deltas = rounds()
    means = np.einsum("i,tid->td", np.array(SIZES) / sum(SIZES), deltas)
    momenta = [sum(0.7 ** (t - s) * means[s] for s in range(t + 1)) for t in range(len(means))]
    expected = start + 0.4 * np.cumsum(momenta, axis=0)
    np.testing.assert_allclose(run(FedAvgM(beta=0.7, lr=0.4), start, deltas), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("distances", [[0.3] * 4, [1.0] * 4, [3.0, 0.5, 10.0, 1.0]], ids=str)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fednova_is_fedavg_for_equal_distances_only(distances: list[float], weighting: Any) -> None:
    start, deltas = rounds(1)
    p = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(4, 0.25)
    a = np.array(distances)
    ours = Server(FedNova(weighting=weighting, lr=0.7), start).round(deltas[0], SIZES, distances)
    np.testing.assert_allclose(ours, start + 0.7 * (p @ a) * ((p / a) @ deltas[0]), rtol=0, atol=1e-12)
    plain = Server(FedAvg(weighting=weighting, lr=0.7), start).round(deltas[0], SIZES)
    assert np.allclose(ours, plain, rtol=0, atol=1e-12) == (len(set(distances)) == 1)


def test_feddyn_steps_by_the_mean_and_all_former_sums() -> None:
    start, deltas = rounds()
    sums = deltas.sum(axis=1)
    expected = start + np.cumsum(sums / 4 + np.cumsum(sums, axis=0) / REGISTERED, axis=0)
    for alpha in (0.01, 1.0):
        np.testing.assert_allclose(run(FedDynServer(alpha=alpha), start, deltas), expected, rtol=0, atol=1e-12)
    first = start + (1 + 4 / REGISTERED) * deltas[0].mean(axis=0)
    np.testing.assert_allclose(expected[0], first, rtol=0, atol=1e-12)


def test_rules_with_epsilon_tend_to_fedavg_as_it_grows() -> None:
    start, deltas = rounds()
    plain = run(FedAvg(), start, deltas)
    options: dict[str, Any] = {"epsilon": 1e13, "lr": 1e13, "initial_v": "zero"}
    for aggregator in (FedAdagrad(**options), FedAdam(beta1=0.0, **options), FedYogi(beta1=0.0, **options)):
        np.testing.assert_allclose(run(aggregator, start, deltas), plain, rtol=0, atol=1e-10)


# All of them


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_state_goes_through_a_checkpoint_to_the_bit(make: Any, dtype: Any, tmp_path: Any) -> None:
    start, deltas = rounds(6, dtype)
    whole = run(make(), start, deltas)
    first = Server(make(), start)
    for each in deltas[:3]:
        middle = first.round(each, SIZES)
    torch.save(first.aggregator.state_dict(), tmp_path / "state")
    kept = first.aggregator.state_dict()
    copies = {name: value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    first.round(deltas[3], SIZES)
    assert all(torch.equal(kept[name], value) for name, value in copies.items()), "the state is live"
    second = Server(make(), middle, torch.load(tmp_path / "state", weights_only=True))
    for t in range(3, 6):
        assert np.array_equal(second.round(deltas[t], SIZES), whole[t])
    assert whole.dtype == dtype
    forgotten = Server(make(), middle).round(deltas[3], SIZES)
    assert np.array_equal(forgotten, whole[3]) == (make in (FedNova, FedExP))  # it keeps what it shows alone


@every
def test_a_second_fit_starts_afresh(make: Any) -> None:
    start, deltas = rounds(2)
    aggregator = make()
    assert np.array_equal(run(aggregator, start, deltas), run(aggregator, start, deltas))
    aggregator.setup(None, None, "validate")
    assert bool(aggregator.state_dict()) == (make is not FedNova)


@every
def test_updates_of_zero_leave_a_fresh_server_where_it_is(make: Any) -> None:
    start, deltas = rounds(1)
    assert np.array_equal(run(make(), start, 0 * deltas)[-1], start)
    assert run(make(), start[:1], deltas[:, :, :1]).shape == (1, 1)


@every
@pytest.mark.parametrize("apply", ["after", "before"])
def test_a_mask_that_lets_all_through_changes_no_bit_and_another_does(make: Any, apply: Any) -> None:
    start, deltas = rounds(3, np.float32)
    plain = run(make(), start, deltas)
    assert np.array_equal(run(make(mask=SignAgreement(0.0), apply=apply), start, deltas), plain)
    masked = run(make(mask=SignAgreement(0.9), apply=apply), start, deltas)
    assert not np.allclose(masked, plain, rtol=1e-3)


@pytest.mark.parametrize("make", [FedAvgM, FedAdam, FedYogi, FedAdagrad], ids=lambda make: make.__name__)
def test_the_mask_before_the_rule_is_what_the_moments_see(make: Any) -> None:
    start, deltas = rounds(4)
    agreed = np.abs(np.sign(deltas).mean(axis=1)) >= 0.6 - 1e-9
    masks = SignAgreement(0.6, binary=True)
    before = run(make(mask=masks, apply="before"), start, deltas)
    np.testing.assert_allclose(before, run(make(), start, deltas * agreed[:, None]), rtol=0, atol=1e-12)
    after = run(make(mask=masks), start, deltas)
    steps = np.diff(run(make(), start, deltas), axis=0, prepend=start[None])
    np.testing.assert_allclose(np.diff(after, axis=0, prepend=start[None]), steps * agreed, rtol=0, atol=1e-12)
    assert not np.allclose(before, after)


@every
def test_the_reduced_update_is_not_changed(make: Any) -> None:
    start, deltas = rounds(2)
    server = Server(make(), start)
    for each in deltas:
        update: ReducedUpdate = server.reduce(each, SIZES)
        before = {name: value.clone() for name, value in vars(update).items() if isinstance(value, Tensor)}
        server.aggregator.step(server.trainer, Module(), update)
        assert all(torch.equal(vars(update)[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("make", "arguments", "option"),
    [
        (FedAvgM, {"beta": 1.0}, "beta"),
        (FedAvgM, {"beta": -0.1}, "beta"),
        (FedAvgM, {"lr": 0.0}, "lr"),
        (FedAdam, {"beta1": 1.0}, "beta1"),
        (FedAdam, {"beta2": float("nan")}, "beta2"),
        (FedYogi, {"beta2": 1.5}, "beta2"),
        (FedYogi, {"epsilon": 0.0}, "epsilon"),
        (FedAdagrad, {"epsilon": float("inf")}, "epsilon"),
        (FedAdagrad, {"initial_v": "one"}, "initial_v"),
        (FedDynServer, {"alpha": 0.0}, "alpha"),
        (FedDynServer, {"weighting": "samples"}, "weighting"),
        (FedACG, {"beta": 1.0}, "beta"),
        (FedExP, {"epsilon": -1e-9}, "epsilon"),
        (FedExP, {"evaluate": "best"}, "evaluate"),
        (FedNova, {"weighting": "equal"}, "weighting"),
        (ServerOptimizer, {"lr": -1.0}, "lr"),
    ],
)
def test_bad_arguments_name_the_option(make: Any, arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected .*`--aggregator\.{option}`"):
        make(**arguments)
