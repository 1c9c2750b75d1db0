"""Masks against exact fractions and formulas written again in NumPy, and the identities that hold for them."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import binom

from lightning_fed.errors import FederatedError
from lightning_fed.functional import (
    agreement,
    coin_flip_votes,
    gradient_and_mask,
    magnitude_agreement,
    magnitude_agreement_mask,
    sand_mask,
    sign_agreement_mask,
    vote_threshold,
)

TENTHS = [Fraction(i, 10) for i in range(11)]
thresholds = st.sampled_from([float(t) for t in TENTHS]) | st.floats(0, 1)
# Subnormal updates are left out: torch may flush them to zero, which is not the formula's business.
values = st.just(0.0) | st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def cohorts(draw: st.DrawFn, min_clients: int = 1, elements: st.SearchStrategy[float] = values) -> np.ndarray:
    """Updates δ of n clients, shape (n, d), float64."""
    shape = (draw(st.integers(min_clients, 7)), draw(st.integers(1, 5)))
    return draw(arrays(np.float64, shape, elements=elements))


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
@pytest.mark.slow
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


@pytest.mark.parametrize("clients", [3, 10, 35])
@pytest.mark.parametrize(("threshold", "share"), [(0.2, "0.6"), (0.4, "0.7"), (0.6, "0.8")])
def test_the_threshold_as_a_share_of_the_clients(clients: int, threshold: float, share: str) -> None:
    for ups in range(clients + 1):
        deltas = np.where(np.arange(clients) < ups, 1.0, -1.0)[:, None]
        reached = Fraction(max(ups, clients - ups)) >= Fraction(share) * clients
        assert mask_of(deltas, threshold, binary=True).tolist() == [float(reached)]


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
        vote_threshold(0.5, 3, "<")


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
        tie = Fraction(abs(votes), len(column)) == Fraction(str(threshold))
        gap = (
            0.0 if tie else abs(votes) / len(column) - threshold
        )  # as far as float64 tells 1/3 from 0.3333333333333333
        if gap <= 0:
            raw.append(0.0)
        else:
            raw.append(1.0 if variance == 0 else math.tanh(min(k * gap / float(variance), 1e6)))
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
@pytest.mark.slow
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


def test_sand_takes_what_float64_cannot_tell_from_a_tie_as_one() -> None:
    deltas = np.array([[1.0], [1.0], [-2.0]])
    third = float(Fraction(1, 3))
    assert sand_of(deltas, third, 1e5).tolist() == numpy_sand(deltas, third, 1e5, [1]).tolist() == [0.0]


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


def test_sand_of_one_client_without_variance() -> None:
    mask = sand_of(np.array([[2.0, 0.0, -1.0, 0.0]]), 0.4, 10.0, [2, 2])
    np.testing.assert_allclose(mask.numpy(), [2.0, 0.0, 2.0, 0.0], rtol=1e-9)
    assert sand_of(np.zeros((1, 3)), 0.4, 10.0).tolist() == [0.0] * 3
    assert sand_of(np.zeros((4, 3)), 0.0, 10.0).tolist() == [0.0] * 3
    assert sand_of(np.array([[5.0]]), 1.0, 10.0).tolist() == [0.0]


def test_sums_with_gaps_and_inputs_left_alone() -> None:
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
def test_thresholds_of_size_and_variance_out_of_range_are_refused(threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.mask\.threshold"):
        magnitude_of(np.ones((2, 1)), threshold)
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.mask\.threshold"):
        sand_of(np.ones((2, 1)), threshold, 1.0)


def gradient_mask_of(gradients: Any, p: float, p_means: Any) -> torch.Tensor:
    gradients = torch.as_tensor(gradients)
    votes = (gradients != 0).sum(0)
    return gradient_and_mask(gradients.sign().sum(0), len(gradients), p, p_means, votes)


def numpy_gradient_mask(gradients: np.ndarray, p: float, p_means: str) -> np.ndarray:
    """Votes counted one at a time, compared as fractions of the number as it is written."""
    clients, coordinates = gradients.shape
    mask = np.empty(coordinates)
    for k in range(coordinates):
        up = sum(1 for value in gradients[:, k] if value > 0)
        down = sum(1 for value in gradients[:, k] if value < 0)
        agreeing = abs(up - down) if p_means == "formula" else max(up, down)
        mask[k] = float(agreeing >= Fraction(str(p)) * clients)
    return mask


@pytest.mark.parametrize("p_means", ["formula", "prose"])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("clients", [1, 2, 5, 10])
def test_gradient_masks_agree_with_numpy(clients: int, p: float, p_means: str) -> None:
    rng = np.random.default_rng(clients)
    gradients = (rng.normal(size=(clients, 60)) + 0.5) * (rng.random((clients, 60)) > 0.2)
    found = gradient_mask_of(gradients, p, p_means)
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), numpy_gradient_mask(gradients, p, p_means))


@pytest.mark.parametrize("p", TENTHS, ids=str)
def test_comparison_of_gradients_is_exact_for_every_cohort_up_to_64(p: Fraction) -> None:
    for clients in range(1, 65):
        ups = torch.arange(clients + 1, dtype=torch.float32)
        sums, votes = 2 * ups - clients, torch.full_like(ups, clients)
        formula = gradient_and_mask(sums, clients, float(p))
        prose = gradient_and_mask(sums, clients, float(p), "prose", votes)
        for up in range(clients + 1):
            assert formula[up] == (abs(2 * up - clients) >= p * clients), (up, clients)
            assert prose[up] == (max(up, clients - up) >= p * clients), (up, clients)


def test_eight_of_ten_pass_the_prose_and_nine_the_formula() -> None:
    gradients = np.ones((10, 2))
    gradients[:2, 0], gradients[:1, 1] = -1, -1
    assert gradient_mask_of(gradients, 0.8, "prose").tolist() == [1.0, 1.0]
    assert gradient_mask_of(gradients, 0.8, "formula").tolist() == [0.0, 1.0]


def test_gradients_of_zero_are_no_votes() -> None:
    gradients = np.array([[1.0], [1.0], [0.0], [0.0]])  # as a sum of signs the same as (+, +, +, -)
    assert gradient_mask_of(gradients, 0.75, "prose").tolist() == [0.0]
    assert gradient_mask_of([[1.0], [1.0], [1.0], [-1.0]], 0.75, "prose").tolist() == [1.0]
    assert gradient_mask_of(gradients, 0.5, "formula").tolist() == [1.0]
    assert gradient_mask_of(np.zeros((3, 2)), 0.8, "formula").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("p_means", ["formula", "prose"])
def test_gradients_with_gaps_and_a_share_of_zero(p_means: str) -> None:
    gradients = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))[:, ::2]
    assert torch.equal(
        gradient_mask_of(gradients, 0.6, p_means), gradient_mask_of(gradients.contiguous(), 0.6, p_means)
    )
    assert torch.equal(gradient_mask_of(gradients, 0.0, p_means), torch.ones(4))


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_shares_out_of_range_are_refused(p: float) -> None:
    with pytest.raises(FederatedError, match=r"\[0, 1\].*--aggregator\.p"):
        gradient_and_mask(torch.ones(2), 3, p)


def test_prose_without_votes_is_refused() -> None:
    with pytest.raises(FederatedError, match=r"p_means"):
        gradient_and_mask(torch.ones(2), 3, 0.8, "prose")


@pytest.mark.parametrize("clients", range(1, 11))
def test_coin_flips_are_those_of_all_outcomes(clients: int) -> None:
    """All 2^n outcomes by hand, and the share of them that a threshold leaves out, as exact fractions."""
    sums = [abs(sum(signs)) for signs in product((-1, 1), repeat=clients)]
    votes = coin_flip_votes(clients)
    assert votes.dtype == torch.float64
    expected = [sums.count(value) / 2**clients for value in range(clients + 1)]
    np.testing.assert_allclose(votes.numpy(), expected, rtol=1e-12, atol=0)
    for threshold in TENTHS:
        below = Fraction(sum(Fraction(value, clients) < threshold for value in sums), 2**clients)
        found = votes[: vote_threshold(float(threshold), clients)].sum().item()
        assert found == pytest.approx(float(below), rel=1e-12)


def test_coin_flips_of_ten_clients_put_two_thirds_below_the_threshold() -> None:
    """C(10, 4) + C(10, 5) + C(10, 6) = 672 of 1,024."""
    assert coin_flip_votes(10)[: vote_threshold(0.4, 10)].sum().item() == pytest.approx(672 / 1024, rel=1e-12)


@pytest.mark.parametrize("clients", [47, 100, 1001, 20_000])
def test_coin_flips_of_many_clients_are_binomial(clients: int) -> None:
    votes = coin_flip_votes(clients)
    assert votes.sum().item() == pytest.approx(1.0, rel=1e-9)
    needed = vote_threshold(0.1, clients)
    # |2 K - n| < s where K is from (n - s) / 2, not itself, to (n + s) / 2, not itself.
    low, high = (clients - needed) // 2, -(-(clients + needed) // 2) - 1
    expected = binom.cdf(high, clients, 0.5) - binom.cdf(low, clients, 0.5)
    assert votes[:needed].sum().item() == pytest.approx(expected, rel=1e-9)
