"""Every server rule under every mask, over rounds in double precision, against formulas in NumPy."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import aggregators
from lightning_fed.aggregators import Aggregator
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Cohort, Need, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import (
    DelayedMask,
    MagnitudeAgreement,
    Mask,
    MaskControl,
    NoiseFloorMask,
    PartialMask,
    SANDMask,
    SignAgreement,
)
from tests.parity import rules_by_hand as by_hand
from tests.parity.rounds_to_reduce import SHAPES, start_of
from tests.parity.rules_by_hand import LR, Round
from tests.parts import cover, leaves


@dataclass(frozen=True)
class Case:
    """A rule twice: how the package makes it from the options that all share, and its formula.

    Attributes:
        weightings: Those that it takes.
        weighs: Whether the p_i enter its step.
        memoryless: Whether a mask before it and one after it are the same.
        fewest: The clients that it needs in a round.
        masked: Whether a mask can go over it.
        before: Whether one can come before it.
        rtol: The relative tolerance.
    """

    make: Callable[..., Aggregator]
    formula: by_hand.Rule
    weightings: tuple[str, ...] = ("samples", "uniform")
    weighs: bool = True
    memoryless: bool = False
    fewest: int = 1
    masked: bool = True
    before: bool = True
    rtol: float = 1e-12


# Options that are left out on both sides are defaults that the papers name.
ROBUST = partial(Case, masked=False, weighs=False)
SEED = 5
RULES = {
    "FedAvg": Case(aggregators.FedAvg, by_hand.fedavg, memoryless=True),
    "FedAvgM": Case(aggregators.FedAvgM, by_hand.fedavgm),
    "FedAdagrad": Case(aggregators.FedAdagrad, by_hand.fedadagrad),
    "FedAdagrad from 0": Case(
        partial(aggregators.FedAdagrad, epsilon=0.1, initial_v="zero"),
        partial(by_hand.fedadagrad, epsilon=0.1, v_from=0.0),
    ),
    "FedAdam": Case(aggregators.FedAdam, by_hand.fedadam),
    "FedAdam from 0": Case(
        partial(aggregators.FedAdam, epsilon=0.1, initial_v="zero"), partial(by_hand.fedadam, epsilon=0.1, v_from=0.0)
    ),
    "FedYogi": Case(aggregators.FedYogi, partial(by_hand.fedadam, yogi=True)),
    "FedYogi from 0": Case(
        partial(aggregators.FedYogi, epsilon=0.1, initial_v="zero"),
        partial(by_hand.fedadam, epsilon=0.1, v_from=0.0, yogi=True),
    ),
    "FedNova": Case(aggregators.FedNova, by_hand.fednova, memoryless=True),
    "FedLWS": Case(aggregators.FedLWS, partial(by_hand.fedlws, beta=0.03, least=0.01, most=0.2), rtol=1e-11),
    "FedLWS unbound": Case(
        partial(aggregators.FedLWS, 0.4, 0.0, 9.0), partial(by_hand.fedlws, beta=0.4, least=0.0, most=9.0), rtol=1e-11
    ),
    "FedDynServer": Case(
        partial(aggregators.FedDynServer, 0.3), partial(by_hand.feddyn, alpha=0.3), weightings=("uniform",)
    ),
    "FedGMA": Case(aggregators.FedGMA, by_hand.fedgma, weightings=("samples", "uniform", "inverse")),
    "FedGMA prose": Case(partial(aggregators.FedGMA, p_means="prose"), partial(by_hand.fedgma, prose=True)),
    "CGW": Case(partial(aggregators.CGW, 0.4), partial(by_hand.cgw, alpha=0.4)),
    "CGW shared": Case(
        partial(aggregators.CGW, 0.4, constraint="shared"), partial(by_hand.cgw, alpha=0.4, shared=True)
    ),
    "ServerOptimizer": Case(
        partial(aggregators.ServerOptimizer, partial(torch.optim.Adam, lr=0.2, eps=0.05)),
        partial(by_hand.adam, lr=0.2, eps=0.05),
    ),
    "ServerOptimizer decay": Case(
        partial(aggregators.ServerOptimizer, partial(torch.optim.Adam, lr=0.2, eps=0.05, weight_decay=0.3)),
        partial(by_hand.adam, lr=0.2, eps=0.05, decay=0.3),
    ),
    "CoordinateMedian": ROBUST(aggregators.CoordinateMedian, by_hand.median),
    "TrimmedMean": ROBUST(aggregators.TrimmedMean, partial(by_hand.trimmed_mean, trim=1), fewest=3),
    "Krum": ROBUST(aggregators.Krum, partial(by_hand.krum, corrupted=1, selected=1), fewest=5),
    "MultiKrum": ROBUST(aggregators.MultiKrum, partial(by_hand.krum, corrupted=1, selected=-1), fewest=5),
    "MultiKrum of 3": ROBUST(
        partial(aggregators.MultiKrum, 0, 3), partial(by_hand.krum, corrupted=0, selected=3), fewest=3
    ),
    "Bulyan": ROBUST(aggregators.Bulyan, partial(by_hand.bulyan, corrupted=1), fewest=7),
    "FedExP": Case(aggregators.FedExP, partial(by_hand.fedexp, epsilon=0.0)),
    "FedExP bounded": Case(partial(aggregators.FedExP, 0.5), partial(by_hand.fedexp, epsilon=0.5)),
    "FedACG": Case(aggregators.FedACG, partial(by_hand.fedavgm, beta=0.85)),
    "SignMajority": ROBUST(aggregators.SignMajority, by_hand.sign_majority),
    "TIES": ROBUST(partial(aggregators.TIES, 0.4), partial(by_hand.ties, keep=0.4)),
    "TIES of all": ROBUST(partial(aggregators.TIES, 1.0), partial(by_hand.ties, keep=1.0)),
    "PCGrad": Case(aggregators.PCGrad, partial(by_hand.pcgrad, seed=SEED), before=False, rtol=1e-10),
    "FedFV": Case(
        partial(aggregators.FedFV, 0.2), partial(by_hand.fedfv, alpha=0.2, tau=1), before=False, rtol=1e-10
    ),
    "FedMGDA": Case(
        partial(aggregators.FedMGDA, 0.1), partial(by_hand.fedmgda, epsilon=0.1), before=False, rtol=1e-10
    ),
    "FedMGDA free": Case(
        partial(aggregators.FedMGDA, 1.0), partial(by_hand.fedmgda, epsilon=1.0), before=False, rtol=1e-10,
        weighs=False,
    ),
    "FedOMG": Case(aggregators.FedOMG, partial(by_hand.fedomg, kappa=0.5), before=False, rtol=1e-5),
    "FedAWA": Case(
        partial(aggregators.FedAWA, 4, 0.2), partial(by_hand.fedawa, steps=4, rate=0.2), before=False, rtol=1e-7
    ),
    "FedGaLAServer": Case(
        aggregators.FedGaLAServer, partial(by_hand.fedgala, iterations=3, mix=0.0), before=False, rtol=1e-10
    ),
    "FedGaLAServer mixed": Case(
        partial(aggregators.FedGaLAServer, 1, 0.3), partial(by_hand.fedgala, iterations=1, mix=0.3), before=False,
        rtol=1e-10,
    ),
    "QFedAvg": Case(
        partial(aggregators.QFedAvg, 1.5, 4.0), partial(by_hand.qfedavg, q=1.5, lipschitz=4.0), before=False
    ),
    "TERM": Case(partial(aggregators.TERM, 0.7), partial(by_hand.term, t=0.7), before=False),
    "AFL": Case(partial(aggregators.AFL, 0.3), partial(by_hand.afl, gamma=0.3), memoryless=True),
    "FedDGGA": Case(partial(aggregators.FedDGGA, 0.3), partial(by_hand.feddg_ga, d=0.3), memoryless=True),
    "GeometricMedian": ROBUST(
        partial(aggregators.GeometricMedian, iterations=100_000, tolerance=1e-14, smoothing=0.05),
        partial(by_hand.geometric_median, smoothing=0.05), weighs=True, rtol=1e-8,
    ),
}  # fmt: skip
MASKS: dict[str, tuple[Callable[[], Mask], by_hand.Mask] | None] = {
    "none": None,
    "soft": (SignAgreement, by_hand.sign_agreement("0.4")),
    "binary": (lambda: SignAgreement(0.6, binary=True), by_hand.sign_agreement("0.6", binary=True)),
    "above": (lambda: SignAgreement(0.4, comparison=">"), by_hand.sign_agreement("0.4", above=True)),
    "samples": (lambda: SignAgreement(0.56, votes="samples"), by_hand.sign_agreement("0.56", by_samples=True)),
    "samples above": (
        lambda: SignAgreement(0.58, True, ">", "samples"), by_hand.sign_agreement("0.58", True, True, True),
    ),
    "magnitude": (lambda: MagnitudeAgreement(0.6), by_hand.magnitude_agreement("0.6")),
    "magnitude binary": (lambda: MagnitudeAgreement(0.3, True), by_hand.magnitude_agreement("0.3", True)),
    "sand": (lambda: SANDMask(0.2, k=0.5), by_hand.sand("0.2", 0.5)),
    "progress": (lambda: MaskControl(SignAgreement(), "progress"), by_hand.sign_agreement("0.4")),
    "length": (lambda: MaskControl(SignAgreement(), "length"), by_hand.sign_agreement("0.4")),
    "direction": (lambda: MaskControl(SignAgreement(), "direction"), by_hand.sign_agreement("0.4")),
    "values": (lambda: MaskControl(SignAgreement(), "values"), by_hand.sign_agreement("0.4")),
    "delayed": (lambda: DelayedMask(SignAgreement(), 1), by_hand.sign_agreement("0.4")),
    "partial": (lambda: PartialMask(SignAgreement(), ["head"]), by_hand.sign_agreement("0.4")),
}  # fmt: skip

GRID = [
    (shape, rule, mask, weighting, apply)
    for shape, rounds in SHAPES.items()
    for rule, case in RULES.items()
    for mask in (MASKS if case.masked else ["none"])
    for weighting in case.weightings
    for apply in (["after"] if mask == "none" or not case.before else ["after", "before"])
    if len(rounds[0].sizes) >= case.fewest
]


def train(aggregator: Aggregator, w: np.ndarray, rounds: list[Round]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Returns w after each round, and what was logged in the last; calls the hooks in the loop's order."""
    weights, logged = torch.tensor(w), {}
    names = (*(f"part {at}" for at in range(len(rounds[0].tensors) - 1)), "head")
    vector = SimpleNamespace(names=names, parameters=weights.split(rounds[0].tensors))
    trainer: Any = SimpleNamespace(weights=weights, vector=vector, seed=SEED)
    trainer.max_rounds = len(rounds)
    module: Any = SimpleNamespace(log=logged.__setitem__, log_dict=logged.update)
    reducer = RoundReducer(weights, aggregator.all_needs, rounds[0].registered)
    delta, gradient = torch.empty_like(weights), torch.empty_like(weights)
    path = []
    for number, each in enumerate(rounds, 1):
        clients = tuple(Client(i, int(size), number) for i, size in enumerate(each.sizes))
        trainer.client_sizes = each.sizes
        aggregator.on_round_start(trainer, module, Cohort(number, clients))
        reducer.reset(len(clients))
        for client in clients:
            delta.copy_(torch.tensor(each.deltas[client.id]))
            gradient.copy_(torch.tensor(each.gradients[client.id]))
            update = Update(client, delta, 1, {}, aggregator.client_weight(client), float(each.distances[client.id]))
            losses = by_hand.losses_of(each) if Need.ANY_LOSS & aggregator.all_needs else each.losses
            update.gradient, update.loss = gradient, torch.tensor(losses[client.id])
            aggregator.on_client_end(trainer, module, update)
            reducer.add(update, average_buffers=False)
            aggregator.on_client_entered(trainer, module, update)
        reduced, after = reducer.reduce(number), torch.tensor(by_hand.losses_after(each))
        trainer.start_gradients = SimpleNamespace(losses_now=lambda clients, after=after: after)
        with torch.no_grad():
            aggregator.step(trainer, module, reduced)
            aggregator.on_after_server_step(trainer, module, reduced)
        path.append(weights.numpy().copy())
    return path, logged


