"""How far local steps lead (Tenison et al., TMLR 2023, lemmas 4.6 and 4.7), exactly, for quadratic clients."""

from dataclasses import dataclass

import numpy as np
import pytest


@dataclass(frozen=True)
class Cohort:
    """F_n has the gradient g_n at w and the curvature a_n <= L = 1, in one dimension; gradients have noise of σ²."""

    a: np.ndarray
    g: np.ndarray
    steps: int
    sigma: float = 0.0
    slack: float = 1.0

    @property
    def lr(self) -> float:
        """At most 1 / (8 L K)."""
        return self.slack / (8 * self.steps)

    @property
    def spread(self) -> float:
        """σ_g², the variance of the clients' gradients."""
        return float(self.g.var())

    def away(self, k: int) -> np.ndarray:
        """E ‖w_(n,k) - w‖² of each client."""
        kept = 1 - self.lr * self.a
        noise = self.lr**2 * self.sigma**2 * sum(kept ** (2 * i) for i in range(k))
        return (self.reach(k) * self.g) ** 2 + noise

    def reach(self, k: int) -> np.ndarray:
        """(1 - (1 - η a)^k) / a."""
        return self.lr * sum((1 - self.lr * self.a) ** i for i in range(k))

    def bias(self) -> float:
        """‖E[Δ + K η ∇f]‖²."""
        return float((self.steps * self.lr * self.g - self.reach(self.steps) * self.g).mean() ** 2)

    def drift(self) -> float:
        """E ‖Δ + K η ∇f‖²."""
        kept = 1 - self.lr * self.a
        noise = self.lr**2 * self.sigma**2 * sum(kept ** (2 * i) for i in range(self.steps))
        return self.bias() + float(noise.mean()) / len(self.a)

    def lemma_46(self) -> float:
        k, variances = self.steps, self.sigma**2 + 2 * self.steps * self.spread
        return float(5 * k * self.lr**2 * variances + 30 * k**2 * self.lr**2 * self.g.mean() ** 2)

    def lemma_47(self, power: int = 3) -> tuple[float, float]:
        """Both bounds; the paper has K³ before ‖∇f‖²."""
        k, lr, variances = self.steps, self.lr, self.sigma**2 + 3 * self.steps * self.spread
        last = 30 * k**power * lr**4 * self.g.mean() ** 2
        return float(5 * k**2 * (lr**2 + lr**4) * variances + last), float(25 * k * lr**4 * variances + last)

    def mended(self) -> float:
        """What lemma 4.6 gives for the bias: L² η² K² times it."""
        return self.lr**2 * self.steps**2 * self.lemma_46()


def drawn(count: int = 300) -> list[Cohort]:
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        n, steps = int(rng.integers(1, 30)), int(rng.choice([1, 2, 5, 20, 60]))
        gradients = rng.normal() + rng.exponential() * rng.normal(size=n)
        found.append(Cohort(rng.uniform(0, 1, n), gradients, steps, float(rng.exponential()), float(rng.uniform())))
    return found


def test_lemma_46_for_equal_weights() -> None:
    shares = [cohort.away(k).mean() / cohort.lemma_46() for cohort in drawn() for k in (1, cohort.steps)]
    assert 0.1 < max(shares) <= 0.2


@pytest.mark.parametrize(("clients", "holds"), [(11, True), (20, False)])
def test_lemma_46_fails_for_any_weights(clients: int, holds: bool) -> None:
    """All the weight on one client that pulls against the others: assumption 4.4 bounds the clients' mean alone."""
    cohort = Cohort(np.full(clients, 0.01), np.array([clients - 1.0, *[-1.0] * (clients - 1)]), 10)
    share = cohort.away(10)[0] / cohort.lemma_46()
    assert (share <= 1) == holds
    assert share == pytest.approx((clients - 1) / 10, rel=0.01)


def test_lemma_47_for_few_local_steps() -> None:
    cohorts = [cohort for cohort in drawn() if cohort.steps <= 20]
    assert max(cohort.drift() / cohort.lemma_47()[0] for cohort in cohorts) <= 0.1
    assert max(cohort.bias() / cohort.lemma_47()[1] for cohort in cohorts) <= 0.1


def test_lemma_47_fails_for_many() -> None:
    """One client: from K = 133 on the drift is above both bounds at the largest rate, from 123 on at a tenth of it.

    With K⁴ for K³ it never is.
    """
    one = np.ones(1)
    for slack, fails_from in ((1.0, 133), (0.1, 123)):
        for steps in (1, 20, fails_from - 1, fails_from, 1000):
            cohort = Cohort(one, one, steps, slack=slack)
            for bound, mended in zip(cohort.lemma_47(), cohort.lemma_47(power=4), strict=True):
                assert (cohort.drift() > bound) == (steps >= fails_from)
                assert cohort.drift() < mended


def test_the_second_part_of_lemma_47_fails_sooner_for_clients_that_differ() -> None:
    """Two clients that pull apart, one flat: from K = 38 on."""
    for steps in (2, 37, 38, 200):
        cohort = Cohort(np.array([1.0, 0.0]), np.array([1.0, -1.0]), steps)
        assert (cohort.bias() > cohort.lemma_47(power=4)[1]) == (steps >= 38)
        assert cohort.drift() < cohort.lemma_47()[0]
        assert cohort.bias() < cohort.mended()


def test_the_bias_is_bounded_by_what_lemma_46_gives() -> None:
    assert max(cohort.bias() / cohort.mended() for cohort in drawn()) <= 0.01
