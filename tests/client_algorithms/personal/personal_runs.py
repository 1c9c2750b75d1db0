"""Runs of clients that keep a part of the model, and what they kept."""

from typing import Any

import numpy as np
import torch

from lightning_fed.core.hooks import FederatedCallback
from tests.client_algorithms.client_runs import Given, make_data, make_trainer
from tests.client_algorithms.known_clients import SIZES, Layered

PROBLEM = Layered()
ROUNDS = 4
COHORTS = ((0, 1, 3), (2, 3, 4), (3, 0, 4), (1, 3, 2))
NORM, LAST, BIAS = np.arange(23) < 8, np.arange(23) >= 8, np.arange(23) >= 20


class Own(FederatedCallback):
    """Notes every client's personal parameters after each round, and the model that the server evaluates.

    Attributes:
        values: Arrays of shape (clients, p), one for each round.
        weights: w after each round.
        shown: What the module holds after each round.
    """

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.shown: list[dict[str, np.ndarray]] = []

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        state = trainer.train_state
        rows = torch.empty(len(SIZES), len(state.initial), dtype=torch.float64)
        for client, row in enumerate(rows):
            state.load_own(client, row)
        self.values.append(rows.numpy())
        self.weights.append(trainer.weights.numpy().copy())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.shown.append({name: p.detach().numpy().copy() for name, p in pl_module.named_parameters()})


def run(*parts: Any, optimizer: str = "sgd", cohorts: Any = COHORTS, **options: Any) -> Own:
    own, module = Own(), PROBLEM.module(PROBLEM.start)
    module.optimizer = optimizer
    if cohorts is not None:
        options |= {"sampler": Given(*cohorts), "clients_per_round": 3}
    given = {"max_rounds": ROUNDS, "local_epochs": 3, "precision": "64-true", **options}
    trainer = make_trainer(*parts, own, **given)
    trainer.fit(module, make_data(PROBLEM))
    if given.get("engine") == "vectorized":
        assert trainer.engine_choice["engine"] == "vectorized"
    return own


def assert_same(one: Own, other: Own, rtol: float = 1e-9) -> None:
    for a, b in zip([*one.weights, *one.values], [*other.weights, *other.values], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * 0.01)
