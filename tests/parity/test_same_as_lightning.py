"""One client that holds everything ends with the very weights of Lightning's Trainer on the same batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader

from tests.parts import (
    CLASSES,
    FEATURES,
    Classifier,
    built,
    federated_data,
    federated_trainer,
    lightning_trainer,
    points,
    train_both,
)


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *extra, nn.ReLU(), nn.Linear(8, CLASSES))


def grouped(module: nn.Module) -> Any:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    return SGD([{"params": others, "lr": 0.3}, {"params": decayed, "weight_decay": 0.1}], lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    "optimizer",
    [
        grouped,
        lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
        lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: Adam(m.parameters(), lr=0.01),
        lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True),
        lambda m: RMSprop(m.parameters(), lr=0.01, centered=True),
        lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.5),
        lambda m: SGD(m.parameters(), lr=torch.tensor(0.1)),
        lambda m: SGD(list(m.net[0].parameters()), lr=0.1),
    ],
    ids=["groups", "sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "tensor_lr", "first_layer_only"],
)
def test_optimizers(tmp_path, optimizer):
    train_both(tmp_path, lambda: Classifier(mlp(), optimizer))


def _with(make_scheduler: Any, **keys: Any) -> Any:
    def optimizer(module: nn.Module) -> Any:
        sgd = SGD(module.parameters(), lr=0.2, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": make_scheduler(sgd), "interval": "step", **keys}}

    return optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        _with(lambda o: StepLR(o, 1, 0.5)),
        _with(lambda o: CosineAnnealingLR(o, 6)),
        _with(lambda o: OneCycleLR(o, 0.5, total_steps=6)),
        _with(lambda o: CyclicLR(o, 0.01, 0.3, step_size_up=2)),
        _with(lambda o: LambdaLR(o, lambda step: 1 / (1 + step))),
        _with(lambda o: SequentialLR(o, [LambdaLR(o, lambda s: 0.1 * s), StepLR(o, 1, 0.5)], milestones=[2])),
    ],
    ids=["step", "cosine", "one_cycle", "cyclic", "lambda", "sequential"],
)
def test_schedules_with_interval_step(tmp_path, optimizer):
    train_both(tmp_path, lambda: Classifier(mlp(), optimizer))


def test_frequency_of_a_schedule_counts_steps(tmp_path):
    # Lightning begins to count anew in each epoch, which shows with several of them only.
    optimizer = _with(lambda o: StepLR(o, 1, 0.1), frequency=2)
    train_both(tmp_path, lambda: Classifier(mlp(), optimizer), federated_data(40), epochs=1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    clipped, _ = train_both(tmp_path, lambda: Classifier(mlp(), grouped), **options)
    free, _ = train_both(tmp_path, lambda: Classifier(mlp(), grouped))
    assert not torch.equal(clipped.net[0].weight, free.net[0].weight)


def test_clipping_counts_only_what_the_optimizer_trains(tmp_path):
    def last_layer(module: nn.Module) -> Any:
        return SGD(module.net[2].parameters(), lr=0.1)

    train_both(tmp_path, lambda: Classifier(mlp(), last_layer), gradient_clip_val=0.1)


@pytest.mark.parametrize("window", [2, 3, 5])
def test_accumulation_closes_a_short_last_window(tmp_path, window):
    data = federated_data(40)  # five batches in each of two epochs
    accumulated, _ = train_both(tmp_path, lambda: Classifier(mlp(), grouped), data, accumulate_grad_batches=window)
    plain, _ = train_both(tmp_path, lambda: Classifier(mlp(), grouped), federated_data(40))
    assert not torch.equal(accumulated.net[0].weight, plain.net[0].weight)


def test_accumulation_with_a_schedule_and_clipping(tmp_path):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    train_both(tmp_path, lambda: Classifier(mlp(), _with(lambda o: StepLR(o, 1, 0.5))), federated_data(40), **options)


class TwoHeads(Classifier):
    """The second head sees only batches that begin with a certain label, and no batch trains a third."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 6), lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.5))
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))
        self.used = [0, 0]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        which = int(y[0] == 1)
        self.used[which] += 1
        return F.cross_entropy(self.heads[which](self.net(x)), y)


