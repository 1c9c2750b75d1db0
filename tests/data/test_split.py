"""Entropy and divergence of label distributions, by hand, by the formula, and against SciPy's whole-table functions."""

import math

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from lightning_fed.data import Split
from lightning_fed.data.split import MOST_PAIRS, count_labels, divergences, entropies, label_statistics


def split_of(sizes: list[int] | np.ndarray, num_classes: int, seed: int = 0) -> tuple[Split, np.ndarray]:
    """Clients of given sizes with random labels; rows are owned in random order."""
    generator = np.random.default_rng(seed)
    rows = np.split(generator.permutation(int(np.sum(sizes))), np.cumsum(sizes)[:-1])
    return Split.of(rows), generator.integers(num_classes, size=int(np.sum(sizes)))


def all_pairs(clients: int) -> np.ndarray:
    return np.stack(np.triu_indices(clients, 1), axis=1)


def test_entropies_are_those_of_the_table() -> None:
    split, labels = split_of([5, 0, 1, 40, 0, 17], num_classes=6)
    counts, table = count_labels(split, labels, 6), split.class_counts(labels, 6)
    assert np.array_equal(counts.toarray(), table)
    assert np.diff(counts.indptr).tolist() == (table > 0).sum(axis=1).tolist(), "one entry for each class that is held"
    held = split.sizes > 0
    np.testing.assert_allclose(entropies(counts)[held], entropy(table[held], base=2, axis=1), atol=1e-12)
    assert entropies(counts)[~held].tolist() == [0.0, 0.0]
    assert not np.signbit(entropies(counts)).any()


def test_divergence_is_the_square_of_scipys_distance() -> None:
    split, labels = split_of([30, 9, 1, 200] * 10, num_classes=12)
    counts, table = count_labels(split, labels, 12), split.class_counts(labels, 12)
    pairs = all_pairs(40)
    found = divergences(counts, pairs)
    np.testing.assert_allclose(found, jensenshannon(*table[pairs.T], base=2, axis=1) ** 2, atol=1e-12)
    np.testing.assert_array_equal(found, divergences(counts, pairs[:, ::-1]))


def test_divergence_is_the_mean_relative_entropy_to_the_mixture() -> None:
    split, labels = split_of([7] * 20, num_classes=5)
    table = split.class_counts(labels, 5) / 7
    for (one, other), got in zip(
        all_pairs(20), divergences(count_labels(split, labels, 5), all_pairs(20)), strict=True
    ):
        mixture = (table[one] + table[other]) / 2
        relative = [
            sum(a * math.log2(a / m) for a, m in zip(table[part], mixture, strict=True) if a > 0)
            for part in (one, other)
        ]
        assert got == pytest.approx(sum(relative) / 2, abs=1e-12)


def test_divergence_is_0_for_equal_and_1_for_disjoint_distributions() -> None:
    labels = np.array([0, 1, 1, 0, 1, 1, 2, 3])
    counts = count_labels(Split.of([np.arange(3), np.arange(3, 6), np.arange(6, 8)]), labels, 4)
    assert divergences(counts, np.array([[0, 1], [0, 2], [1, 2]])) == pytest.approx([0, 1, 1], abs=1e-12)
    assert divergences(counts, np.array([[0, 1]])).tolist() == [0.0]


def test_statistics_of_a_split_by_hand() -> None:
    # Clients: all of class 0; half 0, half 1; nothing; two samples each of four classes.
    labels = np.array([0, 0, 0, 0, 1, 1, 0, 1, 2, 3, 0, 1, 2, 3])
    split = Split.of([np.arange(2), np.arange(2, 6), np.arange(0), np.arange(6, 14)])
    figures = label_statistics(split, labels, 4)
    mixed = [
        float(entropy(np.array(row), base=2))
        for row in ([0.75, 0.25, 0, 0], [0.625, 0.125, 0.125, 0.125], [3 / 8, 3 / 8, 1 / 8, 1 / 8])
    ]
    expected = ((mixed[0] - 0.5) + (mixed[1] - 1) + (mixed[2] - 1.5)) / 3
    assert figures == pytest.approx(
        {
            "classes_per_client_mean": 7 / 4,
            "classes_per_client_min": 1,
            "classes_per_client_median": 2.0,
            "classes_per_client_max": 4,
            "label_entropy_mean": (0 + 1 + 2) / 3,
            "label_entropy_pooled": entropy(np.array([6, 4, 2, 2]), base=2),
            "label_divergence_mean": expected,
            "label_divergence_pairs": 3,
        },
        abs=1e-12,
    )


def test_what_cannot_be_compared_has_no_divergence() -> None:
    """One client with samples alone; more classes than can be compared."""
    assert "label_divergence_mean" not in label_statistics(*split_of([30, 0], num_classes=3), 3)
    figures = label_statistics(*split_of([30, 30], num_classes=2000), 2000)
    assert "label_divergence_mean" not in figures
    assert 3 < figures["label_entropy_mean"] <= math.log2(30)


def test_many_clients_are_compared_by_a_sample_of_pairs() -> None:
    """Fixed seed; the sample's mean is within five of its standard errors of the mean over all pairs."""
    sizes = np.random.default_rng(7).integers(1, 30, size=160)
    split, labels = split_of(sizes, num_classes=5, seed=8)
    figures = label_statistics(split, labels, 5)
    assert figures["label_divergence_pairs"] == MOST_PAIRS < 160 * 159 // 2
    everything = divergences(count_labels(split, labels, 5), all_pairs(160))
    error = everything.std() / math.sqrt(MOST_PAIRS)
    assert abs(figures["label_divergence_mean"] - everything.mean()) < 5 * error
    assert label_statistics(split, labels, 5) == figures


def test_no_client_is_compared_with_itself() -> None:
    """Clients that share no class: every pair but one of the same client has divergence 1."""
    labels = np.repeat(np.arange(150), 2)
    figures = label_statistics(Split.of(np.split(np.arange(300), 150)), labels, 150)
    assert figures["label_divergence_pairs"] == MOST_PAIRS
    assert figures["label_divergence_mean"] == pytest.approx(1, abs=1e-9)


def test_up_to_100_clients_all_pairs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    split, labels = split_of([3] * 100, num_classes=4)
    everything = divergences(count_labels(split, labels, 4), all_pairs(100))
    monkeypatch.setattr("lightning_fed.data.split._BLOCK", 28)
    figures = label_statistics(split, labels, 4)
    assert figures["label_divergence_pairs"] == 4950
    assert figures["label_divergence_mean"] == everything.mean(), "in blocks of any size"
