"""SignAgreement as a mask over a reduced cohort."""

import math

import pytest
import torch

from lightning_fed.errors import FederatedError
from lightning_fed.hooks import Client
from lightning_fed.masks import SignAgreement
from lightning_fed.reduction import Need, ReducedUpdate


def cohort(sign_sum: list[float], clients: int) -> ReducedUpdate:
    return ReducedUpdate(1, tuple(Client(i, 10, 1) for i in range(clients)), sign_sum=torch.tensor(sign_sum))


def test_defaults_are_those_of_the_paper() -> None:
    mask = SignAgreement()
    assert (mask.threshold, mask.binary) == (0.4, False)
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
