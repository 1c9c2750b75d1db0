"""What clients' training leaves in buffers that are no statistics: caches, tables with flags, singular vectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.aggregators import FedAvg
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.parts import FEATURES, Classifier, federated_data, federated_trainer, lightning_trainer, points

LENGTH = 16


class Positions(LightningModule):
    """Fills a table up to the longest sequence that it has met, and notes how far."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layer, self.rate, self.met = nn.Linear(1, 1), rate, list[Tensor]()
        self.set_up()

    def set_up(self) -> None:
        self.filled = 0
        self.register_buffer("table", torch.zeros(LENGTH, 1), persistent=False)

    def extend(self, length: int) -> None:
        if length > self.filled:
            self.filled = length
            self.table[:length, 0] = torch.arange(length)

    def forward(self, x: Tensor) -> Tensor:
        self.extend(x.shape[1])
        self.met.append(self.table[: x.shape[1], 0].clone())
        return self.layer(x) + self.table[: x.shape[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Replaced(Positions):
    """Puts another table into its place, of the length that it needs."""

    def extend(self, length: int) -> None:
        if length > self.filled:
            self.filled, self.table = length, torch.arange(length)[:, None].float()


class Level(Positions):
    """The table and what is filled of it are state."""

    def set_up(self) -> None:
        self.register_buffer("filled", torch.tensor(0))
        self.register_buffer("table", torch.zeros(LENGTH, 1))

    def extend(self, length: int) -> None:
        if length > self.filled:
            self.filled.fill_(length)
            self.table[:length, 0] = torch.arange(length)


class Marks(Positions):
    """A flag for each entry; entries begin as no number that a mean may take in."""

    def set_up(self) -> None:
        self.register_buffer("filled", torch.zeros(LENGTH, dtype=torch.bool))
        self.register_buffer("table", torch.full((LENGTH, 1), -torch.inf))

    def extend(self, length: int) -> None:
        if not self.filled[:length].all():
            self.filled[:length] = True
            self.table[:length, 0] = torch.arange(length)


def sequences(*lengths: int) -> FederatedDataModule:
    parts = [TensorDataset(torch.ones(2, length, 1)) for length in lengths]
    return FederatedDataModule(parts, batch_size=2)


@pytest.mark.parametrize("lengths", [(8, 3), (3, 8)])
@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("kind", [Positions, Replaced, Level, Marks])
@pytest.mark.filterwarnings("ignore:A client's training changes `filled`")
def test_a_table_that_clients_fill_is_as_one_filled_alone(
    kind: type[Positions], engine: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    net, alone = kind(), kind()
    trainer = federated_trainer(tmp_path, engine=engine, max_rounds=2)
    trainer.fit(net, sequences(*lengths))
    alone(torch.ones(1, 8, 1))
    assert torch.equal(net.table, alone.table)
    assert torch.equal(torch.as_tensor(net.filled), torch.as_tensor(alone.filled))
    assert all(torch.equal(met, torch.arange(len(met)).float()) for met in net.met)


def test_a_cache_is_not_sent_kept_or_resumed(tmp_path: Path) -> None:
    """A resumed run fills it anew, as a new module with the state does, and ends at the same weights."""

    def fit(folder: str, rounds: int, policy: Any = "average") -> tuple[Any, Positions]:
        torch.manual_seed(1)
        net, options = Positions(rate=0.01), {"logger": [], "name": "run", "enable_checkpointing": True}
        trainer = federated_trainer(tmp_path / folder, FedAvg(buffers=policy), max_rounds=rounds, **options)
        trainer.fit(net, sequences(8, 3), ckpt_path="last" if rounds > 1 and folder == "parts" else None)
        return trainer, net

    whole, net = fit("whole", 4)
    fit("parts", 1)
    parts, resumed = fit("parts", 4)
    assert torch.equal(whole.weights, parts.weights)
    assert torch.equal(net.table, resumed.table)
    assert whole.totals["comm/bytes_up"] == 4 * 2 * whole.weights.numel() * 4
    (path,) = (tmp_path / "whole").rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["federated"]["buffers"] == {"values": {}, "of_client": {}}
    assert fit("local", 1, "local")[0].train_state.buffers.in_use is False


def test_a_checkpoint_that_holds_a_cache_is_resumed(tmp_path: Path) -> None:
    """As those of versions before did."""
    net = Positions()
    buffers, held = GlobalBuffers(net, "local"), {"table": torch.full((LENGTH, 1), 7.0)}
    buffers.load_state_dict({"values": held, "of_client": {1: held}})
    buffers.load()
    assert net.table.eq(0).all()
    assert buffers.values == {}


class Ramp(Classifier):
    """A buffer as long as the batch."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.linspace(0, 1, 2), persistent=persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ramp = torch.linspace(0, 1, len(batch[0]))
        return super().training_step(batch, batch_idx) * self.ramp.mean()


class Resized(Ramp):
    """As observers of torch's quantization do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ramp.resize_(len(batch[0])).fill_(1.0)
        return Classifier.training_step(self, batch, batch_idx) * self.ramp.mean()


@pytest.mark.parametrize("kind", [Ramp, Resized])
@pytest.mark.parametrize("engine", ["sequential", "auto", "vectorized"])
def test_a_buffer_that_changes_its_shape_is_refused_by_name(kind: type[Ramp], engine: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"`ramp`.*shape") as refused:
        federated_trainer(tmp_path, engine=engine).fit(kind(persistent=True), federated_data(20, 12))
    assert str(refused.value).count(". ") == 0, "one sentence"


def test_a_cache_that_changes_its_shape_trains_as_under_lightning(tmp_path: Path) -> None:
    ours, theirs = Ramp(persistent=False), Ramp(persistent=False)
    theirs.load_state_dict(ours.state_dict())
    federated_trainer(tmp_path, max_rounds=3).fit(ours, federated_data(8))
    lightning_trainer(tmp_path, max_epochs=3).fit(theirs, DataLoader(points(8), batch_size=8))
    assert torch.allclose(ours.net.weight, theirs.net.weight, atol=1e-6)
    assert torch.equal(ours.ramp, theirs.ramp)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "new": lambda: parametrizations.spectral_norm(nn.Linear(FEATURES, 32)),
    "old": lambda: spectral_norm(nn.Linear(FEATURES, 32)),
    "wide": lambda: parametrizations.spectral_norm(nn.Linear(FEATURES, 3)),
    "scaled": lambda: parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(FEATURES, 32))),
}


