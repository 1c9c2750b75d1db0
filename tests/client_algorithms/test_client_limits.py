"""Where a client algorithm is FedAvg, it is so to the last bit, with everything in the model that an extra pass or an
added zero could disturb."""

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, FedProx, GradAlign, LinearScaling
from lightning_fed.data import FederatedDataModule
from tests.client_algorithms.client_runs import Tape, make_trainer
from tests.parts import BySizes

SIZES = (20, 6, 0, 13, 9)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "momentum and decay": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.05),
    "adamw": lambda p: AdamW(p, 0.05, weight_decay=0.05),
}
SGDS = [name for name in OPTIMIZERS if name != "adamw"]


class Net(LightningModule):
    """Dropout, BatchNorm, draws from every stream, a metric object, and parameters that some or all batches miss."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.at_times = nn.Parameter(torch.ones(3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.optimizer = optimizer
        self.passes = itertools.count()  # an object of its own: attributes are put back after a gradient pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.passes)
        _, x, y = batch
        x = x + 0.1 * np.random.rand() + 0.1 * random.random()
        output = self.layers(x)
        if batch_idx != 1:
            output = output + self.at_times * x[:, :3]
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy)
        return cross_entropy(output, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Outcome:
    """What a run left: the model with its buffers, every update, what was logged."""

    def __init__(self, net: Net, tape: Tape, logged: dict[str, float], samples: dict[str, int]) -> None:
        self.model = {name: value.clone() for name, value in net.state_dict().items()}
        self.updates, self.logged, self.samples, self.passes = tape.updates, logged, samples, next(net.passes)


@cache
def run(
    make: Callable[[], Any],
    optimizer: str,
    mode: Any = "eval",
    one_step: bool = False,
    weighting: Any = "samples",
    **options: Any,
) -> Outcome:
    torch.manual_seed(1)
    net, tape = Net(optimizer), Tape()
    rng = torch.Generator().manual_seed(2)
    y = torch.randint(0, 3, (sum(SIZES),), generator=rng)
    x = torch.randn(len(y), 5, generator=rng) + y[:, None]
    data = FederatedDataModule(
        TensorDataset(torch.arange(len(y)), x, y), BySizes(*SIZES), num_clients=5, batch_size=20 if one_step else 7
    )
    made = make()
    options = {"max_rounds": 3, "clients_per_round": 4, "local_epochs": 1 if one_step else 2, **options}
    trainer = make_trainer(
        FedAvg(weighting=weighting), tape, *([made] if made else []), full_gradient_mode=mode, **options
    )
    trainer.fit(net, data)
    return Outcome(net, tape, dict(trainer.metrics.callback), dict(trainer.totals))


def plain() -> None:
    return None


def expect_same(one: Outcome, other: Outcome) -> None:
    for name, value in one.model.items():
        assert torch.equal(value, other.model[name]), name
    for ours, theirs in zip(one.updates, other.updates, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(update, theirs[i]) for i, update in ours.items())
    assert any(one.updates)
    for name in ("train/loss", "accuracy"):
        assert one.logged[name] == other.logged[name]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fedprox_at_0(optimizer: str) -> None:
    expect_same(run(plain, optimizer), run(lambda: FedProx(0.0), optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fedprox_at_0_steps_no_parameter_that_the_loss_missed(optimizer: str) -> None:
    outcome = run(lambda: FedProx(0.0), optimizer)
    assert torch.equal(outcome.model["unused"], torch.ones(3))
    assert not torch.equal(outcome.model["at_times"], torch.ones(3))


def test_fedprox_in_its_first_step() -> None:
    """Whatever μ is: nothing has moved yet."""
    expect_same(run(plain, "momentum", one_step=True), run(lambda: FedProx(3.0), "momentum", one_step=True))


GA_AT_0: dict[str, Callable[[], Any]] = {
    "start": lambda: FedGA(0.0),
    "step": lambda: FedGA(0.0, form="step"),
    "global": lambda: FedGA(0.0, measure_from="global"),
    "not yet": lambda: FedGA({4: 0.3}),
    "no longer": lambda: FedGA({1: 0.0, 4: 0.3}),
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("form", GA_AT_0)
@pytest.mark.parametrize("optimizer", SGDS)
@pytest.mark.quick(6)
def test_fedga_at_0_although_the_gradients_were_exchanged(optimizer: str, form: str, mode: str) -> None:
    """The gradient pass restores buffers and metric objects and draws from streams of its own."""
    fedavg, fedga = run(plain, optimizer), run(GA_AT_0[form], optimizer, mode)
    expect_same(fedavg, fedga)
    assert fedga.passes > fedavg.passes
    assert fedga.samples["gradients"] > fedga.samples["samples"] == fedavg.samples["gradients"]
    assert fedga.samples["comm/rounds"] == 2 * fedavg.samples["comm/rounds"]
    assert torch.equal(fedga.model["unused"], torch.ones(3))


def test_fedga_above_0_is_something_else() -> None:
    fedavg, fedga = run(plain, "momentum"), run(lambda: FedGA(1e-3), "momentum")
    assert any(not torch.equal(value, fedga.model[name]) for name, value in fedavg.model.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradalign_at_0_is_one_step_of_fedavg(optimizer: str) -> None:
    expect_same(run(plain, optimizer, one_step=True), run(lambda: GradAlign(0.0), optimizer, one_step=True))


@pytest.mark.parametrize(("option", "mode"), [("I", "eval"), ("I", "train"), ("II", "eval")])
@pytest.mark.parametrize("optimizer", SGDS)
def test_scaffold_in_its_first_round(optimizer: str, option: Any, mode: str) -> None:
    rounds = {"max_rounds": 1, "clients_per_round": 1.0}
    fedavg, scaffold = run(plain, optimizer, **rounds), run(lambda: SCAFFOLD(option), optimizer, mode, **rounds)
    expect_same(fedavg, scaffold)
    assert (scaffold.passes > fedavg.passes) == (option == "I")


def test_scaffold_in_its_second_round_is_something_else() -> None:
    rounds = {"max_rounds": 2, "clients_per_round": 1.0}
    first, second = run(plain, "momentum", **rounds).updates, run(SCAFFOLD, "momentum", **rounds).updates
    assert all(np.array_equal(first[0][i], second[0][i]) for i in first[0])
    assert not any(np.array_equal(first[1][i], second[1][i]) for i in first[1])


def test_scaffold_steps_no_parameter_that_no_client_has_a_gradient_for() -> None:
    outcome = run(SCAFFOLD, "momentum and decay", clients_per_round=1.0)
    assert torch.equal(outcome.model["unused"], torch.ones(3))


def test_linear_scaling_of_one_client_is_its_plain_step() -> None:
    alone: Any = {"one_step": True, "clients_per_round": 1, "max_rounds": 2, "weighting": "uniform"}
    expect_same(run(plain, "momentum", **alone), run(LinearScaling, "momentum", **alone))
