"""What each partitioner promises: sizes and class counts exactly, distributions by tests with fixed seeds.

A z-test fails by chance where |z| > 4, one time in 16,000; a test of fit where p < 1e-4. There are about 90
of the former and 10 of the latter, so that new seeds would fail once in 150 times.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_fed.data.partitioners import dirichlet
from lightning_fed.data.partitioners.base import Partitioner, deal
from lightning_fed.data.partitioners.classes import ExactClasses
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient
from lightning_fed.data.partitioners.quantity import PowerLaw, QuantityDirichlet
from tests.data.partitioners.parts import owners_of


def counts_of(partitioner: Partitioner, targets: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """Samples of each client and class."""
    owner = owners_of(partitioner, targets, num_clients, seed)
    num_classes = int(targets.max()) + 1
    return np.bincount(owner * num_classes + targets, minlength=num_clients * num_classes).reshape(num_clients, -1)


def balanced(num_classes: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), size))


def z_score(values: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of independent values is from what is expected."""
    return float((values.mean() - expected) / (values.std(ddof=1) / np.sqrt(values.size)))


# Exactly k classes


@given(
    k=st.integers(1, 5),
    num_clients=st.integers(1, 30),
    class_sizes=st.lists(st.integers(1, 60), min_size=5, max_size=9),
)
@settings(max_examples=80, deadline=None)
def test_exactly_k_classes_in_parts_as_equal_as_can_be(k: int, num_clients: int, class_sizes: list[int]) -> None:
    most = np.minimum(class_sizes, num_clients)
    if num_clients * k < len(class_sizes) or most.sum() < num_clients * k or num_clients > sum(class_sizes):
        return
    targets = np.repeat(np.arange(len(class_sizes)), class_sizes)
    counts = counts_of(ExactClasses(k), targets, num_clients, seed=3)
    assert ((counts > 0).sum(axis=1) == k).all()
    holders = (counts > 0).sum(axis=0)
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1
    # No class could give a holder to another and have the larger parts smaller: parts of Webster's method.
    free, held = holders < most, holders > 1
    if free.any() and held.any():
        sizes = np.asarray(class_sizes)
        assert (sizes[free] / (holders[free] + 0.5)).max() <= (sizes[held] / (holders[held] - 0.5)).min() + 1e-9


def test_balanced_classes_give_clients_of_one_size() -> None:
    counts = counts_of(ExactClasses(2), balanced(10, 600), 100, seed=0)
    assert set(np.unique(counts)) == {0, 30}
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) >= 33, "100 clients of random pairs have about 40 of the 45; 5 before the exchanges"


@pytest.mark.parametrize(("num_classes", "num_clients", "k"), [(47, 47, 1), (100, 50, 2)])
def test_the_splits_of_fedga_are_disjoint(num_classes: int, num_clients: int, k: int) -> None:
    """EMNIST, one class per client, and CIFAR-100, two classes per client (Dandi et al., AAAI 2022)."""
    counts = counts_of(ExactClasses(k), balanced(num_classes, 20), num_clients, seed=1)
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert ((counts > 0).sum(axis=1) == k).all()
    assert (counts.sum(axis=1) == 20 * k).all()


def test_who_holds_which_classes_is_random() -> None:
    """Of 3 clients with 2 of 3 classes each, every of the 6 arrangements is as likely: chi-square over 300 seeds."""
    found = [counts_of(ExactClasses(2), balanced(3, 4), 3, seed).argmin(axis=1) for seed in range(300)]
    _, frequencies = np.unique(found, axis=0, return_counts=True)
    assert len(frequencies) == 6
    assert stats.chisquare(frequencies).pvalue > 1e-4


# Dirichlet by class


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_a_classs_shares_have_the_moments_of_the_dirichlet(alpha: float) -> None:
    num_clients, size, targets = 20, 2000, balanced(20, 2000)
    split = DirichletByClass(alpha, min_samples=0)
    shares = np.concatenate([counts_of(split, targets, num_clients, seed).T / size for seed in range(30)])
    spread = ((shares - 1 / num_clients) ** 2).sum(axis=1)  # one value for each of 600 independent draws
    expected = (1 - 1 / num_clients) / (alpha * num_clients + 1)
    assert abs(z_score(spread, expected)) < 4
    assert abs(z_score(shares[:, 0], 1 / num_clients)) < 4


