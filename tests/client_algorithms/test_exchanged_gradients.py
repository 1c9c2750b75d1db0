"""The gradients of a cohort at w: right for every batch size and source, and without those that are not finite."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, StatelessSCAFFOLD
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule, TensorSource
from lightning_fed.data.batch_sources import LoaderSource
from tests.client_algorithms.client_runs import Given, Tape, fit, make_trainer
from tests.client_algorithms.known_clients import Known, Logistic, LogisticModule
from tests.parts import BySizes

SIZES = (6, 2, 0, 8, 5)
DECAY = 0.3


class Spy(FederatedCallback):
    """Records what an algorithm finds when a client starts."""

    def __init__(self) -> None:
        self.at: list[dict[int, np.ndarray]] = []
        self.gradients: list[dict[int, np.ndarray]] = []
        self.losses: list[dict[int, float]] = []
        self.exchange: list[tuple[Any, ...]] = []
        self.source: Any = None

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.source = trainer.source
        for records in (self.at, self.gradients, self.losses):
            records.append({})

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        start = trainer.start_gradients
        self.at[-1][client.id] = trainer.weights.numpy().copy()
        self.gradients[-1][client.id] = start.gradient.numpy().copy()
        self.losses[-1][client.id] = start.loss.item()

    def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        start = trainer.start_gradients
        ids = [client.id for client in start.clients]
        self.exchange.append((ids, start.rows.numpy().copy(), start.weights.numpy().copy(), start.mean.numpy().copy()))


class Listed(Dataset):
    """A data set that is read sample by sample."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


def spied(source: str, algorithm: Any, weighting: Any = "samples", **options: Any) -> tuple[Spy, Logistic]:
    problem, spy = Logistic(SIZES), Spy()
    tensors = (torch.arange(sum(SIZES)), torch.tensor(problem.inputs), torch.tensor(problem.targets))
    dataset = TensorDataset(*tensors) if source == "tensors" else Listed(tensors)
    data = FederatedDataModule(dataset, BySizes(*SIZES), num_clients=len(SIZES), batch_size=3)
    module: Known = LogisticModule(problem.start)
    module.optimizer = "decay"
    trainer = make_trainer(
        FedAvg(weighting=weighting), algorithm, spy, precision="64-true", max_rounds=2,
        sampler=Given((0, 2, 3), (1, 3, 4)), clients_per_round=3, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    assert isinstance(spy.source, LoaderSource if source == "loader" else TensorSource)
    return spy, problem


def loss_by_hand(problem: Logistic, w: np.ndarray, client: int) -> float:
    rows = problem.rows[client]
    return -np.log(problem.probabilities(w, rows)[np.arange(len(rows)), problem.targets[rows]]).mean()


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("source", ["tensors", "loader"])
@pytest.mark.parametrize("size", [None, 1, 4, 7, 100])
@pytest.mark.parametrize("kind", ["cohort", "client"])
def test_gradients_are_those_of_the_mean_loss_at_w(kind: str, source: str, size: int | None, decayed: bool) -> None:
    """In batches that do not divide a client's data too; with wd·w on top if asked for, and the loss without."""
    algorithm = FedGA(0.2) if kind == "cohort" else SCAFFOLD("I")
    spy, problem = spied(source, algorithm, full_gradient_batch_size=size, full_gradient_weight_decay=decayed)
    assert [set(found) for found in spy.gradients] == [{0, 3}, {1, 3, 4}]
    for at, found, losses in zip(spy.at, spy.gradients, spy.losses, strict=True):
        for i, gradient in found.items():
            expected = problem.full(at[i], i) + (DECAY * at[i] if decayed else 0)
            np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-13)
            assert losses[i] == pytest.approx(loss_by_hand(problem, at[i], i), rel=1e-10)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_their_mean_has_the_aggregators_weights_over_the_cohort(weighting: str) -> None:
    spy, problem = spied("tensors", StatelessSCAFFOLD(), weighting)
    for (ids, rows, weights, mean), at in zip(spy.exchange, spy.at, strict=True):
        sizes = np.array([SIZES[i] if weighting == "samples" else 1 for i in ids])
        gradients = np.array([problem.full(at[i], i) for i in ids])
        np.testing.assert_allclose(weights, sizes / sizes.sum(), rtol=1e-14)
        np.testing.assert_allclose(rows, gradients, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(mean, sizes @ gradients / sizes.sum(), rtol=1e-10, atol=1e-13)


class Spoilt(LogisticModule):
    """The loss of sample 12, which client 3 holds, is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if bool((batch[0] == 12).any()) else loss


@pytest.mark.parametrize("algorithm", [FedGA(0.3), FedGA(0.3, "step"), StatelessSCAFFOLD()])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_gradient_that_is_not_finite_leaves_the_exchange(algorithm: Any, weighting: Any) -> None:
    """Its client takes no part in the round: g̅ and p_i are those of a cohort without it, and so is the model."""
    problem, spy = Logistic(SIZES), Spy()
    assert 12 in problem.rows[3]
    problem.module = Spoilt
    with pytest.warns(UserWarning, match="Client 3 diverged in round 1"):
        tape = fit(problem, FedAvg(weighting=weighting), algorithm, spy, max_diverged=0.5)
    ids, rows, weights, mean = spy.exchange[0]
    sizes = np.array([6, 2, 5] if weighting == "samples" else [1, 1, 1])
    gradients = np.array([problem.full(problem.start, i) for i in (0, 1, 4)])
    assert ids == [0, 1, 4] == list(tape.updates[0])
    np.testing.assert_allclose(weights, sizes / sizes.sum(), rtol=1e-14)
    np.testing.assert_allclose(rows, gradients, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(mean, sizes @ gradients / sizes.sum(), rtol=1e-10, atol=1e-13)
    without = fit(Logistic(SIZES), FedAvg(weighting=weighting), algorithm, cohorts=[(0, 1, 4)])
    np.testing.assert_array_equal(tape.weights[0], without.weights[0])


class Normalized(LightningModule):
    """BatchNorm and dropout, which the gradient's mode decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_they_see_the_global_models_buffers_and_no_dropout() -> None:
    torch.manual_seed(0)
    problem, spy, module = Logistic((6, 8, 5)), Spy(), Normalized()
    module.layers[1].running_mean.normal_()
    before = deepcopy(module.layers).eval()
    data = TensorDataset(torch.arange(19), torch.tensor(problem.inputs), torch.tensor(problem.targets))
    trainer = make_trainer(FedAvg(), FedGA(0.1), spy, Tape(), precision="64-true", full_gradient_batch_size=4)
    trainer.fit(module, FederatedDataModule(data, BySizes(6, 8, 5), num_clients=3, batch_size=8))
    for i, rows in enumerate(problem.rows):
        loss = nn.functional.cross_entropy(before(data.tensors[1][rows]), data.tensors[2][rows])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(before.parameters()))])
        np.testing.assert_allclose(spy.gradients[0][i], expected.numpy(), rtol=1e-9, atol=1e-13)
