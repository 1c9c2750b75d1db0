"""Robust means as server rules: weights, limits, refusals, and whole runs with corrupted clients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import FederatedCallback
from lightning_fed.aggregators import (
    Aggregator,
    Bulyan,
    CoordinateMedian,
    FedAvg,
    GeometricMedian,
    Krum,
    MultiKrum,
    RobustMean,
    TrimmedMean,
)
from lightning_fed.core.updates import Need, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.quadratic import step_by_hand, train_by_hand, weights_after

RULES = {
    "median": lambda **kwargs: CoordinateMedian(**kwargs),
    "trimmed": lambda **kwargs: TrimmedMean(2, **kwargs),
    "krum": lambda **kwargs: Krum(2, **kwargs),
    "multi-krum": lambda **kwargs: MultiKrum(2, 4, **kwargs),
    "bulyan": lambda **kwargs: Bulyan(1, **kwargs),
    "geometric": lambda **kwargs: GeometricMedian(iterations=5000, tolerance=1e-15, **kwargs),
}
SIZES = [7, 1, 30, 12, 5, 5, 9, 2, 4]
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def problem(clients: int = 9, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=size), rng.normal(size=(clients, size))


def distances(deltas: np.ndarray) -> np.ndarray:
    return ((deltas[:, None] - deltas[None]) ** 2).sum(axis=2)


def best_of(deltas: np.ndarray, f: int) -> np.ndarray:
    scores = np.sort(distances(deltas), axis=1)[:, 1 : len(deltas) - f - 1].sum(axis=1)
    return np.argsort(scores, kind="stable")


def weiszfeld(deltas: np.ndarray, weights: np.ndarray) -> np.ndarray:
    center = np.average(deltas, axis=0, weights=weights)
    for _ in range(20_000):
        pulls = weights / np.linalg.norm(deltas - center, axis=1).clip(min=1e-6)
        center = np.average(deltas, axis=0, weights=pulls)
    return center


def bulyan_of(deltas: np.ndarray, f: int) -> np.ndarray:
    picked, left = [], deltas
    while len(picked) < len(deltas) - 2 * f:
        best = best_of(left, f)[0]
        picked.append(left[best])
        left = np.delete(left, best, axis=0)
    far = np.abs(picked - np.median(picked, axis=0))
    nearest = np.argsort(far, axis=0)[: len(picked) - 2 * f]
    return np.take_along_axis(np.array(picked), nearest, axis=0).mean(axis=0)


def by_numpy(name: str, deltas: np.ndarray, weighting: str) -> np.ndarray:
    weights = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(9, 1 / 9)
    ordered = np.sort(deltas, axis=0)
    if name == "median":
        return ordered[4]
    if name == "trimmed":
        return ordered[2:7].mean(axis=0)
    if name == "bulyan":
        return bulyan_of(deltas, 1)
    if name == "geometric":
        return weiszfeld(deltas, weights)
    return deltas[best_of(deltas, 2)[: 1 if name == "krum" else 4]].mean(axis=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.quick(5)
def test_agrees_with_numpy(name: str, weighting: Any) -> None:
    start, deltas = problem()
    after, _ = step_by_hand(RULES[name](lr=0.7, weighting=weighting), start, deltas, SIZES)
    tolerance = 1e-8 if name == "geometric" else 1e-12
    np.testing.assert_allclose(after, start + 0.7 * by_numpy(name, deltas, weighting), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.quick(2)
def test_nine_quadratic_clients_over_rounds(name: str, tmp_path: Path) -> None:
    rng, w = np.random.default_rng(0), np.ones(2)
    clients = {"strengths": rng.uniform(0.5, 2, 9), "targets": 3 * rng.normal(size=(9, 2))}
    found = weights_after(tmp_path, RULES[name](), 4, 3, **clients)
    for _ in range(4):
        w = w + by_numpy(name, train_by_hand(w, 3, **clients) - w, "uniform")
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-8 if name == "geometric" else 1e-12)


def test_only_the_geometric_median_looks_at_samples() -> None:
    start, deltas = problem()
    for name, rule in RULES.items():
        one, other = (step_by_hand(rule(weighting=w), start, deltas, SIZES)[0] for w in ("samples", "uniform"))
        assert np.array_equal(one, other) == (name != "geometric"), name


@every_rule
def test_needs_the_updates_and_nothing_else(rule: Any) -> None:
    assert rule().all_needs == Need.UPDATES


@every_rule
def test_no_movement_leaves_the_model_to_the_bit(rule: Any) -> None:
    start, _ = problem()
    after, _ = step_by_hand(rule(), start, np.zeros((9, 6)), SIZES)
    assert np.array_equal(after, start)


@every_rule
def test_a_single_coordinate_and_the_dtype_of_the_model(rule: Any) -> None:
    start, deltas = problem(size=1)
    after, _ = step_by_hand(rule(), start.astype(np.float32), deltas.astype(np.float32), SIZES)
    assert after.dtype == np.float32
    assert np.isfinite(after).all()
    assert deltas.min() <= after - start <= deltas.max()


@pytest.mark.parametrize("rule", [CoordinateMedian(), TrimmedMean(0), GeometricMedian()], ids=lambda r: r.label)
def test_one_client_is_followed(rule: Aggregator) -> None:
    start, deltas = problem(clients=1)
    after, _ = step_by_hand(rule, start, deltas, [3])
    assert np.array_equal(after, start + deltas[0])


def test_limits_that_are_the_unweighted_mean() -> None:
    start, deltas = problem()
    expected, _ = step_by_hand(FedAvg(weighting="uniform"), start, deltas, SIZES)
    for rule in (TrimmedMean(0), MultiKrum(2, 9), MultiKrum(0, None), Bulyan(0)):
        after, _ = step_by_hand(rule, start, deltas, SIZES)
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-15)
    two, _ = step_by_hand(CoordinateMedian(), start, deltas[:2], SIZES[:2])
    np.testing.assert_allclose(two, start + deltas[:2].mean(axis=0), rtol=0, atol=1e-15)


def test_multi_krum_takes_those_taken_for_sound_by_default() -> None:
    start, deltas = problem()
    after, _ = step_by_hand(MultiKrum(3), start, deltas, SIZES)
    np.testing.assert_allclose(after, start + deltas[best_of(deltas, 3)[:6]].mean(axis=0), rtol=0, atol=1e-15)


@every_rule
def test_masks_are_refused_with_the_reason(rule: Any) -> None:
    reason = rule().mask_refusal
    assert reason
    with pytest.raises(FederatedError, match=f"no mask over .*, got SignAgreement: {reason}.*--aggregator.mask"):
        rule(mask=SignAgreement())


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: TrimmedMean(-1), "trim"),
        (lambda: Krum(-1), "num_corrupted"),
        (lambda: MultiKrum(1, 0), "num_selected"),
        (lambda: Bulyan(-1), "num_corrupted"),
        (lambda: GeometricMedian(iterations=0), "iterations"),
        (lambda: GeometricMedian(tolerance=-1e-9), "tolerance"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing"),
        (lambda: GeometricMedian(smoothing=float("nan")), "smoothing"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"--aggregator\.{option}"):
        make()


@pytest.mark.parametrize(
    ("rule", "option"),
    [
        (TrimmedMean(2), "trim"),
        (Krum(1), "num_corrupted"),
        (MultiKrum(0, 4), "num_selected"),
        (Bulyan(1), "num_corrupted"),
    ],
    ids=["trimmed", "krum", "multi-krum", "bulyan"],
)
def test_a_cohort_that_is_too_small_is_refused_before_training(rule: RobustMean, option: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=rf"got 3: lower `--aggregator\.{option}`"):
        weights_after(tmp_path, rule)
    with pytest.raises(FederatedError, match="got 2"):  # clients of a round that left it
        step_by_hand(rule, np.zeros(2), np.ones((2, 2)), [1, 1])
    rule.check_cohort(rule.min_clients)
    with pytest.raises(FederatedError, match=f"got {rule.min_clients - 1}"):
        rule.check_cohort(rule.min_clients - 1)


class Corrupt(FederatedCallback):
    """Client 0 sends what would throw the mean far off."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        if update.client.id == 0:
            update.delta.fill_(1e5)


@pytest.mark.parametrize(
    "rule", [CoordinateMedian(), TrimmedMean(1), GeometricMedian(), Krum(0), MultiKrum(0, 2)], ids=lambda r: r.label
)
def test_a_corrupted_client_among_three_does_not_carry_the_model_off(rule: Aggregator, tmp_path: Path) -> None:
    assert np.linalg.norm(weights_after(tmp_path, rule, 60, 1, Corrupt())) < 6
    assert np.linalg.norm(weights_after(tmp_path, FedAvg(), 3, 1, Corrupt())) > 1e4


def test_updates_are_left_as_they_are() -> None:
    start, deltas = problem()
    for rule in RULES.values():
        kept = torch.tensor(deltas)
        step_by_hand(rule(), start, deltas, SIZES)
        assert torch.equal(torch.tensor(deltas), kept)