def formula(shape: str, rule: str, mask: str, weighting: str, apply: str) -> list[np.ndarray]:
    keep = mask if mask in ("progress", "length", "direction") else "all"
    given = (masks_of(shape, mask), weighting, apply, start_of(shape), SHAPES[shape], keep)
    return by_hand.train(RULES[rule].formula, *given)


@cache
def masks_of(shape: str, mask: str) -> list[np.ndarray]:
    over, rounds = MASKS[mask], SHAPES[shape]
    found = [np.ones(sum(each.tensors)) if over is None else over[1](each) for each in rounds]
    if mask == "values":
        found = [
            by_hand.shuffled(m, each.tensors, SEED, i) for i, (m, each) in enumerate(zip(found, rounds, strict=True), 1)
        ]
    if mask == "partial":
        sizes = [each.tensors[-1] for each in rounds]
        found = [np.r_[m[:-size], np.ones(size)] for m, size in zip(found, sizes, strict=True)]
    return [np.ones_like(found[0]), *found[1:]] if mask == "delayed" else found


def test_every_aggregator_and_mask_of_the_package_is_in_the_suite() -> None:
    for module in pkgutil.walk_packages(aggregators.__path__, f"{aggregators.__name__}."):
        import_module(module.name)
    made = {type(case.make(lr=LR)) for case in RULES.values()}
    assert leaves(Aggregator) == made, "say in RULES how the aggregator is made, and its formula"
    made = {type(over[0]()) for over in MASKS.values() if over is not None}
    assert leaves(Mask) - {NoiseFloorMask} == made, "say in MASKS how the mask is made, and its formula"


