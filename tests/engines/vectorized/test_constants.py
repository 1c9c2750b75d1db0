"""What a graph takes for constant: where it changes, the graph is traced anew, or the step is refused."""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.engines.vectorized.compiled_step import CompiledStep
from lightning_fed.engines.vectorized.constants import Constants
from lightning_fed.engines.vectorized.step import CannotTrace
from lightning_fed.errors import FederatedError
from tests.engines.parts import CLASSES, FEATURES, Model, agree, compiled_agrees, data, train
from tests.parts import quick_first

pytest_plugins = ["tests.engines.vectorized.compiled_parts"]


class Loss:
    """Not a module."""

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits / self.by, y)

    def scaled(self) -> float:
        return self.by


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


class Slotted(nn.Module):
    __slots__ = ("by",)

    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


class Inner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


class Tempered(Model):
    """Divides its logits by a temperature that is kept in one of many ways."""

    of_class = 1.0

    def __init__(self, temperature: Callable[["Tempered"], Any]) -> None:
        super().__init__()
        self.temperature = temperature
        self.save_hyperparameters({"loss": {"by": 1.0}})
        self.number, self.entries, self.several, self.classes = 1.0, {"a": {"b": [1.0]}}, deque([1.0]), {1}
        self.array, self.one = np.ones(1), torch.ones(())
        self.many, self.replaced = torch.ones(CLASSES), torch.ones(CLASSES)
        self.loss, self.slotted, self.inner = Loss(), Slotted(), Inner()
        self.slots = Slots()
        self.method, self.unregistered = self.loss.scaled, [Inner()]
        self.last: nn.Module = nn.Identity()
        self.frozen = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) / self.temperature(self), batch[1])


