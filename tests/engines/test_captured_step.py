"""A captured local step is the one that is not captured, with all that is around it."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.aggregators import FedAvg, FedDynServer, FedGMA
from lightning_fed.client_algorithms import SCAFFOLD, FedDyn, FedGA, FedProx, StatelessSCAFFOLD
from lightning_fed.data import CropFlip
from lightning_fed.hooks import FederatedCallback
from lightning_fed.models import CNN, MLP, CharLSTM, Classifier, ImageClassifier, LeNet, LogisticRegression, ResNet18
from tests.engines.graph_parts import captured_as_plain as both
from tests.engines.graph_parts import made  # noqa: F401  # a fixture
from tests.engines.parts import CLASSES, FEATURES, SIZES, LogsEverything, Model, agree, data, train, vectors

pytestmark = pytest.mark.usefixtures("made")


def optimizing(make: Callable[..., Any], **options: Any) -> Callable[[], Model]:
    return lambda: Model(optimizer=lambda m: make(m.parameters(), **options))


def schedule(module: Model) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
    }


def norm() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))


def tied() -> Model:
    net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3))
    net[2].weight = net[0].weight
    return Model(net)


def frozen() -> Model:
    model = Model()
    model.net[0].weight.requires_grad = False
    return model


class LeavesOut(Model):
    """Two of its parameters get no gradient, and must not decay."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net[:1](batch[0])[:, :CLASSES], batch[1])


class Logs(LogsEverything):
    """Logs one name at full batches alone."""

    def training_step(self, batch: Any) -> Any:
        loss, logits = self.logged(batch)
        if len(batch[0]) == 8:
            self.log("train/full", loss, batch_size=2, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits}


class LogsLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # passing the number on is not reading it
        self.log("train/loss", 2 * loss, batch_size=1)
        return loss


class Replaces(Model):
    """Replaces a buffer by assignment, changes another and a tensor of its own in place, and reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.seen = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.count += len(x)
        self.seen.add_(1)
        return F.cross_entropy(self.net(x - self.mean), y) / (1 + 0.01 * self.count + 0.001 * self.seen)


def dropout() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.5), nn.Linear(9, CLASSES)))


def conv() -> Model:
    return Model(nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)))


MODELS = {
    "plain": Model, "dropout": dropout, "tied": tied, "frozen": frozen, "no gradient": LeavesOut, "logs": Logs,
    "logs its loss": LogsLoss, "replaces buffers": Replaces, "schedule": lambda: Model(optimizer=schedule),
    "momentum": optimizing(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": optimizing(torch.optim.Adam, lr=0.01), "adafactor": optimizing(torch.optim.Adafactor),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, name):
    both(tmp_path, MODELS[name])


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_batch_norm(tmp_path, buffers):
    sizes = (8, 19, 0, 26, 16, 13)  # a batch of one sample has no statistics
    both(tmp_path, norm, lambda: FedAvg(buffers=buffers), make_data=lambda: data(sizes=sizes))


def images(side: int, **options: Any) -> Any:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(sum(SIZES), 1, side, side, generator=rng)
    whole = TensorDataset(x, torch.randint(CLASSES, (sum(SIZES),), generator=rng))
    return data(whole, val_dataset=whole, **options)


def windows() -> Any:
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(12, (sum(SIZES), 7), generator=rng)
    whole = TensorDataset(x, torch.randint(12, (sum(SIZES),), generator=rng))
    return data(whole, val_dataset=whole)


@pytest.mark.parametrize("layout", ["preserve", "channels_last"])
def test_convolutions_of_augmented_images(tmp_path, layout):
    both(tmp_path, conv, make_data=lambda: images(6, augmentation=CropFlip(1)), memory_format=layout)


class Read(Dataset):
    """Samples that are read one by one, as dicts."""

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, row: int) -> Any:
        x, y = vectors()[row]
        return {"x": x + torch.randn(()) / 9, "y": y}


class OfDicts(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


def test_batches_of_a_data_loader(tmp_path):
    both(tmp_path, OfDicts, make_data=lambda: data(Read()), max_rounds=2)


PACKAGE = {
    "LogisticRegression": lambda: ImageClassifier(LogisticRegression(64, CLASSES), CLASSES),
    "MLP": lambda: ImageClassifier(MLP(64, num_classes=CLASSES), CLASSES),
    "LeNet": lambda: ImageClassifier(LeNet(CLASSES, image_size=12), CLASSES),
    "CNN": lambda: ImageClassifier(CNN(CLASSES, channels=(4,), image_size=8), CLASSES),
    "CharLSTM": lambda: Classifier(CharLSTM(12, embedding_dim=3, hidden_size=4), 12),
    "ResNet18": lambda: ImageClassifier(ResNet18(CLASSES, in_channels=1), CLASSES),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "ResNet18" else ()) for n in PACKAGE])
def test_every_model_of_the_package_is_captured_once_for_each_shape(tmp_path, name, request):
    make_data = windows if name == "CharLSTM" else lambda: images(12 if name == "LeNet" else 8)
    run = both(tmp_path, PACKAGE[name], make_data=make_data, max_rounds=3)
    assert "val/acc" in run.logged
    sizes = run.trainer.source.sizes
    shapes = {min(8, size - first) for size in sizes.tolist() for first in range(0, size, 8)}
    assert len(request.getfixturevalue("made")[-1].tapes) == len(shapes)


class Validates(Model):
    """Collections of metrics keep books of their own while a model is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(self.net(batch[0]).mean())
        self.log("val/x", self.scores["MeanMetric"])


def test_metrics_of_evaluation_lead_to_no_new_captures(tmp_path, request):
    both(tmp_path, Validates, make_data=lambda: data(sizes=(16, 24), val_dataset=vectors()))
    assert len(request.getfixturevalue("made")[-1].tapes) == 1


