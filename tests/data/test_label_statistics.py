"""Entropy and divergence of label distributions, against formulas written another way and against SciPy."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy

from lightning_fed.data import Split
from lightning_fed.data.label_statistics import MOST_PAIRS, LabelCounts, divergence, entropy, label_statistics


def distributions(seed: int, *shape: int) -> np.ndarray:
    """Random distributions of which many shares are 0."""
    generator = np.random.default_rng(seed)
    shares = generator.random(shape) * (generator.random(shape) < 0.5)
    shares[..., 0] += 1e-3
    return shares / shares.sum(axis=-1, keepdims=True)


def split_of(sizes: list[int] | np.ndarray, num_classes: int, seed: int = 0) -> tuple[Split, np.ndarray]:
    """Clients of given sizes with random labels; rows are owned in random order."""
    generator = np.random.default_rng(seed)
    rows = np.split(generator.permutation(int(np.sum(sizes))), np.cumsum(sizes)[:-1])
    return Split.of(rows), generator.integers(num_classes, size=int(np.sum(sizes)))


def test_entropy_of_known_distributions() -> None:
    shares = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]])
    assert entropy(shares).tolist() == [0.0, 1.0, 2.0, 1.75]
    assert not np.signbit(entropy(shares)[0])


def test_entropy_is_that_of_scipy() -> None:
    shares = distributions(1, 7, 5, 30)
    np.testing.assert_allclose(entropy(shares), scipy_entropy(shares, base=2, axis=-1), atol=1e-12)


def test_divergence_is_the_mean_relative_entropy_to_the_mixture() -> None:
    p, q = distributions(2, 40, 12), distributions(3, 40, 12)
    for one, other, got in zip(p, q, divergence(p, q), strict=True):
        mixture = (one + other) / 2
        relative = [
            sum(a * math.log2(a / m) for a, m in zip(part, mixture, strict=True) if a > 0) for part in (one, other)
        ]
        assert got == pytest.approx(sum(relative) / 2, abs=1e-12)


def test_divergence_is_the_square_of_scipys_distance() -> None:
    p, q = distributions(4, 40, 12), distributions(5, 40, 12)
    np.testing.assert_allclose(divergence(p, q), jensenshannon(p, q, base=2, axis=1) ** 2, atol=1e-12)
    np.testing.assert_array_equal(divergence(p, q), divergence(q, p))


def test_divergence_is_0_for_equal_and_1_for_disjoint_distributions() -> None:
    p = distributions(6, 9, 4)
    assert divergence(p, p).tolist() == [0.0] * 9
    nothing = np.zeros_like(p)
    assert divergence(np.hstack([p, nothing]), np.hstack([nothing, p])) == pytest.approx([1.0] * 9, abs=1e-12)


def test_counts_are_those_of_the_table() -> None:
    split, labels = split_of([5, 0, 1, 40, 0, 17], num_classes=6)
    counts, table = LabelCounts.of(split, labels, 6), split.class_counts(labels, 6)
    assert counts.classes_per_client.tolist() == (table > 0).sum(axis=1).tolist()
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    chosen = np.array([3, 0, 1, 3, 5])
    np.testing.assert_allclose(counts.shares(chosen), shares[chosen], atol=1e-15)
    np.testing.assert_allclose(counts.pooled(), np.bincount(labels, minlength=6) / len(labels), atol=1e-15)
    np.testing.assert_allclose(counts.entropies(), [entropy(row) for row in shares], atol=1e-12)


def test_statistics_of_a_split_by_hand() -> None:
    # Clients: all of class 0; half 0, half 1; nothing; two samples each of four classes.
    labels = np.array([0, 0, 0, 0, 1, 1, 0, 1, 2, 3, 0, 1, 2, 3])
    split = Split.of([np.arange(2), np.arange(2, 6), np.arange(0), np.arange(6, 14)])
    figures = label_statistics(LabelCounts.of(split, labels, 4))
    pooled = np.array([6, 4, 2, 2]) / 14
    mixed = [
        entropy(np.array(row))
        for row in ([0.75, 0.25, 0, 0], [0.625, 0.125, 0.125, 0.125], [3 / 8, 3 / 8, 1 / 8, 1 / 8])
    ]
    expected = ((mixed[0] - 0.5) + (mixed[1] - 1) + (mixed[2] - 1.5)) / 3
    assert figures == pytest.approx(
        {
            "classes_per_client_min": 1,
            "classes_per_client_median": 2.0,
            "classes_per_client_max": 4,
            "label_entropy_mean": (0 + 1 + 2) / 3,
            "label_entropy_pooled": scipy_entropy(pooled, base=2),
            "label_divergence_mean": expected,
            "label_divergence_pairs": 3,
        },
        abs=1e-12,
    )


def test_one_client_has_no_divergence() -> None:
    split, labels = split_of([30, 0], num_classes=3)
    assert "label_divergence_mean" not in label_statistics(LabelCounts.of(split, labels, 3))


def test_nor_do_more_classes_than_can_be_compared() -> None:
    split, labels = split_of([30, 30], num_classes=2000)
    figures = label_statistics(LabelCounts.of(split, labels, 2000))
    assert "label_divergence_mean" not in figures
    assert 3 < figures["label_entropy_mean"] <= math.log2(30)


def test_many_clients_are_compared_by_a_sample_of_pairs() -> None:
    """Fixed seed; the sample's mean is within five of its standard errors of the mean over all pairs."""
    sizes = np.random.default_rng(7).integers(1, 30, size=160)
    split, labels = split_of(sizes, num_classes=5, seed=8)
    counts = LabelCounts.of(split, labels, 5)
    figures = label_statistics(counts)
    assert figures["label_divergence_pairs"] == MOST_PAIRS < 160 * 159 // 2
    everything = counts.divergences(np.stack(np.triu_indices(160, 1), axis=1))
    error = everything.std() / math.sqrt(MOST_PAIRS)
    assert abs(figures["label_divergence_mean"] - everything.mean()) < 5 * error
    assert label_statistics(counts) == figures


def test_no_client_is_compared_with_itself() -> None:
    """Clients that share no class: every pair but one of the same client has divergence 1."""
    labels = np.repeat(np.arange(150), 2)
    split = Split.of(np.split(np.arange(300), 150))
    figures = label_statistics(LabelCounts.of(split, labels, 150))
    assert figures["label_divergence_pairs"] == MOST_PAIRS
    assert figures["label_divergence_mean"] == pytest.approx(1, abs=1e-9)


def test_up_to_100_clients_all_pairs_are_compared() -> None:
    split, labels = split_of([3] * 100, num_classes=4)
    counts = LabelCounts.of(split, labels, 4)
    everything = counts.divergences(np.stack(np.triu_indices(100, 1), axis=1))
    figures = label_statistics(counts)
    assert figures["label_divergence_pairs"] == 4950
    assert figures["label_divergence_mean"] == pytest.approx(everything.mean())


def test_blocks_of_pairs_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    split, labels = split_of([9] * 12, num_classes=4)
    counts, pairs = LabelCounts.of(split, labels, 4), np.stack(np.triu_indices(12, 1), axis=1)
    whole = counts.divergences(pairs)
    monkeypatch.setattr("lightning_fed.data.label_statistics._BLOCK", 28)
    np.testing.assert_array_equal(counts.divergences(pairs), whole)
