"""Workers see the data set as it is, end with the call that started them, and draw what a resumed run draws."""

import functools
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.batch_sources import LoaderSource
from lightning_fed.data.collation import Loading
from lightning_fed.data.split import Split
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_trainer

GLOBAL = np.random.default_rng(7)


class Lesson:
    """A transform with a level."""

    level = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.level


class Levels(Dataset[Any]):
    """Samples that show what a hook has set, in each of the places where a user keeps it."""

    of_class = 0

    def __init__(self, size: int = 24) -> None:
        self.size, self.level, self.transform = size, 0, Lesson()
        self.options, self.table = {"level": 0}, np.zeros(1)
        self.large, self.tensor = np.zeros(100_000), torch.zeros(1)
        self.places: list[int] = [0] * 2000

    def set(self, place: str, level: int) -> None:
        match place:
            case "attribute":
                self.level = level
            case "transform":
                self.transform.level = level
            case "dict":
                self.options["level"] = level
            case "array":
                self.table[0] = level
            case "large array":
                self.large[-1] = level
            case "tensor":
                self.tensor.fill_(level)
            case "long list":
                self.places[-1] = level
            case "class":
                type(self).of_class = level

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        level = self.level + self.options["level"] + self.table[0] + self.large[-1] + self.places[-1] + self.of_class
        return self.transform(torch.full((FEATURES,), float(level)) + self.tensor), index % CLASSES


class Sets(FederatedCallback):
    """Sets a level in a hook, and notes what training and validation see of it."""

    def __init__(self, dataset: Levels, place: str, hook: str) -> None:
        self.seen: list[Any] = []
        self.validated: list[Any] = []
        setattr(
            self, hook, lambda trainer, *_: dataset.set(place, 10 * trainer.round + getattr(trainer.client, "id", 0))
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].max().item())

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.validated.append(batch[0].max().item())


PLACES = ("attribute", "transform", "dict", "array", "large array", "tensor", "long list", "class")


@pytest.mark.parametrize(
    ("place", "hook"),
    [*((place, "on_train_epoch_start") for place in PLACES), ("attribute", "on_client_start")],
)
@pytest.mark.quick(2)
def test_what_a_hook_sets_in_a_data_set_reaches_its_workers(tmp_path: Path, place: str, hook: str) -> None:
    Levels.of_class = 0
    dataset = Levels()
    sets = Sets(dataset, place, hook)
    data = FederatedDataModule(dataset, num_clients=2, batch_size=12, val_dataset=dataset, num_workers=1)
    trainer = federated_trainer(tmp_path, sets, max_rounds=3)
    trainer.fit(Classifier(), data)
    by_client = hook == "on_client_start"
    assert sets.seen == [10 * round + by_client * client for round in (1, 2, 3) for client in (0, 1)]
    assert sets.validated == [0, *(10 * round + by_client for round in (1, 2, 3))]


def test_workers_live_on_while_the_data_set_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    original = multiprocessing.Process.start
    monkeypatch.setattr(multiprocessing.Process, "start", lambda self: (started.append(self), original(self))[1])
    samples: Any = list(zip(torch.zeros(8, 2), range(8), strict=True))
    source = LoaderSource(samples, Split.of([np.arange(4)] * 2), Loading(2, num_workers=1))
    for round in range(3):
        source.close(unsure=True)
        for client in (0, 1):
            assert len(list(source.batches(client, torch.arange(4), seed=round))) == 2
    source.close()
    assert len(started) == 1


def workers() -> int:
    return len(multiprocessing.active_children())


class Fails(Classifier):
    """Fails in a step of a stage."""

    stage = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.stage != "train"
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.stage != "val" or self.trainer.round == 0
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("stage", ["", "train", "val"])
@pytest.mark.quick(2)
def test_no_worker_outlives_the_call_that_started_it(tmp_path: Path, stage: str) -> None:
    data = FederatedDataModule(
        Levels(), num_clients=2, batch_size=4, eval_batch_size=4, val_dataset=Levels(), num_workers=2,
        client_test_fraction=0.5,
    )  # fmt: skip
    module = Fails()
    module.stage = stage
    before = workers()
    kept = None
    try:
        federated_trainer(tmp_path, ClientEvaluation(data="test"), max_rounds=1).fit(module, data)
    except AssertionError as error:
        kept = error  # whoever holds it holds every frame
    assert (kept is not None, workers()) == (stage != "", before)