ALGORITHMS = {
    "FedProx": FedProx, "SCAFFOLD": SCAFFOLD, "SCAFFOLD I": lambda: SCAFFOLD("I"), "FedDyn": FedDyn,
    "stateless": StatelessSCAFFOLD, "FedGA": lambda: FedGA(0.5), "displaced": lambda: FedGA(0.5, form="step"),
    "gradients": lambda: FedGMA(gradient_at="last_step"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms(tmp_path, name):
    server = [FedDynServer] if name == "FedDyn" else []
    run = both(tmp_path, Model, ALGORITHMS[name], *server)
    if name in ("displaced", "FedGA", "stateless"):
        assert not torch.equal(run.deltas[0], train(tmp_path, Model, "sequential").deltas[0])


OPTIONS: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"local_steps": 7},
    {"local_epochs": 2}, {"precision": "32-true"}, {"precision": "bf16-true"}, {"precision": "bf16-mixed"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(tmp_path, options):
    both(tmp_path, optimizing(torch.optim.SGD, lr=0.1, momentum=0.5), **options)


def test_gradients_that_only_some_batches_of_a_window_reach_are_stepped(tmp_path):
    class Short(LeavesOut):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            whole = len(batch[0]) < 8
            return F.cross_entropy((self.net if whole else self.net[:1])(batch[0])[:, :CLASSES], batch[1])

    both(tmp_path, Short, accumulate_grad_batches=2)


class Varies(LeavesOut):
    """Which parameters get a gradient depends on the shape of a batch, which its first label says."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x[:, : 3 + int(y[0])], y]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.pad(batch[0], (0, FEATURES - batch[0].shape[1]))
        net = self.net if batch[0].shape[1] == 4 else self.net[:1]
        return F.cross_entropy(net(x)[:, :CLASSES], batch[1])


def test_what_a_batch_reaches_is_its_own_whatever_window_it_was_captured_in(tmp_path):
    both(tmp_path, Varies, accumulate_grad_batches=2, local_epochs=3, max_rounds=4)


calls: list[tuple[int, ...]] = []


class Counts(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls.append(tuple(batch[0].shape))
        return super().training_step(batch, batch_idx)


def test_python_runs_for_captures_alone(tmp_path, request):
    stand_ins = request.getfixturevalue("made")
    calls.clear()
    short = train(tmp_path, Counts, "sequential", cuda_graphs=True, max_rounds=1)
    few = len(calls)
    calls.clear()
    train(tmp_path, Counts, "sequential", cuda_graphs=True, max_rounds=20)
    assert len(calls) == few
    shapes = {(size, FEATURES) for size in (8, 3, 1, 5)}
    assert set(calls) == shapes
    steps = sum(num for _, _, num in short.entered)
    engine_graphs = stand_ins[-1]
    assert engine_graphs.replays == 20 * steps + len(shapes)  # each is compared once
    assert len(engine_graphs.tapes) == len(shapes)


class Collects(pl.Callback):
    """Keeps what steps return."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("kept", torch.stack(self.outputs).mean())
        pl_module.log("spread", torch.stack(self.outputs).std())


def test_what_a_step_returns_may_be_kept(tmp_path):
    both(tmp_path, Logs, Collects)


class Tempered(Model):
    """Its step reads an attribute that hooks change, and a frozen copy that is another one in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.options = 1.0, {"scale": 1.0}

    def on_train_epoch_start(self) -> None:
        self.power *= 0.5
        self.options["scale"] += 1.0
        self.__dict__["teacher"] = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        far = (self.net(batch[0]) - self.teacher(batch[0])).square().mean()
        return super().training_step(batch, batch_idx) * self.power + self.options["scale"] * far


def test_attributes_that_change_between_rounds_are_captured_anew(tmp_path):
    both(tmp_path, _with_teacher, precision="32-true")


def _with_teacher() -> Tempered:
    model = Tempered()
    model.__dict__["teacher"] = deepcopy(model.net).requires_grad_(False)
    return model


class ByClient(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        pl_module.scale = 1.0 + client.id

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.shift = float(batch_idx)


class Scaled(Model):
    scale = shift = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale + self.shift * self.net[0].weight.sum() / 99


def test_attributes_that_change_with_clients_and_batches_are_captured_anew_and_told(tmp_path):
    with pytest.warns(UserWarning, match=r"captured again whenever an attribute of Scaled changes, such as `s"):
        train(tmp_path, Scaled, "sequential", ByClient(), cuda_graphs=True, max_rounds=1)
    both(tmp_path, Scaled, ByClient, max_rounds=2)


class Cuts(FederatedCallback):
    """Cuts the parameters loose from the flat vector between rounds."""

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data = parameter.data.clone()
        trainer.vector.refresh()


def test_parameters_that_move_are_captured_where_they_are(tmp_path):
    both(tmp_path, Model, Cuts)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    kept = {"enable_checkpointing": True, "logger": [], "cuda_graphs": True}
    whole = train(tmp_path, dropout, "sequential", max_rounds=3, name="whole", **kept)
    part = train(tmp_path, dropout, "sequential", max_rounds=1, name="part", **kept)
    part.trainer.max_rounds = 3
    torch.manual_seed(5)
    module = dropout()
    part.trainer.fit(module, data(), ckpt_path=str(part.trainer.run.checkpoints / "last.ckpt"))
    for name, value in whole.state.items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)


def test_without_the_option_nothing_is_captured(tmp_path, request):
    run = train(tmp_path, Model, "sequential")
    assert run.trainer.engine_choice == {"engine": "sequential"}
    assert not request.getfixturevalue("made")
    agree(run, train(tmp_path, Model, "sequential", cuda_graphs=True), rtol=0)
