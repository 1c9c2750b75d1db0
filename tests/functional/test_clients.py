"""What clients compute, against formulas written by hand and NumPy."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lightning_fed.errors import FederatedError
from lightning_fed.functional import (
    calibration_margins,
    contrastive_loss,
    difference,
    log_priors,
    not_true_divergence,
    optimizer_distance,
    restricted_factors,
    sgd_distance,
    summarize_clients,
)

PRECISIONS = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
]

COUNTS = torch.tensor([16.0, 0.0, 1.0, 81.0], dtype=torch.float64)

rates = st.lists(st.floats(0, 2), max_size=12)
shares = st.sampled_from([0.0, 0.3, 0.9, 0.99])


@pytest.mark.parametrize(("left", "right", "out"), PRECISIONS)
@pytest.mark.parametrize("rows", [(), (3,)])
def test_a_difference_has_the_precision_of_its_result(rows, left, right, out):
    torch.manual_seed(0)
    a, b = torch.randn(*rows, 1003).to(left), torch.randn(1003).to(right)
    result = torch.full(a.shape, torch.nan, dtype=out)
    assert difference(a, b, result) is result
    assert torch.equal(result, a.to(out) - b.to(out))


def test_terms_of_losses_have_closed_forms() -> None:
    # 16^{-1/4} = 1/2, 81^{-1/4} = 1/3; 1/16 sample counts as 2.
    assert calibration_margins(COUNTS, 3.0, absent=1 / 16).tolist() == pytest.approx([-1.5, -6.0, -3.0, -1.0])
    assert log_priors(COUNTS, 2.0, absent=0.5).exp().tolist() == pytest.approx(
        [(n / 98) ** 2 for n in (16, 0.5, 1, 81)]
    )
    assert restricted_factors(COUNTS, 0.25).tolist() == [1, 0.25, 1, 1]


@pytest.mark.parametrize("value", [calibration_margins, log_priors])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_class_without_samples_leaves_the_softmax_exactly(value, dtype) -> None:
    scores = torch.tensor([[0.0, 900.0, 1.0, 2.0]], dtype=dtype, requires_grad=True)
    changed = scores + value(COUNTS, 1.0).to(dtype)
    assert changed.softmax(1)[0, 1] == 0
    cross_entropy(changed, torch.tensor([3])).backward()
    assert scores.grad[0, 1] == 0
    assert scores.grad.isfinite().all()
    assert scores.grad.any()


def test_equal_priors_move_no_probability() -> None:
    scores = torch.randn(5, 4, dtype=torch.float64)
    for value in (calibration_margins, log_priors):
        moved = scores + value(torch.full((4,), 7.0, dtype=torch.float64), 1.3)
        torch.testing.assert_close(moved.softmax(1), scores.softmax(1))


def test_contrast_of_like_and_of_opposite_features() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=torch.float64)
    assert contrastive_loss(z, 3 * z, z, 0.5).item() == pytest.approx(math.log(2))
    # s = 1 towards w and -1 towards the last model: log(1 + e^{-2/τ}).
    assert contrastive_loss(z, z, -z, 0.5).item() == pytest.approx(math.log1p(math.exp(-4)))
    assert contrastive_loss(z.view(2, 1, 2), z, -z, 0.5) == contrastive_loss(z, z, -z, 0.5)


def test_the_true_class_is_no_part_of_the_divergence() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 6, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    found = not_true_divergence(live, teacher, labels, 1.5)
    live[range(6), labels] += 7.0
    teacher[range(6), labels] -= 300.0
    assert not_true_divergence(live, teacher, labels, 1.5).item() == pytest.approx(found.item(), rel=1e-12)
    assert not_true_divergence(teacher, teacher, labels, 1.5) == 0
    assert found > 0


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2)])
def test_labels_that_are_no_class_count_for_nothing(shape: tuple[int, ...]) -> None:
    """As in torch's cross-entropy, whose mean is over the others."""
    live, teacher = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(6 * math.prod(shape[2:])).view(6, *shape[2:]) % 3
    labels[4:] = -100
    known = not_true_divergence(live[:4], teacher[:4], labels[:4], 1.3)
    torch.testing.assert_close(not_true_divergence(live, teacher, labels, 1.3), known)
    assert known > 0.01
    assert not_true_divergence(live[4:], teacher[4:], labels[4:], 1.3) == 0


def test_places_of_a_sequence_count_like_samples() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 2, 4, 3)
    labels = torch.randint(4, (2, 3))
    flat = [part.movedim(1, 2).flatten(0, 1) for part in (live, teacher)]
    found = not_true_divergence(live, teacher, labels, 2.0)
    torch.testing.assert_close(found, not_true_divergence(*flat, labels.flatten(), 2.0))


def test_many_clients_at_once() -> None:
    torch.manual_seed(0)
    live, teacher = torch.randn(2, 3, 6, 4)
    labels = torch.randint(4, (3, 6))
    found = vmap(lambda a, b, c: not_true_divergence(a, b, c, 1.5))(live, teacher, labels)
    alone = [not_true_divergence(*one, 1.5) for one in zip(live, teacher, labels, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone))
    torch.testing.assert_close(
        vmap(lambda a, b: contrastive_loss(a, b, -b, 0.5))(live, teacher),
        torch.stack([contrastive_loss(a, b, -b, 0.5) for a, b in zip(live, teacher, strict=True)]),
    )


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
def test_distances_have_closed_forms(steps: int, rho: float, lr: float) -> None:
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


@pytest.mark.parametrize(("n", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (25, 3)])
@pytest.mark.parametrize("lower_is_better", [False, True])
def test_agrees_with_numpy(n: int, tenth: int, lower_is_better: bool) -> None:
    rng = np.random.default_rng(n)
    values, sizes = rng.normal(size=n), rng.integers(1, 50, size=n)
    found = summarize_clients(torch.tensor(values), torch.tensor(sizes), lower_is_better)
    worst = np.sort(values)[::-1][:tenth] if lower_is_better else np.sort(values)[:tenth]
    expected = (values.mean(), np.average(values, weights=sizes), worst.mean(), values.std())
    assert [figure.item() for figure in found] == pytest.approx(expected, rel=1e-12)
    assert {figure.dtype for figure in found} == {torch.float64}


def test_summaries_have_closed_forms() -> None:
    # 0, 1, ..., 19: the mean of arithmetic series, and (n² - 1) / 12 as variance.
    values = torch.arange(20.0)
    found = summarize_clients(values, torch.ones(20), lower_is_better=True)
    assert found == pytest.approx((9.5, 9.5, 18.5, (399 / 12) ** 0.5), rel=1e-15)
    # Weights i + 1: Σ i (i + 1) / Σ (i + 1) = (n - 1) n (n + 1) / 3 / (n (n + 1) / 2).
    assert summarize_clients(values, values + 1, True).weighted.item() == pytest.approx(2 / 3 * 19, rel=1e-15)


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_what_is_no_number_is_in_every_figure_and_what_is_infinite_in_its_own(lower_is_better: bool) -> None:
    values = torch.ones(30)
    values[3] = torch.nan
    assert torch.stack([*summarize_clients(values, torch.ones(30), lower_is_better)]).isnan().all()
    values[3] = torch.inf
    mean, weighted, worst, _ = summarize_clients(values, torch.ones(30), lower_is_better)
    assert (mean, weighted, worst) == (torch.inf, torch.inf, torch.inf if lower_is_better else 1.0)
