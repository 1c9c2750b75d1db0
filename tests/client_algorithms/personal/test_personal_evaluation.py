"""Each client's own model, with its personal part, is measured beside the global one, and nothing of it stays."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.client_algorithms import Ditto, FedPer, FedProx, FedRep
from lightning_fed.trainer import evaluation
from tests.client_algorithms.client_runs import Given, make_data, make_trainer
from tests.client_algorithms.known_clients import SIZES
from tests.client_algorithms.personal.personal_runs import COHORTS, LAST, PROBLEM, Own, assert_same
from tests.parts import Classifier, federated_data, federated_trainer, points


class MeasuredModule(PROBLEM.module):  # type: ignore[misc, name-defined]  # with a validation
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


def run(*parts: Any, **options: Any) -> tuple[Own, Any]:
    own = Own()
    trainer = make_trainer(
        *parts, own, max_rounds=3, local_epochs=2, precision="64-true", sampler=Given(*COHORTS), clients_per_round=3,
        **options,
    )  # fmt: skip
    module = MeasuredModule(PROBLEM.start)
    module.optimizer = "momentum"
    trainer.fit(module, make_data(PROBLEM))
    return own, trainer


def mean_loss(shared: np.ndarray, own: np.ndarray) -> float:
    """The mean over clients of f_i by hand, at the shared part and each one's own."""
    losses = []
    for client, values in enumerate(own):
        if SIZES[client]:
            point, rows = np.empty(23), PROBLEM.rows[client]
            point[~LAST], point[LAST] = shared, values
            hidden = point[:4] * PROBLEM.normed[rows] + point[4:8]
            logits = torch.tensor(hidden @ point[8:20].reshape(3, 4).T + point[20:])
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(PROBLEM.targets[rows])).item())
    return float(np.mean(losses))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("kind", [FedPer, FedRep])
def test_own_and_global_models_are_those_by_hand_and_training_is_the_same(kind: Any, engine: Any) -> None:
    looks = ClientEvaluation(1, models=("global", "tuned", "own"), tune_steps=2)
    plain, _ = run(kind(), engine=engine)
    seen, trainer = run(kind(), looks, engine=engine)
    assert_same(plain, seen, rtol=1e-16)
    initial = np.tile(PROBLEM.start[LAST], (len(SIZES), 1))
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert logged["per_client/loss"] == pytest.approx(mean_loss(seen.weights[-1], initial), rel=1e-6)
    assert logged["per_client/own/loss"] == pytest.approx(mean_loss(seen.weights[-1], seen.values[-1]), rel=1e-6)
    assert logged["per_client/own/loss"] < logged["per_client/loss"]
    # It is tuned from its own part, which two steps on its own samples make no worse.
    assert logged["per_client/tuned/loss"] < logged["per_client/own/loss"]


WHOSE = "Validation and test measure the global model, not what {} keeps for each client: that is `own` in `models` of"


@pytest.mark.parametrize("made", [FedPer, Ditto, FedProx])
def test_what_keeps_models_of_clients_says_that_validation_is_of_the_global_one(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once after training, and once for each call that prints figures; other methods say nothing."""
    lines: list[str] = []
    monkeypatch.setattr(evaluation, "rank_zero_info", lines.append)

    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.loss(batch), prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch), prog_bar=True)

    net = Tested(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    said = []
    trainer, data = (
        federated_trainer(tmp_path, made(), logger=[], name="run"),
        federated_data(8, 8, test_dataset=points(6, seed=2)),
    )
    for call in (trainer.fit, trainer.validate, trainer.test, partial(trainer.test, verbose=False)):
        call(net, datamodule=data)
        said.append(sum(line.startswith(WHOSE.format(made.__name__)) for line in lines))
        lines.clear()
    assert said == ([0] * 4 if made is FedProx else [1, 1, 1, 0])
