"""One suite over every partitioner."""

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_fed.data import Split
from lightning_fed.data.partitioners.base import Partitioner
from lightning_fed.data.partitioners.classes import ExactClasses, Shards
from lightning_fed.data.partitioners.dirichlet import DirichletBalanced, DirichletByClass, DirichletByClient
from lightning_fed.data.partitioners.quantity import IID, ByUser, PowerLaw, QuantityDirichlet
from lightning_fed.errors import FederatedError
from tests.data.partitioners.parts import CLASSES, EVERY, every_partitioner, owners_of, values_for
from tests.parts import BySizes

# Splits of 300 samples of 10 classes over 20 clients under seed 7. Who changes one breaks all experiments that used it.
HASHES = {
    "iid": "2011406418b8ab09",
    "shards1": "280c7bef9b801b00",
    "shards2": "427062e27b6c1371",
    "shards3": "461db07593de90a0",
    "exact1": "9da8f264e1174f6d",
    "exact2": "54e6759a90d0fe48",
    "client": "329135eba937efa7",
    "class": "7fa627829b35a088",
    "balanced": "71f397dc853dc2b7",
    "quantity": "4a74dc8a8dffb055",
    "power": "ad8418b03cb40a0e",
    "user": "15c97d917cda856f",
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Targets with classes 0, 1, 2 at least, a number of clients that every partitioner can serve, a seed."""
    num_clients = draw(st.integers(1, 12))
    extra = draw(st.lists(st.integers(0, 6), max_size=60))
    base = [0, 1, 2] * num_clients
    targets = np.asarray(draw(st.permutations(base + extra)))
    return targets, num_clients, draw(st.integers(0, 2**63 - 1))


@every_partitioner
@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_each_sample_goes_to_exactly_one_client(partitioner: Partitioner, problem: tuple[np.ndarray, int, int]) -> None:
    targets, num_clients, seed = problem
    targets = values_for(partitioner, targets, num_clients)
    clients = partitioner(targets, len(targets), num_clients, seed)
    assert len(clients) == num_clients
    assert sorted(np.concatenate(clients).tolist()) == list(range(len(targets)))
    for client in clients:
        assert client.dtype == np.int64
        assert np.all(np.diff(client) > 0)


@every_partitioner
@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_depends_on_the_arguments_alone(partitioner: Partitioner, problem: tuple[np.ndarray, int, int]) -> None:
    targets, num_clients, seed = problem
    targets = values_for(partitioner, targets, num_clients)
    given_targets = targets.copy()
    before = partitioner(targets, len(targets), num_clients, seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    after = partitioner(targets, len(targets), num_clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert np.array_equal(targets, given_targets)
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])


@every_partitioner
def test_another_seed_gives_another_split(partitioner: Partitioner) -> None:
    targets = values_for(partitioner, np.arange(300) % 10, 10)
    hashes = {Split.of(partitioner(targets, 300, 10, seed)).hash() for seed in range(5)}
    assert len(hashes) == (1 if isinstance(partitioner, ByUser) else 5)


@pytest.mark.parametrize("name", EVERY)
def test_the_split_stays_the_same_from_version_to_version(name: str) -> None:
    targets = np.random.default_rng(1).permutation(np.arange(300) % 10)
    values = np.arange(300) % 20 if EVERY[name].reads == "users" else targets
    assert Split.of(EVERY[name](values, 300, 20, 7)).hash()[:16] == HASHES[name]


@given(num_clients=st.integers(1, 40), extra=st.integers(0, 200), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_iid_sizes_differ_by_at_most_one_and_need_no_targets(num_clients: int, extra: int, seed: int) -> None:
    sizes = [len(client) for client in IID()(None, num_clients + extra, num_clients, seed)]
    assert max(sizes) - min(sizes) <= 1


@given(problem=problems(), classes_per_client=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_shards_are_near_equal_and_hold_few_classes(
    problem: tuple[np.ndarray, int, int], classes_per_client: int
) -> None:
    targets, num_clients, seed = problem
    clients = Shards(classes_per_client)(targets, len(targets), num_clients, seed)
    shard = len(targets) / (classes_per_client * num_clients)
    sorted_targets = np.sort(targets)
    for client in clients:
        assert classes_per_client * int(shard) <= len(client) <= classes_per_client * int(np.ceil(shard))
        # A shard is a run of the sorted labels no longer than ceil(shard), which bounds the classes that it can hold.
        width = int(np.ceil(shard))
        most = max(len(np.unique(sorted_targets[i : i + width])) for i in range(len(targets)))
        assert len(np.unique(targets[client])) <= classes_per_client * most


def test_shards_of_balanced_classes_hold_exactly_whole_classes() -> None:
    """100 clients × 2 shards of 300 on 10 classes of 6,000: a shard never lies across a boundary (McMahan 2017)."""
    targets = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 6000))
    clients = Shards(classes_per_client=2)(targets, 60000, 100, seed=0)
    counts = np.stack([np.bincount(targets[client], minlength=10) for client in clients])
    assert set(np.unique(counts)) == {0, 300, 600}
    assert np.all(counts.sum(axis=0) == 6000)
    assert np.all(counts.sum(axis=1) == 600)
    assert set((counts > 0).sum(axis=1)) <= {1, 2}


def test_shards_mix_the_samples_of_a_class() -> None:
    targets = np.repeat([0, 1], 500)
    first = Shards(classes_per_client=1)(targets, 1000, 10, seed=0)[0]
    assert np.ptp(first) > 200, "a shard of unshuffled samples would be 100 neighbours"


def test_shards_accept_any_sortable_labels() -> None:
    targets = np.asarray(["cat", "dog", "cat", "dog"])
    clients = Shards(classes_per_client=1)(targets, 4, 2, seed=0)
    assert sorted(sorted(set(targets[client])) for client in clients) == [["cat"], ["dog"]]


@every_partitioner
@pytest.mark.slow
def test_many_clients_cost_no_loop(partitioner: Partitioner) -> None:
    """1,000,000 samples over 100,000 clients in less than 5 s of one core's time."""
    num_samples, num_clients = 1_000_000, 100_000
    targets = np.random.default_rng(0).integers(0, 10, num_samples)
    values = values_for(partitioner, targets, num_clients)
    start = time.process_time()
    clients = partitioner(values, num_samples, num_clients, seed=0)
    assert time.process_time() - start < 5
    assert len(clients) == num_clients
    assert clients[0].base is clients[-1].base, "the index arrays share one vector"


@every_partitioner
def test_memory_is_proportional_to_the_samples(partitioner: Partitioner) -> None:
    """One client per sample and 200 classes: a table of clients × classes would take 1,600 bytes for each sample."""
    size = 20_000
    targets = np.random.default_rng(0).integers(0, 200, size)
    if isinstance(partitioner, (Shards, ExactClasses)):
        partitioner = type(partitioner)(classes_per_client=1)
    elif partitioner.reads == "users":
        targets = np.arange(size)
    tracemalloc.start()
    try:
        partitioner(targets, size, size, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500 * size


class Overlapping(Partitioner):
    """Wrong on purpose: everything to everyone."""

    def assign(self, targets: object, num_samples: int, num_clients: int, generator: np.random.Generator) -> np.ndarray:
        return np.full(num_samples, num_clients)


def test_a_partitioner_of_the_users_own_takes_one_method() -> None:
    assert [client.tolist() for client in BySizes(3, 3)(None, 6, 2, seed=0)] == [[0, 1, 2], [3, 4, 5]]


def test_a_client_may_stay_empty() -> None:
    assert [len(client) for client in BySizes(5, 0, 0)(None, 5, 3, seed=0)] == [5, 0, 0]


@pytest.mark.parametrize(
    ("partitioner", "targets", "num_samples", "num_clients", "sentence"),
    [
        (Shards(4), np.arange(30) % 3, 30, 2, r"classes_per_client` .* number of classes, 3, got 4\."),
        (Shards(3), np.arange(10) % 5, 10, 4, r"for each of the 12 shards, got 10 samples: lower `--data.num_cl"),
        (Shards(2), None, 10, 2, r"Expected targets for the partitioner Shards.*`--data.targets`"),
        (Shards(2), np.arange(9), 10, 2, r"`--data.targets` to hold one value for each of the 10 .*, got shape \(9,\)"),
        (Shards(1), np.asarray([0, np.nan]), 2, 2, r"class labels .* for the partitioner Shards, got nan: "),
        (IID(), None, 3, 4, r"`--data.num_clients` to be at most the number of training samples, 3, got 4\."),
        (IID(), None, 3, 0, r"`--data.num_clients` to be an integer of at least 1, got 0\."),
        (ExactClasses(4), np.arange(30) % 3, 30, 2, r"classes_per_client` to be at most the number of classes, 3, got"),
        (ExactClasses(2), np.arange(30) % 5, 30, 2, r"at least the number of classes, 5, so .*, got 2 times 2\."),
        (ExactClasses(2), np.asarray([0, 1, 1, 1]), 4, 3, r"Expected enough samples for 3 clients of 2 classes each"),
        (ExactClasses(1), np.arange(4) + 0.5, 4, 2, r"class labels \(.*\) for the partitioner ExactClasses, got 0\.5:"),
        (DirichletByClient(), None, 10, 2, r"Expected targets for the partitioner DirichletByClient.*`--data.targets`"),
        (ByUser(), None, 10, 2, r"Expected users for the partitioner ByUser.*`--data.users`"),
        (ByUser(), np.arange(9), 10, 2, r"`--data.users` to hold one value for each of the 10 .*, got shape \(9,\)"),
        (ByUser(), np.arange(10) % 3, 10, 2, r"`--data.num_clients` to be the number of users, 3, .*got 2: set it to"),
        (Overlapping(), None, 6, 2, r"`--data.partitioner` Overlapping to assign a client id in \[0, 2\)"),
    ],
)  # fmt: skip
def test_impossible_splits_are_refused(
    partitioner: Partitioner, targets: np.ndarray | None, num_samples: int, num_clients: int, sentence: str
) -> None:
    with pytest.raises(FederatedError, match=sentence):
        partitioner(targets, num_samples, num_clients, 0)


@pytest.mark.parametrize("kind", [Shards, ExactClasses])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_classes_per_client_must_be_a_count(kind: Any, value: object) -> None:
    with pytest.raises(FederatedError, match=r"`--data.partitioner.classes_per_client` to be an integer of at least 1"):
        kind(classes_per_client=value)


def test_split_counts_and_summary() -> None:
    targets = np.asarray([0, 1, 2, 0, 1, 2])
    split = Split.of([np.asarray([0, 3]), np.asarray([], dtype=np.int64), np.asarray([1, 2, 4, 5])])
    assert split.sizes.tolist() == [2, 0, 4]
    assert split.class_counts(targets, 4).tolist() == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 2, 2, 0]]
    assert split.summary() == {
        "clients": 3,
        "clients_empty": 1,
        "samples": 6,
        "samples_per_client_min": 0,
        "samples_per_client_median": 2.0,
        "samples_per_client_max": 4,
    }