class TwoHeadsMomentum(TwoHeads):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)


@pytest.mark.parametrize("module_class", [TwoHeads, TwoHeadsMomentum])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_parameters_without_gradient_are_skipped(tmp_path, module_class, options):
    start = built(module_class).state_dict()
    ours, theirs = train_both(tmp_path, module_class, federated_data(60), **options)
    assert min(theirs.used) > 0
    assert torch.equal(ours.heads[2].weight, start["heads.2.weight"])


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(tmp_path, line_search):
    def optimizer(module: nn.Module) -> Any:
        return torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    train_both(tmp_path, lambda: Classifier(mlp(), optimizer))


def test_frozen_parameters(tmp_path):
    def make() -> Classifier:
        module = Classifier(mlp(), grouped)
        module.net[0].requires_grad_(False)
        return module

    ours, _ = train_both(tmp_path, make)
    start = built(make)
    assert torch.equal(ours.net[0].weight, start.net[0].weight)
    assert not torch.equal(ours.net[2].weight, start.net[2].weight)


def test_tied_weights_stay_tied(tmp_path):
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES)))
            self.net[2].weight = self.net[0].weight

    ours, _ = train_both(tmp_path, Tied)
    assert ours.net[2].weight is ours.net[0].weight


def test_dropout_draws_the_same_numbers(tmp_path):
    train_both(tmp_path, lambda: Classifier(mlp(nn.Dropout(0.5)), grouped))


def test_batch_norm(tmp_path):
    ours, theirs = train_both(tmp_path, lambda: Classifier(mlp(nn.BatchNorm1d(8)), grouped))
    assert ours.net[1].num_batches_tracked == theirs.net[1].num_batches_tracked == 6


def test_channels_last_convolution(tmp_path):
    def make() -> Classifier:
        net = nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 3))
        return Classifier(net.to(memory_format=torch.channels_last), grouped)

    train_both(tmp_path, make)


class DictOfTuples(torch.utils.data.Dataset):
    """Samples as nested containers of two inputs, a label and a name."""

    def __init__(self) -> None:
        self.x, self.y = points(20).tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"inputs": (self.x[index], [self.x[index] ** 2]), "label": self.y[index], "name": f"sample {index}"}


class FromNested(Classifier):
    def loss(self, batch: Any) -> Tensor:
        (x, (squares,)), y = batch["inputs"], batch["label"]
        assert isinstance(batch["name"][0], str)
        return F.cross_entropy(self(x + 0.1 * squares), y)


class FromDict(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


def test_nested_batches(tmp_path):
    train_both(tmp_path, FromNested, federated_data(dataset=DictOfTuples(), val_dataset=None))


def test_dict_batches_from_memory(tmp_path):
    class Named:
        def __init__(self) -> None:
            x, y = points(20).tensors
            self.tensors = {"x": x, "y": y}

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return {name: tensor[index] for name, tensor in self.tensors.items()}

    train_both(tmp_path, FromDict, federated_data(dataset=Named(), val_dataset=None))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_precision(tmp_path, precision):
    ours, _ = train_both(tmp_path, lambda: Classifier(mlp(nn.BatchNorm1d(8)), grouped), precision=precision)
    expected = {"64-true": torch.float64, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}[precision]
    assert ours.net[0].weight.dtype == expected


class Sees(Classifier):
    """Notes in what precision its steps get a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[torch.dtype]()

    def loss(self, batch: Any) -> Tensor:
        self.seen.add(batch[0].dtype)
        return super().loss(batch)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_batches_come_in_the_precision_of_lightnings_trainer(tmp_path, precision):
    """Under autocast unchanged: the replay of other tests gives Lightning what our client got."""
    ours, theirs = built(Sees), built(Sees)
    federated_trainer(tmp_path, precision=precision).fit(ours, federated_data())
    loader = DataLoader(points(), batch_size=8)
    lightning_trainer(tmp_path, max_epochs=1, precision=precision).fit(theirs, loader, loader)
    assert ours.seen == theirs.seen
    assert len(theirs.seen) == 1
