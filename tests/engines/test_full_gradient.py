"""The gradient over a client's full data: right, and without a trace in the client's training."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError, FederatedTrainer, Need, ReducedUpdate
from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.data import IID, FederatedDataModule


class Collecting(FedAvg):
    """FedAvg that asks for gradients and keeps what it is given."""

    def __init__(self, needs: Need, gradient_at: Any) -> None:
        super().__init__()
        self.needs, self.gradient_at = needs, gradient_at
        self.given: list[ReducedUpdate] = []
        self.before: list[Tensor] = []

    def server_step(self, update: ReducedUpdate) -> Tensor:
        self.given.append(update)
        return super().server_step(update)

    def on_round_start(self, trainer: Any, pl_module: LightningModule, cohort: Any) -> None:
        self.before.append(trainer.weights.clone())


class Net(LightningModule):
    """Dropout and BatchNorm, which a careless extra pass would disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("seen", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _tensors() -> tuple[Tensor, Tensor]:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(1) > 0).long()


def _data(batch_size: int = 7) -> FederatedDataModule:
    return FederatedDataModule(TensorDataset(*_tensors()), IID(), num_clients=3, batch_size=batch_size)


def _fit(
    tmp_path: Path, aggregator: Aggregator, rounds: int = 2, kind: type[Net] = Net, batch_size: int = 7, **options: Any
) -> tuple[FederatedTrainer, Net]:
    torch.manual_seed(0)
    net = kind()
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=rounds, callbacks=[aggregator], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(tmp_path), **options,
    )  # fmt: skip
    trainer.fit(net, _data(batch_size))
    return trainer, net


ENGINES = ("sequential", "vectorized")
NEEDS = Need.MEAN | Need.GRADIENTS | Need.GRADIENT_MEAN | Need.GRADIENT_SIGN_SUM | Need.UPDATES


@pytest.mark.parametrize("point", ["start", "end", "last_step"])
@pytest.mark.parametrize(("mode", "engine"), list(product(["eval", "train"], ENGINES)))
def test_asking_for_gradients_changes_nothing_else(tmp_path: Path, point: str, mode: Any, engine: str) -> None:
    plain, plain_net = _fit(tmp_path, FedAvg(), engine=engine)
    aggregator = Collecting(NEEDS & ~Need.GRADIENTS, point)
    asked, asked_net = _fit(tmp_path, aggregator, full_gradient_mode=mode, engine=engine)
    for name, value in plain_net.state_dict().items():
        assert torch.equal(asked_net.state_dict()[name], value), name
    assert plain.metrics.callback["seen"] == asked.metrics.callback["seen"]
    assert plain.metrics.callback["train/loss"] == asked.metrics.callback["train/loss"]


class Linear(Net):
    """Nothing that an eval pass computes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(("point", "engine"), list(product(["start", "end"], ENGINES)))
def test_the_gradient_is_that_of_the_mean_loss_over_all_samples(tmp_path: Path, point: str, engine: str) -> None:
    aggregator = Collecting(NEEDS, point)
    _fit(tmp_path, aggregator, rounds=1, kind=Linear, precision="64-true", engine=engine)
    (update,) = aggregator.given
    data = _data()
    data.setup("fit")
    x, y = _tensors()
    expected = []
    for i, client in enumerate(update.clients):
        rows = data.split.index[data.split.offsets[client.id] : data.split.offsets[client.id + 1]]
        net = Linear().double()
        nn.utils.vector_to_parameters(
            aggregator.before[0] + (update.updates[i] if point == "end" else 0), net.parameters()
        )
        loss = nn.functional.cross_entropy(net.layers(x[rows].double()), y[rows])
        expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
        torch.testing.assert_close(update.gradients[i], expected[-1], rtol=1e-10, atol=1e-12)
        assert update.losses[i].item() == pytest.approx(loss.item(), rel=1e-10)
    mean = sum(p * g for p, g in zip(update.weights, expected, strict=True))
    torch.testing.assert_close(update.gradient_mean, mean, rtol=1e-10, atol=1e-12)
    signs = sum(torch.sign(g) for g in expected)
    assert torch.equal(update.gradient_sign_sum, signs)


def test_the_last_step_of_one_full_batch_is_the_gradient_at_the_start(tmp_path: Path) -> None:
    given = {}
    for point in ("start", "last_step"):
        aggregator = Collecting(NEEDS & ~Need.GRADIENTS, point)
        options: Any = {"precision": "64-true", "gradient_clip_val": 1e-3, "batch_size": 50}
        _fit(tmp_path, aggregator, rounds=1, kind=Linear, **options)
        given[point] = aggregator.given[0].gradient_mean.clone()
    torch.testing.assert_close(given["last_step"], given["start"], rtol=1e-10, atol=1e-14)


def test_a_gradient_over_fewer_batches_than_promised_is_refused(tmp_path: Path) -> None:
    """It would be taken for the one over all of the client's data."""
    source = _data().train_source()
    complete = source.batches

    def short(*args: Any, batch_size: int | None = None) -> Any:
        found = list(complete(*args, batch_size=batch_size))
        return iter(found if batch_size is None else found[1:])

    source.batches = short
    data = _data()
    data.train_source = lambda: source
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=1, callbacks=[Collecting(Need.GRADIENT_MEAN, "end")], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=str(tmp_path),
        full_gradient_batch_size=4,
    )  # fmt: skip
    with pytest.raises(FederatedError, match="batches of client 0 from the TensorSource .* in batches of 4, got"):
        trainer.fit(Net(), data)
