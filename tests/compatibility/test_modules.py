"""Modules that nobody wrote for federated training: those of Lightning's demos, and in the manner of public ones."""

from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import StepLR

from lightning_fed.client_algorithms import FedGA, FedProx
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer

ENGINES = ["sequential", "vectorized"]


def trained(folder: Any, module: Any, *sizes: int, dataset: Any = None, callbacks: Any = (), **options: Any) -> Any:
    """Trains a module on clients of these sizes; returns the trainer."""
    trainer = federated_trainer(folder, *callbacks, **options)
    trainer.fit(module, federated_data(*sizes, dataset=dataset))
    return trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("make", "dataset"),
    [
        (BoringModel, lambda: RandomDataset(32, 24)),
        (lambda: DemoModel(out_dim=CLASSES), lambda: torch.utils.data.TensorDataset(torch.randn(24, 32))),
    ],
    ids=["BoringModel", "DemoModel"],
)
def test_demo_modules_of_lightning(tmp_path, engine, make, dataset):
    class Flat(make if isinstance(make, type) else DemoModel):
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            if isinstance(batch, (list, tuple)):
                return self(batch[0]).square().mean()
            return super().training_step(batch, batch_nb)

        def validation_step(self, *_: Any) -> None:
            return None

    module = built(Flat)
    before = weights(module)
    trainer = trained(tmp_path, module, 8, 16, dataset=dataset(), engine=engine)
    assert trainer.logged_metrics["clients/trained"] == 2
    assert not torch.equal(weights(module), before)


class Skipping(Classifier):
    """Returns None for batches of the numbers that it is given."""

    def __init__(self, *skipped: int, optimizer: Any = None) -> None:
        super().__init__(optimizer=optimizer)
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


def adam_with_schedule(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]