def test_hash_tells_splits_apart() -> None:
    parts = [np.asarray([0, 1]), np.asarray([2])]
    assert Split.of(parts).hash() == Split.of([part.copy() for part in parts]).hash()
    assert Split.of(parts).hash() != Split.of([np.asarray([0]), np.asarray([1, 2])]).hash()
    assert Split.of(parts).hash() != Split.of([np.asarray([1, 0]), np.asarray([2])]).hash()


@pytest.mark.parametrize("value", [0, -0.5, float("nan"), float("inf"), "0.5", True, None])
@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (DirichletByClient, "alpha"),
        (DirichletByClass, "alpha"),
        (DirichletBalanced, "alpha"),
        (QuantityDirichlet, "beta"),
        (PowerLaw, "exponent"),
    ],
)
def test_concentrations_must_be_above_zero(cls: type[Partitioner], option: str, value: object) -> None:
    with pytest.raises(FederatedError, match=rf"`--data.partitioner.{option}` to be a finite number above 0, got "):
        cls(**{option: value})


def test_only_natural_splits_find_the_number_of_clients() -> None:
    users = np.asarray(["b", "a", "b", "c"])
    assert ByUser().count_clients(users, None) == 3
    assert ByUser().count_clients(users, 4) == 4, "refused later, when the split is made"
    with pytest.raises(FederatedError, match=r"`--data.num_clients` to be a number for the partitioner IID, got none"):
        IID().count_clients(None, None)
    with pytest.raises(FederatedError, match=r"Expected users for the partitioner ByUser"):
        ByUser().count_clients(None, None)


