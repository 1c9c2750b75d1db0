"""Clients that end with NaN or infinity are left out, counted and named, up to a share; then the run stops."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.distributed.processes import Processes
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.masks import SignAgreement
from tests.engines.pretended_device import DEVICE, PretendedDevice


class Fragile(LightningModule):
    """Turns some clients' losses into NaN, or their buffer into infinity."""

    def __init__(self, bad: set[int], what: str = "loss") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.bad, self.what = bad, what
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.full((2,), -torch.inf))  # infinite by design

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        client = self.trainer.client.id
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("logged", loss)
        if client in self.bad and self.what == "buffer":
            self.seen.fill_(torch.inf)
        if client in self.bad and self.what == "value":  # with a gradient that is finite
            return loss + torch.inf
        return loss * torch.nan if client in self.bad and self.what == "loss" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(tmp_path: Path, module: Fragile, share: float, callback: Any = None) -> FederatedTrainer:
    torch.manual_seed(3)
    x = torch.randn(40, 4)
    data = FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=5)
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=2, callbacks=_callbacks(callback), logger=[], max_diverged=share,
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def _callbacks(callback: Any) -> list[Any]:
    return [callback] if isinstance(callback, Aggregator) else [callback, FedAvg(mask=SignAgreement())]


def _module(bad: set[int], what: str = "loss") -> Fragile:
    torch.manual_seed(0)
    return Fragile(bad, what)


@pytest.mark.parametrize("what", ["loss", "value", "buffer"])
def test_one_bad_client_of_four_is_left_out(tmp_path: Path, what: str) -> None:
    module = _module({2}, what)
    with pytest.warns(UserWarning, match="Client 2 diverged in round 1"):
        trainer = _fit(tmp_path, module, share=0.25)
    assert trainer.run is not None
    rows = trainer.run.metrics.read_text().splitlines()
    header = rows[0].split(",")
    last = dict(zip(header, rows[-1].split(","), strict=True))
    assert (last["clients/trained"], last["clients/diverged"]) == ("3.0", "1.0")
    assert float(last["train/loss"]) == pytest.approx(float(last["logged"]))
    assert torch.isfinite(module.layer.weight).all()
    assert torch.isfinite(module.seen)


def test_the_model_is_that_of_the_other_clients(tmp_path: Path) -> None:
    """Leaving out a client gives the model that a cohort without it gives."""
    module = _module({2})
    with pytest.warns(UserWarning, match="diverged"):
        _fit(tmp_path / "left_out", module, share=0.3)

    class WithoutTwo(FedAvg):
        def client_weight(self, client: Any) -> float:
            return 0.0 if client.id == 2 else float(client.num_samples)

    other = _module(set())
    torch.manual_seed(3)
    x = torch.randn(40, 4)
    data = FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=5)
    FederatedTrainer(
        accelerator="cpu", max_rounds=2, callbacks=[WithoutTwo()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    ).fit(other, data)  # fmt: skip
    unmasked = _module({2})
    with pytest.warns(UserWarning, match="diverged"):
        FederatedTrainer(
            accelerator="cpu", max_rounds=2, callbacks=[FedAvg()], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, default_root_dir=str(tmp_path), max_diverged=0.3,
        ).fit(unmasked, data)  # fmt: skip
    assert torch.equal(unmasked.layer.weight, other.layer.weight)


def test_one_more_than_the_share_stops_the_run_with_the_last_good_model(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Client 1 diverged"), pytest.raises(FederatedError, match="client 2 diverged"):
        _fit(tmp_path, _module({1, 2}), share=0.25)
    (path,) = tmp_path.rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["epoch"] == 0
    assert torch.isfinite(checkpoint["state_dict"]["layer.weight"]).all()


class Spoils(FederatedCallback):
    """Puts NaN or infinity where a callback can, in the second round."""

    def __init__(self, what: str, client: int = 2) -> None:
        self.what, self.client = what, client

    def on_client_end(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
        if trainer.round == 2 and update.client.id == self.client:
            if self.what == "delta":
                update.delta[3] = torch.nan
            elif self.what == "buffer":
                update.buffers["seen"].fill_(torch.nan)

    def on_before_server_step(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
        if trainer.round == 2 and self.what == "mean":
            update.mean[3] = -torch.inf


class Infinite(Aggregator):
    """Divides by what comes to zero in the second round."""

    def server_step(self, update: Any) -> Tensor:
        return update.mean / (2 - update.round)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Spoils("delta"), "client 2 diverged in round 2.*learning rate"),
        (Spoils("buffer"), "client 2 diverged in round 2.*learning rate"),
        (Spoils("mean"), r"server step of round 2.*--aggregator\.lr"),
        (Infinite(), r"server step of round 2.*--aggregator\.lr"),
    ],
    ids=["delta", "buffer", "mean", "aggregator"],
)
def test_nothing_infinite_reaches_the_global_model(tmp_path: Path, callback: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message) as error:
        _fit(tmp_path, _module(set()), 0.0, callback)
    assert "\n" not in str(error.value)
    (path,) = tmp_path.rglob("last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["epoch"] == 1
    state = {name: value for name, value in checkpoint["state_dict"].items() if name != "hidden"}
    assert all(torch.isfinite(value).all() for value in state.values())


def test_a_client_that_a_callback_spoilt_is_left_out(tmp_path: Path) -> None:
    module = _module(set())
    with pytest.warns(UserWarning, match="Client 2 diverged in round 2"):
        trainer = _fit(tmp_path, module, 0.3, Spoils("delta"))
    assert trainer.finished_round == 2
    assert trainer.logged_metrics["clients/diverged"] == 1
    assert torch.isfinite(module.layer.weight).all()


def watch_of(**buffers: Tensor) -> DivergenceWatch:
    state: Any = SimpleNamespace(recorder=None, weights=torch.zeros(1), buffers=SimpleNamespace(values=buffers))
    return DivergenceWatch(state, LocalOptions(), Processes())


def test_a_round_of_many_buffers_begins_with_few_kernels() -> None:
    with PretendedDevice() as device:
        watch = watch_of(**{str(number): torch.ones(4).to(DEVICE) for number in range(20)})
        before = device.kernels.total()
        watch.start_round(1)
        assert device.kernels.total() - before <= 6


def test_buffers_that_are_not_finite_before_a_round_say_nothing() -> None:
    infinite, none = torch.tensor([1.0, -torch.inf]), torch.tensor([torch.nan, 0.0])
    watch = watch_of(mean=torch.ones(3), mask=infinite, seen=torch.arange(2), none=none, empty=torch.ones(0))
    watch.start_round(1)
    assert watch.buffers == ["mean", "mask", "none", "empty"]
    norms = [torch.tensor(size) for size in (2.0, torch.inf, torch.nan, 0.0)]
    assert watch.buffer_sizes(norms) == 2
    norms[0] = torch.tensor(torch.inf)
    assert watch.buffer_sizes(norms).isinf()
