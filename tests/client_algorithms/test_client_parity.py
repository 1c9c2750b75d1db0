"""Every client algorithm against a NumPy loop on the same batches, in double precision."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_fed import client_algorithms
from lightning_fed.aggregators import FedAvg, FedDynServer, FedNova
from lightning_fed.client_algorithms import (
    APFL,
    SCAFFOLD,
    Attack,
    ClientAlgorithm,
    DeltaSGD,
    Ditto,
    FedBN,
    FedCM,
    FedDyn,
    FedGA,
    FedGaLA,
    FedLESAM,
    FedPer,
    FedProx,
    FedRep,
    FedSAM,
    GradAlign,
    LGFedAvg,
    LinearScaling,
    LocalOnly,
    LossAlgorithm,
    MimeLite,
    PerFedAvg,
    PersonalParameters,
    PFedMe,
    StatelessSCAFFOLD,
)
from tests.client_algorithms import hand_loops as hand
from tests.client_algorithms import second_loops as second
from tests.client_algorithms.client_runs import Kept, fit
from tests.client_algorithms.known_clients import SIZES, Layered, Logistic, Quadratic
from tests.client_algorithms.personal_loops import personal

ROUNDS = 4
SGDS = ("sgd", "momentum", "nesterov", "schedule", "decay")
ALL = (*SGDS, "adam", "adamw")
# One client joins in every round, one twice and one only in the last; cohorts have their own Σ p_i.
EMPTY = SIZES.index(0)
COHORTS = ((0, 1, 3), (2, 3, 4), (3, 0, 4), (1, 3, 2))
BETAS = {1: 0.3, 3: 0.1, 4: 0.0}


def beta_by_hand(round: int) -> float:
    return {1: 0.3, 2: 0.3, 3: 0.1, 4: 0.0}[round]


@dataclass(frozen=True)
class Case:
    """An algorithm in the suite: how it is made, by hand too, and what it takes."""

    make: Callable[[], ClientAlgorithm | None]
    by_hand: Callable[..., hand.FedAvgByHand]
    server: Callable[..., Any] = FedAvg
    optimizers: tuple[str, ...] = SGDS
    weightings: tuple[str, ...] = ("samples", "uniform")
    options: dict[str, Any] = field(default_factory=lambda: {"local_epochs": 2})
    problems: tuple[str, ...] = ("quadratic", "logistic")


# γ and β of the normalisation, then weight and bias of the layer.
NORM, LAST, BIAS = np.arange(23) < 8, np.arange(23) >= 8, np.arange(23) >= 20
LAYERED: dict[str, Any] = {"optimizers": ALL, "problems": ("layered",)}
ONE_STEP = {"local_epochs": 1, "batch_size": max(SIZES)}
CASES = {
    "none": Case(lambda: None, hand.FedAvgByHand),
    "FedProx": Case(partial(FedProx, 0.7), partial(hand.FedProxByHand, mu=0.7), optimizers=ALL),
    "SCAFFOLD I": Case(partial(SCAFFOLD, "I"), partial(hand.ScaffoldByHand, option="I"), optimizers=ALL),
    "SCAFFOLD II": Case(SCAFFOLD, partial(hand.ScaffoldByHand, option="II")),
    "StatelessSCAFFOLD": Case(StatelessSCAFFOLD, hand.StatelessByHand),
    "FedCM": Case(partial(FedCM, 0.3), partial(hand.FedCMByHand, alpha=0.3)),
    "MimeLite": Case(partial(MimeLite, 0.6), partial(hand.MimeLiteByHand, beta=0.6), optimizers=ALL),
    "FedGA start": Case(partial(FedGA, 0.3), partial(hand.FedGAByHand, beta=0.3), optimizers=ALL),
    "FedGA step": Case(partial(FedGA, 0.3, "step"), partial(hand.FedGAByHand, beta=0.3, form="step")),
    "FedGA global": Case(
        partial(FedGA, 0.3, measure_from="global"), partial(hand.FedGAByHand, beta=0.3, measure_from="global")
    ),
    "FedGA by round": Case(partial(FedGA, BETAS), partial(hand.FedGAByHand, beta=beta_by_hand)),
    "GradAlign": Case(partial(GradAlign, 0.3), partial(hand.FedGAByHand, beta=0.3, form="step"), options=ONE_STEP),
    "LinearScaling": Case(
        LinearScaling,
        hand.LinearScalingByHand,
        optimizers=("sgd", "momentum", "schedule", "decay"),
        weightings=("uniform",),
        options=ONE_STEP,
    ),
    "FedDyn": Case(
        FedDyn, partial(hand.FedDynByHand, alpha=0.4), partial(FedDynServer, alpha=0.4), weightings=("uniform",)
    ),
    "FedBN": Case(FedBN, partial(personal, hand.FedAvgByHand, own=NORM), **LAYERED),
    "FedPer": Case(FedPer, partial(personal, hand.FedAvgByHand, own=LAST), **LAYERED),
    "LGFedAvg": Case(LGFedAvg, partial(personal, hand.FedAvgByHand, own=NORM), **LAYERED),
    "FedRep": Case(
        FedRep,
        partial(personal, hand.FedAvgByHand, own=LAST, head=2, epochs=True),
        **{**LAYERED, "optimizers": ("sgd", "momentum", "nesterov", "decay", "adam", "adamw")},
        options={"local_epochs": 3},
    ),
    "FedRep by steps": Case(
        partial(FedRep, head_steps=1),
        partial(personal, hand.FedAvgByHand, own=LAST, head=1),
        **{**LAYERED, "optimizers": ("momentum", "nesterov", "decay", "adamw")},
        options={"local_steps": 4},
    ),
    "PersonalParameters": Case(
        partial(PersonalParameters, ["layer.bias"]), partial(personal, hand.FedAvgByHand, own=BIAS), **LAYERED
    ),
    "FedNova with FedProx": Case(partial(FedProx, 0.7), partial(hand.FedNovaByHand, mu=0.7), FedNova),
}
CASES |= {
    "FedSAM": Case(partial(FedSAM, 0.3), partial(second.FedSAMByHand, rho=0.3), optimizers=ALL),
    "FedLESAM": Case(partial(FedLESAM, 0.3), partial(second.LesamByHand, rho=0.3), optimizers=ALL),
    "FedLESAM last": Case(
        partial(FedLESAM, 0.3, "last"), partial(second.LesamByHand, rho=0.3, last=True), optimizers=ALL
    ),
    "FedGaLA": Case(partial(FedGaLA, 0.1), partial(second.GalaByHand, threshold=0.1, sign=1), **LAYERED),
    "FedGaLA step": Case(
        partial(FedGaLA, compare="step"), partial(second.GalaByHand, threshold=0.0, sign=-1), **LAYERED
    ),
    "DeltaSGD": Case(
        DeltaSGD, partial(second.DeltaSgdByHand, eta=0.2, gamma=2.0, delta=0.1, theta=1.0), optimizers=("sgd",) * 4
    ),
    "FedNova with DeltaSGD": Case(
        DeltaSGD,
        partial(second.DeltaNovaByHand, eta=0.2, gamma=2.0, delta=0.1, theta=1.0),
        FedNova,
        optimizers=("sgd",) * 4,
    ),
    "DeltaSGD far": Case(
        partial(DeltaSGD, 0.05, 1.0, 3.0, 2.0),
        partial(second.DeltaSgdByHand, eta=0.05, gamma=1.0, delta=3.0, theta=2.0),
        optimizers=("sgd",) * 4,
        options={"local_epochs": 4},
    ),
    "PerFedAvg": Case(partial(PerFedAvg, 0.2), partial(second.PerFedAvgByHand, inner=0.2), optimizers=ALL),
    "PFedMe": Case(
        partial(PFedMe, 3.0, 4, 0.1), partial(second.PFedMeByHand, lam=3.0, steps=4, lr=0.1), optimizers=ALL
    ),
    "LocalOnly": Case(LocalOnly, second.LocalOnlyByHand, optimizers=ALL),
    "Ditto": Case(partial(Ditto, 0.8), partial(second.DittoByHand, lam=0.8), optimizers=ALL),
    "APFL": Case(partial(APFL, 0.3), partial(second.APFLByHand, alpha=0.3), optimizers=ALL),
}
PROBLEMS = {"quadratic": Quadratic(), "logistic": Logistic(), "layered": Layered()}


def grid() -> list[tuple[str, str, str, str]]:
    """Gives every algorithm every optimizer that it takes, with problems and weightings in turn."""
    found = []
    for at, (name, case) in enumerate(CASES.items()):
        for turn, optimizer in enumerate(case.optimizers, start=at):
            problem, weighting = (
                case.problems[turn % len(case.problems)],
                case.weightings[turn // 2 % len(case.weightings)],
            )
            found.append((name, optimizer, problem, weighting))
    return found


@pytest.mark.parametrize(("name", "optimizer", "problem", "weighting"), grid())
@pytest.mark.quick(40)
def test_rounds_are_those_of_a_loop_by_hand(name: str, optimizer: str, problem: str, weighting: str) -> None:
    case, clients = CASES[name], PROBLEMS[problem]
    made = case.make()
    kept = Kept(made)
    tape = fit(
        clients, *([made, kept] if made is not None else []), case.server(weighting=weighting), optimizer=optimizer,
        max_rounds=ROUNDS, cohorts=COHORTS, **case.options,
    )  # fmt: skip
    loop = case.by_hand(problem=clients, optimizer=optimizer, weighting=weighting)
    for round in range(ROUNDS):
        assert set(tape.batches[round]) == set(COHORTS[round]) - {EMPTY}
        expected = loop.run(tape.batches[round])
        np.testing.assert_allclose(tape.weights[round], expected, rtol=1e-10, atol=1e-11)
        for i, update in loop.updates.items():
            np.testing.assert_allclose(tape.updates[round][i], update, rtol=1e-10, atol=1e-11)
        for i, own in loop.own.items() if isinstance(loop, second.OwnByHand) else ():
            np.testing.assert_allclose(kept.own[round][i], own, rtol=1e-10, atol=1e-11)
    if isinstance(loop, second.LocalOnlyByHand):
        assert np.array_equal(tape.weights[-1], clients.start)
        return
    assert np.abs(tape.weights[-1] - loop.problem.start).max() > 0.01


def test_every_algorithm_meets_both_problems_and_the_weightings_it_takes() -> None:
    for name, case in CASES.items():
        met = [(problem, weighting) for tested, _, problem, weighting in grid() if tested == name]
        assert {problem for problem, _ in met} == set(case.problems)
        assert {weighting for _, weighting in met} == set(case.weightings)


def test_every_algorithm_is_in_the_suite() -> None:
    """Those that change the loss are in losses/, others in test_stale.py, test_dpsgd.py and test_attacks.py."""
    tested = {type(case.make()).__name__ for case in CASES.values()} - {"NoneType"}
    losses = {name for name in client_algorithms.__all__ if issubclass(getattr(client_algorithms, name), LossAlgorithm)}
    attacks = {name for name in client_algorithms.__all__ if issubclass(getattr(client_algorithms, name), Attack)}
    assert tested == set(client_algorithms.__all__) - {"ClientAlgorithm", "DPSGD", "Stale"} - losses - attacks