def test_a_classs_shares_have_the_marginals_of_the_dirichlet() -> None:
    targets = balanced(20, 4000)
    shares = np.concatenate([counts_of(DirichletByClass(5.0, 0), targets, 10, seed)[3] / 4000 for seed in range(30)])
    assert stats.kstest(shares, stats.beta(5.0, 5.0 * 9).cdf).pvalue > 1e-4


def test_full_clients_get_nothing_more() -> None:
    """The first classes are divided as without balance; a client is full at n / N."""
    num_clients, size = 25, 1000
    targets = balanced(10, size)
    fair = len(targets) / num_clients
    for seed in range(5):
        counts = counts_of(DirichletBalanced(0.3, 0), targets, num_clients, seed)
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= fair] == 0).all()
        assert (before >= fair).any()
        plain = counts_of(DirichletByClass(0.3, 0), targets, num_clients, seed)
        assert np.array_equal(counts[:, 0], plain[:, 0])
        assert counts.sum(axis=1).std() < plain.sum(axis=1).std()


# Dirichlet by client


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_the_urn_has_the_moments_of_draws_from_a_dirichlet(alpha: float) -> None:
    """Two passes of 10 draws are as 20 draws: variance s p (1 − p) (s + α) / (1 + α) (Dirichlet-multinomial)."""
    prior, num_clients = np.asarray([0.5, 0.3, 0.15, 0.05]), 4000
    generator, client = np.random.default_rng(0), np.repeat(np.arange(num_clients), 10)
    none = np.empty(0, dtype=np.int64)
    first = dirichlet._draw_once(alpha * prior, none, none, client, generator)
    second = dirichlet._draw_once(alpha * prior, client, first, client, generator)
    cells = np.tile(client, 2) * 4 + np.concatenate([first, second])
    counts = np.bincount(cells, minlength=4 * num_clients).reshape(-1, 4)
    for column, p in zip(counts.T, prior, strict=True):
        assert abs(z_score(column, 20 * p)) < 4
        assert abs(z_score((column - 20 * p) ** 2, 20 * p * (1 - p) * (20 + alpha) / (1 + alpha))) < 4


def test_draws_among_fewer_classes_are_those_of_the_restricted_dirichlet() -> None:
    """Without class 0 a draw counts the client's former draws of the other classes alone."""
    base, num_clients = np.asarray([0.9, 0.3, 0.6]), 20000
    generator, client = np.random.default_rng(1), np.repeat(np.arange(num_clients), 3)
    first = dirichlet._draw_once(base, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), client, generator)
    kept, open_base = first > 0, np.asarray([0.0, 0.3, 0.6])
    again = dirichlet._draw_once(open_base, client[kept], first[kept], np.arange(num_clients), generator)
    assert set(np.unique(again)) == {1, 2}
    assert abs(z_score(again == 1, 1 / 3)) < 4
    # Given what the client drew of the open classes, the next follows the urn's rule.
    ones, twos = (np.bincount(client[first == c], minlength=num_clients) for c in (1, 2))
    for a, b in ((0, 0), (1, 0), (0, 2), (1, 1)):
        chosen = (ones == a) & (twos == b)
        assert chosen.sum() > 500
        assert abs(z_score(again[chosen] == 1, (0.3 + a) / (0.9 + a + b))) < 4


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_clients_have_the_spread_of_their_prior(alpha: float) -> None:
    """Mean over clients and classes of (share − p)²; classes that run out change it by less than 5 %."""
    num_clients, size, sizes = 2000, 50, np.asarray([40_000, 30_000, 20_000, 10_000])
    targets, p = np.repeat(np.arange(4), sizes), sizes / sizes.sum()
    counts = counts_of(DirichletByClient(alpha), targets, num_clients, seed=5)
    assert (counts.sum(axis=1) == size).all()
    expected = (p * (1 - p)).sum() * (size + alpha) / (size * (1 + alpha))
    assert ((counts / size - p) ** 2).sum(axis=1).mean() == pytest.approx(expected, rel=0.05)


def test_late_clients_are_as_early_ones() -> None:
    """Classes run out for all alike: the last two clients have as much in common as the first two (rank-sum test)."""
    targets = balanced(10, 200)
    split = [counts_of(DirichletByClient(1.0), targets, 10, seed) for seed in range(200)]
    first, last = ([np.minimum(counts[i], counts[j]).sum() for counts in split] for i, j in ((0, 1), (-1, -2)))
    assert stats.mannwhitneyu(first, last).pvalue > 1e-4


