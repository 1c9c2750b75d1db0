"""SignAgreement as a mask over a reduced cohort."""

import math

import pytest
import torch

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement


def cohort(sign_sum: list[float], clients: int) -> ReducedUpdate:
    return ReducedUpdate(1, tuple(Client(i, 10, 1) for i in range(clients)), sign_sum=torch.tensor(sign_sum))


def test_defaults_are_those_of_the_paper() -> None:
    mask = SignAgreement()
    assert (mask.threshold, mask.binary, mask.comparison, mask.votes) == (0.4, False, ">=", "equal")
    assert mask.needs == Need.SIGN_SUM


def test_counts_the_clients_that_entered() -> None:
    update = cohort([5.0, -3.0, 1.0, 0.0], clients=5)
    assert SignAgreement(0.4).compute(update).tolist() == pytest.approx([1.0, 1.0, 0.2, 0.0])
    assert SignAgreement(0.4, binary=True).compute(update).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert SignAgreement(0.6).compute(update).tolist() == pytest.approx([1.0, 1.0, 0.2, 0.0])
    assert SignAgreement(0.7).compute(update).tolist() == pytest.approx([1.0, 0.6, 0.2, 0.0])


def test_reports_the_mean_of_the_mask_and_the_share_below_the_threshold() -> None:
    update, mask = cohort([5.0, -3.0, 1.0, 0.0], clients=5), SignAgreement(0.7)
    facts = mask.diagnose(update, mask.compute(update))
    assert {name: value.item() for name, value in facts.items()} == pytest.approx(
        {"mask/mean": (1.0 + 0.6 + 0.2 + 0.0) / 4, "mask/below_threshold": 3 / 4}
    )


def test_share_below_zero_threshold_is_nothing() -> None:
    update, mask = cohort([0.0, 1.0], clients=3), SignAgreement(0.0)
    assert mask.diagnose(update, mask.compute(update))["mask/below_threshold"].item() == 0.0


@pytest.mark.parametrize("threshold", [-0.1, 1.5, math.nan])
def test_refuses_thresholds_out_of_range_when_made(threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.threshold"):
        SignAgreement(threshold)


def test_a_share_at_the_threshold_counts_or_does_not() -> None:
    update = cohort([3.0, -3.0, 1.0], clients=5)
    at, above = SignAgreement(0.6, True), SignAgreement(0.6, True, comparison=">")
    assert at.compute(update).tolist() == [1.0, 1.0, 0.0]
    assert above.compute(update).tolist() == [0.0, 0.0, 0.0]
    shares = [mask.diagnose(update, mask.compute(update))["mask/below_threshold"].item() for mask in (at, above)]
    assert shares == pytest.approx([1 / 3, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_votes_by_samples_are_counted_over_the_clients_that_entered(dtype: torch.dtype) -> None:
    deltas = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 3.0, 0.0], [-1.0, 0.0, -5.0]], dtype=dtype)
    mask, samples = SignAgreement(0.5, votes="samples"), [50, 20, 10]
    assert Need.WEIGHTED_SIGN_SUM in mask.needs
    assert Need.SIGN_SUM not in mask.needs
    reducer = RoundReducer(torch.zeros(3, dtype=dtype), mask.needs)
    reducer.reset(3)
    for i, delta in enumerate(deltas):
        reducer.add(Update(Client(i, samples[i], 1), delta, 1), average_buffers=False)
    update = reducer.reduce(1)
    found = mask.compute(update)
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx([20 / 80, 1.0, 10 / 80])
    assert mask.diagnose(update, found)["mask/below_threshold"].item() == pytest.approx(2 / 3)


def test_refuses_unknown_words_when_made() -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.comparison.*'<'"):
        SignAgreement(comparison="<")  # type: ignore[arg-type]
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.votes.*'clients'"):
        SignAgreement(votes="clients")  # type: ignore[arg-type]
