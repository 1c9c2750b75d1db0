"""An exception in a client's training names the client, the round and the step; or the client is left out."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import IID, FederatedDataModule

NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes, they are printed")


class Failing(LightningModule):
    """Raises in the second step of some clients, after it has changed all that a step can change."""

    def __init__(self, bad: set[int], error: BaseException | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.bad, self.error, self.kept, self.steps = bad, error or ValueError("a bad sample"), [0], 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.drop(self.norm(self.layer(batch[0]))), batch[1])
        self.log("logged", loss)
        if self.trainer.client.id in self.bad and batch_idx == 1:
            loss.backward()
            self.eval()
            self.kept.append(1)
            self.steps += 1
            self.layer.bias.requires_grad = False
            self.norm.running_mean.fill_(torch.nan)
            self.frozen.data.add_(1)
            torch.rand(7)
            raise self.error
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(batch_size: int = 5) -> FederatedDataModule:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=generator)
    return FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=batch_size)


def fit(
    folder: Path, module: LightningModule, *callbacks: Any, batch_size: int = 5, **options: Any
) -> FederatedTrainer:
    given = {
        "max_rounds": 2,
        "logger": [],
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        **options,
    }
    trainer = FederatedTrainer(accelerator="cpu", callbacks=list(callbacks), **given)
    trainer.fit(module, data(batch_size))
    return trainer


@NOTES
@pytest.mark.parametrize("error", [ValueError("bad"), torch.cuda.OutOfMemoryError("CUDA out of memory")])
def test_the_users_own_error_says_where_it_was(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        fit(tmp_path, Failing({2}, error))
    assert raised.value is error
    assert raised.value.__notes__ == ["In the training of client 2: round 1, local step 1."]
    assert raised.traceback[-1].name == "training_step"


@NOTES
def test_a_short_batch_is_named_with_what_leaves_it_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad sample") as raised:
        fit(tmp_path, Failing({2}), batch_size=8)
    place, short = raised.value.__notes__[0].split(". ", 1)
    assert place == "In the training of client 2: round 1, local step 1"
    assert short == "Its batch has 2 of 8 samples; `--data.drop_last true` leaves such batches out."


FAULTS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered"),
]


@NOTES
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_device_may_be_of_a_client_before(tmp_path: Path, fault: Exception) -> None:
    """Nor is it skipped: every client after it would fail too."""
    with pytest.raises(type(fault)) as raised:
        fit(tmp_path, Failing({2}, fault), on_client_error="skip", max_diverged=0.5)
    who = "client 2 or of one before it, as a device reports its faults late"
    assert raised.value.__notes__ == [f"In the training of {who}: round 1, local step 1."]


def test_faults_are_known_by_their_type_and_by_their_text() -> None:
    by_type = [kind("XPU error") for kind in [getattr(torch, "AcceleratorError", None)] if kind]  # torch 2.6 has none
    assert all(map(is_device_fault, [*FAULTS, *by_type]))
    others = [torch.cuda.OutOfMemoryError("CUDA out of memory"), ValueError("CUDA error"), RuntimeError("a CUDA error")]
    assert not any(map(is_device_fault, others))


class AtEnd(FederatedCallback):
    """Raises as an update enters the round."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.id == 3:
            raise ValueError("bad")


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@NOTES
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_hooks_of_a_client_are_part_of_its_training(tmp_path: Path, engine: Any) -> None:
    with pytest.raises(ValueError, match="bad") as raised:
        fit(tmp_path, Small(), AtEnd(), engine=engine)
    assert raised.value.__notes__ == ["In the training of client 3: round 1, local step 0."]


@NOTES
def test_of_many_clients_at_once_all_are_named(tmp_path: Path) -> None:
    class Late(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.round == 2:
                raise IndexError("Target 7 is out of bounds.")
            return super().training_step(batch, batch_idx)

    with pytest.raises(IndexError) as raised:
        fit(tmp_path, Late(), engine="vectorized", chunk_size=2)
    assert raised.value.__notes__ == ["In the training of one of clients 0, 1: round 2, local step 0."]


def rows(trainer: FederatedTrainer) -> list[dict[str, str]]:
    assert trainer.run is not None
    header, *lines = trainer.run.metrics.read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


@pytest.mark.parametrize("bad", [2, 3])
def test_a_client_that_is_skipped_leaves_no_trace(tmp_path: Path, bad: int) -> None:
    """Neither for the clients after it nor, of the last one, for the round."""

    class Without(FedAvg):
        def client_weight(self, client: Any) -> float:
            return 0.0 if client.id == bad else float(client.num_samples)

    module, other = Failing({bad}), Failing(set())
    with pytest.warns(
        UserWarning, match=rf"Client {bad} failed in round 1 .*left out of it \(ValueError: a bad sample"
    ):
        trainer = fit(tmp_path / "skip", module, on_client_error="skip", max_diverged=0.25)
    fit(tmp_path / "without", other, Without())
    for name, value in other.state_dict().items():
        if "num_batches" not in name:  # the largest of all counts, also of a client without weight
            assert torch.equal(value, module.state_dict()[name]), name
    assert module.training
    assert (module.kept, module.steps, module.layer.bias.requires_grad) == ([0], 0, True)
    last = rows(trainer)[-1]
    assert (last["clients/trained"], last["clients/failed"], last["clients/diverged"]) == ("3.0", "1.0", "0.0")
    assert float(last["train/loss"]) == pytest.approx(float(last["logged"]))


def test_a_client_that_is_skipped_keeps_its_state(tmp_path: Path) -> None:
    class Rarely(FederatedCallback):
        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            if (client.round, client.id) == (2, 1):
                raise ValueError("not today")

    seen: list[Tensor] = []

    class Looks(FederatedCallback):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            kept = torch.empty_like(trainer.weights)
            trainer.client_states.recall("SCAFFOLD", 1, kept)
            seen.append(kept)

    with pytest.warns(UserWarning, match="Client 1 failed in round 2"):
        fit(tmp_path, Small(), SCAFFOLD(), Rarely(), Looks(), on_client_error="skip", max_diverged=0.3)
    assert seen[0].any()
    assert torch.equal(*seen)


def test_one_more_than_the_share_raises_the_users_own_error(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Client 1 failed"), pytest.raises(ValueError, match="a bad sample") as raised:
        fit(tmp_path, Failing({1, 3}), on_client_error="skip", max_diverged=0.25)
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["In the training of client 3: round 1, local step 1."]


def test_many_clients_at_once_cannot_be_skipped(tmp_path: Path) -> None:
    options = {"on_client_error": "skip", "max_diverged": 0.5}
    with pytest.raises(FederatedError, match=r"`--trainer.tolerance.on_client_error` is skip"):
        fit(tmp_path, Small(), engine="vectorized", **options)
    trainer = fit(tmp_path, Small(), engine="auto", **options)
    assert trainer.engine_choice["engine"] == "sequential"


@pytest.mark.parametrize("code", [None, 0, 3, "done"])
def test_an_exit_in_a_module_is_no_success(tmp_path: Path, code: Any) -> None:
    with pytest.raises(FederatedError, match=r"got an exit \(.*\) in round 1, in the training of client 2: "):
        fit(tmp_path, Failing({2}, SystemExit(code)), on_client_error="skip", max_diverged=0.5)
    (path,) = tmp_path.rglob("metrics.csv")
    assert len(path.read_text().splitlines()) == 2  # of round 0


def test_the_option_that_bounds_them_is_asked_for() -> None:
    with pytest.raises(FederatedError, match="`--trainer.tolerance.max_diverged` to be above 0 with"):
        FederatedTrainer(on_client_error="skip")
