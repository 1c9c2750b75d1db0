"""MagnitudeAgreement and SANDMask over a cohort reduced one update at a time."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import MagnitudeAgreement, Mask, SANDMask


def reduced(deltas: Tensor, mask: Mask) -> ReducedUpdate:
    """The cohort as the loop reduces it for a mask, with samples that must not count."""
    reducer = RoundReducer(torch.zeros_like(deltas[0]), mask.needs)
    reducer.reset(len(deltas))
    for i, delta in enumerate(deltas):
        reducer.add(Update(Client(i, 10 + i, 1), delta, 1, weight=10.0 + i), average_buffers=False)
    return reducer.reduce(1)


def drawn(clients: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    deltas = torch.randn(clients, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    deltas[:, 2] = 0.0  # nobody moves this coordinate
    deltas[0, 3] = 0.0
    deltas[:, 4] = 0.25  # all move this one alike
    return deltas


def test_magnitude_defaults_and_needs() -> None:
    mask = MagnitudeAgreement()
    assert (mask.threshold, mask.binary) == (0.4, False)
    assert mask.needs == Need.SUM | Need.ABS_SUM


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
@pytest.mark.parametrize("binary", [False, True])
def test_magnitude_of_a_cohort(clients: int, binary: bool) -> None:
    deltas, mask = drawn(clients), MagnitudeAgreement(0.3, binary)
    update = reduced(deltas, mask)
    pull, size = np.abs(deltas.numpy().sum(axis=0)), np.abs(deltas.numpy()).sum(axis=0)
    share = np.divide(pull, size, out=np.zeros_like(pull), where=size > 0)
    expected = np.where(share >= 0.3, 1.0, 0.0 if binary else share)
    found = mask.compute(update)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    facts = {name: value.item() for name, value in mask.diagnose(update, found).items()}
    assert facts == pytest.approx({"mask/mean": expected.mean(), "mask/below_threshold": (share < 0.3).mean()})


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [0.01, 10.0])
def test_sand_of_a_cohort_is_divided_tensor_by_tensor(clients: int, k: float) -> None:
    deltas, mask = drawn(clients), SANDMask(0.3, k)
    mask.prepare([2, 4])
    values = deltas.numpy()
    update = reduced(deltas, mask)
    share = np.abs(np.sign(values).sum(axis=0)) / clients
    variance = values.var(axis=0, ddof=1) if clients > 1 else np.zeros(6)
    with np.errstate(divide="ignore"):
        raw = np.maximum(np.tanh(k * (share - 0.3) / variance), 0.0)
    expected = np.concatenate([raw[:2] / (1e-10 + raw[:2].mean()), raw[2:] / (1e-10 + raw[2:].mean())])
    found = mask.compute(update)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    facts = {name: value.item() for name, value in mask.diagnose(update, found).items()}
    assert facts == pytest.approx({"mask/mean": expected.mean(), "mask/below_threshold": (share < 0.3).mean()})


def test_sand_defaults_and_needs() -> None:
    mask = SANDMask()
    assert (mask.threshold, mask.k) == (0.4, 10.0)
    assert mask.needs == Need.SIGN_SUM | Need.VARIANCE


@pytest.mark.parametrize("mask", [MagnitudeAgreement(0.4), MagnitudeAgreement(0.4, True), SANDMask(0.4)])
def test_coordinates_that_nobody_moves_and_single_ones(mask: Mask) -> None:
    mask.prepare([3])
    assert mask.compute(reduced(torch.zeros(4, 3), mask)).tolist() == [0.0] * 3
    mask.prepare([1])
    one = mask.compute(reduced(torch.tensor([[2.0]]), mask))
    assert one.dtype == torch.float32
    assert one.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("threshold", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("kind", [MagnitudeAgreement, SANDMask])
def test_thresholds_out_of_range_are_refused_when_made(kind: type, threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.threshold"):
        kind(threshold)


@pytest.mark.parametrize("k", [0.0, -1.0, math.inf, math.nan])
def test_steepness_out_of_range_is_refused_when_made(k: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.k"):
        SANDMask(k=k)