def test_no_worker_of_a_users_loader_outlives_a_call(tmp_path: Path) -> None:
    loader = DataLoader(Levels(), 4, num_workers=1, persistent_workers=True)
    before = workers()
    trainer = federated_trainer(tmp_path, max_rounds=1)
    trainer.fit(Classifier(), loader, loader)
    assert workers() == before
    trainer.validate(Classifier(), loader, verbose=False)
    assert workers() == before


class Draws(Dataset[Any]):
    """Draws each sample from a generator that it keeps somewhere."""

    def __init__(self, kind: str) -> None:
        self.kind, self.lazy = kind, None
        self.held: Any = {
            "RandomState": lambda: np.random.RandomState(0),
            "Generator": lambda: np.random.default_rng(0),
            "MT19937": lambda: np.random.RandomState(np.random.MT19937(0)),
            "random": lambda: random.Random(0),
            "torch": lambda: torch.Generator(),
            "partial": lambda: functools.partial(torch.randn, FEATURES, generator=torch.Generator()),
            "closure": lambda: self.closing_over(np.random.default_rng(0)),
        }.get(kind, lambda: None)()

    @staticmethod
    def closing_over(generator: np.random.Generator) -> Any:
        return lambda: generator.normal(size=FEATURES)

    def draw(self) -> Any:
        if self.kind == "lazy":
            if self.lazy is None:
                self.lazy = np.random.default_rng(torch.initial_seed() % 2**32)
            return self.lazy.normal(size=FEATURES)
        if self.kind == "global":
            return GLOBAL.normal(size=FEATURES)
        if self.kind == "random":
            return [self.held.gauss(0, 1) for _ in range(FEATURES)]
        if self.kind == "torch":
            return torch.randn(FEATURES, generator=self.held)
        return self.held() if callable(self.held) else self.held.normal(size=FEATURES)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.draw(), dtype=torch.float32), index % CLASSES


KINDS = ("RandomState", "Generator", "MT19937", "random", "torch", "partial", "closure", "global", "lazy")


@pytest.mark.parametrize(
    ("kind", "num_workers"), [*((kind, 0) for kind in KINDS), ("RandomState", 1), ("lazy", 2), ("collate", 1)]
)
@pytest.mark.quick(2)
def test_a_resumed_run_draws_the_same_from_generators_of_the_data(tmp_path: Path, kind: str, num_workers: int) -> None:
    """Also what a random collate function draws from the global streams in a worker."""

    def noisy(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return [torch.randn(len(x), FEATURES), y]

    def fitted(folder: str, rounds: int) -> Any:
        dataset = Draws("RandomState" if kind == "collate" else kind)
        GLOBAL.bit_generator.advance(rounds)  # as in another process
        data = FederatedDataModule(
            dataset, num_clients=3, batch_size=4, num_workers=num_workers, val_dataset=dataset,
            collate_fn=noisy if kind == "collate" else None,
        )  # fmt: skip
        options = {"logger": [], "enable_checkpointing": True, "name": "run", "max_rounds": rounds}
        trainer = federated_trainer(tmp_path / folder, **options)
        trainer.fit(module := built(Classifier), data, ckpt_path="last")
        return module.net.weight, trainer.callback_metrics["val/loss"]

    whole, loss = fitted("whole", 4)
    half, _ = fitted("parts", 2)
    resumed, resumed_loss = fitted("parts", 4)
    assert torch.equal(resumed, whole)
    assert torch.equal(resumed_loss, loss)
    assert not torch.equal(half, whole)


def test_draws_of_a_held_generator_do_not_depend_on_other_clients_or_workers() -> None:
    def read(num_workers: int, *clients: int) -> list[Any]:
        split = Split.of([np.arange(8), np.arange(8, 24)])
        source = LoaderSource(Draws("RandomState"), split, Loading(4, num_workers=num_workers))
        read = [[batch[0] for batch in source.batches(client, torch.arange(8), seed=client)] for client in clients]
        source.close()
        return read[-1]

    alone, after, shared = read(0, 1), read(0, 0, 1), read(2, 0, 1)
    for other in (after, shared):
        assert all(map(torch.equal, alone, other))
    assert not torch.equal(alone[0], alone[1])
