"""Every server rule and mask at its edges: other numbers for the clients, no update, one client, any magnitude."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.parity.rules_by_hand import Round
from tests.parity.test_rules_and_masks import MASKS, RULES, train

SIZES = np.array([7, 1, 22, 12, 8, 3, 3])
# Draws the order in which updates meet from the seed, by rows.
DRAWS = {"PCGrad"}
# Multiplied by how much the step is, if all updates are by 2; not those with a length of their own in their formula (ε
# of the adaptive rules, ν of the geometric median, L of q-FedAvg, the gradients of CGW).
SCALES = dict.fromkeys(
    (
        "FedAvg", "FedAvgM", "FedNova", "FedDynServer", "FedGMA", "FedGMA prose", "CoordinateMedian", "TrimmedMean",
        "Krum", "MultiKrum", "MultiKrum of 3", "Bulyan", "FedExP", "FedACG", "TIES", "TIES of all", "PCGrad", "FedFV",
        "FedOMG", "TERM", "AFL", "FedDGGA", "FedLWS", "FedLWS unbound", "FedGaLAServer", "FedGaLAServer mixed",
    ),
    2.0,
)  # fmt: skip
SCALES |= {"SignMajority": 1.0, "FedMGDA": 1.0, "FedMGDA free": 1.0}
WITH_OWN_LENGTH = {
    "FedAdagrad", "FedAdagrad from 0", "FedAdam", "FedAdam from 0", "FedYogi", "FedYogi from 0", "CGW", "CGW shared",
    "ServerOptimizer", "ServerOptimizer decay", "FedExP bounded", "FedAWA", "QFedAvg", "GeometricMedian",
}  # fmt: skip
every_rule = pytest.mark.parametrize("rule", RULES)
every_mask = pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])


def cohort(deltas: Any, seed: int = 0) -> Round:
    deltas, rng = np.asarray(deltas, dtype=float), np.random.default_rng(seed)
    n, d = deltas.shape
    gradients, losses = rng.integers(-2, 3, (n, d)).astype(float), rng.integers(1, 3, n) / 2  # many equal ones
    return Round(SIZES[:n], deltas, rng.uniform(0.5, 2, n), gradients, losses, (d - 2, 2))


def ties(seed: int, unit: float = 1.0) -> Round:
    """Seven clients with updates of few values, so that signs, scores, sums and losses are full of ties."""
    return cohort(unit * np.random.default_rng(seed).integers(-1, 2, (7, 6)), seed)


def step(rule: str, each: Round, mask: str = "none", dtype: Any = np.float32) -> np.ndarray:
    over = MASKS[mask]
    options = {} if over is None else {"mask": over[0]()}
    made = RULES[rule].make(lr=1.0, **options)
    return train(made, np.zeros(each.deltas.shape[1], dtype), [each])[0][0]


def renumbered(each: Round, order: np.ndarray) -> Round:
    rows = {name: getattr(each, name)[order] for name in ("sizes", "deltas", "distances", "gradients", "losses")}
    return replace(each, **rows)


def test_it_is_known_of_every_rule_what_scaling_does() -> None:
    assert set(SCALES) | WITH_OWN_LENGTH == set(RULES)
    assert not set(SCALES) & WITH_OWN_LENGTH


@pytest.mark.parametrize("unit", [1.0, 0.1])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in DRAWS])
@pytest.mark.quick(28)
def test_the_numbers_of_clients_do_not_matter(rule: str, unit: float) -> None:
    for seed in range(5):
        each, orders = ties(seed, unit), np.random.default_rng(seed + 50)
        expected = step(rule, each)
        for _ in range(3):
            found = step(rule, renumbered(each, orders.permutation(7)))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@every_mask
def test_the_numbers_of_clients_do_not_matter_to_masks(mask: str) -> None:
    for seed in range(5):
        each, orders = ties(seed), np.random.default_rng(seed + 50)
        found = step("FedAvg", renumbered(each, orders.permutation(7)), mask)
        np.testing.assert_allclose(found, step("FedAvg", each, mask), rtol=0, atol=2e-6)


@every_rule
def test_no_movement_is_no_step(rule: str) -> None:
    still = replace(cohort(np.zeros((7, 6))), gradients=np.zeros((7, 6)))
    assert not step(rule, still).any()


@every_mask
def test_no_movement_is_no_step_under_masks(mask: str) -> None:
    assert not step("FedAvg", cohort(np.zeros((7, 6))), mask).any()


@every_rule
@pytest.mark.parametrize("exponent", [-96, -20, 20, 96])
def test_scaled_updates_scale_the_step_and_nothing_is_lost_on_the_way(rule: str, exponent: int) -> None:
    """By powers of two, from 1e-29 to 1e29 in single precision."""
    each = cohort(np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32))
    scaled = replace(each, deltas=each.deltas * 2.0**exponent)
    found, plain = step(rule, scaled), step(rule, each)
    assert np.isfinite(found).all()
    if rule in SCALES:
        np.testing.assert_allclose(found, plain * np.float32(SCALES[rule] ** exponent), rtol=2e-5, atol=0)


@every_mask
@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_masks_do_not_change_with_the_magnitude(mask: str, exponent: int) -> None:
    """As far as single precision holds the squares, of which SANDMask takes the variance and MaskControl lengths."""
    each = cohort(np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32))
    scaled = replace(each, deltas=each.deltas * 2.0**exponent)
    found, plain = (step("FedAvg", one, mask) for one in (scaled, each))
    assert np.isfinite(found).all()
    if mask != "sand":
        np.testing.assert_allclose(found, plain * np.float32(2.0**exponent), rtol=2e-5, atol=0)


@pytest.mark.parametrize("rule", [rule for rule, case in RULES.items() if case.fewest == 1])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_one_client_is_followed(rule: str, scale: float) -> None:
    row = np.array([[1.0, -2.0, 0.5, 3.0, -1.0, 2.0]])
    found = step(rule, replace(cohort(scale * row), gradients=np.zeros((1, 6))))
    assert np.isfinite(found).all()
    assert (found * row >= 0).all()


@every_rule
def test_clients_that_agree_to_the_bit_are_followed(rule: str) -> None:
    row = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 2.0])
    found = step(rule, replace(cohort(np.tile(0.1 * row, (7, 1))), gradients=np.zeros((7, 6))))
    assert np.isfinite(found).all()
    assert (found * row >= 0).all()
    assert found.any()


@pytest.mark.parametrize("rule", ["FedAvg", "CoordinateMedian", "GeometricMedian", "TIES", "FedOMG", "TERM", "FedExP"])
def test_a_cohort_that_is_there_twice_changes_nothing(rule: str) -> None:
    each = cohort(np.random.default_rng(2).normal(size=(7, 6)))
    found = step(rule, renumbered(each, np.repeat(np.arange(7), 2)), dtype=np.float64)
    np.testing.assert_allclose(found, step(rule, each, dtype=np.float64), rtol=1e-6, atol=1e-9)


def test_updates_are_those_of_the_rule_alone() -> None:
    """That the steps above are no constants."""
    each = ties(0)
    expected = SIZES @ each.deltas / SIZES.sum()
    np.testing.assert_allclose(step("FedAvg", each), expected, rtol=1e-5, atol=1e-7)