@pytest.mark.parametrize("concentration", [1e-9, 1e-3])
@pytest.mark.parametrize("cls", [DirichletByClient, DirichletByClass, DirichletBalanced, QuantityDirichlet])
def test_towards_0_one_class_or_client_takes_nearly_all(cls: type[Partitioner], concentration: float) -> None:
    counts = counts_of(cls(concentration, min_samples=0), balanced(5, 400), 20, seed=0)
    assert (counts.sum(axis=0) == 400).all()
    if cls is DirichletByClient:
        assert (counts.sum(axis=1) == 100).all()
        assert np.median(counts.max(axis=1)) >= 90
        assert (counts > 0).sum() <= 40, "what is beside it are classes that had run out"
    elif cls is QuantityDirichlet:
        assert counts.sum(axis=1).max() >= 1990
    else:
        assert (counts.max(axis=0) >= 390).all()
    if cls is DirichletBalanced:
        assert (counts.max(axis=1) >= 390).sum() == 5, "who has one class is full"


@pytest.mark.parametrize("cls", [DirichletByClient, DirichletByClass, DirichletBalanced, QuantityDirichlet])
def test_towards_infinity_shares_are_equal(cls: type[Partitioner]) -> None:
    counts = counts_of(cls(1e9, min_samples=0), balanced(5, 400), 20, seed=0)
    assert (counts.sum(axis=0) == 400).all()
    if cls in (DirichletByClass, DirichletBalanced):
        assert set(np.unique(counts)) <= {19, 20, 21}
    else:
        assert set(counts.sum(axis=1)) <= {99, 100, 101}
        # Samples or their classes are drawn: a count is binomial of 100 and 1/5, with a standard deviation of 4.
        assert np.abs(counts - 20).max() < 20
        assert 3 < counts.std() < 5


# Sizes


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=30), num=st.integers(0, 200), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_parts_are_their_shares_rounded_down_or_up(shares: list[float], num: int, seed: int) -> None:
    weights = np.asarray(shares)
    if weights.sum() < 1e-6:
        return
    parts = deal(weights, num, np.random.default_rng(seed))
    exact = weights / weights.sum() * num
    sizes = np.bincount(parts, minlength=len(weights))
    assert len(parts) == num
    assert (np.diff(parts) >= 0).all()
    assert (sizes >= np.floor(exact - 1e-6)).all()
    assert (sizes <= np.ceil(exact + 1e-6)).all()


def test_rounding_favours_no_part() -> None:
    """Parts of less than one sample: each gets it as often as its share says."""
    shares = np.asarray([0.02, 0.18, 0.4, 0.38, 0.02])
    sizes = [np.bincount(deal(shares, 2, np.random.default_rng(seed)), minlength=5) for seed in range(2000)]
    for part, share in zip(np.stack(sizes).T, shares, strict=True):
        assert abs(z_score(part, 2 * share)) < 4


@pytest.mark.parametrize("beta", [0.2, 0.5, 5.0])
def test_sizes_have_the_moments_of_the_dirichlet(beta: float) -> None:
    num_clients, n = 10, 2000
    sizes = np.stack([counts_of(QuantityDirichlet(beta), balanced(1, n), num_clients, s)[:, 0] for s in range(600)])
    expected = n**2 * (1 - 1 / num_clients) / (beta * num_clients + 1)
    assert abs(z_score(((sizes - n / num_clients) ** 2).sum(axis=1), expected)) < 4
    assert abs(z_score(sizes[:, 0], n / num_clients)) < 4


@pytest.mark.parametrize("partitioner", [QuantityDirichlet(2.0), PowerLaw(0.7)])
def test_skewed_sizes_leave_labels_alone(partitioner: Partitioner) -> None:
    counts = counts_of(partitioner, balanced(10, 2000), 10, seed=4)
    assert counts.sum(axis=1).max() > 2 * counts.sum(axis=1).min()
    assert stats.chi2_contingency(counts).pvalue > 1e-4


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_sizes_follow_the_power_law(exponent: float) -> None:
    by_rank = np.arange(1, 101) ** -exponent
    exact, first = 10_000 * by_rank / by_rank.sum(), []
    for seed in range(5):
        sizes = counts_of(PowerLaw(exponent), balanced(1, 10_000), 100, seed)[:, 0]
        assert (np.abs(np.sort(sizes)[::-1] - exact) <= 1).all()
        first.append(int(sizes.argmax()))
    assert len(set(first)) > 1, "the largest client is not always the same"
