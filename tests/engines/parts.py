"""Small runs under any engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from tests.parts import BySizes

FEATURES, CLASSES = 6, 3
# Batches of 8: from one to four in an epoch, the last ones of 8, 3, 1, 8 and 5 samples; one client has none.
SIZES = (8, 19, 0, 25, 16, 13)


HEARD: list[int] = []


def count_calls() -> None:
    """Keeps something in a global variable of this file."""
    HEARD.append(1)


class Model(pl.LightningModule):
    """A classifier of vectors; arguments and subclasses change one thing at a time."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = net if net is not None else nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        self.make_optimizer = optimizer if optimizer is not None else lambda m: torch.optim.SGD(m.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class LogsEverything(Model):
    """Logs in every way."""

    def logged(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns loss and logits."""
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        hits = (logits.argmax(1) == batch[1]).double()
        self.log("train/acc", hits.mean(), on_step=True, on_epoch=True)
        self.log("train/hits", hits.sum(), reduce_fx="sum")
        self.log_dict({"train/least": logits.min(), "train/five": 5.0}, reduce_fx="min")
        self.log("train/most", logits.max(), reduce_fx=torch.max)
        return loss, logits


class Cohorts(FederatedCallback):
    """Collects who entered each round, and with what."""

    stacks = True

    def __init__(self) -> None:
        self.entered: list[tuple[int, int, int]] = []
        self.deltas: list[Tensor] = []

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.entered.append((update.client.round, update.client.id, update.num_steps))
        self.deltas.append(update.delta.clone())


@dataclass(frozen=True)
class Outcome:
    """What a run ended with."""

    state: dict[str, Tensor]
    logged: dict[str, float]
    entered: list[tuple[int, int, int]]
    deltas: list[Tensor]
    trainer: FederatedTrainer


def vectors(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), FEATURES, generator=rng, dtype=torch.float64).float()
    return TensorDataset(x, torch.randint(CLASSES, (sum(sizes),), generator=rng))


def data(dataset: Dataset | None = None, sizes: tuple[int, ...] = SIZES, **options: Any) -> FederatedDataModule:
    dataset = vectors(sizes) if dataset is None else dataset
    return FederatedDataModule(dataset, BySizes(*sizes), len(sizes), **{"batch_size": 8, **options})


def train(
    folder: Path,
    make: Callable[[], pl.LightningModule],
    engine: str,
    *callbacks: pl.Callback,
    datamodule: FederatedDataModule | None = None,
    **options: Any,
) -> Outcome:
    """Trains a fresh model for three rounds of all clients."""
    torch.manual_seed(5)
    module, seen = make(), Cohorts()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "seed": 1, "max_rounds": 3, "precision": "64-true", **quiet, **options}
    trainer = FederatedTrainer(default_root_dir=str(folder), callbacks=[seen, *callbacks], engine=engine, **options)
    trainer.fit(module, data() if datamodule is None else datamodule)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return Outcome(state, dict(trainer.logged_metrics), seen.entered, seen.deltas, trainer)


def agree(one: Outcome, other: Outcome, rtol: float = 1e-10) -> None:
    """Asserts that two runs are the same up to rounding."""
    assert one.entered == other.entered
    for a, b in zip(one.deltas, other.deltas, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        torch.testing.assert_close(value, other.state[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")
    assert one.logged.keys() == other.logged.keys()
    for name, value in one.logged.items():
        if not name.startswith("time/"):
            assert float(other.logged[name]) == pytest.approx(float(value), rel=rtol, abs=rtol, nan_ok=True), name


def both(folder: Path, make: Callable[[], pl.LightningModule], *callbacks: Any, **options: Any) -> Outcome:
    """Trains under both engines and asserts that they agree; callbacks are given as what makes them."""
    rtol = options.pop("rtol", 1e-10)
    made = options.pop("make_data", None)
    one, other = (
        train(folder, make, engine, *[c() for c in callbacks], datamodule=made() if made else None, **options)
        for engine in ("sequential", "vectorized")
    )
    assert other.trainer.engine_choice["engine"] == "vectorized"
    agree(one, other, rtol)
    return other
