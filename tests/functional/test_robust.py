"""Robust means against NumPy, written again from the papers, and what they promise about corrupted clients."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from lightning_fed.errors import FederatedError
from lightning_fed.functional import (
    bulyan,
    coordinate_median,
    geometric_median,
    geometry,
    gram_matrix,
    krum_scores,
    krum_select,
    robust,
    squared_distances,
    trimmed_mean,
    value_order,
)
from tests.parts import Reads


def uniform_geometric_median(updates: Tensor) -> Tensor:
    return geometric_median(updates, torch.ones(len(updates)), iterations=2000, tolerance=1e-14)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "median": coordinate_median,
    "trimmed": lambda updates: trimmed_mean(updates, (len(updates) - 1) // 4),
    "geometric": uniform_geometric_median,
}
every_mean = pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)


def cohort(clients: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(clients, size))


@st.composite
def cohorts(draw: st.DrawFn, min_clients: int = 1) -> np.ndarray:
    shape = (draw(st.integers(min_clients, 9)), draw(st.integers(1, 5)))
    return draw(arrays(np.float64, shape, elements=st.floats(-100, 100, allow_subnormal=False)))


@given(cohorts())
@settings(deadline=None)
def test_median_is_the_middle_value_or_the_mean_of_the_middle_two(deltas: np.ndarray) -> None:
    np.testing.assert_allclose(coordinate_median(torch.tensor(deltas)), np.median(deltas, axis=0), rtol=0, atol=1e-12)


@given(cohorts(), st.data())
@settings(deadline=None)
def test_trimmed_mean_agrees_with_numpy(deltas: np.ndarray, data: st.DataObject) -> None:
    trim = data.draw(st.integers(0, (len(deltas) - 1) // 2))
    expected = np.sort(deltas, axis=0)[trim : len(deltas) - trim].mean(axis=0)
    np.testing.assert_allclose(trimmed_mean(torch.tensor(deltas), trim), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clients", range(1, 10))
def test_trimmed_mean_goes_from_the_mean_to_the_median(clients: int) -> None:
    updates = torch.tensor(cohort(clients, 4))
    torch.testing.assert_close(trimmed_mean(updates, 0), updates.mean(0), rtol=0, atol=1e-15)
    most = (clients - 1) // 2
    torch.testing.assert_close(trimmed_mean(updates, most), coordinate_median(updates), rtol=0, atol=1e-15)
    with pytest.raises(FederatedError, match=r"at least \d+ clients.*--aggregator\.trim"):
        trimmed_mean(updates, most + 1)


def numpy_krum_scores(deltas: np.ndarray, f: int) -> np.ndarray:
    scores = []
    for i, own in enumerate(deltas):
        others = sorted(((own - other) ** 2).sum() for j, other in enumerate(deltas) if j != i)
        scores.append(sum(others[: len(deltas) - f - 2]))
    return np.array(scores)


@given(cohorts(min_clients=3), st.data())
@settings(deadline=None)
def test_krum_agrees_with_numpy(deltas: np.ndarray, data: st.DataObject) -> None:
    f = data.draw(st.integers(0, (len(deltas) - 3) // 2))
    expected = numpy_krum_scores(deltas, f)
    np.testing.assert_allclose(krum_scores(torch.tensor(deltas), f), expected, rtol=1e-12, atol=1e-12)


def test_krum_by_hand() -> None:
    updates = torch.tensor([[0.0], [1.0], [3.0], [10.0], [-20.0]])  # f = 1: the 2 nearest others count
    assert krum_scores(updates, 1).tolist() == [1 + 9, 1 + 4, 4 + 9, 49 + 81, 400 + 441]
    assert krum_select(updates, 1).tolist() == [1]
    assert krum_select(updates, 1, 3).tolist() == [1, 0, 2]
    assert krum_select(updates, 1, 5).tolist() == [1, 0, 2, 3, 4]


def test_krum_breaks_ties_by_value_and_among_equal_updates_by_the_lowest_client() -> None:
    point = torch.tensor(cohort(1, 70_000)[0], dtype=torch.float32)
    far = point + 1
    assert krum_select(torch.stack([far, point, point, point, point]), 1).tolist() == [1]
    assert krum_select(torch.stack([far, point, point, point, point]), 1, 3).tolist() == [1, 2, 3]
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert krum_select(square, 0, 4).tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bulyan_does_not_depend_on_how_clients_are_numbered(dtype: torch.dtype) -> None:
    """With f = 1 the last one is picked without a score, and of the last four the nearest two have equal ones."""
    for values, expected in (([0, 1, 2, 3, 4, 10, 11], 2.0), ([1, 1, 1, 1, 1, 5, 9], 1.0)):
        columns = torch.tensor(values, dtype=dtype)[:, None]
        orders = [np.random.default_rng(seed).permutation(len(values)) for seed in range(200)]
        (found,) = {bulyan(columns[order], 1).item() for order in orders}
        assert found == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "f"), [(3, 0), (5, 1), (7, 1), (8, 2), (11, 2)])
def test_no_choice_depends_on_how_clients_are_numbered(clients: int, f: int) -> None:
    """Small whole numbers are full of ties, and tenths of rounding."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        updates = torch.tensor(rng.integers(-1, 2, (clients, 2)) * rng.choice([1.0, 0.1]), dtype=torch.float32)
        found = set()
        for _ in range(20):
            shuffled = updates[rng.permutation(clients)]
            chosen = shuffled[krum_select(shuffled, f, 2)]
            mean = bulyan(shuffled, f) if clients >= 4 * f + 3 else chosen[0]
            means = [trimmed_mean(shuffled, f), coordinate_median(shuffled), mean]
            found.add(tuple(torch.cat([chosen.flatten(), *means]).tolist()))
        assert len(found) == 1


