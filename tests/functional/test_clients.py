"""How a value is distributed over clients, against NumPy."""

import numpy as np
import pytest
import torch

from lightning_fed.functional import summarize_clients


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


def test_closed_forms() -> None:
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