def test_a_natural_split_follows_the_users() -> None:
    users = np.asarray(["b", "a", "b", "c", "a", "b"])
    assert [client.tolist() for client in ByUser()(users, 6, 3, seed=0)] == [[1, 4], [0, 2, 5], [3]]


# Clients with few samples: what is asked for, and what happens where it cannot be had.

TARGETS = np.arange(600) % 6


def sizes(partitioner: Partitioner, num_clients: int, seed: int = 0) -> np.ndarray:
    return np.asarray([len(client) for client in partitioner(TARGETS, len(TARGETS), num_clients, seed)])


@pytest.mark.parametrize("cls", CLASSES)
def test_every_partitioner_has_the_options(cls: type[Partitioner]) -> None:
    made = cls(min_samples=3, too_small="refuse")
    assert (made.min_samples, made.too_small) == (3, "refuse")
    with pytest.raises(FederatedError, match=r"partitioner.too_small` to be one of redraw, refuse, allow, got 'no'"):
        cls(too_small="no")
    for value in (-1, 1.5, True):
        with pytest.raises(FederatedError, match=r"`--data.partitioner.min_samples` to be an integer of at least 0"):
            cls(min_samples=value)


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        (QuantityDirichlet(beta=0.5), QuantityDirichlet(beta=0.5, min_samples=15)),
        (DirichletByClass(alpha=0.2, min_samples=0), DirichletByClass(alpha=0.2, min_samples=25)),
        (DirichletBalanced(alpha=0.05, min_samples=0), DirichletBalanced(alpha=0.05, min_samples=40)),
    ],
)
def test_a_split_with_too_small_clients_is_drawn_again(loose: Partitioner, strict: Partitioner) -> None:
    redrawn = 0
    for seed in range(8):
        first, kept = sizes(loose, 6, seed), sizes(strict, 6, seed)
        assert kept.min() >= strict.min_samples
        if first.min() >= strict.min_samples:
            assert np.array_equal(first, kept), "a first draw that will do is kept"
        redrawn += first.min() < strict.min_samples
    assert redrawn >= 2


