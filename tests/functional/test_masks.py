"""The mask of gradient masked averaging against exact fractions and formulas written again in NumPy."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_fed.errors import FederatedError
from lightning_fed.functional import agreement, sign_agreement_mask, vote_threshold

TENTHS = [Fraction(i, 10) for i in range(11)]
thresholds = st.sampled_from([float(t) for t in TENTHS]) | st.floats(0, 1)
# Subnormal updates are left out: torch may flush them to zero, which is not the formula's business.
values = st.just(0.0) | st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def cohorts(draw: st.DrawFn, min_clients: int = 1, elements: st.SearchStrategy[float] = values) -> np.ndarray:
    """Updates δ of n clients, shape (n, d), float64."""
    shape = (draw(st.integers(min_clients, 7)), draw(st.integers(1, 5)))
    return draw(arrays(np.float64, shape, elements=elements))


def mask_of(deltas: np.ndarray, threshold: float, binary: bool = False) -> torch.Tensor:
    sign_sum = torch.sign(torch.from_numpy(deltas)).sum(0)
    return sign_agreement_mask(sign_sum, len(deltas), threshold, binary)


def numpy_mask(deltas: np.ndarray, threshold: float, binary: bool) -> np.ndarray:
    """The formula with votes counted one at a time and compared as exact fractions of the number as written."""
    clients, coordinates = deltas.shape
    mask = np.empty(coordinates)
    for k in range(coordinates):
        votes = sum(1 for value in deltas[:, k] if value > 0) - sum(1 for value in deltas[:, k] if value < 0)
        share = abs(Fraction(votes, clients))
        mask[k] = 1.0 if share >= Fraction(str(threshold)) else 0.0 if binary else float(share)
    return mask


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans())
@settings(max_examples=200, deadline=None)
def test_agrees_with_the_formula_in_numpy(deltas: np.ndarray, threshold: float, binary: bool) -> None:
    ours = mask_of(deltas, threshold, binary)
    assert ours.dtype == torch.float64
    assert ours.shape == (deltas.shape[1],)
    np.testing.assert_allclose(ours.numpy(), numpy_mask(deltas, threshold, binary), rtol=0, atol=1e-12)


@given(deltas=cohorts(), binary=st.booleans())
@settings(deadline=None)
def test_threshold_zero_masks_nothing(deltas: np.ndarray, binary: bool) -> None:
    assert torch.equal(mask_of(deltas, 0.0, binary), torch.ones(deltas.shape[1], dtype=torch.float64))


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans())
@settings(deadline=None)
def test_one_client_is_masked_only_where_it_stood_still(deltas: np.ndarray, threshold: float, binary: bool) -> None:
    mask = mask_of(deltas[:1], threshold, binary)
    moved = torch.from_numpy(deltas[0]) != 0
    assert torch.equal(mask, (moved | (threshold == 0)).double())


@given(deltas=cohorts(), threshold=thresholds, copies=st.integers(1, 9))
@settings(deadline=None)
def test_equal_updates_are_masked_only_where_nobody_moved(deltas: np.ndarray, threshold: float, copies: int) -> None:
    mask = mask_of(np.repeat(deltas[:1], copies, axis=0), threshold)
    assert torch.equal(mask, (torch.from_numpy(deltas[0] != 0) | (threshold == 0)).double())


@given(deltas=cohorts(), threshold=thresholds.filter(bool), scale=st.floats(1e-3, 1e3), binary=st.booleans())
@settings(deadline=None)
def test_two_opposed_clients_cancel(deltas: np.ndarray, threshold: float, scale: float, binary: bool) -> None:
    mask = mask_of(np.stack([deltas[0], -scale * deltas[0]]), threshold, binary)
    assert torch.equal(mask, torch.zeros_like(mask))


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), data=st.data())
@settings(deadline=None)
def test_depends_on_signs_only(deltas: np.ndarray, threshold: float, binary: bool, data: st.DataObject) -> None:
    before = mask_of(deltas, threshold, binary)
    scales = data.draw(arrays(np.float64, (len(deltas), 1), elements=st.floats(1e-3, 1e3)))
    assert torch.equal(mask_of(scales * deltas, threshold, binary), before)
    assert torch.equal(mask_of(np.sign(deltas), threshold, binary), before)


@given(deltas=cohorts(min_clients=2), threshold=thresholds, binary=st.booleans(), data=st.data())
@settings(deadline=None)
def test_order_and_parts_of_the_cohort_do_not_matter(
    deltas: np.ndarray, threshold: float, binary: bool, data: st.DataObject
) -> None:
    before = mask_of(deltas, threshold, binary)
    order = data.draw(st.permutations(range(len(deltas))))
    assert torch.equal(mask_of(deltas[order], threshold, binary), before)
    cut = data.draw(st.integers(0, len(deltas)))
    parts = [torch.sign(torch.from_numpy(part)).sum(0) for part in (deltas[:cut], deltas[cut:])]
    assert torch.equal(sign_agreement_mask(parts[0] + parts[1], len(deltas), threshold, binary), before)


@given(deltas=cohorts(elements=st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3)))
@settings(deadline=None)
def test_without_zero_votes_agreement_steps_by_two_clients(deltas: np.ndarray) -> None:
    clients = len(deltas)
    possible = {k / clients for k in range(clients % 2, clients + 1, 2)}
    found = agreement(torch.sign(torch.from_numpy(deltas)).sum(0), clients)
    assert set(found.tolist()) <= possible


def test_a_zero_vote_stays_in_the_denominator() -> None:
    deltas = np.array([[3.0], [2.0], [0.0], [0.0]])
    assert mask_of(deltas, 0.5).tolist() == [1.0]
    assert mask_of(deltas, 0.6).tolist() == [0.5]
    assert mask_of(deltas, 0.6, binary=True).tolist() == [0.0]
    assert mask_of(np.zeros((4, 2)), 0.4).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
@pytest.mark.parametrize("binary", [False, True], ids=["soft", "binary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_comparison_is_exact_for_every_cohort_up_to_64(threshold: Fraction, binary: bool, dtype: torch.dtype) -> None:
    for clients in range(1, 65):
        sums = range(-clients, clients + 1)
        mask = sign_agreement_mask(torch.tensor(list(sums), dtype=dtype), clients, float(threshold), binary)
        for votes, value in zip(sums, mask.tolist(), strict=True):
            share = Fraction(abs(votes), clients)
            expected = 1.0 if share >= threshold else 0.0 if binary else torch.tensor(float(share), dtype=dtype).item()
            assert value == expected, (votes, clients)


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
def test_vote_threshold_is_the_exact_ceiling(threshold: Fraction) -> None:
    for clients in range(65):
        assert vote_threshold(float(threshold), clients) == math.ceil(threshold * clients)


def test_the_grid_can_tell_the_number_as_written_from_its_binary_neighbour() -> None:
    wrong = [(t, n) for t in TENTHS for n in range(1, 65) if math.ceil(Fraction(float(t)) * n) != math.ceil(t * n)]
    assert (Fraction(1, 5), 5) in wrong
    assert all(vote_threshold(float(t), n) == math.ceil(t * n) for t, n in wrong)


@pytest.mark.parametrize("binary", [False, True])
def test_views_with_gaps_and_single_coordinates(binary: bool) -> None:
    sign_sum = torch.tensor([[3.0, 9.0], [-1.0, 9.0], [0.0, 9.0]])
    column = sign_sum[:, 0]
    assert not column.is_contiguous()
    expected = sign_agreement_mask(column.clone(), 3, 0.4, binary)
    assert torch.equal(sign_agreement_mask(column, 3, 0.4, binary), expected)
    assert sign_agreement_mask(torch.tensor([-1.0]), 3, 0.4, binary).shape == (1,)
    assert sign_sum.tolist() == [[3.0, 9.0], [-1.0, 9.0], [0.0, 9.0]], "the input was changed"


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan, math.inf])
def test_thresholds_out_of_range_are_refused(threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.mask\.threshold"):
        vote_threshold(threshold, 3)