class Changes(FederatedCallback):
    """Changes the module at the end of the first round."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change, self.rounds = change, 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds += 1
        if self.rounds == 1:
            self.change(pl_module)


def hooked(module: Tempered) -> None:
    module.last.register_forward_hook(lambda part, args, output: output / 2)


WAYS: dict[str, tuple[Callable[[Tempered], Any], Callable[[Tempered], Any]]] = {
    "number": (lambda m: m.number, lambda m: setattr(m, "number", 2.0)),
    "hyperparameter": (lambda m: m.hparams.loss["by"], lambda m: m.hparams.loss.update(by=2.0)),
    "dict": (lambda m: m.entries["a"]["b"][0], lambda m: m.entries["a"].update(b=[2.0])),
    "deque": (lambda m: sum(m.several), lambda m: m.several.append(1.0)),
    "set": (lambda m: len(m.classes), lambda m: m.classes.add(5)),
    "array": (lambda m: float(m.array[0]), lambda m: m.array.fill(2.0)),
    "tensor of one element": (lambda m: m.one.item(), lambda m: m.one.fill_(2.0)),
    "tensor in place": (lambda m: m.many, lambda m: m.many.mul_(torch.tensor([1.0, 2.0, 3.0]))),
    "another tensor": (lambda m: m.replaced, lambda m: setattr(m, "replaced", torch.tensor([1.0, 2.0, 3.0]))),
    "frozen parameter": (
        lambda m: m.frozen,
        lambda m: setattr(m, "frozen", nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), requires_grad=False)),
    ),
    "attribute that is new": (lambda m: m.of_class, lambda m: setattr(m, "of_class", 2.0)),
    "attribute that is asked for": (lambda m: 2.0 if hasattr(m, "new") else 1.0, lambda m: setattr(m, "new", True)),
    "attribute that goes": (lambda m: getattr(m, "number", 2.0), lambda m: delattr(m, "number")),
    "object": (lambda m: m.loss.by, lambda m: setattr(m.loss, "by", 2.0)),
    "method of an object": (lambda m: m.method(), lambda m: setattr(m.loss, "by", 2.0)),
    "object with slots": (lambda m: m.slots.by, lambda m: setattr(m.slots, "by", 2.0)),
    "slot": (lambda m: m.slotted(torch.ones(())) ** -1, lambda m: setattr(m.slotted, "by", 2.0)),
    "module in a list": (lambda m: m.unregistered[0].by, lambda m: setattr(m.unregistered[0], "by", 2.0)),
    "inner module": (lambda m: m.inner(torch.ones(())) ** -1, lambda m: setattr(m.inner, "by", 2.0)),
    "another part": (lambda m: 1 + m.last(torch.ones(())), lambda m: setattr(m, "last", nn.Threshold(5, 3))),
    "hook": (lambda m: 1 + m.last(torch.ones(())), hooked),
}


@pytest.mark.parametrize("way", quick_first(2, WAYS))
def test_what_changes_between_rounds_is_followed(tmp_path, traced, way):
    temperature, change = WAYS[way]
    options = {"make_data": lambda: data(sizes=(8,) * 3)}
    changed = compiled_agrees(tmp_path, lambda: Tempered(temperature), lambda: Changes(change), **options)
    assert traced[-1].blocks == 3
    plain = train(tmp_path, lambda: Tempered(temperature), "vectorized", datamodule=data(sizes=(8,) * 3))
    assert not torch.allclose(changed.deltas[-1], plain.deltas[-1]), "the change matters"


class Anneals(FederatedCallback):
    """Lowers the temperature after every step, between two chunks, or in every round."""

    stacks = True

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.lower)

    def lower(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.number *= 0.9


@pytest.mark.parametrize(("hook", "rounds"), quick_first(1, [("on_before_optimizer_step", 1), ("on_client_end", 2)]))
def test_what_changes_within_a_round_is_followed(tmp_path, traced, hook, rounds):
    options = {"make_data": lambda: data(sizes=(16,) * 4), "chunk_size": 2, "max_rounds": rounds}
    compiled_agrees(tmp_path, lambda: Tempered(lambda m: m.number), lambda: Anneals(hook), **options)


@pytest.mark.slow
def test_what_always_changes_is_refused(tmp_path, traced):
    def make() -> Tempered:
        return Tempered(lambda m: m.number)

    options = {"compile": True, "datamodule": data(sizes=(8,) * 3)}
    compiled_agrees(tmp_path, make, lambda: Anneals("on_train_epoch_end"), max_rounds=8)
    with pytest.raises(FederatedError, match="attribute `number`, which it reads, has changed 8 times: set") as caught:
        train(tmp_path, make, "vectorized", Anneals("on_train_epoch_end"), **options, max_rounds=9)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(". ") == 0


class ReadsRound(Model):
    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) / (1 + self.current_epoch)


class ReadsRoundAndCatches(Model):
    def training_step(self, batch: Any, _: int) -> Tensor:
        try:
            steps = self.trainer.global_step
        except Exception:  # noqa: BLE001  # as users do
            steps = 0
        return F.cross_entropy(self.net(batch[0]), batch[1]) / (1 + steps)


class InnerReadsRound(Model):
    def __init__(self) -> None:
        super().__init__()
        self.part = Inner()

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) / (1 + self.part.global_step)


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.calls += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Writes(Model):
    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen = len(batch[1])
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Appends(Model):
    def __init__(self) -> None:
        super().__init__()
        self.all_seen: list[int] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.all_seen.append(len(batch[1]))
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Draws(Model):
    """Has a stream of its own."""

    def __init__(self, stream: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.stream, self.draw = stream, draw

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) * self.draw(self.stream)


def streams(name: str) -> Draws:
    if name == "count":
        return Draws(itertools.count(1), next)
    if name == "torch":
        return Draws(torch.Generator(), lambda stream: float(torch.rand((), generator=stream)))
    stream = random.Random(3) if name == "random" else np.random.default_rng(3)
    return Draws(stream, lambda stream: stream.random())


def scripted() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, CLASSES), torch.jit.script(nn.Tanh())))


class Forgets(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def training_step(self, batch: Any, _: int) -> Tensor:
        if "first" in self.__dict__:
            del self.first
        return F.cross_entropy(self.net(batch[0]), batch[1])


REFUSED = {
    "round": (ReadsRound, "reads the trainer"),
    "steps": (ReadsRoundAndCatches, "reads the trainer"),
    "inner round": (InnerReadsRound, "reads the trainer"),
    "counts": (Counts, "changes its attribute `calls`"),
    "writes": (Writes, "changes its attribute `seen`"),
    "appends": (Appends, "changes its attribute `all_seen`"),
    "script": (scripted, "part `net.1` is a ScriptModule"),
    "deletes": (Forgets, "changes its attribute `first`"),
}


@pytest.mark.parametrize("name", quick_first(3, REFUSED))
def test_what_a_graph_would_not_repeat_is_refused_and_auto_falls_back(tmp_path, traced, name):
    make, message = REFUSED[name]
    with pytest.raises(FederatedError, match=message) as caught:
        train(tmp_path, make, "vectorized", compile=True)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(". ") == 0
    assert "`--trainer.compile false`, or `--trainer.engine sequential`" in str(caught.value)
    fallen = train(tmp_path, make, "auto", compile=True)
    assert fallen.trainer.engine_choice["engine"] == "sequential"
    agree(train(tmp_path, make, "sequential"), fallen, rtol=0)


class Toggles(Model):
    """Writes what it puts back, asks for its own class, and calls its superclass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(self) is Toggles
        self.net[1].eval()
        loss = super().training_step(batch, batch_idx)
        self.net[1].train()
        return loss


