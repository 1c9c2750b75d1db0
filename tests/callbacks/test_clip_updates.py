"""Clipping of updates against NumPy, on one update and over a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.aggregators import Aggregator, CoordinateMedian, FedAvg
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.core.updates import Client, Update
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement


class Logged(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, float] = {}

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        self.values.update({name: float(value) for name, value in dictionary.items()})


def clip(delta: Tensor, max_norm: float) -> dict[str, float]:
    """Clips in place; returns what was logged."""
    module, trainer = Logged(), None
    ClipUpdates(max_norm).encode(trainer, module, Update(Client(0, 5, 1), delta, 1))
    return module.values


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 2.9])
@pytest.mark.parametrize("size", [1, 8])
def test_agrees_with_numpy(max_norm: float, size: int) -> None:
    delta = np.random.default_rng(0).normal(size=size) * 3 / np.sqrt(size)
    delta *= 3 / np.linalg.norm(delta)
    clipped = torch.tensor(delta)
    logged = clip(clipped, max_norm)
    np.testing.assert_allclose(clipped, delta * max_norm / 3, rtol=0, atol=1e-12)
    assert logged == pytest.approx({"clip/share": 1.0, "clip/norm": 3.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_short_update_keeps_its_bits(dtype: torch.dtype) -> None:
    delta = torch.randn(50, dtype=dtype, generator=torch.Generator().manual_seed(0))
    kept = delta.clone()
    assert clip(delta, 100.0)["clip/share"] == 0.0
    assert torch.equal(delta, kept)
    exact = torch.tensor([3.0, 4.0], dtype=dtype)
    assert clip(exact, 5.0)["clip/share"] == 0.0
    assert exact.tolist() == [3.0, 4.0]


def test_zero_updates_and_updates_whose_squares_overflow() -> None:
    zero = torch.zeros(4)
    assert clip(zero, 1.0) == {"clip/share": 0.0, "clip/norm": 0.0}
    assert zero.tolist() == [0.0] * 4
    huge = torch.tensor([3e30, 4e30])
    clip(huge, 5.0)
    torch.testing.assert_close(huge, torch.tensor([3.0, 4.0]))


class Weights(LightningModule):
    """Each client pulls w to the mean of its points."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * (self.w - batch[0]).square().sum(dim=1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Lengths(FederatedCallback):
    """Notes the lengths of updates, and what was logged."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self.logged: dict[str, float] = {}

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        self.lengths.append(update.delta.norm().item())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("aggregator", [FedAvg, CoordinateMedian, lambda: FedAvg(mask=SignAgreement(0.0))])
def test_any_aggregator_sees_clipped_updates_and_the_share_is_logged(aggregator: Any, tmp_path: Path) -> None:
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    before, after, rule = Lengths(), Lengths(), aggregator()
    assert isinstance(rule, Aggregator)
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=1, callbacks=[rule, before, ClipUpdates(1.5), after], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Weights(), FederatedDataModule(TensorDataset(points), IID(), num_clients=5, batch_size=8))
    lengths = points.norm(dim=1)
    assert sorted(before.lengths) == pytest.approx(sorted(lengths.tolist()))
    assert sorted(after.lengths) == pytest.approx(sorted(lengths.clamp(max=1.5).tolist()))
    share = (lengths > 1.5).float().mean().item()
    assert 0 < share < 1
    assert after.logged["clip/share"] == pytest.approx(share)
    assert after.logged["clip/norm"] == pytest.approx(lengths.mean().item())
    clipped = points * (1.5 / lengths).clamp(max=1)[:, None]
    expected = clipped.median(dim=0).values if isinstance(rule, CoordinateMedian) else clipped.mean(dim=0)
    torch.testing.assert_close(trainer.weights, expected)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_out_of_range_are_refused(max_norm: float) -> None:
    with pytest.raises(FederatedError, match="max_norm"):
        ClipUpdates(max_norm)
