"""What hooks draw from the global streams is the same in a run that was resumed, and apart from what clients draw."""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.core.hooks import FederatedCallback
from tests.parts import Classifier, built, federated_data, federated_trainer


def draw() -> float:
    """One number from all three global streams."""
    return torch.rand(()).item() + np.random.rand() + random.random()


class Shakes(FederatedCallback):
    """Moves the global model by a random amount in one of its hooks, and notes each."""

    def __init__(self, hook: str) -> None:
        self.drawn: list[float] = []
        setattr(self, hook, self._shake)

    def _shake(self, trainer: Any, *args: Any) -> None:
        self.drawn.append(draw())
        trainer.weights.add_(self.drawn[-1])


class ShakesItself(Classifier):
    """Moves itself by a random amount before each round, and logs it."""

    def on_train_epoch_start(self) -> None:
        amount = draw()
        self.log("amount", amount)
        self.trainer.weights.add_(amount)


def fit(folder: Path, rounds: int, module: Classifier, *callbacks: FederatedCallback) -> Classifier:
    """Trains up to a round from the newest checkpoint, if there is one, in whatever state the process is."""
    options = {"logger": [], "enable_checkpointing": True, "max_rounds": rounds, "name": "run"}
    trainer = federated_trainer(folder, *callbacks, **options)
    torch.seed()
    np.random.seed()
    random.seed()
    trainer.fit(module, federated_data(12, 9), ckpt_path="last")
    return module


def rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("run/version_*/metrics.csv")
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_round_start", "on_round_end", "module"])
def test_a_resumed_run_draws_the_same(tmp_path, hook):
    def make() -> tuple[Any, ...]:
        return (built(ShakesItself),) if hook == "module" else (built(Classifier), Shakes(hook))

    whole = fit(tmp_path / "whole", 4, *make())
    fit(tmp_path / "parts", 2, *make())
    parts = fit(tmp_path / "parts", 4, *make())
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert len(rows(tmp_path / "whole")) == 5
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_draws_of_different_rounds_and_hooks_differ(tmp_path):
    shakes = [Shakes(hook) for hook in ("on_train_epoch_start", "on_round_end")]
    fit(tmp_path, 3, built(Classifier), *shakes)
    drawn = [amount for callback in shakes for amount in callback.drawn]
    assert len(set(drawn)) == len(drawn) == 6


def test_the_end_of_a_round_does_not_depend_on_what_clients_drew(tmp_path):
    class Noisy(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            draw()
            return self.loss(batch)

    first, second = Shakes("on_round_end"), Shakes("on_round_end")
    fit(tmp_path / "quiet", 2, built(Classifier), first)
    fit(tmp_path / "noisy", 2, built(Noisy), second)
    assert first.drawn == second.drawn
