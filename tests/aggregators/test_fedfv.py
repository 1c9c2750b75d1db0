"""FedFV: whose update gives way to whose, over rounds that differ in who takes part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedAvg, FedFV
from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.errors import FederatedError
from tests.aggregators.quadratic import STRENGTHS, TARGETS, train_by_hand, weights_after

COHORTS = [(0, 1, 2, 3), (1, 4, 5), (0, 2, 6, 7), (3, 5, 6), (0, 1, 2, 4, 7)]


def rounds() -> list[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Clients, updates and losses of each round; in few dimensions, so that there are conflicts."""
    rng = np.random.default_rng(3)
    return [(ids, rng.normal(size=(len(ids), 4)), rng.uniform(0.5, 2, len(ids))) for ids in COHORTS]


def reduced(number: int, ids: tuple[int, ...], deltas: np.ndarray, losses: np.ndarray) -> ReducedUpdate:
    n = len(ids)
    return ReducedUpdate(
        number,
        tuple(Client(i, 5, number) for i in ids),
        8,
        torch.full((n,), 1 / n, dtype=torch.float64),
        updates=torch.tensor(deltas),
        losses=torch.tensor(losses),
    )


def run(rule: FedFV, given: Any, first: int = 1) -> list[np.ndarray]:
    return [rule.server_step(reduced(number, *each)).numpy() for number, each in enumerate(given, first)]


def by_hand(given: Any, alpha: float, tau: int, restore: bool = True, ascending: bool = True) -> list[np.ndarray]:
    """Vector by vector, as the paper's algorithms go; the authors' code spares at least one unless α is 0."""
    last: dict[int, tuple[int, np.ndarray]] = {}
    steps = []
    for t, (ids, deltas, losses) in enumerate(given, 1):
        order = np.argsort(losses if ascending else -losses)
        spared = set(np.argsort(losses)[len(ids) - max(round(alpha * len(ids)), alpha > 0) :].tolist())
        parts = []
        for i, own in enumerate(deltas):
            g = own.copy()
            for j in [] if i in spared else order:
                if j != i and g @ deltas[j] < 0:
                    g = g - (g @ deltas[j]) / (deltas[j] @ deltas[j]) * deltas[j]
            parts.append(g)
        step = np.mean(parts, axis=0)
        for s in range(t - tau, t):
            against = [v for i, (at, v) in last.items() if at == s and i not in ids and step @ v < 0]
            if against:
                total = np.sum(against, axis=0)
                step = step - (step @ total) / (total @ total) * total
        length = np.linalg.norm(deltas.mean(axis=0)) if restore else np.linalg.norm(step)
        steps.append(step / np.linalg.norm(step) * length)
        last.update({i: (t, row) for i, row in zip(ids, deltas, strict=True)})
    return steps


@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 0), (0.3, 0), (0.3, 1), (0.0, 2), (1.0, 3)])
def test_rounds_of_changing_cohorts_by_hand(alpha: float, tau: int) -> None:
    np.testing.assert_allclose(run(FedFV(alpha, tau), rounds()), by_hand(rounds(), alpha, tau), rtol=1e-11)


def test_every_part_tells() -> None:
    """The length, the order, who is spared and how far back: each alone makes another step."""
    found = by_hand(rounds(), 0.3, 2)
    others = [
        by_hand(rounds(), 0.3, 2, restore=False),
        by_hand(rounds(), 0.3, 2, ascending=False),
        by_hand(rounds(), 0.0, 2),
        by_hand(rounds(), 0.3, 1),
        by_hand(rounds(), 0.3, 0),
    ]
    for other in others:
        assert max(abs(one - two).max() for one, two in zip(found, other, strict=True)) > 1e-3


def test_all_spared_and_nothing_former_is_uniform_fedavg(tmp_path: Path) -> None:
    plain = weights_after(tmp_path / "plain", FedAvg(weighting="uniform"), 3, 2)
    found = weights_after(tmp_path / "fedfv", FedFV(1.0, 0), 3, 2)
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12)


def test_three_quadratic_clients_over_rounds(tmp_path: Path) -> None:
    """With the losses that the engine takes at w."""
    w = np.ones(2)
    for _ in range(4):
        losses = 0.5 * STRENGTHS * ((w - TARGETS) ** 2).sum(axis=1)
        (step,) = by_hand([((0, 1, 2), train_by_hand(w, 3) - w, losses)], 0.4, 0)
        w = w + step
    np.testing.assert_allclose(weights_after(tmp_path, FedFV(0.4), 4, 3), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clients", [2, 3, 4, 5])
def test_by_default_the_client_of_greatest_loss_is_spared_in_small_cohorts(clients: int) -> None:
    """The authors spare n - ⌈(n - 1) (1 - α)⌉, which is 1 here."""
    deltas, losses = np.random.default_rng(clients).normal(size=(clients, 1)), np.arange(clients, 0, -1.0)
    deltas[0], deltas[1:] = -1.0, abs(deltas[1:])  # on a line, where whoever gives way has nothing left
    (step,) = run(FedFV(), [(tuple(range(clients)), deltas, losses)])
    assert step == pytest.approx(-abs(deltas.mean(axis=0)))
    (none,) = run(FedFV(0.0), [(tuple(range(clients)), deltas, losses)])
    assert not none.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("factors", [(1.0, -0.3), (1.0, -1.0), (0.7, 0.1, -0.9)])
def test_what_rounding_leaves_of_opposed_updates_is_no_step(factors: Any, scale: float, dtype: Any) -> None:
    """It used to get the length of the mean, in a direction of noise; former updates leave such noise as well."""
    row = np.random.default_rng(0).normal(size=1000)
    deltas = (scale * np.outer(factors, row)).astype(dtype)
    ids, losses = tuple(range(len(factors))), np.arange(len(factors), dtype=float)
    (step,) = run(FedFV(0.0), [(ids, deltas, losses)])
    assert not step.any()
    _, second = run(FedFV(), [((0,), -deltas[:1], losses[:1]), ((5,), (0.3 * deltas[:1]).astype(dtype), losses[:1])])
    assert not second.any()


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_equal_loss_do_not_go_by_their_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    deltas, losses = rng.integers(-2, 3, (6, 3)).astype(float), rng.integers(0, 2, 6).astype(float)
    order = rng.permutation(6)
    (one,) = run(FedFV(0.3), [(tuple(range(6)), deltas, losses)])
    (other,) = run(FedFV(0.3), [(tuple(range(6)), deltas[order], losses[order])])
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_no_update_is_no_step() -> None:
    (step,) = run(FedFV(), [((0, 1), np.zeros((2, 4)), np.ones(2))])
    assert not step.any()


def test_former_updates_go_through_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    whole, first, second = FedFV(tau=2), FedFV(tau=2), FedFV(tau=2)
    expected = run(whole, rounds())
    run(first, rounds()[:3])
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert np.array_equal(run(second, rounds()[3:], 4), expected[3:])
    forgotten = FedFV(tau=2)
    assert not np.allclose(run(forgotten, rounds()[3:], 4), expected[3:])
    short = FedFV(tau=1)
    run(short, rounds())
    assert {at for at, _ in short.former.values()} == {5}, "older ones are let go"
    whole.setup(None, None, "fit")
    assert not whole.former


@pytest.mark.parametrize(
    ("options", "option"), [({"alpha": 1.1}, "alpha"), ({"tau": -1}, "tau"), ({"tau": 0.5}, "tau")]
)
def test_bad_arguments_name_the_option(options: dict[str, Any], option: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--aggregator\.{option}`"):
        FedFV(**options)
