"""What a module finds around itself while it trains: trainer, device, optimizers, logger, its own buffers and state."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import DoublePrecision
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.user_code import batch_transfer
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points


def test_names_of_the_trainer(tmp_path):
    found: dict[str, Any] = {}

    class Asks(Classifier):
        def setup(self, stage: str) -> None:
            found["device"] = self.device

        def configure_optimizers(self) -> Any:
            found["batches"] = self.trainer.num_training_batches
            found["steps"] = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            found.update(
                {name: getattr(trainer, name) for name in (
                    "max_epochs", "min_epochs", "max_steps", "current_epoch", "global_step", "world_size", "num_nodes",
                    "num_devices", "device_ids", "global_rank", "local_rank", "node_rank", "is_global_zero",
                    "precision", "training", "validating", "evaluating", "sanity_checking", "interrupted_or_failed",
                    "barebones", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
                    "fast_dev_run", "check_val_every_n_epoch", "val_check_interval", "early_stopping_callback",
                )}
            )  # fmt: skip
            found["mine"] = (self.current_epoch, self.global_step, self.global_rank, self.local_rank)
            found["same"] = (trainer.model is self, trainer.lightning_module is self, trainer.datamodule is data)
            assert self.trainer.strategy.root_device == self.device == self.net.weight.device == torch.device("cpu")

    data = federated_data(24, 8)
    federated_trainer(tmp_path, max_rounds=2, local_epochs=2).fit(Asks(), data)
    expected = {
        "device": torch.device("cpu"), "batches": 3, "steps": 6, "max_epochs": 2, "min_epochs": 0, "max_steps": -1,
        "current_epoch": 1, "global_step": 7, "world_size": 1, "num_nodes": 1, "num_devices": 1, "device_ids": [0],
        "global_rank": 0, "local_rank": 0, "node_rank": 0, "is_global_zero": True, "precision": "32-true",
        "training": True, "validating": False, "evaluating": False, "sanity_checking": False,
        "interrupted_or_failed": False, "barebones": False, "gradient_clip_val": None, "gradient_clip_algorithm": None,
        "accumulate_grad_batches": 1, "fast_dev_run": False, "check_val_every_n_epoch": 1, "val_check_interval": 1.0,
        "early_stopping_callback": None, "mine": (1, 7, 0, 0), "same": (True, True, True),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_optimizers_schedulers_print_and_logger(tmp_path, capsys):
    class Asks(Classifier):
        def configure_optimizers(self) -> Any:
            self.made = SGD(self.parameters(), lr=0.1)
            self.rounds, self.steps = StepLR(self.made, 1), StepLR(self.made, 1)
            return [self.made], [self.rounds, {"scheduler": self.steps, "interval": "step"}]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.optimizers() is self.made
            assert self.optimizers(use_pl_optimizer=False) is self.made
            assert self.lr_schedulers() == [self.rounds, self.steps]
            assert outputs["loss"].ndim == 0
            self.print("printed", batch_idx)
            self.trainer.print("by the trainer")

        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"own": 1.5}, step=self.current_epoch)

    logger = CSVLogger(tmp_path, name="mine")
    trainer = federated_trainer(tmp_path, logger=logger)
    trainer.fit(Asks(), federated_data(8))
    printed = capsys.readouterr().out
    assert "printed 0\n" in printed
    assert "by the trainer" in printed
    assert trainer.logger is logger
    assert "1.5" in (tmp_path / "mine" / "version_0" / "metrics.csv").read_text()


def test_two_fits_start_from_the_same_place(tmp_path):
    trainer, module = federated_trainer(tmp_path, max_rounds=2), Classifier()
    start = module.net.weight.detach().clone()
    trainer.fit(module, federated_data())
    with torch.no_grad():
        module.net.weight.copy_(start)
        module.net.bias.copy_(Classifier().net.bias)
    assert trainer.current_epoch == 2
    trainer.fit(module, federated_data())
    assert trainer.current_epoch == 2
    assert not torch.equal(module.net.weight, start)


def test_module_is_an_ordinary_one_afterwards(tmp_path):
    module = Classifier()
    federated_trainer(tmp_path).fit(module, federated_data())
    assert module.net.weight.untyped_storage().size() == 4 * FEATURES * CLASSES
    assert module.net.weight.grad is None
    assert "log" not in vars(module)
    module.loss(points().tensors).backward()
    optimizer = SGD(module.parameters(), lr=0.1)
    before = module.net.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(module.net.weight, before)


class Remembers(Classifier):
    """Replaces buffers by assignment, as running statistics often are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.tensor(0))
        self.started: list[tuple[float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.started.append((self.mean.sum().item(), int(self.count)))
        loss = self.loss(batch)
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0) + 0 * loss  # still in the graph of the loss
        self.count = self.count + 1
        return loss


def test_buffers_replaced_by_assignment(tmp_path):
    module = Remembers()
    federated_trainer(tmp_path, max_rounds=2).fit(module, federated_data(8, 8, 8))
    first, second = module.started[:3], module.started[3:]
    assert first == [(0.0, 0)] * 3  # every client begins with the global buffers
    assert len(set(second)) == 1
    assert second[0][1] == 1
    assert second[0][0] == pytest.approx(0.5 * points(24).tensors[0].mean(0).sum().item(), abs=1e-5)
    assert module.count == 2


def test_parameters_cut_loose_by_user_code(tmp_path):
    class Replaces(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            self.net.weight.data = self.net.weight.data.clone()
            self.zero_grad(set_to_none=True)

    plain, cut = Classifier(), Replaces()
    cut.load_state_dict(plain.state_dict())
    for module in (plain, cut):
        federated_trainer(tmp_path, max_rounds=3).fit(module, federated_data(20, 8))
    assert torch.equal(plain.net.weight, cut.net.weight)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_tiny_updates_do_not_vanish(tmp_path, precision):
    """One of four clients moves a weight of 1.0 by 2**-7; a quarter of that is lost in a bfloat16 sum."""

    class Scalar(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moves = self.trainer.client.id == 0
            return -self.weight.sum() * (1.0 if moves else 0.0)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=2**-7)

    module, rounds = Scalar(), 100
    trainer = federated_trainer(tmp_path, max_rounds=rounds, precision=precision)
    trainer.fit(module, federated_data(4, 4, 4, 4, val_dataset=None))
    assert trainer.weights.dtype == torch.float32
    assert trainer.weights.item() == pytest.approx(1 + rounds * 2**-9, abs=0.02)
    assert module.weight.item() == pytest.approx(trainer.weights.item(), abs=2**-7)


def test_one_server_step_is_exact_in_double(tmp_path):
    class Weights(FederatedCallback):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            assert trainer.weights.dtype == update.mean.dtype == pl_module.net.weight.dtype == torch.float64

    federated_trainer(tmp_path, Weights(), precision="64-true").fit(Classifier(), federated_data())


def test_fast_dev_run(tmp_path):
    seen: list[str] = []

    class Counted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(f"train {self.trainer.client.id}")
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append("val")

    trainer = federated_trainer(
        tmp_path, fast_dev_run=True, max_rounds=50, logger=None, enable_checkpointing=True, local_epochs=9
    )
    trainer.fit(Counted(), federated_data(20, 20, 20, val_dataset=points(40)))
    assert [step.split()[0] for step in seen] == ["val", "train", "train", "val"]
    assert seen[1] != seen[2]
    assert list(tmp_path.iterdir()) == []


def test_resident_batches_are_handed_over_as_they_are(tmp_path):
    fabric = federated_trainer(tmp_path).fabric
    assert batch_transfer(fabric, Classifier(), None, resident=True) is None
    assert batch_transfer(fabric, Classifier(), None, resident=False) is not None
    double = federated_trainer(tmp_path, precision="64-true").fabric
    transfer = batch_transfer(double, Classifier(), None, resident=True)
    assert transfer is not None
    assert transfer([torch.ones(1), torch.ones(1, dtype=torch.int64)], 0) == [torch.ones(1, dtype=torch.float64), 1]


def test_what_only_converts_numbers_is_known(tmp_path):
    class Hooks(Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class Own(DoublePrecision):
        def convert_input(self, data: Any) -> Any:
            return [part - part.mean() for part in data]

    def converts(model: Classifier, own: Any = None, **options: Any) -> Any:
        fabric = federated_trainer(tmp_path, **options).fabric
        if own is not None:
            fabric.strategy.precision = own
        transfer = batch_transfer(fabric, model, None, resident=True)
        return transfer and transfer.converts

    assert converts(Classifier()) is None
    assert converts(Classifier(), precision="bf16-true") is True
    assert converts(Hooks()) is False
    assert converts(Hooks(), precision="64-true") is False
    assert converts(Classifier(), own=Own()) is False


def test_batch_transfer_hooks(tmp_path):
    calls: list[str] = []

    class Transfers(Classifier):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("before")
            return {"x": batch[0], "y": batch[1]}

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            calls.append(str(device))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("after")
            return batch["x"] * 2, batch["y"]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("x", batch[0].mean())
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/x", batch[0].mean())

    trainer = federated_trainer(tmp_path)
    trainer.fit(Transfers(), federated_data(8, val_dataset=points(8, seed=1)))
    assert calls == ["before", "cpu", "after"] * 3
    assert trainer.callback_metrics["x"].item() == pytest.approx(2 * points(8).tensors[0].mean().item())
    expected = 2 * points(8, seed=1).tensors[0].mean().item()
    assert trainer.callback_metrics["val/x"].item() == pytest.approx(expected)


def test_loaders_and_counts_of_batches(tmp_path):
    found: dict[str, Any] = {}

    class Asks(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            found.setdefault("last", []).append(trainer.is_last_batch)
            found["val"] = trainer.val_dataloaders
            found.update(
                {name: getattr(trainer, name) for name in (
                    "num_val_batches", "num_sanity_val_batches", "enable_validation", "limit_train_batches",
                    "ckpt_path", "log_every_n_steps", "min_steps", "num_test_batches", "received_sigterm",
                    "val_check_batch", "scaler",
                )}
            )  # fmt: skip
            with trainer.profiler.profile("own"), trainer.init_module():
                nn.Linear(1, 1)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/loss", self.loss(batch))

    data = federated_data(20, test_dataset={"one": points(9), "other": points(16)}, eval_batch_size=4)
    trainer = federated_trainer(tmp_path, limit_test_batches=2)
    trainer.fit(Asks(), data)
    assert found.pop("last") == [False, False, True]
    assert [len(batch[1]) for batch in found.pop("val")] == [4, 4, 4]
    assert found == {
        "num_val_batches": [3], "num_sanity_val_batches": [0], "enable_validation": True, "limit_train_batches": 1.0,
        "ckpt_path": None, "log_every_n_steps": 50, "min_steps": None, "num_test_batches": [],
        "received_sigterm": False, "val_check_batch": 3, "scaler": None,
    }  # fmt: skip
    trainer.test(Asks(), data)
    assert trainer.test_dataloaders.keys() == {"one", "other"}
    assert trainer.num_test_batches == [2, 2]
    assert trainer.predict_dataloaders is None


def test_the_folder_of_a_run_that_keeps_metrics_csv_alone(tmp_path):
    found: list[Any] = []

    class Asks(Classifier):
        def on_train_start(self) -> None:
            found.extend([self.logger.log_dir, self.logger.save_dir, self.trainer.log_dir])

    trainer = federated_trainer(tmp_path, logger=[], enable_checkpointing=True)
    trainer.fit(Asks(), federated_data())
    assert found == [str(trainer.run.path)] * 3
    path = str(trainer.run.checkpoints / "last.ckpt")
    trainer.validate(Asks(), federated_data(), ckpt_path=path)
    assert trainer.ckpt_path == path
    trainer.validate(Asks(), federated_data())
    assert trainer.ckpt_path is None


def test_the_last_batch_is_that_of_one_client(tmp_path):
    class Asks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + self.trainer.is_last_batch)

    with pytest.raises(FederatedError, match=r"trainer\.client\.id"):
        federated_trainer(tmp_path, engine="vectorized").fit(Asks(), federated_data(8, 8))
