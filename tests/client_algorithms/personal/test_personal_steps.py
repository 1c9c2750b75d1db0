"""The steps of clients that keep a part of the model: phases, windows, schedules, chunks and steps by hand."""

from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.aggregators import FedAvg, FedNova
from lightning_fed.client_algorithms import SCAFFOLD, FedCM, FedPer, FedRep, PersonalParameters
from lightning_fed.core.updates import Need
from lightning_fed.data.holdout import DivisionOptions
from lightning_fed.errors import FederatedError
from tests.client_algorithms.client_runs import fit as taped
from tests.client_algorithms.client_runs import make_data, make_trainer
from tests.client_algorithms.known_clients import Known, Layered
from tests.client_algorithms.personal.personal_runs import COHORTS, PROBLEM, Own, assert_same, run


@pytest.mark.parametrize("algorithm", ["SCAFFOLD", "FedCM", "FedNova"])
def test_a_distance_is_that_of_the_steps_which_move_the_body(algorithm: str) -> None:
    made: dict[str, Any] = {"SCAFFOLD": SCAFFOLD, "FedCM": partial(FedCM, 0.3), "FedNova": FedNova}
    options: Any = {"local_epochs": 3, "max_rounds": 2}
    tape = taped(PROBLEM, made[algorithm](), FedRep(), optimizer="momentum", **options)
    for batches, distances in zip(tape.batches, tape.distances, strict=True):
        for client, rows in batches.items():
            if rows:  # a third of the steps, with fresh momentum; the first gradient is not damped, by torch's rule
                buffer = total = 0.0
                for number in range(len(rows) // 3):
                    buffer = 1.0 if number == 0 else 0.8 * buffer + 0.9
                    total += 0.1 * buffer
                np.testing.assert_allclose(distances[client], total, rtol=1e-12)
    alone, many = (
        run(made[algorithm](), FedRep(), optimizer="momentum", engine=engine, **options)
        for engine in ("sequential", "vectorized")
    )
    assert_same(alone, many)


@pytest.mark.parametrize("make", [FedPer, FedRep])
def test_windows_of_batches_are_alike_in_both_engines(make: Any) -> None:
    alone, many = (
        run(make(), engine=engine, accumulate_grad_batches=2, optimizer="momentum")
        for engine in ("sequential", "vectorized")
    )
    assert_same(alone, many)


@pytest.mark.parametrize(("kind", "words"), [(FedPer, ""), (FedRep, "schedule steps with each local step")])
def test_a_schedule_of_steps_goes_with_epochs_of_the_head_in_the_sequential_engine(kind: Any, words: str) -> None:
    run(kind(), optimizer="schedule", engine="sequential")
    if not words:
        assert_same(*(run(kind(), optimizer="schedule", engine=engine) for engine in ("sequential", "vectorized")))
    else:
        with pytest.raises(FederatedError, match=words):
            run(kind(), optimizer="schedule", engine="vectorized")
        steps: Any = {"optimizer": "schedule", "local_steps": 5, "local_epochs": None}
        assert_same(*(run(SCAFFOLD(), kind(), engine=engine, **steps) for engine in ("sequential", "vectorized")))


class ByItself(PROBLEM.module):  # type: ignore[misc, name-defined]  # steps its optimizer in `training_step`
    def __init__(self, start: np.ndarray) -> None:
        super().__init__(start)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_module_that_steps_by_itself_keeps_a_part_too() -> None:
    found = []
    for kind in (PROBLEM.module, ByItself):
        own, module = Own(), kind(PROBLEM.start)
        trainer = make_trainer(FedPer(), own, max_rounds=3, precision="64-true")
        trainer.fit(module, make_data(PROBLEM))
        found.append(own)
    assert_same(*found)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("kind", [FedPer, FedRep])
@pytest.mark.quick(2)
def test_chunks_and_the_order_of_clients_change_nothing(kind: Any, chunk: int) -> None:
    whole, parts = (run(kind(), engine="vectorized", cohorts=None, chunk_size=size) for size in (5, chunk))
    assert_same(whole, parts)
    turned = run(kind(), engine="vectorized", cohorts=[cohort[::-1] for cohort in COHORTS])
    assert_same(run(kind(), engine="vectorized"), turned)


class TiedModule(Known):
    """A weight that two layers share, in torch's other layout of images, under a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 2, (1, 2))
        self.first, self.second, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.second.weight = self.first.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.image(batch[1].reshape(-1, 2, 1, 2)).flatten(1)
        return nn.functional.cross_entropy(self.out(self.second(self.first(hidden).tanh())), batch[2])


@pytest.mark.parametrize("names", [["second.weight"], ["image", "out.bias"]])
def test_tied_weights_and_other_layouts_are_alike_in_both_engines(names: list[str]) -> None:
    found = []
    for engine in ("sequential", "vectorized"):
        own = Own()
        torch.manual_seed(0)
        trainer = make_trainer(
            PersonalParameters(names), own, max_rounds=3, precision="64-true", engine=engine,
            memory_format="channels_last",
        )  # fmt: skip
        module = TiedModule()
        trainer.fit(module, make_data(PROBLEM))
        assert module.first.weight is module.second.weight
        assert len(trainer.weights) + own.values[-1].shape[1] == sum(p.numel() for p in module.parameters())
        found.append(own)
    assert_same(*found)
    assert np.abs(found[0].values[-1] - found[0].values[0]).max() > 1e-3


class ReadsLosses(FedAvg):
    """FedAvg that also reads losses over held-out samples."""

    needs = Need.MEAN | Need.LOSSES
    losses_over = "held_out"

    def __init__(self, at: Literal["start", "end"]) -> None:
        super().__init__()
        self.losses_at = at


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("at", ["start", "end"])
def test_a_pass_at_w_leaves_what_the_client_keeps_alone(engine: Any, at: Any) -> None:
    """It is taken at the client's former part; what it has trained since is kept all the same."""
    found = []
    for rule in (FedAvg(), ReadsLosses(at)):
        own, module = Own(), PROBLEM.module(PROBLEM.start)
        trainer = make_trainer(rule, FedPer(), own, max_rounds=3, precision="64-true", engine=engine)
        data = make_data(Layered(tuple(3 * size for size in PROBLEM.sizes)))
        data.held_out = DivisionOptions(0.34, "per_client")
        trainer.fit(module, data)
        found.append(own)
    assert_same(*found, rtol=1e-15)
    assert np.abs(found[0].values[-1] - found[0].values[0]).max() > 1e-3
