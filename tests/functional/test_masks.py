"""The mask of gradient masked averaging against exact fractions and formulas written again in NumPy."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_fed.errors import FederatedError
from lightning_fed.functional import agreement, sign_agreement_mask, vote_threshold
from tests.functional.mask_cohorts import TENTHS, cohorts, thresholds

COMPARISONS = [">=", ">"]
comparisons = st.sampled_from(COMPARISONS)


def mask_of(
    deltas: np.ndarray,
    threshold: float,
    binary: bool = False,
    comparison: Any = ">=",
    samples: list[int] | None = None,
) -> torch.Tensor:
    signs, votes = torch.sign(torch.from_numpy(deltas)), torch.tensor(samples or [1] * len(deltas), dtype=torch.float64)
    return sign_agreement_mask(votes @ signs, int(votes.sum()), threshold, binary, comparison)


def numpy_mask(
    deltas: np.ndarray, threshold: float, binary: bool, comparison: str = ">=", samples: list[int] | None = None
) -> np.ndarray:
    """The formula with votes counted one at a time and compared as exact fractions of the number as written."""
    clients, coordinates = deltas.shape
    samples = samples or [1] * clients
    mask = np.empty(coordinates)
    for k in range(coordinates):
        ups = sum(count for count, value in zip(samples, deltas[:, k], strict=True) if value > 0)
        downs = sum(count for count, value in zip(samples, deltas[:, k], strict=True) if value < 0)
        share, least = Fraction(abs(ups - downs), sum(samples)), Fraction(str(threshold))
        agreed = share > least if comparison == ">" else share >= least
        mask[k] = 1.0 if agreed else 0.0 if binary else float(share)
    return mask


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), comparison=comparisons)
@settings(max_examples=200, deadline=None)
def test_agrees_with_the_formula_in_numpy(deltas: np.ndarray, threshold: float, binary: bool, comparison: str) -> None:
    ours = mask_of(deltas, threshold, binary, comparison)
    assert ours.dtype == torch.float64
    assert ours.shape == (deltas.shape[1],)
    np.testing.assert_allclose(ours.numpy(), numpy_mask(deltas, threshold, binary, comparison), rtol=0, atol=1e-12)


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), comparison=comparisons, data=st.data())
@settings(max_examples=200, deadline=None)
def test_votes_by_samples_agree_with_the_formula_in_numpy(
    deltas: np.ndarray, threshold: float, binary: bool, comparison: str, data: st.DataObject
) -> None:
    samples = data.draw(st.lists(st.integers(1, 10**9), min_size=len(deltas), max_size=len(deltas)))
    ours = mask_of(deltas, threshold, binary, comparison, samples).numpy()
    np.testing.assert_allclose(ours, numpy_mask(deltas, threshold, binary, comparison, samples), rtol=0, atol=1e-12)


@given(deltas=cohorts(), threshold=thresholds, binary=st.booleans(), comparison=comparisons, count=st.integers(1, 999))
@settings(deadline=None)
def test_votes_by_equal_samples_are_equal_votes(
    deltas: np.ndarray, threshold: float, binary: bool, comparison: str, count: int
) -> None:
    samples = [count] * len(deltas)
    expected = mask_of(deltas, threshold, binary, comparison)
    assert torch.equal(mask_of(deltas, threshold, binary, comparison, samples), expected)


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


@given(deltas=cohorts(), binary=st.booleans())
@settings(deadline=None)
def test_above_zero_is_not_the_unmasked_rule(deltas: np.ndarray, binary: bool) -> None:
    votes = np.sign(deltas).sum(axis=0)
    assert torch.equal(mask_of(deltas, 0.0, binary, ">"), torch.from_numpy(votes != 0).double())


def test_what_changes_when_the_threshold_itself_does_not_count() -> None:
    opposed, unanimous = np.array([[1.0], [-2.0]]), np.array([[1.0], [2.0]])
    assert mask_of(opposed, 0.0).tolist() == [1.0]
    assert mask_of(opposed, 0.0, comparison=">").tolist() == [0.0]
    assert mask_of(unanimous, 1.0, True).tolist() == [1.0]
    assert mask_of(unanimous, 1.0, True, ">").tolist() == [0.0]
    assert mask_of(unanimous, 1.0, False, ">").tolist() == [1.0]  # softly, A itself is 1
    three_of_five = np.array([[1.0], [1.0], [1.0], [1.0], [-1.0]])
    assert mask_of(three_of_five, 0.6).tolist() == [1.0]
    assert mask_of(three_of_five, 0.6, comparison=">").tolist() == [0.6]
    assert mask_of(three_of_five, 0.5, comparison=">").tolist() == [1.0]


def test_a_client_of_many_samples_outvotes_the_others() -> None:
    deltas = np.array([[1.0], [-1.0], [-1.0]])
    assert mask_of(deltas, 0.5, binary=True).tolist() == [0.0]
    assert mask_of(deltas, 0.5, binary=True, samples=[8, 1, 1]).tolist() == [1.0]
    assert mask_of(deltas, 0.7, samples=[8, 1, 1]).tolist() == [0.6]


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
@pytest.mark.parametrize("binary", [False, True], ids=["soft", "binary"])
@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_comparison_is_exact_for_every_cohort_up_to_64(
    threshold: Fraction, binary: bool, comparison: Any, dtype: torch.dtype
) -> None:
    for clients in range(1, 65):
        sums = range(-clients, clients + 1)
        votes = torch.tensor(list(sums), dtype=dtype)
        mask = sign_agreement_mask(votes, clients, float(threshold), binary, comparison)
        for total, value in zip(sums, mask.tolist(), strict=True):
            share = Fraction(abs(total), clients)
            agreed = share > threshold if comparison == ">" else share >= threshold
            expected = 1.0 if agreed else 0.0 if binary else torch.tensor(float(share), dtype=dtype).item()
            assert value == expected, (total, clients)


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparison_of_samples_is_exact_for_every_cohort_up_to_64(threshold: Fraction, comparison: Any) -> None:
    """Sums of votes at and beside τ Σ s_j, up to what float32 could not hold."""
    rng = np.random.default_rng(0)
    for clients in range(1, 65):
        for most in (9, 600, 10**8):
            samples = int(rng.integers(1, most, clients, endpoint=True).sum())
            middle = math.floor(threshold * samples)
            sums = [0, 1, samples, *range(max(middle - 2, 0), min(middle + 2, samples) + 1)]
            votes = torch.tensor([*sums, *(-total for total in sums)], dtype=torch.float64)
            mask = sign_agreement_mask(votes, samples, float(threshold), True, comparison)
            exact = [Fraction(total, samples) for total in [*sums, *sums]]
            agreed = [float(share > threshold if comparison == ">" else share >= threshold) for share in exact]
            assert mask.tolist() == agreed, samples


@pytest.mark.parametrize("threshold", TENTHS, ids=str)
def test_vote_threshold_is_exact(threshold: Fraction) -> None:
    for votes in (*range(65), 10**9 + 7):
        assert vote_threshold(float(threshold), votes) == math.ceil(threshold * votes)
        assert vote_threshold(float(threshold), votes, ">") == math.floor(threshold * votes) + 1


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


def test_an_unknown_comparison_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.comparison.*'<'"):
        vote_threshold(0.5, 3, "<")  # type: ignore[arg-type]
