"""Every algorithm that changes the loss against rounds by hand, in both engines; and what others get wrong."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import client_algorithms
from lightning_fed.client_algorithms import (
    MOON,
    FedIIR,
    FedLC,
    FedNTD,
    FedRS,
    LogitAdjustment,
    LossAlgorithm,
)
from tests.client_algorithms.losses import scored_clients as hand
from tests.client_algorithms.losses.scored_clients import COHORTS, SIZES, RowTape, fit, fit_weights

CASES: dict[str, tuple[Callable[[], LossAlgorithm], Callable[[], hand.ByHand]]] = {
    "FedLC": (lambda: FedLC(0.7), lambda: hand.CalibratedByHand(0.7)),
    "FedLC, half a sample": (lambda: FedLC(0.7, absent=0.5), lambda: hand.CalibratedByHand(0.7, 0.5)),
    "LogitAdjustment": (lambda: LogitAdjustment(1.5), lambda: hand.AdjustedByHand(1.5)),
    "LogitAdjustment, half": (lambda: LogitAdjustment(1.5, 0.5), lambda: hand.AdjustedByHand(1.5, 0.5)),
    "FedRS": (lambda: FedRS(0.3), lambda: hand.RestrictedByHand(0.3)),
    "MOON": (lambda: MOON(3.0, 0.4), lambda: hand.MoonByHand(3.0, 0.4)),
    "FedNTD": (lambda: FedNTD(2.0, 1.7), lambda: hand.DistilledByHand(2.0, 1.7)),
    "FedIIR": (lambda: FedIIR(0.8, 0.6), lambda: hand.InvariantByHand(0.8, 0.6)),
}
ENGINES = ["sequential", "vectorized"]
CLEAR = 1e-3


@cache
def batches() -> list[dict[int, list[list[int]]]]:
    tape = RowTape()
    fit(tape)
    return tape.rounds


@cache
def by_hand(name: str) -> list[Tensor]:
    return [loop.run(each) for loop in [CASES[name][1]()] for each in batches()]


def differ(one: list[Tensor], other: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def test_the_loop_by_hand_is_fedavg() -> None:
    assert [set(each) for each in batches()] == [set(cohort) for cohort in COHORTS]
    loop = hand.ByHand()
    assert differ([loop.run(each) for each in batches()], fit_weights()) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(5)
def test_rounds_are_those_by_hand(name: str, engine: str) -> None:
    found = fit_weights(CASES[name][0](), engine=engine)
    assert differ(found, by_hand(name)) < 1e-12
    assert differ(found, fit_weights()) > CLEAR


def test_every_loss_is_in_the_suite() -> None:
    tested = {type(make()).__name__ for make, _ in CASES.values()}
    kinds = {name: getattr(client_algorithms, name) for name in client_algorithms.__all__}
    losses = {name for name, kind in kinds.items() if issubclass(kind, LossAlgorithm)}
    assert tested == losses - {"LossAlgorithm", "LabelFlip"}


@pytest.mark.parametrize(
    ("name", "mistaken"),
    [
        ("FedLC", partial(hand.GloballyCalibrated, 0.7)),  # a library counts the labels of all clients together
        ("FedRS", partial(hand.RestrictedByHand, 0.3, fewest=3)),  # another calls classes of two samples absent
        ("FedIIR", partial(hand.InvariantByHand, 0.8, 0.6, kept=False)),  # and one never stores the moving average
    ],
)
def test_mistakes_of_others_would_show(name: str, mistaken: Callable[[], hand.ByHand]) -> None:
    loop = mistaken()
    assert differ([loop.run(each) for each in batches()], by_hand(name)) > CLEAR


def test_counts_are_the_clients_own() -> None:
    """Over balanced data global counts are a constant margin, which no softmax sees: FedAvg, not FedLC."""
    labels = torch.tensor([0] * 4 + [1] * 1 + [1] * 4 + [2] * 1 + [2] * 4 + [3] * 1 + [3] * 4 + [0] * 1)
    assert torch.equal(labels.bincount(), torch.full((4,), 5))
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes: Any = (5, 5, 5, 5)

    def weights(*algorithms: Any) -> Tensor:
        data = hand.scored_data(inputs, labels, sizes=sizes)
        return fit(*algorithms, data=data, max_rounds=1, sampler=None, clients_per_round=1.0).weights

    assert (weights(FedLC(1.0, absent=0.5)) - weights()).abs().max() > CLEAR
    assert sum(SIZES) == len(hand.make_samples()[1])


class Pauses(hand.ScoredModule):
    """Skips every batch of round 2; the gradients at w are taken in eval mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.training and self.trainer.round == 2 else super().training_step(batch, batch_idx)


class Idle(FedIIR):
    """As in a process that trains none of the round's clients."""

    def prepare(self, trainer: Any, client: Any) -> dict[str, Tensor]:
        return super().prepare(trainer, client) if trainer.round == 1 else {}


def test_the_mean_gradient_moves_on_though_no_client_enters_the_round() -> None:
    """So that all processes hold the same, whoever trains."""
    busy, idle = FedIIR(0.8, 0.6), Idle(0.8, 0.6)
    for made in (busy, idle):
        with pytest.warns(UserWarning, match="returned None"):
            trainer = fit(made, module=Pauses(), max_rounds=2)
        assert trainer.logged_metrics["clients/trained"] == 0
    after_one = FedIIR(0.8, 0.6)
    fit(after_one, module=Pauses(), max_rounds=1)
    assert busy.mean is not None
    assert idle.mean is not None
    assert after_one.mean is not None
    assert torch.equal(busy.mean, idle.mean)
    assert not torch.equal(busy.mean, after_one.mean)


def test_moon_begins_as_fedavg() -> None:
    """In a client's first round its last model is w, and the term has no gradient."""
    first, plain = fit_weights(MOON(5.0)), fit_weights()
    torch.testing.assert_close(first[0], plain[0], rtol=0, atol=1e-15)
    assert differ(first[1:], plain[1:]) > CLEAR