def test_the_papers_minimum_is_the_default_of_their_recipe() -> None:
    assert (DirichletByClass().min_samples, DirichletByClass().too_small) == (10, "redraw")
    assert (DirichletBalanced().min_samples, DirichletBalanced().too_small) == (10, "redraw")
    assert all(cls().min_samples == 0 for cls in (IID, Shards, ExactClasses, DirichletByClient, QuantityDirichlet))


def test_redrawing_gives_up() -> None:
    with pytest.raises(FederatedError) as caught:
        sizes(QuantityDirichlet(beta=0.05, min_samples=30), 20)
    text = str(caught.value)
    assert text.startswith("Expected at least 30 samples for every client, got ")
    assert " in the last of 100 draws: lower `--data.partitioner.min_samples` or `--data.num_clients`" in text
    assert "`--data.partitioner.too_small allow`" in text


@pytest.mark.parametrize("too_small", ["redraw", "refuse"])
def test_sizes_that_do_not_vary_are_refused_at_once(too_small: str) -> None:
    with pytest.raises(FederatedError, match=r"at least 50 samples for every client, got \d+ for client \d+: lower"):
        sizes(PowerLaw(min_samples=50, too_small=too_small), 12)


def test_refuse_does_not_draw_again() -> None:
    seeds = range(30)
    fits = [sizes(QuantityDirichlet(beta=0.5), 6, seed).min() >= 15 for seed in seeds]
    assert any(fits)
    assert not all(fits)
    for seed, fit in zip(seeds, fits, strict=True):
        partitioner = QuantityDirichlet(beta=0.5, min_samples=15, too_small="refuse")
        if fit:
            assert sizes(partitioner, 6, seed).min() >= 15
        else:
            with pytest.raises(FederatedError, match=r"at least 15 samples for every client, got \d+ for client \d: l"):
                sizes(partitioner, 6, seed)


def test_small_clients_may_be_allowed() -> None:
    allowed = QuantityDirichlet(beta=0.1, min_samples=15, too_small="allow")
    assert np.array_equal(sizes(allowed, 20), sizes(QuantityDirichlet(beta=0.1), 20))
    assert sizes(allowed, 20).min() == 0


@pytest.mark.parametrize("cls", [IID, DirichletByClass])
def test_more_than_there_are_samples_is_refused_before_any_draw(cls: type[Partitioner]) -> None:
    with pytest.raises(FederatedError, match=r"at least 61 samples for each of 10 clients, got 600 samples in all: "):
        sizes(cls(min_samples=61), 10)
    assert sizes(cls(min_samples=61, too_small="allow"), 10).sum() == 600


# Which samples of a class a client gets is random, whatever their order in the data set.


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "user"])
def test_a_clients_samples_of_a_class_are_random_ones(name: str, shuffled: bool) -> None:
    """Kruskal and Wallis' test of the places in a class by client, each class of each split failing 1 in 10,000."""
    targets = np.repeat(np.arange(4), 1000)
    if shuffled:
        targets = np.random.default_rng(0).permutation(targets)
    for seed in range(3):
        owner = owners_of(EVERY[name], targets, 20, seed)
        for label in range(4):
            owners = owner[targets == label]
            groups = [np.flatnonzero(owners == client) for client in np.unique(owners)]
            assert stats.kruskal(*(group for group in groups if len(group) >= 5)).pvalue > 1e-4
