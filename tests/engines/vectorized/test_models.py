"""Every kind of model trains alike one client after another and many at once."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_fed.aggregators import FedGMA
from lightning_fed.client_algorithms import SCAFFOLD, FedGA
from lightning_fed.data import CropFlip, FederatedDataModule
from tests.engines.package_models import PACKAGE
from tests.engines.parts import (
    CLASSES,
    FEATURES,
    SIZES,
    LogsEverything,
    Model,
    agree,
    both,
    data,
    train,
    vectors,
)
from tests.parts import BySizes, graded, quick_first


class Tied(Model):
    """One matrix in two places."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES)))
        self.net[2].weight = self.net[0].weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch[0])), batch[1])


class Logs(LogsEverything):
    """Logs one name at one batch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.logged(batch)
        self.log("train/loss", 2 * loss, batch_size=1)
        if batch_idx == 1:
            self.log("train/second", loss)
        return {"loss": loss, "logits": logits}


class Replaces(Model):
    """Replaces a buffer by assignment, changes another in place, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.count += len(x)
        return F.cross_entropy(self.net(x - self.mean), y) / (1 + 0.01 * self.count)


class NamesItsBatch(Model):
    """Weighs a batch by its number within the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (2.0 if batch_idx == 0 else 0.5)


def frozen() -> Model:
    model = Model()
    for parameter in model.net[0].parameters():
        parameter.requires_grad = False
    return model


def grouped(model: Model) -> Any:
    """Weight decay on matrices alone, and one bias that is not trained at all."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": [model.net[0].bias], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def last_gradient() -> FedGMA:
    return FedGMA(gradient_at="last_step", weighting="inverse")


def norm() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES)))


MODELS = {
    "plain": Model,
    "batch norm": norm,
    "layer norm": lambda: Model(nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES))),
    "tied": Tied,
    "logs": Logs,
    "replaces buffers": Replaces,
    "reads batch_idx": NamesItsBatch,
    "frozen": frozen,
    "groups": lambda: Model(optimizer=grouped),
    "not all trained": lambda: Model(optimizer=lambda m: torch.optim.Adam(m.net[2].parameters(), weight_decay=0.1)),
}


@pytest.mark.parametrize(
    "options", quick_first(1, [{}, {"local_epochs": 2}, {"local_steps": 6}]), ids=["", "epochs", "steps"]
)
@pytest.mark.parametrize("model", MODELS)
# Of clients with one sample in a batch BatchNorm has no statistics, under either engine.
def test_modules_of_the_users_own(tmp_path, model, options):
    sizes = tuple(size if size != 25 else 26 for size in SIZES)
    both(tmp_path, MODELS[model], make_data=lambda: data(sizes=sizes), **options)


WINDOWS: dict[str, dict[str, Any]] = {
    "two": {"accumulate_grad_batches": 2, "local_epochs": 2},
    "three": {"accumulate_grad_batches": 3, "local_steps": 5},
    "more than there are": {"accumulate_grad_batches": 9, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize(
    ("model", "window"), graded(product(["batch norm", "logs", "replaces buffers", "reads batch_idx"], WINDOWS))
)
def test_accumulated_gradients(tmp_path, model, window):
    """Over the batches of an epoch: clients have from one to four."""
    sizes = tuple(size if size != 25 else 26 for size in SIZES)
    both(tmp_path, MODELS[model], make_data=lambda: data(sizes=sizes), **WINDOWS[window])


@pytest.mark.parametrize("part", [lambda: SCAFFOLD("II"), lambda: FedGA(0.3, form="step"), last_gradient])
def test_accumulated_gradients_of_every_method(tmp_path, part):
    both(tmp_path, Model, part, accumulate_grad_batches=2)


@pytest.mark.slow
def test_the_largest_model_of_the_package(tmp_path):
    make, make_data = PACKAGE["ResNet18"]
    both(tmp_path, make, make_data=make_data, max_rounds=2, clients_per_round=3)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.quick(4)
def test_every_elementwise_optimizer(tmp_path, name):
    both(tmp_path, lambda: Model(optimizer=lambda m: OPTIMIZERS[name](m.parameters())), local_epochs=2)


@pytest.mark.parametrize("schedule", ["restart", "continue"])
def test_a_schedule_of_steps(tmp_path, schedule):
    def configure(model: Model) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": steps, "interval": "step"}]

    both(tmp_path, lambda: Model(optimizer=configure), local_schedule=schedule)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_that_of_each_client(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    both(tmp_path, MODELS["not all trained"], **options)
    both(tmp_path, Model, **options)


@pytest.mark.parametrize(("precision", "rtol"), [("32-true", 1e-5), ("bf16-mixed", 2e-2), ("bf16-true", 8e-2)])
def test_other_precisions(tmp_path, precision, rtol):
    sequential = train(tmp_path, Model, "sequential", precision=precision)
    vectorized = train(tmp_path, Model, "vectorized", precision=precision)
    for a, b in zip(sequential.deltas[:5], vectorized.deltas[:5], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    assert {d.dtype for d in vectorized.deltas} == {torch.float32}


class OutsideAutocast(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().training_step(batch, batch_idx)


def test_the_backward_pass_is_none_of_autocasts(tmp_path):
    sequential, vectorized = (
        train(tmp_path, OutsideAutocast, engine, precision="bf16-mixed") for engine in ("sequential", "vectorized")
    )
    for a, b in zip(sequential.deltas, vectorized.deltas, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Rows(Dataset):
    """Samples read one by one, as dicts."""

    def __init__(self) -> None:
        self.inner = vectors()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, row: int) -> dict[str, Any]:
        x, y = self.inner[row]
        return {"x": x + 0.1 * torch.rand(FEATURES), "y": y}


class OfDicts(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"].to(self.net[0].weight)), batch["y"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_a_data_loader_reads(tmp_path, num_workers):
    options = {"batch_size": 8, "num_workers": num_workers}
    make = partial(FederatedDataModule, Rows(), BySizes(*SIZES), len(SIZES), **options)
    both(tmp_path, OfDicts, local_epochs=2, make_data=make)


def test_accumulated_gradients_of_samples_that_are_read(tmp_path):
    make = partial(FederatedDataModule, Rows(), BySizes(*SIZES), len(SIZES), batch_size=8)
    both(tmp_path, OfDicts, local_steps=3, accumulate_grad_batches=2, max_rounds=1, make_data=make)


def test_augmented_samples(tmp_path):
    make, make_data = PACKAGE["CNN"]
    plain = train(tmp_path, make, "vectorized", datamodule=make_data(), max_rounds=1)

    def augmented() -> FederatedDataModule:
        module = make_data()
        module.augmentation = CropFlip()
        return module

    changed = both(tmp_path, make, make_data=augmented, max_rounds=1)
    assert not torch.equal(plain.deltas[0], changed.deltas[0])


class Moves(Model):
    """Has a hook of its own that changes a batch on its way."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [3 * batch[0], batch[1]]


def test_batches_go_through_the_modules_own_hooks(tmp_path):
    moved, plain = both(tmp_path, Moves), both(tmp_path, Model)
    assert not torch.allclose(moved.deltas[0], plain.deltas[0])


@pytest.mark.slow
def test_a_compiled_step_trains_alike_and_logs_alike(tmp_path):
    from torch._dynamo.utils import counters

    counters.clear()
    plain = train(tmp_path, Logs, "sequential")
    assert not counters["stats"]["unique_graphs"]
    agree(plain, train(tmp_path, Logs, "sequential", compile=True), rtol=1e-8)
    assert 0 < counters["stats"]["unique_graphs"] < 20, "it does not compile anew at every step"