def test_the_order_by_value_goes_on_where_the_first_coordinates_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[0.0, 2, 1], [0, 1, 5], [-1, 9, 9], [0, 1, 5], [0, 1, -5], [-0.0, 2, 0]])
    for columns in (1, 2, 100):
        monkeypatch.setattr(geometry, "_FEW_COLUMNS", columns)
        assert value_order(rows).tolist() == [2, 4, 1, 3, 5, 0]


@pytest.mark.parametrize(("clients", "f"), [(1, 0), (2, 0), (4, 1), (6, 2), (8, 3)])
def test_krum_refuses_too_small_a_cohort(clients: int, f: int) -> None:
    message = rf"2f \+ 3 = {2 * f + 3} clients.*got {clients}.*--aggregator\.num_corrupted"
    with pytest.raises(FederatedError, match=message):
        krum_scores(torch.zeros(clients, 2), f)
    krum_scores(torch.zeros(2 * f + 3, 2), f)
    with pytest.raises(FederatedError, match=r"--aggregator\.num_selected"):
        krum_select(torch.zeros(2 * f + 3, 2), f, 2 * f + 4)


def numpy_weiszfeld(deltas: np.ndarray, weights: np.ndarray, smoothing: float, iterations: int) -> np.ndarray:
    center = weights @ deltas / weights.sum()
    for _ in range(iterations):
        pulls = weights / np.maximum(np.sqrt(((deltas - center) ** 2).sum(axis=1)), smoothing)
        center = (pulls[:, None] * deltas).sum(axis=0) / pulls.sum()
    return center


