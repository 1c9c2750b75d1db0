"""A trainer for clients with known gradients, and a tape of what they did."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.updates import Cohort, Update
from lightning_fed.data import FederatedDataModule
from lightning_fed.sampling import ClientSampler
from tests.client_algorithms.known_clients import Problem
from tests.parts import BySizes


class Tape(FederatedCallback):
    """Records, for each round, who trained on which rows, the updates and the model after it.

    Attributes:
        batches: Row numbers of a client's batches, by client, one dict for each round; its keys are the cohort.
        updates: δ_i as the server gets it, shape (d,), by client.
        weights: w after the round, shape (d,).
        distances: a_i, by client.
    """

    def __init__(self) -> None:
        self.batches: list[dict[int, list[np.ndarray]]] = []
        self.updates: list[dict[int, np.ndarray]] = []
        self.weights: list[np.ndarray] = []
        self.distances: list[dict[int, float]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Cohort) -> None:
        self.batches.append({client.id: [] for client in cohort.clients})
        self.updates.append({})
        self.distances.append({})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches[-1][trainer.client.id].append(batch[0].numpy().copy())

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        self.updates[-1][update.client.id] = update.delta.numpy().copy()
        self.distances[-1][update.client.id] = update.distance

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.weights.append(trainer.weights.numpy().copy())


class Kept(FederatedCallback):
    """Records what clients keep, after each round.

    Attributes:
        own: Every client's vector, shape (clients, d), zeros if it has none; one array for each round.
        shared: SCAFFOLD's c, shape (d,).
    """

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.own: list[np.ndarray] = []
        self.shared: list[np.ndarray] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        rows = torch.empty(len(trainer.source.sizes), trainer.weights.numel(), dtype=trainer.weights.dtype)
        for i, row in enumerate(rows):
            trainer.client_states.recall(type(self.algorithm).__name__, i, row)
        self.own.append(rows.numpy())
        if isinstance(self.algorithm, SCAFFOLD):
            assert self.algorithm.control is not None
            self.shared.append(self.algorithm.control.numpy().copy())


class Given(ClientSampler):
    """Draws the next of the given cohorts in each round, over and over."""

    def __init__(self, *cohorts: tuple[int, ...]) -> None:
        self.cohorts = cohorts

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.array(self.cohorts[(round - 1) % len(self.cohorts)])


def make_data(problem: Problem, batch_size: int = 3) -> FederatedDataModule:
    tensors = (torch.arange(sum(problem.sizes)), torch.tensor(problem.inputs), torch.tensor(problem.targets))
    return FederatedDataModule(
        TensorDataset(*tensors), BySizes(*problem.sizes), num_clients=len(problem.sizes), batch_size=batch_size
    )


def make_trainer(*callbacks: Any, **options: Any) -> FederatedTrainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "seed": 5, "max_rounds": 1, "default_root_dir": "not-written", **quiet, **options}
    return FederatedTrainer(callbacks=list(callbacks), **options)


def fit(problem: Problem, *callbacks: Any, optimizer: Any = "sgd", batch_size: int = 3, **options: Any) -> Tape:
    """Trains in double precision; returns the tape.

    Args:
        problem: The clients.
        *callbacks: Aggregator, algorithms and others.
        optimizer: A name of TORCH, or what makes an optimizer of parameters.
        batch_size: Samples per batch.
        **options: Options of the trainer, and ``cohorts``, the clients of each round.
    """
    cohorts = options.pop("cohorts", None)
    if cohorts is not None:
        options |= {"sampler": Given(*cohorts), "clients_per_round": len(cohorts[0])}
    tape, module = Tape(), problem.module(problem.start)
    module.optimizer = optimizer
    trainer = make_trainer(*callbacks, tape, **{"precision": "64-true", **options})
    trainer.fit(module, make_data(problem, batch_size))
    return tape