@pytest.mark.parametrize(("shape", "rule", "mask", "weighting", "apply"), cover(GRID, 1))
def test_three_rounds_agree_with_the_formula(shape: str, rule: str, mask: str, weighting: str, apply: str) -> None:
    case, over = RULES[rule], MASKS[mask]
    aggregator = case.make(lr=LR, mask=None if over is None else over[0](), weighting=weighting, apply=apply)
    found, logged = train(aggregator, start_of(shape), SHAPES[shape])
    expected = formula(shape, rule, mask, weighting, apply)
    np.testing.assert_allclose(found, expected, rtol=case.rtol, atol=case.rtol / 100)
    moves = shape != "still" or ("decay" in rule and (mask in ("none", "delayed", "partial") or apply == "before"))
    assert (abs(found[-1] - start_of(shape)).max() > 1e-3) == moves
    if over is not None:
        assert logged["mask/mean"].item() == pytest.approx(masks_of(shape, mask)[-1].mean(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_combination_agrees_with_the_formula(rule: str) -> None:
    for case in GRID:
        if case[1] == rule:
            test_three_rounds_agree_with_the_formula(*case)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_out_of_the_grid_is_refused(rule: str) -> None:
    case = RULES[rule]
    for over in MASKS.values():
        if over is not None and not case.masked:
            with pytest.raises(FederatedError, match="Expected no mask"):
                case.make(lr=LR, mask=over[0]())
        if over is not None and case.masked and not case.before:
            with pytest.raises(FederatedError, match="apply after"):
                case.make(lr=LR, mask=over[0](), apply="before")
    for weighting in {"samples", "uniform"} - set(case.weightings):
        with pytest.raises(FederatedError, match="weighting"):
            case.make(lr=LR, weighting=weighting)
    if case.fewest > 1:
        short = [replace(each, sizes=each.sizes[: case.fewest - 1]) for each in SHAPES["seven clients"]]
        with pytest.raises(FederatedError, match=f"got {case.fewest - 1}"):
            train(case.make(lr=LR), start_of("plain"), short)


@pytest.mark.parametrize("rule", ["CGW", "CGW shared"])
def test_a_gradient_that_is_not_finite_corrects_nothing(rule: str) -> None:
    rounds = SHAPES["plain"][:1]
    gradients = rounds[0].gradients.copy()
    gradients[2, 3], gradients[4, 0] = np.nan, -np.inf
    broken = [replace(rounds[0], gradients=gradients)]
    found, _ = train(RULES[rule].make(lr=LR), start_of("plain"), broken)
    expected = by_hand.train(RULES[rule].formula, [np.ones(23)], "samples", "after", start_of("plain"), broken)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert abs(expected[0] - formula("plain", rule, "none", "samples", "after")[0]).max() > 1e-3


@pytest.mark.slow
def test_the_rounds_tell_everything_apart() -> None:
    """No agreement above could come from the wrong rule, mask, weights or order."""
    plain = {key[1:]: formula(*key)[-1] for key in GRID if key[0] == "plain"}
    for (one, here), (other, there) in combinations(plain.items(), 2):
        case, differing = RULES[one[0]], [i for i in range(4) if one[i] != other[i]]
        if one[1] == "sand" and {one[0], other[0]} <= {"FedAvg", "FedExP", "FedExP bounded"}:
            continue  # before the rule it lengthens Δ, so that FedExP's factor is 1
        if one[:2] == other[:2] and "FedExP" in one[0] and one[1] == "direction":
            continue  # it leaves ‖Δ‖, and so the factor, as it is
        if differing == [2] and not case.weighs or differing == [3] and case.memoryless:
            assert np.allclose(here, there, rtol=1e-12)
        elif len(differing) == 1:
            assert abs(here - there).max() > 1e-4, (one, other)


def test_the_rounds_lie_on_thresholds() -> None:
    """Coordinates on which a comparison in floating point would go wrong, and others exactly on a threshold."""
    for each in SHAPES["plain"]:
        votes = abs(np.sign(each.deltas).sum(axis=0))
        samples = abs(each.sizes @ np.sign(each.deltas))
        assert {1, 2, 3} <= set(votes)
        assert {28, 29} <= set(samples)
        assert 0.56 * 50 > 28
        assert 0.58 * 50 < 29
        assert 0.6 in abs(each.deltas.sum(axis=0)) / np.maximum(abs(each.deltas).sum(axis=0), 1e-9)
        agreeing = {"formula": abs(np.sign(each.gradients).sum(axis=0)), "prose": (each.gradients > 0).sum(axis=0)}
        assert all(4 in counts for counts in agreeing.values()), "p = 0.8 of five"


@pytest.mark.parametrize("rule", ["Krum", "MultiKrum"])
def test_the_rounds_have_ties_for_krum(rule: str) -> None:
    """Mirrored, the greatest of the tied updates is taken instead of the least."""
    rounds, start = SHAPES["whole numbers"], start_of("whole numbers")
    given = (RULES[rule].formula, masks_of("whole numbers", "none"), "uniform", "after", start)
    once = by_hand.train(*given, rounds)
    again = by_hand.train(*given, [replace(each, deltas=-each.deltas) for each in rounds])
    assert not np.allclose(once - start, start - again)