@pytest.mark.parametrize("through", ["step", "closure"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_batches_without_a_loss_are_no_steps(tmp_path, window, through):
    class Counts(Skipping):
        ends: list[Any] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ends.append((self.trainer.local_step, sorted(outputs)))

    class ByClosure(Counts):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    Counts.ends = []
    module = built(lambda: (Counts if through == "step" else ByClosure)(1, 2, 3, optimizer=adam_with_schedule))
    before = weights(module)
    with pytest.warns(UserWarning, match="returned None: such batches are skipped"):
        trained(tmp_path, module, 32, accumulate_grad_batches=window, callbacks=[FedProx(mu=0.5)])
    steps = {1: [1, 1, 1, 1], 2: [0, 1, 1, 1], 4: [0, 0, 0, 1]}[window]
    assert Counts.ends == [(step, [] if at else ["loss"]) for at, step in enumerate(steps)]
    assert not torch.equal(weights(module), before)


def test_a_skipped_batch_moves_nothing_and_what_remains_trains_as_alone(tmp_path):
    first, alone = (built(lambda skip=skip: Skipping(*skip)) for skip in ((), (1, 2)))
    trained(tmp_path, first, 24, 20, local_steps=1)
    with pytest.warns(UserWarning, match="returned None"):
        trained(tmp_path, alone, 24, 20)
    assert torch.equal(weights(first), weights(alone))


def test_clients_that_skip_everything_are_skipped(tmp_path):
    with pytest.warns(UserWarning, match="returned None"):
        trainer = trained(tmp_path, built(lambda: Skipping(0)), 8, 24, callbacks=[FedGA(beta=0.1)])
    assert trainer.logged_metrics["clients/skipped"] == 1
    module = built(lambda: Skipping(0, 1, 2))
    with pytest.raises(FederatedError, match="no client has taken a step"), pytest.warns(UserWarning, match="None"):
        trained(tmp_path, module, 8, 24, callbacks=[FedGA(beta=0.1)])


def test_where_a_batch_cannot_be_skipped_it_is_said(tmp_path):
    with pytest.raises(FederatedError, match="return a loss for LBFGS"), pytest.warns(UserWarning, match="None"):
        trained(tmp_path, Skipping(0, optimizer=lambda m: LBFGS(m.parameters())), 8)
    with pytest.raises(FederatedError, match="returns None for a batch.*--trainer.engine sequential"):
        trained(tmp_path, Skipping(1), 16, engine="vectorized")


def test_the_step_gives_lightnings_outputs(tmp_path):
    seen: list[Any] = []

    class Says(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "extra": 1}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["extra"], outputs["loss"].requires_grad))

    trained(tmp_path, Says(), 8)
    assert seen == [(1, False)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_compiled_modules_train_as_they_are(tmp_path, compiled):
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("own", loss)
            return loss

    plain, other = built(Logs), built(Logs)
    trained(tmp_path, plain, 8, 16)
    given = torch.compile(other, backend="eager") if compiled else other
    trainer = trained(tmp_path, given, 8, 16)
    assert torch.allclose(weights(other), weights(plain))
    assert trainer.lightning_module is other
    assert {"own", "train/loss"} <= trainer.logged_metrics.keys()
    assert trainer.validate(given, federated_data(8))[0].keys() == {"val/loss"}
    if compiled:
        with pytest.raises(FederatedError, match="went through `torch.compile`"):
            trained(tmp_path, given, 8, engine="vectorized")


def test_compiled_networks_are_refused_by_their_name(tmp_path):
    with pytest.raises(FederatedError, match="LightningModule, got Linear"):
        federated_trainer(tmp_path).fit(torch.compile(nn.Linear(1, 1)), federated_data())


@pytest.mark.parametrize("engine", ENGINES)
def test_modules_on_the_other_package(tmp_path, engine):
    other: Any = pytest.importorskip("pytorch_lightning")

    def make(base: Any) -> Any:
        class Module(base):
            def __init__(self) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.net = nn.Linear(FEATURES, CLASSES)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("own", loss, prog_bar=True)
                assert self.device.type == "cpu"
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log_dict({"val/loss": nn.functional.cross_entropy(self.net(batch[0]), batch[1])})

            def configure_optimizers(self) -> Any:
                return adam_with_schedule(self)

        return Module

    class Outer(make(other.LightningModule)):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class Steps(other.Callback):
        ends = 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            Steps.ends += 1

    ours, theirs, outer = built(make(Classifier.__mro__[1])), built(make(other.LightningModule)), built(Outer)
    runs = [trained(tmp_path, module, 8, 16, engine=engine, callbacks=[Steps()]) for module in (ours, theirs, outer)]
    assert Steps.ends == 3
    for module, trainer in zip((theirs, outer), runs[1:], strict=True):
        assert torch.equal(weights(module), weights(ours))
        for name in ("own", "train/loss", "val/loss"):
            assert trainer.logged_metrics[name] == runs[0].logged_metrics[name]


def test_stock_callbacks_of_the_other_package_are_refused(tmp_path):
    other: Any = pytest.importorskip("pytorch_lightning")
    with pytest.raises(FederatedError, match=r"EarlyStopping of lightning\.pytorch"):
        federated_trainer(tmp_path, other.callbacks.EarlyStopping("val/loss"))


class Remembers(Classifier):
    """Keeps something from step to step in an attribute, in one of the ways of public modules."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.hidden, self.count, self.seen, self.cache = what, None, 0, [], None
        self.losses: list[Any] = []
        self.by_name: dict[str, Any] = {"train": []}
        self.by_name["itself"] = self.by_name
        self.register_buffer("kept", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.what == "hidden":
            self.hidden = self(batch[0]).mean(0).detach()
        elif self.what == "count":
            self.count += 1
        elif self.what == "seen":
            self.seen = [batch_idx, loss.detach()]
        elif self.what == "outputs":
            self.losses.append(loss.detach())
            self.by_name["train"].append(loss.detach())
        elif self.what == "buffer":
            self.kept += 1
        elif self.cache is None:
            self.cache = torch.ones(3)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.clear()


@pytest.mark.parametrize("what", ["hidden", "count", "seen"])
def test_attributes_that_pass_from_client_to_client_are_named_once(tmp_path, what, recwarn):
    trained(tmp_path, Remembers(what), 8, 8, 8, max_rounds=2)
    said = [str(warning.message) for warning in recwarn if "the next client starts with" in str(warning.message)]
    assert len(said) == 1
    assert f"changes `{what}` of Remembers" in said[0]


@pytest.mark.parametrize("what", ["outputs", "buffer", "cache"])
def test_what_is_gathered_for_the_rounds_end_is_not_named(tmp_path, what, recwarn):
    trained(tmp_path, Remembers(what), 8, 8, 8, max_rounds=2)
    assert not [warning for warning in recwarn if "the next client starts with" in str(warning.message)]


def test_a_count_of_many_clients_at_once_is_named_too(tmp_path):
    with pytest.warns(UserWarning, match="changes `count` of Remembers"):
        trained(tmp_path, Remembers("count"), 8, 8, max_rounds=2, engine="vectorized")


@pytest.mark.parametrize(
    ("hook", "engine"),
    [
        ("on_fit_start", "sequential"), ("on_train_start", "vectorized"), ("on_train_epoch_start", "sequential"),
        ("training_step", "sequential"),
    ],
)  # fmt: skip
def test_parameters_replaced_during_fit_are_refused(tmp_path, hook, engine):
    class Replaces(Classifier):
        def replace(self) -> None:
            self.net = nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if hook == "training_step" and batch_idx == 1:
                self.replace()
            return super().training_step(batch, batch_idx)

    module = Replaces()
    if hook != "training_step":
        setattr(module, hook, module.replace)
    with pytest.raises(FederatedError, match=r"`net\.weight` of Replaces.*`configure_model`") as error:
        trained(tmp_path, module, 24, engine=engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_networks_built_in_configure_model_train(tmp_path, engine):
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = nn.Linear(FEATURES, CLASSES)

    module = Late()
    trained(tmp_path, module, 8, 16, engine=engine)
    assert weights(module).numel() == CLASSES * (FEATURES + 1)
