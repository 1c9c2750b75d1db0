"""Modules that step their optimizers by themselves end with Lightning's weights, and what needs more is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel, RandomDataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lightning_fed.aggregators import CGW, TERM, FedNova
from lightning_fed.callbacks.diagnostics import GradientDissimilarity
from lightning_fed.client_algorithms import FedGA, FedProx, StatelessSCAFFOLD
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientSampler
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer, points, train_both


class Manual(Classifier):
    """One optimizer, its closure, its schedule by the step and accumulation, all by hand."""

    def __init__(self, with_closure: bool = False, window: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.with_closure, self.window = with_closure, window

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.1, weight_decay=0.1)
        return [optimizer], [StepLR(optimizer, 1, 0.8)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        if self.with_closure:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
        else:
            self.manual_backward(self.loss(batch) / self.window)
            if (batch_idx + 1) % self.window:
                return
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.lr_schedulers().step()


class GAN(Classifier):
    """Two networks against each other, as in Lightning's own example."""

    def __init__(self, way: str = "toggle") -> None:
        super().__init__(nn.Linear(2, FEATURES))
        self.critic, self.way = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), way
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, critic = self.optimizers()
        real, ones = batch[0], torch.ones(len(batch[0]), 1)
        noise = torch.randn(len(real), 2)

        if self.way == "toggle_model":
            with maker.toggle_model():
                self.descend(maker, F.binary_cross_entropy_with_logits(self.critic(self.net(noise)), ones))
        else:
            self.toggle_optimizer(maker)
            assert not any(p.requires_grad for p in self.critic.parameters())
            self.descend(maker, F.binary_cross_entropy_with_logits(self.critic(self.net(noise)), ones))
            self.untoggle_optimizer(maker)
        loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(self.critic(self.net(noise).detach()), 0 * ones)
        self.descend(critic, loss)
        self.log_dict({"critic_loss": loss})

    def descend(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, *_: Any) -> None:
        return None

    def configure_optimizers(self) -> Any:
        maker, critic = Adam(self.net.parameters(), lr=0.02, betas=(0.5, 0.9)), SGD(self.critic.parameters(), lr=0.1)
        if self.way == "toggle_model":
            return [{"optimizer": maker, "lr_scheduler": StepLR(maker, 1)}, {"optimizer": critic}]
        return [maker, critic], []


@pytest.mark.parametrize(
    "make",
    [
        Manual, lambda: Manual(with_closure=True), lambda: Manual(window=2), GAN, lambda: GAN("toggle_model"),
    ],
    ids=["plain", "closure", "accumulates", "gan", "toggled_model"],
)  # fmt: skip
def test_a_client_ends_with_lightnings_weights(tmp_path, make):
    train_both(tmp_path, make)


def test_lightnings_demo(tmp_path):
    class Demo(ManualOptimBoringModel):
        def validation_step(self, *_: Any) -> None:
            return None

    module = built(Demo)
    before = module.layer.weight.detach().clone()
    federated_trainer(tmp_path).fit(module, federated_data(8, 16, dataset=RandomDataset(32, 24)))
    assert not torch.equal(module.layer.weight, before)


@pytest.mark.parametrize("make", [Manual, GAN])
def test_clients_start_alike_whoever_trained_before(tmp_path, make):
    """The last of several clients has the update that it has alone: momenta, schedules and gradients are its own."""
    updates: dict[int, list[Tensor]] = {0: [], 1: []}

    class Keeps(Callback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            updates[update.client.id].append(update.delta.clone())
            assert update.num_steps == 2

    class Second(ClientSampler):
        def sample(self, round: int, count: int, sizes: Any, seed: int) -> list[int]:
            return [1]

    for options in ({}, {"sampler": Second(), "clients_per_round": 1}):
        federated_trainer(tmp_path, Keeps(), **options).fit(built(make), federated_data(16, 16))
    assert torch.equal(*updates[1])
    assert not torch.equal(updates[0][0], updates[1][0])


def test_schedules_that_the_module_steps_by_the_round(tmp_path):
    rates = []

    class Plateau(Manual):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0)}

        def training_step(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])
            loss = self.loss(batch)
            self.log("loss", loss)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step(1.0)

    trainer = federated_trainer(tmp_path, max_rounds=3)
    trainer.fit(built(Plateau), federated_data(8, 8))
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    assert "train/loss" not in trainer.logged_metrics


