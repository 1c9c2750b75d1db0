"""That a mask of votes depends on the updates, which proposition 4.8 of GMA excludes (Tenison et al., TMLR 2023)."""

from math import comb

import numpy as np
import pytest
import torch

from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.masks import SignAgreement

VOTERS, TAU, COORDINATES = 10, 0.4, 20_000


def masks(signs: np.ndarray) -> np.ndarray:
    """m of the package for votes, shape (n, d)."""
    cohort = tuple(Client(i, 1, 1) for i in range(len(signs)))
    update = ReducedUpdate(1, cohort, sign_sum=torch.from_numpy(signs.sum(axis=0)))
    return SignAgreement(TAU).compute(update).double().numpy()


def counts_for(share: float) -> float:
    """What the push of a share q of the clients counts under the mask, relative to that of the others.

    Of n voters k ~ Bin(n, q) push one way. W = (E[m k] / n q) / (E[m (n - k)] / n (1 - q)); 1 without a mask.
    """
    n = VOTERS
    chances = [comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    agreed = [abs(2 * k - n) / n for k in range(n + 1)]
    passed = [p * (1 if 10 * a >= 10 * TAU else a) for p, a in zip(chances, agreed, strict=True)]
    few = sum(p * k for k, p in enumerate(passed)) / share
    return few / (sum(p * (n - k) for k, p in enumerate(passed)) / (1 - share))


@pytest.mark.parametrize(("share", "counts"), [(0.1, 0.96), (0.2, 0.84), (0.3, 0.72), (0.5, 1.0)])
def test_what_few_push_counts_less(share: float, counts: float) -> None:
    assert counts_for(share) == pytest.approx(counts, abs=0.005)
    pushes = np.random.default_rng(0).random((VOTERS, 50 * COORDINATES)) < share
    m = masks(np.where(pushes, 1.0, -1.0))
    drawn = ((m * pushes).mean() / share) / ((m * ~pushes).mean() / (1 - share))
    assert drawn == pytest.approx(counts_for(share), abs=0.005)


def test_an_even_vote_stops_a_coordinate() -> None:
    """A is 0, so that A ∈ (0, 1] fails: for 10 clients of random signs in a quarter of the cases, for 11 never."""
    rng = np.random.default_rng(1)
    for n, share in ((10, comb(10, 5) / 2**10), (11, 0.0)):
        m = masks(rng.choice([-1.0, 1.0], (n, 10 * COORDINATES)))
        assert (m == 0).mean() == pytest.approx(share, abs=0.003)
    assert comb(10, 5) / 2**10 == pytest.approx(0.246, abs=0.0005)


def test_gma_does_not_stand_still_where_fedavg_does() -> None:
    """Clients with f_i(w) = (w - c_i)² / 2: a share q has c = 4, the others c = -1, so that f is least at 0.

    FedAvg stays there. GMA goes on to (4 q W - (1 - q)) / (q W + 1 - q), where the push of the few, at W of its weight,
    holds the others'.
    """
    share, rng = 0.2, np.random.default_rng(2)
    rest = (4 * share * counts_for(share) - (1 - share)) / (share * counts_for(share) + 1 - share)
    assert rest == pytest.approx(-0.13, abs=0.005)
    ends = []
    for masked in (False, True):
        w = np.zeros(COORDINATES)
        for _ in range(150):
            updates = 0.1 * (np.where(rng.random((VOTERS, COORDINATES)) < share, 4.0, -1.0) - w)
            w += (masks(np.sign(updates)) if masked else 1.0) * updates.mean(axis=0)
        ends.append(float(w.mean()))
    assert ends == pytest.approx([0.0, rest], abs=0.01)
