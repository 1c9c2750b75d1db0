"""MagnitudeAgreement and SAND against formulas in NumPy, and the identities that hold for them and that do not."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_fed.errors import FederatedError
from lightning_fed.functional import magnitude_agreement, magnitude_agreement_mask, sand_mask, sign_agreement_mask
from tests.functional.mask_cohorts import TENTHS, cohorts, thresholds

moved = st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3)
tenths = st.sampled_from([float(t) for t in TENTHS])
steepness = st.sampled_from([1e-3, 1.0, 10.0, 1e5])


def magnitude_of(deltas: np.ndarray, threshold: float, binary: bool = False) -> torch.Tensor:
    total, abs_total = torch.from_numpy(deltas.sum(axis=0)), torch.from_numpy(np.abs(deltas).sum(axis=0))
    return magnitude_agreement_mask(total, abs_total, threshold, binary)


def variance_of(deltas: np.ndarray) -> np.ndarray:
    return deltas.var(axis=0, ddof=1) if len(deltas) > 1 else np.zeros(deltas.shape[1])


def sand_of(deltas: np.ndarray, threshold: float, k: float, sizes: list[int] | None = None) -> torch.Tensor:
    signs, variance = torch.from_numpy(np.sign(deltas).sum(axis=0)), torch.from_numpy(variance_of(deltas))
    return sand_mask(signs, variance, len(deltas), threshold, k, [deltas.shape[1]] if sizes is None else sizes)


def numpy_sand(deltas: np.ndarray, threshold: float, k: float, sizes: list[int]) -> np.ndarray:
    raw = []
    for column, variance in zip(deltas.T, variance_of(deltas), strict=True):
        votes = int((column > 0).sum()) - int((column < 0).sum())
        gap = Fraction(abs(votes), len(column)) - Fraction(str(threshold))
        if gap <= 0:
            raw.append(0.0)
        else:
            raw.append(1.0 if variance == 0 else math.tanh(min(k * float(gap) / float(variance), 1e6)))
    parts = np.split(np.array(raw), np.cumsum(sizes)[:-1])
    return np.concatenate([part / (1e-10 + part.mean()) for part in parts])


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans())
@settings(max_examples=200, deadline=None)
def test_magnitude_agrees_with_the_formula_in_numpy(deltas: np.ndarray, threshold: float, binary: bool) -> None:
    expected = []
    for pull, size in zip(np.abs(deltas.sum(axis=0)), np.abs(deltas).sum(axis=0), strict=True):
        share = pull / size if size else 0.0
        expected.append(1.0 if share >= threshold else 0.0 if binary else share)
    ours = magnitude_of(deltas, threshold, binary)
    assert ours.dtype == torch.float64
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-12)


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), copies=st.integers(1, 9))
@settings(deadline=None)
def test_limits_of_magnitude(deltas: np.ndarray, threshold: float, binary: bool, copies: int) -> None:
    ones = torch.ones(deltas.shape[1], dtype=torch.float64)
    assert torch.equal(magnitude_of(deltas, 0.0, binary), ones)
    alone = torch.from_numpy((deltas[0] != 0) | (threshold == 0)).double()
    assert torch.equal(magnitude_of(np.repeat(deltas[:1], copies, axis=0), threshold, binary), alone)
    opposed = magnitude_of(np.stack([deltas[0], -deltas[0]]), threshold, binary)
    assert torch.equal(opposed, ones * (threshold == 0))


@given(deltas=cohorts(elements=moved), threshold=tenths, binary=st.booleans(), power=st.integers(-9, 9))
@settings(deadline=None)
def test_magnitude_is_the_sign_agreement_of_updates_of_one_size(
    deltas: np.ndarray, threshold: float, binary: bool, power: int
) -> None:
    signs = np.sign(deltas)
    expected = sign_agreement_mask(torch.from_numpy(signs.sum(axis=0)), len(signs), threshold, binary)
    assert torch.equal(magnitude_of(2.0**power * signs, threshold, binary), expected)


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), power=st.integers(-9, 9))
@settings(deadline=None)
def test_magnitude_depends_on_the_proportion_of_updates(
    deltas: np.ndarray, threshold: float, binary: bool, power: int
) -> None:
    assert torch.equal(magnitude_of(2.0**power * deltas, threshold, binary), magnitude_of(deltas, threshold, binary))


def test_magnitude_changes_when_one_client_is_scaled() -> None:
    deltas = np.array([[3.0], [-1.0]])
    assert magnitude_of(deltas, 0.6).tolist() == [0.5]
    assert magnitude_of(deltas, 0.5).tolist() == [1.0]
    assert magnitude_of(deltas * [[3.0], [1.0]], 0.9).tolist() == [0.8]
    assert magnitude_of(deltas * [[1.0], [3.0]], 0.6).tolist() == [0.0]
    assert magnitude_of(np.zeros((3, 1)), 0.6).tolist() == [0.0]


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
def test_magnitude_compares_with_the_threshold_in_the_dtype_of_the_updates(threshold: Fraction) -> None:
    at = torch.tensor([float(threshold)], dtype=torch.float32)
    assert magnitude_agreement_mask(at, torch.ones(1), float(threshold), True).tolist() == [1.0]
    below = torch.nextafter(at, torch.tensor([-1.0]))
    expected = 1.0 if threshold == 0 else 0.0
    assert magnitude_agreement_mask(below.abs(), torch.ones(1), float(threshold), True).tolist() == [expected]


@given(deltas=cohorts(), threshold=thresholds, k=steepness, data=st.data())
@settings(max_examples=200, deadline=None)
def test_sand_agrees_with_the_formula_in_numpy(
    deltas: np.ndarray, threshold: float, k: float, data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, deltas.shape[1]))
    sizes = [size for size in (first, deltas.shape[1] - first) if size]
    ours = sand_of(deltas, threshold, k, sizes)
    assert ours.dtype == torch.float64
    np.testing.assert_allclose(ours.numpy(), numpy_sand(deltas, threshold, k, sizes), rtol=1e-12, atol=1e-12)


@given(deltas=cohorts(elements=moved), threshold=thresholds.filter(lambda t: t < 1), k=steepness, n=st.integers(1, 9))
@settings(deadline=None)
def test_sand_lets_equal_updates_through(deltas: np.ndarray, threshold: float, k: float, n: int) -> None:
    mask = sand_of(np.repeat(deltas[:1], n, axis=0), threshold, k)
    torch.testing.assert_close(mask, torch.ones_like(mask), rtol=0, atol=2e-10)


@given(deltas=cohorts(), threshold=tenths)
@settings(deadline=None)
def test_steep_sand_is_the_binary_mask_above_the_threshold_over_its_mean(deltas: np.ndarray, threshold: float) -> None:
    binary = sign_agreement_mask(torch.from_numpy(np.sign(deltas).sum(axis=0)), len(deltas), threshold, True, ">")
    mask = sand_of(deltas, threshold, 1e20)
    torch.testing.assert_close(mask, binary / (1e-10 + binary.mean()), rtol=1e-12, atol=0)


@given(deltas=cohorts(min_clients=2), threshold=thresholds, k=steepness, data=st.data())
@settings(deadline=None)
def test_sand_does_not_depend_on_the_order_of_votes(
    deltas: np.ndarray, threshold: float, k: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(deltas))))
    # Integers keep the variance free of rounding.
    whole = np.round(deltas)
    torch.testing.assert_close(sand_of(whole[order], threshold, k), sand_of(whole, threshold, k), rtol=1e-9, atol=1e-12)


def test_sand_with_threshold_zero_is_not_the_unmasked_rule() -> None:
    deltas = np.array([[1.0, 1.0, 2.0], [-1.0, 1.0, 4.0]])
    mask = sand_of(deltas, 0.0, 1.0)
    raw = np.array([0.0, 1.0, np.tanh(0.5)])
    np.testing.assert_allclose(mask.numpy(), raw / (1e-10 + raw.mean()), rtol=1e-12)


def test_sand_changes_when_updates_are_scaled() -> None:
    deltas = np.array([[1.0, 1.0], [2.0, 3.0]])
    assert not torch.allclose(sand_of(2 * deltas, 0.4, 1.0), sand_of(deltas, 0.4, 1.0), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sand_at_the_threshold_is_zero_whatever_the_variance(dtype: torch.dtype) -> None:
    """A = τ as fractions of the number as written; a rounding error over a tiny variance would let it through."""
    for threshold in TENTHS:
        for clients in range(1, 65):
            votes = threshold * clients
            if votes.denominator > 1:
                continue
            signs = torch.tensor([float(votes), -float(votes), float(clients)], dtype=dtype)
            for variance in (0.0, 1e-30, 1.0):
                spread = torch.full((3,), variance, dtype=dtype)
                mask = sand_mask(signs, spread, clients, float(threshold), 10.0, [3])
                assert mask[:2].tolist() == [0.0, 0.0]
                assert (mask[2] > 0) == (threshold < 1)


def test_one_client_without_variance() -> None:
    mask = sand_of(np.array([[2.0, 0.0, -1.0, 0.0]]), 0.4, 10.0, [2, 2])
    np.testing.assert_allclose(mask.numpy(), [2.0, 0.0, 2.0, 0.0], rtol=1e-9)
    assert sand_of(np.zeros((1, 3)), 0.4, 10.0).tolist() == [0.0] * 3
    assert sand_of(np.zeros((4, 3)), 0.0, 10.0).tolist() == [0.0] * 3
    assert sand_of(np.array([[5.0]]), 1.0, 10.0).tolist() == [0.0]


def test_views_with_gaps_and_inputs_left_alone() -> None:
    table = torch.tensor([[3.0, 4.0, 0.5], [-1.0, 2.0, 0.1], [0.0, 0.0, 0.0]])
    before, (total, size, variance) = table.clone(), table.T.unbind()
    assert not total.is_contiguous()
    given = [column.clone() for column in (total, size, variance)]
    assert torch.equal(magnitude_agreement_mask(total, size, 0.6), magnitude_agreement_mask(*given[:2], 0.6))
    expected = sand_mask(given[0], given[2], 3, 0.2, 1.0, [1, 2])
    assert torch.equal(sand_mask(total, variance, 3, 0.2, 1.0, [1, 2]), expected)
    assert torch.equal(table, before), "the input was changed"


@given(updates=arrays(np.float32, (5, 3), elements=st.floats(-1e3, 1e3, width=32)))
@settings(deadline=None)
def test_magnitude_never_exceeds_one(updates: np.ndarray) -> None:
    total, size = torch.zeros(3), torch.zeros(3)
    for row in torch.from_numpy(updates):
        total, size = total + row, size + row.abs()
    assert magnitude_agreement(total, size).max() <= 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_thresholds_out_of_range_are_refused(threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.mask\.threshold"):
        magnitude_of(np.ones((2, 1)), threshold)
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.mask\.threshold"):
        sand_of(np.ones((2, 1)), threshold, 1.0)