def test_hooks_around_the_modules_own_steps(tmp_path):
    called: list[str] = []

    class Notes(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            called.append("before backward")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            called.append(type(optimizer).__name__)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            called.append(str(outputs))

    class Owns(GAN):
        def on_after_backward(self) -> None:
            called.append("after backward")

    federated_trainer(tmp_path, Notes()).fit(built(Owns), federated_data(8))
    step = ["before backward", "after backward"]
    assert called == [*step, "Adam", *step, "SGD", "{}"]


def test_local_steps_are_batches_in_which_an_optimizer_stepped(tmp_path):
    trainer = federated_trainer(tmp_path, local_steps=3)
    trainer.fit(built(GAN), federated_data(16))
    assert trainer.global_step == 6  # of two optimizers
    trainer = federated_trainer(tmp_path)
    trainer.fit(built(lambda: Manual(window=2)), federated_data(32))
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (FedProx(), {}, "FedProx adds to the gradient"),
        (StatelessSCAFFOLD(), {}, "StatelessSCAFFOLD asks for gradients"),
        (FedGA(), {}, "FedGA asks for gradients"),
        (FedNova(), {}, "FedNova divides by the distance"),
        (CGW(), {}, "CGW asks for the clients' gradients"),
        (TERM(), {}, "TERM asks for the clients' losses"),
        (GradientDissimilarity(), {}, "GradientDissimilarity asks for gradients"),
        (None, {"gradient_clip_val": 1.0}, ": remove `--trainer.gradient_clip_val`, or return the loss"),
        (None, {"accumulate_grad_batches": 2}, "`--trainer.accumulate_grad_batches`"),
        (None, {"compile": True}, "`--trainer.compile`"),
        (None, {"local_schedule": "continue"}, "`--trainer.local_schedule continue`"),
        (None, {"engine": "vectorized"}, "GAN steps its optimizers by itself.*--trainer.engine sequential"),
    ],
)
def test_what_needs_automatic_optimization_is_refused_by_name(tmp_path, part, options, message):
    trainer = federated_trainer(tmp_path, *([] if part is None else [part]), **options)
    with pytest.raises(FederatedError, match=message) as error:
        trainer.fit(GAN(), federated_data(8, 8))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_auto_takes_the_sequential_engine(tmp_path):
    trainer = federated_trainer(tmp_path, engine="auto")
    trainer.fit(GAN(), federated_data(8, 8))
    assert trainer.engine_choice == {"engine": "sequential", "reason": "GAN steps its optimizers by itself"}


def test_an_automatic_module_after_a_manual_one(tmp_path):
    trainer = federated_trainer(tmp_path)
    trainer.fit(GAN(), federated_data(8))
    plain, alone = built(Classifier), built(Classifier)
    trainer.fit(plain, federated_data(8))
    federated_trainer(tmp_path).fit(alone, federated_data(8))
    assert torch.equal(plain.net.weight, alone.net.weight)
    assert plain.net.weight.shape == (CLASSES, FEATURES)


@pytest.mark.parametrize("make", [Manual, GAN])
def test_a_resumed_run_goes_on(tmp_path, make):
    def go(folder: Any, rounds: int, **options: Any) -> dict[str, Tensor]:
        module = built(make)
        trainer = federated_trainer(folder, max_rounds=rounds, enable_checkpointing=True, name="run")
        trainer.fit(module, federated_data(8, 20), **options)
        return module.state_dict()

    go(tmp_path / "twice", 1)
    resumed = go(tmp_path / "twice", 2, ckpt_path=str(next((tmp_path / "twice").rglob("last.ckpt"))))
    for name, value in go(tmp_path / "once", 2).items():
        assert torch.equal(resumed[name], value), name


class FourSteps(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.losses: list[float] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())


class Searches(FourSteps):
    """LBFGS evaluates the loss several times within one step."""

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.5, max_iter=4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.losses = []

        def closure() -> Tensor:
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        self.optimizers().step(closure)


class Scales(Classifier):
    """Weights that change within a step under automatic optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses = []
        for _ in range(4):
            self.losses.append(self.loss(batch).item())
            with torch.no_grad():
                self.net.weight.mul_(1.5)
        return self.loss(batch)


@pytest.mark.parametrize("make", [FourSteps, Searches, Scales])
def test_each_pass_of_a_step_sees_the_weights_of_the_moment_in_mixed_precision(tmp_path: Path, make: type[Any]) -> None:
    """Autocast would keep its casts of the weights as long as one `training_step` lasts, as in Lightning 2.5."""
    ours, theirs = built(make), built(make)
    trainer = federated_trainer(tmp_path, precision="bf16-mixed", max_rounds=1, local_steps=1, engine="sequential")
    trainer.fit(ours, federated_data(8, dataset=points(8)))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(theirs, DataLoader(points(8), 8))
    assert len(set(ours.losses)) >= 3
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-2)  # of other steps they are farther
