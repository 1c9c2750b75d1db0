"""Clients with few samples: what is asked for, and what happens where it cannot be had."""

import numpy as np
import pytest

from lightning_fed.data import (
    IID,
    ByUser,
    DirichletBalanced,
    DirichletByClass,
    DirichletByClient,
    ExactClasses,
    Partitioner,
    PowerLaw,
    QuantityDirichlet,
    Shards,
)
from lightning_fed.errors import FederatedError

TARGETS = np.arange(600) % 6
OPTIONS = [IID, Shards, ExactClasses, DirichletByClient, DirichletByClass, DirichletBalanced, PowerLaw, ByUser]


def sizes(partitioner: Partitioner, num_clients: int, seed: int = 0) -> np.ndarray:
    return np.asarray([len(client) for client in partitioner(TARGETS, len(TARGETS), num_clients, seed)])


@pytest.mark.parametrize("cls", [*OPTIONS, QuantityDirichlet])
def test_every_partitioner_has_the_options(cls: type[Partitioner]) -> None:
    made = cls(min_samples=3, too_small="refuse")
    assert (made.min_samples, made.too_small) == (3, "refuse")
    with pytest.raises(FederatedError, match=r"`--data.partitioner.too_small` to be redraw, refuse or allow, got 'no'"):
        cls(too_small="no")  # type: ignore[arg-type]
    for value in (-1, 1.5, True):
        with pytest.raises(FederatedError, match=r"`--data.partitioner.min_samples` to be an integer of at least 0"):
            cls(min_samples=value)  # type: ignore[arg-type]


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
        sizes(PowerLaw(min_samples=50, too_small=too_small), 12)  # type: ignore[arg-type]


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
