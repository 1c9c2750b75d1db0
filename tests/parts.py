"""Tiny data, modules and trainers for the tests of the training core."""

from collections.abc import Callable, Iterable, Iterator
from inspect import isabstract
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.partitioners import Partitioner
from lightning_fed.trainer import FederatedTrainer

FEATURES, CLASSES, SEED = 5, 3, 0


def cover(cases: Iterable[tuple[Any, ...]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Chooses few of the cases, a covering array: any two values that occur together in one of them still do.

    Most mistakes show in two parts that do not go together, hardly one in three at once, and a product of all parts
    costs many times as much. Cases that bring most are taken first; the same cases give the same choice.

    Args:
        cases: All that make sense, of equal length.
        strength: How many values together; 1 chooses cases in which each value occurs.
    """
    left = [(case, set(combinations(enumerate(case), strength))) for case in cases]
    chosen, seen = [], set[Any]()
    for gain in range(max((len(found) for _, found in left), default=0), 0, -1):
        for case, found in left:
            if len(found - seen) >= gain:
                chosen.append(case)
                seen |= found
        left = [(case, found - seen) for case, found in left if not found <= seen]
    return chosen


def quick_first(count: int, cases: Iterable[Any], kept: int | None = None) -> list[Any]:
    """Parameters of a test: the first ``count``, then slow ones up to ``kept``, by default all, then those of pairs."""
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [pytest.mark.slow, pytest.mark.pairs]
    grades = [(at >= count) + (kept is not None and at >= kept) for at in range(len(given))]
    return [pytest.param(*case, marks=marks[:grade]) for case, grade in zip(given, grades, strict=True)]


def graded(
    cases: Iterable[tuple[Any, ...]], quick: int | None = None, kept: Iterable[tuple[Any, ...]] | None = None
) -> list[Any]:
    """Parameters of a test: cases in which each value occurs, and those in which each pair does.

    Args:
        cases: All that make sense.
        quick: How many are not slow; by default those in which each value occurs.
        kept: By default ``make test-all`` runs them all. Where two parts never see each other, it runs these and
            one for each value that does not occur in them; the others are for ``make test-pairs``.
    """
    cases = list(cases)
    few = [case for case in dict.fromkeys(kept or ()) if case in cases]
    seen = {each for case in few for each in enumerate(case)}
    few += [case for case in cover(cases, 1) if not seen.issuperset(enumerate(case))]
    ordered = [*few, *(case for case in cover(cases) if case not in few)]
    return quick_first(len(few) if quick is None else quick, ordered, None if kept is None else len(few))


def points(count: int = 20, seed: int = 0) -> TensorDataset:
    """Samples of FEATURES numbers with one of CLASSES labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


class OneByOne(Dataset[Any]):
    """Samples that are computed one by one from their row, and what else a data set knows, such as ``targets``."""

    def __init__(self, size: int, sample: Callable[[int], Any], **known: Any) -> None:
        self.size, self.sample = size, sample
        vars(self).update(known)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def leaves(base: type) -> set[type]:
    """Returns the classes of the package below an abstract one that can be made."""
    found = {kind for kind in base.__subclasses__() if kind.__module__.startswith("lightning_fed.")}
    return {kind for kind in found if not isabstract(kind)}.union(*map(leaves, found))


def same(a: Any, b: Any) -> bool:
    """Whether nested lists, tuples and dicts hold equal tensors of equal types at the same places."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a, b)


class Sent(TorchFunctionMode):
    """Notes how many numbers go from the host to a device at each of the copies within the block.

    The device may be ``meta``, whose tensors have no values: torch follows what is computed with them all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = function in (torch.tensor, torch.as_tensor, torch.scalar_tensor)
        moved = function in (Tensor.to, Tensor.copy_) and any(a.is_cpu for a in args if isinstance(a, Tensor))
        if (made or moved) and not result.is_cpu:
            self.sizes.append(result.numel())
        return result


class Reads(TorchFunctionMode):
    """Notes by name what the host reads of tensors within the block, for which it would wait on another device."""

    NAMES = ("cpu", "item", "tolist", "nonzero", "__bool__", "__float__", "__int__")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(function, "__name__", "")) in self.NAMES:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts torch's operations, but for those that make views or empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func._schema.name or "_unsafe_view" in func._schema.name)
        return func(*args, **(kwargs or {}))


class BySizes(Partitioner):
    """Gives client i the next ``sizes[i]`` samples."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: Any) -> np.ndarray:
        return np.repeat(np.arange(num_clients), self.sizes)


def federated_data(*sizes: int, dataset: Dataset | None = None, **options: Any) -> FederatedDataModule:
    """One client of 20 samples, or clients of these sizes; batches of 8."""
    sizes = sizes or (20,)
    options = {"batch_size": 8, "eval_batch_size": 8, "val_dataset": points(12, seed=1), **options}
    dataset = points(sum(sizes)) if dataset is None else dataset
    return FederatedDataModule(dataset, BySizes(*sizes), num_clients=len(sizes), **options)


def federated_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> FederatedTrainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "seed": SEED, "max_rounds": 1, **quiet, **options}
    return FederatedTrainer(default_root_dir=str(folder), callbacks=list(callbacks), **options)


def lightning_trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "max_epochs": 1, **quiet, **options}
    return pl.Trainer(default_root_dir=str(folder), callbacks=list(callbacks), enable_model_summary=False, **options)


class Classifier(pl.LightningModule):
    """Logistic regression by default; subclasses and arguments change one thing at a time."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = net if net is not None else nn.Linear(FEATURES, CLASSES)
        self.make_optimizer = optimizer if optimizer is not None else lambda m: torch.optim.SGD(m.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def copied(batch: Any) -> Any:
    return apply_to_collection(batch, Tensor, torch.clone)


class Tape(FederatedCallback):
    """Records the batches that clients trained on, and the model of the client that trained last."""

    def __init__(self) -> None:
        self.epochs: list[list[Any]] = []
        self.state: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.epochs.append([])
        self.epochs[-1].append(copied(batch))

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


class Replay:
    """A loader that gives the recorded batches of the trainer's epoch."""

    def __init__(self, epochs: list[list[Any]], trainer: pl.Trainer) -> None:
        self.epochs, self.trainer = epochs, trainer

    def __len__(self) -> int:
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[Any]:
        return iter([copied(batch) for batch in self.epochs[self.trainer.current_epoch]])


class SeedLikeClient(pl.Callback):
    """Puts the global random state where the first client of the first round finds it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        seed_everywhere(seed_for(SEED, Purpose.LOCAL, 1, 0))


def built(make: Callable[[], pl.LightningModule]) -> pl.LightningModule:
    torch.manual_seed(123)
    return make()


def train_both(
    folder: Path,
    make: Callable[[], pl.LightningModule],
    data: FederatedDataModule | None = None,
    epochs: int = 2,
    federated: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[pl.LightningModule, pl.LightningModule]:
    """Trains one client for one round, and Lightning's Trainer on the same batches; both must end with equal weights.

    Args:
        folder: Scratch folder.
        make: Builds the module; called twice under one seed.
        data: One client's data.
        epochs: Passes over the data.
        federated: Options for FederatedTrainer alone.
        **options: Options for both trainers.

    Returns:
        The two modules; the first holds the client's weights again.
    """
    tape, ours, theirs = Tape(), built(make), built(make)
    trainer = federated_trainer(folder, tape, local_epochs=epochs, **options, **(federated or {}))
    trainer.fit(ours, data if data is not None else federated_data())
    lightning = lightning_trainer(folder, SeedLikeClient(), max_epochs=epochs, **options)
    lightning.fit(theirs, train_dataloaders=Replay(tape.epochs, lightning))
    start, reference = built(make).state_dict(), theirs.state_dict()
    assert tape.state.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(tape.state[name], value), f"{name} differs by {(tape.state[name] - value).abs().max()}"
    assert any(not torch.equal(start[name], value.to(start[name].dtype)) for name, value in reference.items())
    ours.load_state_dict(tape.state)
    return ours, theirs
