"""Torch optimizers as server rules against the rules that they equal, and those that they only resemble."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedAdagrad, FedAdam, FedAvg, FedAvgM, ServerOptimizer
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.server_parts import SIZES, Server, rounds, run


def test_sgd_is_fedavg_and_with_momentum_fedavgm() -> None:
    start, deltas = rounds()
    np.testing.assert_allclose(run(ServerOptimizer(), start, deltas), run(FedAvg(), start, deltas), rtol=0, atol=1e-12)
    momentum = ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    expected = run(FedAvgM(beta=0.9, lr=0.5), start, deltas)
    np.testing.assert_allclose(run(momentum, start, deltas), expected, rtol=0, atol=1e-12)


def test_torch_adagrad_started_at_epsilon_squared_is_fedadagrad() -> None:
    start, deltas = rounds()
    ours = ServerOptimizer(lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.02, initial_accumulator_value=0.02**2))
    expected = run(FedAdagrad(lr=0.1, epsilon=0.02), start, deltas)
    np.testing.assert_allclose(run(ours, start, deltas), expected, rtol=0, atol=1e-12)


def test_torch_adam_corrects_the_bias_that_fedadam_keeps() -> None:
    start, deltas = rounds()
    ours = run(ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3)), start, deltas)
    means = np.einsum("i,tid->td", np.array(SIZES) / sum(SIZES), deltas)
    w, z, v = start.copy(), np.zeros(6), np.zeros(6)
    for t, mean in enumerate(means, start=1):
        z, v = 0.9 * z + 0.1 * mean, 0.99 * v + 0.01 * mean**2
        w = w + 0.1 * (z / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-3)
        np.testing.assert_allclose(ours[t - 1], w, rtol=0, atol=1e-12)
    without = run(FedAdam(lr=0.1, initial_v="zero"), start, deltas)
    assert np.abs(without - ours).max() > 0.01


def test_the_mask_comes_after_the_optimizer_and_its_momentum_is_unmasked() -> None:
    start, deltas = rounds()
    ours = run(ServerOptimizer(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1), lr=0.8,
                               mask=SignAgreement(0.6, binary=True)), start, deltas)  # fmt: skip
    w, momentum, masked = start.copy(), np.zeros(6), 0
    for t, each in enumerate(deltas):
        gradient = -(np.array(SIZES) / sum(SIZES)) @ each + 0.1 * w
        momentum = 0.9 * momentum + gradient
        m = (np.abs(np.sign(each).mean(axis=0)) >= 0.6 - 1e-9).astype(float)
        masked += int((m == 0).sum())
        w = w - 0.8 * m * 0.5 * momentum
        np.testing.assert_allclose(ours[t], w, rtol=0, atol=1e-12)
    assert 0 < masked < 30


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, "got LBFGS"),
        (lambda p: torch.optim.SparseAdam(p), "got SparseAdam"),
        (lambda p: torch.optim.SGD(p, lr=-1.0), "Invalid learning rate"),
        (lambda p: "Adam", "got str"),
    ],
)
def test_optimizers_that_cannot_work_are_refused_before_the_first_round(make: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected `--aggregator\.optimizer` .*{said}"):
        Server(ServerOptimizer(make), np.zeros(3))


def test_a_resumed_run_keeps_its_server_optimizer() -> None:
    start, deltas = rounds(1)
    server = Server(ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1)), start)
    server.round(deltas[0], SIZES)
    state = server.aggregator.state_dict()
    Server(ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1)), start, state)
    with pytest.raises(FederatedError, match=r"lr 0\.1, got 0\.2: .*--weights"):
        Server(ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.2)), start, state)
    with pytest.raises(FederatedError, match=r"class Adam, got AdamW"):
        Server(ServerOptimizer(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)), start, state)
    with pytest.raises(FederatedError, match=r"(Adam|None), got "):
        Server(ServerOptimizer(), start, state)


def test_a_state_that_comes_between_two_rounds_is_taken_over_at_once() -> None:
    """As from another process, whose processor rounds otherwise; the checkpoint of the round holds it."""
    start, deltas = rounds()
    servers = [Server(ServerOptimizer(lambda p: torch.optim.Adam(p, lr=0.1)), start) for _ in range(2)]
    for server, shift in zip(servers, (0.0, 1e-3), strict=True):
        server.round(deltas[0] + shift, SIZES)
    first, second = (server.aggregator for server in servers)
    second.load_state_dict(first.state_dict())
    kept, taken = (aggregator.state_dict()["optimizer"]["state"][0] for aggregator in (first, second))
    assert all(torch.equal(kept[name], taken[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert kept["exp_avg"].abs().sum() > 0
