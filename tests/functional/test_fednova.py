"""The distance of SGD against its closed forms and against torch's own SGD on a scalar."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lightning_fed.errors import FederatedError
from lightning_fed.functional import optimizer_distance, sgd_distance

rates = st.lists(st.floats(0, 2), max_size=12)
shares = st.sampled_from([0.0, 0.3, 0.9, 0.99])


def scalar() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def travelled(learning_rates: list[float], **options: Any) -> float:
    """Steps torch's SGD on a scalar whose gradient is always 1."""
    x = scalar()
    optimizer = torch.optim.SGD([x], lr=1.0, **options)
    for lr in learning_rates:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return -x.item()


@given(learning_rates=rates, momentum=shares, dampening=shares)
@settings(deadline=None)
def test_is_what_torch_does(learning_rates: list[float], momentum: float, dampening: float) -> None:
    ours = sgd_distance(learning_rates, momentum, dampening)
    assert ours == pytest.approx(travelled(learning_rates, momentum=momentum, dampening=dampening), rel=1e-12)


@given(learning_rates=rates, momentum=shares.filter(bool))
@settings(deadline=None)
def test_is_what_torch_does_with_nesterov(learning_rates: list[float], momentum: float) -> None:
    ours = sgd_distance(learning_rates, momentum, nesterov=True)
    assert ours == pytest.approx(travelled(learning_rates, momentum=momentum, nesterov=True), rel=1e-12)


@pytest.mark.parametrize(("steps", "rho", "lr"), list(product([1, 2, 3, 10, 50], [0.3, 0.9, 0.99], [0.05, 1.0])))
def test_closed_forms(steps: int, rho: float, lr: float) -> None:
    ends = (1 - rho**steps) / (1 - rho)
    s = (steps - rho * ends) / (1 - rho)
    rates = [lr] * steps
    assert sgd_distance(rates) == pytest.approx(lr * steps, rel=1e-12)
    assert sgd_distance(rates, rho) == pytest.approx(lr * s, rel=1e-9)
    assert sgd_distance(rates, rho, nesterov=True) == pytest.approx(lr * (steps + rho * s), rel=1e-9)
    for kappa in (0.2, 1.0):
        expected = lr * ((1 - kappa) * s + kappa * ends)
        assert sgd_distance(rates, rho, kappa) == pytest.approx(expected, rel=1e-9)


def test_dampening_without_momentum_does_nothing_and_no_step_is_no_distance() -> None:
    assert sgd_distance([0.5, 0.25], dampening=0.7) == 0.75
    assert sgd_distance([]) == 0.0
    assert sgd_distance([], 0.9, nesterov=True) == 0.0


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_schedule_of_rate_and_momentum_is_exact(nesterov: bool) -> None:
    x = scalar()
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9, nesterov=nesterov)
    schedule = OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    learning_rates, momenta = [], []
    for _ in range(9):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        schedule.step()
    assert len(set(momenta)) > 3
    assert optimizer_distance(optimizer, learning_rates, momenta) == pytest.approx(-x.item(), rel=1e-12)
    assert optimizer_distance(optimizer, learning_rates) != pytest.approx(-x.item(), rel=1e-3)


def test_momentum_that_comes_and_goes() -> None:
    x = scalar()
    optimizer = torch.optim.SGD([x], lr=0.5, momentum=0.9)
    momenta = [0.0, 0.9, 0.0, 0.5]
    for momentum in momenta:
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
    assert sgd_distance([0.5] * 4, momenta) == pytest.approx(-x.item(), rel=1e-12)


def test_reads_the_optimizer_and_leaves_weight_decay_out() -> None:
    x = scalar()
    optimizer = torch.optim.SGD([x], lr=torch.tensor(0.2), momentum=0.5, dampening=0.1, weight_decay=0.3)
    CosineAnnealingLR(optimizer, T_max=4)  # wraps `step` of this very object
    assert optimizer_distance(optimizer, [0.2, 0.1]) == sgd_distance([0.2, 0.1], 0.5, 0.1)
    assert optimizer_distance(optimizer, []) == 0.0


def test_groups_that_move_alike_have_one_distance() -> None:
    groups = [{"params": [scalar()], "weight_decay": 0.1}, {"params": [scalar()]}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    assert optimizer_distance(optimizer, [0.2, 0.2]) == sgd_distance([0.2, 0.2], 0.9)


@pytest.mark.parametrize(("key", "value"), [("lr", 0.1), ("momentum", 0.0), ("dampening", 0.5), ("nesterov", True)])
def test_groups_that_move_differently_are_refused(key: str, value: Any) -> None:
    groups = [{"params": [scalar()]}, {"params": [scalar()], "dampening": 0.0, key: value}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
    with pytest.raises(FederatedError, match=rf"^Expected every .* the same {key},.*--model\.optimizer"):
        optimizer_distance(optimizer, [0.2])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adam", "own size"), ("AdamW", "own size"), ("NAdam", "own size"), ("RAdam", "own size"),
        ("Adamax", "own size"), ("Adagrad", "own size"), ("Adadelta", "own size"), ("RMSprop", "own size"),
        ("Adafactor", "own size"), ("SparseAdam", "own size"), ("Rprop", "sign"), ("ASGD", "average"),
        ("LBFGS", "search"),
    ],
)  # fmt: skip
def test_other_optimizers_are_refused_by_name(name: str, reason: str) -> None:
    optimizer = getattr(torch.optim, name)([scalar()])
    with pytest.raises(
        FederatedError, match=rf"^Expected SGD .* got {name}, which .*{reason}.*--model\.optimizer"
    ) as e:
        optimizer_distance(optimizer, [0.1])
    assert str(e.value).count(". ") == 0


def test_an_sgd_with_a_step_of_its_own_is_refused() -> None:
    class SignedSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(FederatedError, match="SignedSGD, which is not known"):
        optimizer_distance(SignedSGD([scalar()], lr=0.1), [0.1])