def test_what_is_put_back_is_no_change(tmp_path, traced):
    compiled_agrees(tmp_path, Toggles)
    assert traced[-1].blocks > 0


def test_it_says_which_attributes_have_changed():
    module = Model()
    constants = Constants(module)
    assert not constants.changed()
    module.many = torch.ones(3)
    module.net[0].by = [{"a": (1, 2.0)}]
    assert constants.changed() == {("", "many"), ("net.0", "by")}
    module.many.add_(1)
    module.net[0].by[0]["a"] = (1, 2.0)
    assert not constants.changed()
    module.many.requires_grad_()
    module.net[0].by[0]["a"] = (1, 3.0)
    module.net[1].eval()
    assert constants.changed() == {("", "many"), ("net.0", "by"), ("net.1", "training")}
    with pytest.raises(CannotTrace, match="changes its attribute `by`"), constants.tracing(set()):
        module.net[0].by.append(1)


class Annotates(FederatedCallback):
    """Keeps a count of rounds in the module, where no training step reads it."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.number += 1
        pl_module.notes.append(Loss())


def test_an_attribute_that_nobody_reads_may_always_change(tmp_path, traced, monkeypatch):
    made: list[set[Any]] = []
    trace = CompiledStep.traced

    def noting(self: CompiledStep, *args: Any) -> Any:
        made.append(args[4] if len(args) > 4 else set())
        return trace(self, *args)

    def make() -> Tempered:
        module = Tempered(lambda m: m.one.item())
        module.notes = []
        return module

    monkeypatch.setattr(CompiledStep, "traced", noting)
    compiled_agrees(tmp_path, make, Annotates, max_rounds=12, make_data=lambda: data(sizes=(8,) * 3))
    assert made.count(set()) == 2, "on trial, and once"
    assert made[2:] == [{("", "number"), ("", "notes")}]


@pytest.mark.parametrize("name", ["NumPy", "random", "count", "torch"])
def test_a_stream_of_its_own_is_seen_to_go_on(name):
    module = streams(name)
    constants = Constants(module)
    assert not constants.changed()
    with pytest.raises(CannotTrace, match="changes its attribute `stream`"), constants.tracing(set()):
        module.draw(module.stream)
    assert constants.changed() == {("", "stream")}


def test_objects_that_hold_each_other_are_compared_once():
    module, nan = Inner(), float("nan")
    module.by = SimpleNamespace(value=nan, kind=np.float32(2), device=torch.device("cpu"))
    module.by.itself, module.by.module = module.by, module
    constants = Constants(module)
    module.by.device = torch.device("cpu")
    assert not constants.changed()
    module.by.kind = np.float32(3)
    assert constants.changed() == {("", "by")}
    module.by.lock = threading.Lock()
    constants.changed()
    module.by.value = 3.0
    assert constants.changed() == {("", "by")}, "also beside what cannot be pickled"