def sizes_of(net: nn.Module) -> tuple[list[float], float]:
    """The lengths of the vectors of a spectral norm, and the largest singular value of the layer in evaluation."""
    lengths = [float(value.norm()) for name, value in net.named_buffers() if name.endswith(("_u", "_v"))]
    layer = net[0].eval()
    weight = layer(torch.eye(FEATURES)) - layer(torch.zeros(1, FEATURES))
    return lengths, float(torch.linalg.matrix_norm(weight.detach(), 2))


@pytest.mark.parametrize("policy", ["average", "local", "keep"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.quick(3)
def test_a_spectral_norm_is_that_of_the_averaged_weights(name: str, policy: Any, tmp_path: Path) -> None:
    """Ten unlike clients, large steps: each client's singular vectors are others."""
    torch.manual_seed(0)
    x = torch.randn(200, FEATURES) * torch.randn(10, FEATURES).repeat_interleave(20, 0) * 3
    labels = torch.arange(10).repeat_interleave(20) % 3
    data = federated_data(*[20] * 10, dataset=TensorDataset(x, labels))
    layer = NORMS[name]()
    net = Classifier(nn.Sequential(layer, nn.Linear(3 if name == "wide" else 32, 3)), lambda m: torch.optim.SGD(
        m.parameters(), lr=0.5))  # fmt: skip
    federated_trainer(tmp_path, FedAvg(buffers=policy), max_rounds=10, local_epochs=2).fit(net, data)
    lengths, largest = sizes_of(net.net)
    assert lengths == pytest.approx([1.0, 1.0], abs=1e-5)
    assert largest == pytest.approx(1.0, abs=1e-3)


def test_a_spectral_norm_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def fit(folder: str, rounds: int, **options: Any) -> Tensor:
        torch.manual_seed(0)
        net = Classifier(nn.Sequential(NORMS["new"](), nn.Linear(32, 3)))
        kept = {"logger": [], "name": "run", "enable_checkpointing": True}
        trainer = federated_trainer(tmp_path / folder, max_rounds=rounds, **kept)
        trainer.fit(net, federated_data(20, 12), **options)
        return torch.cat([trainer.weights, *(value.flatten() for value in net.buffers())])

    whole = fit("whole", 4)
    fit("parts", 2)
    assert torch.equal(fit("parts", 4, ckpt_path="last"), whole)


class Later(Classifier):
    """Puts another cache into its place where a batch is short."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.ones(FEATURES), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) < 8:
            self.factors = torch.full((FEATURES,), 2.0)
        return super().training_step((batch[0] * self.factors, batch[1]), batch_idx)


def test_many_clients_at_once_may_read_a_cache_but_not_replace_it(tmp_path: Path) -> None:
    net, one_by_one = Later(), Later()
    one_by_one.load_state_dict(net.state_dict())
    for module, engine in ((net, "vectorized"), (one_by_one, "sequential")):
        federated_trainer(tmp_path, engine=engine).fit(module, federated_data(16, 8))
    assert torch.allclose(net.net.weight, one_by_one.net.weight, atol=1e-6)
    with pytest.raises(FederatedError, match="replaces the buffer `factors`"):
        federated_trainer(tmp_path, engine="vectorized").fit(net, federated_data(16, 12))
    assert net.factors.tolist() == [1.0] * FEATURES