@pytest.mark.parametrize(("clients", "size"), [(3, 2), (4, 1), (5, 7), (10, 30), (31, 4)])
def test_geometric_median_agrees_with_a_converged_weiszfeld(clients: int, size: int) -> None:
    deltas, weights = cohort(clients, size), np.random.default_rng(1).uniform(1, 9, clients)
    expected = numpy_weiszfeld(deltas, weights / weights.sum(), 1e-6, 20_000)
    found = geometric_median(torch.tensor(deltas), torch.tensor(weights), 20_000, tolerance=1e-15)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    early = geometric_median(torch.tensor(deltas), torch.tensor(weights))
    assert np.linalg.norm(early.numpy() - expected) < 1e-3 * np.linalg.norm(deltas - expected, axis=1).mean()


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 0.0])
def test_geometric_median_seldom_waits_for_a_device(monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    """It ends at the same iteration as on the CPU, which looks after each."""
    updates, weights = torch.tensor(cohort(5, 7), dtype=torch.float32), torch.linspace(1, 2, 5)
    with Reads() as looks:
        expected = geometric_median(updates, weights, 40, tolerance)
    for module in (robust, geometry):
        monkeypatch.setattr(module, "waits", lambda tensor: True)
    with Reads() as reads:
        found = geometric_median(updates, weights, 40, tolerance)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    iterations = looks.names.count("__bool__")
    assert reads.names == ["__bool__"] * -(-iterations // 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_mean
def test_the_same_on_cuda(mean: Callable[[Tensor], Tensor]) -> None:
    updates = torch.tensor(cohort(9, 6))
    torch.testing.assert_close(mean(updates.cuda()).cpu(), mean(updates), rtol=0, atol=1e-12)


def test_geometric_median_of_a_triangle_and_of_a_majority() -> None:
    angles = 2 * np.pi * np.arange(3) / 3
    triangle = torch.tensor(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    assert uniform_geometric_median(triangle).norm() < 1e-12
    # Whoever weighs more than all others together is the median.
    heavy = geometric_median(triangle, torch.tensor([5.0, 1.0, 1.0]), iterations=5000, tolerance=0.0)
    assert torch.dist(heavy, triangle[0]) < 1e-6


@pytest.mark.parametrize(("seed", "is_an_update"), [(0, True), (1, False), (2, False)])
def test_geometric_median_solves_what_it_claims(seed: int, is_an_update: bool) -> None:
    """The pulls Σ p_i (z - δ_i) / ‖z - δ_i‖ cancel, or do not exceed the weight of the update on which z lies."""
    updates, weights = torch.tensor(cohort(6, 3, seed)), torch.linspace(1, 2, 6, dtype=torch.float64)
    gaps = geometric_median(updates, weights, 5000, tolerance=1e-15) - updates
    lengths = gaps.norm(dim=1)
    others = lengths > 1e-6
    assert others.sum() == (5 if is_an_update else 6)
    pull = (weights[:, None] * gaps / lengths[:, None])[others].sum(0).norm()
    assert pull < weights[~others].sum() + 1e-12


@every_mean
def test_order_does_not_matter(mean: Callable[[Tensor], Tensor]) -> None:
    updates = torch.tensor(cohort(9, 6))
    for seed in range(5):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(mean(updates[order]), mean(updates), rtol=0, atol=1e-12)


@every_mean
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_client_equal_clients_and_no_movement(mean: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    update = torch.tensor(cohort(1, 5), dtype=dtype)
    assert torch.equal(mean(update), update[0])
    equal = mean(update.repeat(5, 1))
    assert equal.dtype == dtype
    torch.testing.assert_close(equal, update[0])
    assert torch.equal(mean(torch.zeros(4, 3, dtype=dtype)), torch.zeros(3, dtype=dtype))
    assert mean(torch.ones(4, 1, dtype=dtype)).tolist() == [1.0]


@every_mean
def test_views_with_gaps_and_unchanged_input(mean: Callable[[Tensor], Tensor]) -> None:
    whole = torch.tensor(cohort(10, 12))
    gaps = whole[::2, ::3]
    kept = whole.clone()
    assert not gaps.is_contiguous()
    assert torch.equal(mean(gaps), mean(gaps.clone(memory_format=torch.contiguous_format)))
    assert torch.equal(krum_scores(gaps, 1), krum_scores(gaps.clone(memory_format=torch.contiguous_format), 1))
    assert torch.equal(whole, kept)


@every_mean
@pytest.mark.parametrize("kind", ["flipped", "far", "as far as can be"])
def test_a_minority_moves_nothing_far(mean: Callable[[Tensor], Tensor], kind: str) -> None:
    honest = cohort(8, 20) + 3
    far = {"far": 1e6, "as far as can be": 1e38}
    bad = -5 * honest[:2] if kind == "flipped" else np.full((2, 20), far[kind])
    updates = torch.tensor(np.concatenate([bad, honest]))
    center = honest.mean(axis=0)
    spread = np.linalg.norm(honest - center, axis=1).max()
    assert np.linalg.norm(updates.mean(0).numpy() - center) > spread
    assert np.linalg.norm(mean(updates).numpy() - center) < spread
    default = geometric_median(updates, torch.ones(10))
    assert np.linalg.norm(default.numpy() - center) < spread, "it must not end early when somebody is far"
    assert set(krum_select(updates, 2, 8).tolist()) == set(range(2, 10))


def test_columns_taken_in_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = torch.tensor(cohort(6, 11))
    whole = [coordinate_median(updates), trimmed_mean(updates, 1), gram_matrix(updates)]
    monkeypatch.setattr(robust, "_COLUMNS", 4)
    monkeypatch.setattr(geometry, "_COLUMNS", 4)
    blocks = [coordinate_median(updates), trimmed_mean(updates, 1), gram_matrix(updates)]
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_inner_products_and_distances_agree_with_numpy() -> None:
    rows = cohort(5, 40)
    np.testing.assert_allclose(gram_matrix(torch.tensor(rows)), rows @ rows.T, rtol=0, atol=1e-12)
    expected = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(torch.tensor(rows)), expected, rtol=0, atol=1e-12)


def test_distances_of_long_rows_that_lie_close_are_not_lost() -> None:
    rows = torch.full((3, 4), 1e6)
    rows[1, 0] += 0.5
    assert squared_distances(rows).tolist() == [[0.0, 0.25, 0.0], [0.25, 0.0, 0.25], [0.0, 0.25, 0.0]]


def test_a_row_that_is_not_finite_spoils_itself_only() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, float("inf")], [0.0, 1.0]])
    gram = gram_matrix(rows)
    assert gram.dtype == torch.float64
    assert gram[[0, 0, 3], [0, 3, 3]].tolist() == [5.0, 2.0, 1.0]
    assert not gram[[1, 2]].isfinite().all(dim=1).any()
