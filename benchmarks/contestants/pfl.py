"""pfl-research as a side of a row: one process, or several under torchrun (https://github.com/apple/pfl-research)."""

from functools import partial
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, distributed, nn

from benchmarks.contestants.contestant import Contestant
from benchmarks.race.turns import Turns
from benchmarks.workloads import Data, Work

__all__ = ["take_part"]


class Classifier(nn.Module):
    """A network with the methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Computes the mean cross-entropy."""
        return nn.functional.cross_entropy(self.network(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Computes what is evaluated, which is only asked for in the first round, before the repeats that count."""
        return {"loss": Weighted(len(labels) * self.loss(images, labels).item(), len(labels))}


class Rounds(TrainingProcessCallback):
    """Waits between two rounds, in all processes."""

    def __init__(self, turns: Turns, rounds: int) -> None:
        self.turns, self.rounds = turns, rounds
        self.together = distributed.is_initialized()
        self.speaks = not self.together or distributed.get_rank() == 0

    def _begin(self) -> None:
        barrier = distributed.barrier if self.together else None
        if self.speaks:
            self.turns.begin(barrier)
        elif barrier is not None:
            barrier()

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Begins the first round."""
        self._begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Ends a round and begins the next one."""
        if self.speaks:
            self.turns.end()
        if central_iteration + 1 < self.rounds:
            self._begin()
        return False, Metrics()


def users_of(data: Data) -> FederatedDataset:
    """Makes one user for each client, with its samples in random order."""

    def make_dataset(user: int) -> PyTorchTensorDataset:
        rows = data.clients[user]
        order = rows[torch.randperm(len(rows))]
        return PyTorchTensorDataset((data.images[order], data.labels[order]), user_id=str(user))

    return FederatedDataset(make_dataset, get_user_sampler("minimize_reuse", range(len(data.clients))))


def take_part(turns: Turns, work: Work, side: Contestant, rounds: int) -> None:
    """Trains by turns."""
    network = Classifier(work.model())
    model = PyTorchModel(
        network,
        local_optimizer_create=partial(torch.optim.SGD, momentum=work.momentum),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = users_of(work.data())
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=work.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Rounds(turns, rounds)],
        send_metrics_to_platform=False,
    )  # fmt: skip
