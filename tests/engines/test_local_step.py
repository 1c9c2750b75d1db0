"""Modules that override Lightning's optimization hooks train as they do under Lightning's Trainer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, SparseAdam

from lightning_fed.client_algorithms import FedProx
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, train_both


class Base(Classifier):
    """A small network under SGD with momentum and weight decay."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)))
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class WarmUp(Base):
    """Sets the learning rate after each step, as in Lightning's own example."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)


class EverySecondBatch(Base):
    """Steps on every second batch only, and runs the closure alone on the others."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class OwnClipping(Base):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.calls.append(f"{gradient_clip_val} {gradient_clip_algorithm}")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class HigherOrderBackward(Base):
    """With ``create_graph`` torch replaces gradients instead of adding to them."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(create_graph=True)


class ScaledGradients(Base):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad = p.grad * 2

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.net[0].parameters():
            p.grad.mul_(0.5)


class DropsLoss(Base):
    """Hooks see the gradients of the step before when they are about to be zeroed."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        norms = [p.grad.norm().item() for p in self.parameters() if p.grad is not None]
        self.calls.append("before zero_grad" if any(norms) else "nothing yet")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(f"loss {loss.item():.6f}")


class KeepsZeroedGradients(Base):
    """Zeroes in place, so that weight decay moves a head without gradient from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) + self.heads[int(y[0] == 1)](x), y)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append(str(batch_idx))
        optimizer.zero_grad(set_to_none=False)


class Adversarial(Base):
    """Runs a backward pass of its own in ``training_step``, whose gradients must not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        F.cross_entropy(self(x), y).backward()
        return F.cross_entropy(self((x + 0.1 * x.grad.sign()).detach()), y)


class ZeroesInStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.zero_grad()
        return self.loss(batch)


class StopsEpochEarly(Base):
    last = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.last else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(str(batch_idx))


class StepsScheduleItself(Base):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(str(metric))
        scheduler.step()
        scheduler.step()


class LossInDict(Base):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.loss(batch), "extra": batch[0].mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"{batch_idx} {outputs['extra']:.6f}")


class NoBatchIndex(Base):
    def training_step(self, batch: Any) -> Tensor:
        return self.loss(batch)


class OtherNames(Base):
    def training_step(self, data: Any, number: int) -> Tensor:
        self.calls.append(str(number))
        return self.loss(data)


MODULES = [
    WarmUp, EverySecondBatch, OwnClipping, HigherOrderBackward, ScaledGradients, DropsLoss, KeepsZeroedGradients,
    Adversarial, ZeroesInStep, StepsScheduleItself, LossInDict, NoBatchIndex, OtherNames,
]  # fmt: skip


@pytest.mark.parametrize("module_class", MODULES)
def test_same_weights_and_same_calls(tmp_path, module_class):
    ours, theirs = train_both(tmp_path, module_class, federated_data(40))
    assert ours.calls == theirs.calls


@pytest.mark.parametrize("module_class", [DropsLoss, KeepsZeroedGradients, Adversarial, ZeroesInStep])
def test_the_same_with_accumulation(tmp_path, module_class):
    ours, theirs = train_both(tmp_path, module_class, federated_data(40), accumulate_grad_batches=2)
    assert ours.calls == theirs.calls


def test_epoch_stopped_by_the_module(tmp_path):
    ours, theirs = train_both(tmp_path, StopsEpochEarly, federated_data(40), epochs=2)
    assert ours.calls == theirs.calls == ["0", "1", "0", "1"]


def test_epoch_stopped_within_an_accumulation_window(tmp_path):
    class StopsLater(StopsEpochEarly):
        last = 3

    ours, theirs = train_both(tmp_path, StopsLater, federated_data(40), epochs=2, accumulate_grad_batches=2)
    assert ours.calls == theirs.calls == ["0", "1", "2"] * 2


@pytest.mark.parametrize(("skips_at", "window"), [(0, 1), (1, 4)], ids=["at_once", "within_every_window"])
def test_local_steps_end_where_the_module_skips_every_epoch(tmp_path, skips_at, window):
    class NeverSteps(Base):
        batches = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            self.batches += 1
            assert self.batches < 100, "local steps that never come are waited for"
            return -1 if batch_idx == skips_at else None

    module = NeverSteps()
    start = module.net[0].weight.detach().clone()
    trainer = federated_trainer(tmp_path, local_steps=5, accumulate_grad_batches=window, max_rounds=2)
    with pytest.raises(FederatedError, match="no client has taken a step in any round"):
        trainer.fit(module, federated_data(40))
    assert module.batches == 2 * (1 + skips_at)
    assert torch.equal(module.net[0].weight, start)
    assert trainer.logged_metrics["clients/skipped"] == 1


class SharpnessAware(SGD):
    """An optimizer from elsewhere that evaluates the loss twice in each step."""

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            closure()
        shifts = [(p, 0.05 * p.grad.sign()) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, shift in shifts:
                p.add_(shift)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, shift in shifts:
                p.sub_(shift)
        super().step()
        return loss


def test_optimizer_that_calls_the_closure_itself(tmp_path):
    class Sharp(Base):
        def configure_optimizers(self) -> Any:
            return SharpnessAware(self.parameters(), lr=0.1)

    train_both(tmp_path, Sharp, gradient_clip_val=0.1)


def test_an_optimizer_that_looks_at_gradients_first_finds_none_of_another_client(tmp_path):
    """As public sharpness-aware ones do: they begin with the gradients of the step before."""
    found = []

    class Looks(SGD):
        def step(self, closure: Any) -> Any:
            found.append([p.grad is None for p in self.param_groups[0]["params"]])
            super().step(closure)

    module = Classifier(optimizer=lambda m: Looks(m.parameters(), lr=0.1))
    federated_trainer(tmp_path, max_rounds=2).fit(module, federated_data(8, 16))
    assert found == [[True] * 2, [True] * 2, [False] * 2] * 2


class Words(Classifier):
    """The meaning of a bag of words, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(10, CLASSES, sparse=True), lambda m: SparseAdam(m.parameters(), lr=0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((3 * x.abs()).long().clamp(0, 9))


def test_sparse_adam_steps_by_sparse_gradients(tmp_path):
    train_both(tmp_path, Words)


@pytest.mark.parametrize("callbacks", [[], [FedProx(mu=0.1)]], ids=["dense layer", "dense term"])
def test_sparse_adam_without_sparse_gradients_is_told_in_a_sentence(tmp_path, callbacks):
    module = Words()
    if not callbacks:
        module.net = nn.Sequential(module.net, nn.Linear(CLASSES, CLASSES))
    with pytest.raises(FederatedError, match=r"SparseAdam raised RuntimeError \(.*dense gradients.*`--optimizer`"):
        federated_trainer(tmp_path, *callbacks).fit(module, federated_data())


class Broken(SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("mine")


class BrokenStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("mine")


@pytest.mark.parametrize(("kind", "optimizer"), [(Classifier, Broken), (BrokenStep, LBFGS)])
def test_a_defect_of_the_users_own_is_shown(tmp_path, kind, optimizer):
    with pytest.raises(RuntimeError, match="mine"):
        federated_trainer(tmp_path).fit(kind(optimizer=lambda m: optimizer(m.parameters())), federated_data())


def test_closure_must_be_called(tmp_path):
    class Forgetful(Base):
        def optimizer_step(self, *args: Any) -> None:
            pass

    with pytest.raises(FederatedError, match=r"Forgetful\.optimizer_step.*closure"):
        federated_trainer(tmp_path).fit(Forgetful(), federated_data())


class LateHead(Base):
    """A head has no gradient in the first batches of some windows."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) + (self.head(x) if batch_idx % 3 == 2 else 0), y)


def replayed(function: Any, mode: str) -> Any:
    """Stands for ``torch.compile`` with CUDA graphs: a call writes where gradients were left before it."""
    module = function.__self__

    def replay(*args: Any) -> Any:
        own = module.trainer.vector._grad.untyped_storage().data_ptr()
        for p in module.parameters():
            if p.grad is not None and p.grad.untyped_storage().data_ptr() != own:
                p.grad.fill_(torch.nan)
        return function(*args)

    return replay


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_are_kept_from_the_memory_of_graphs(tmp_path, monkeypatch, mode, clip):
    weights = []
    for options in ({}, {"compile": mode}):
        monkeypatch.setattr(torch, "compile", replayed)
        module = LateHead()
        options |= {"engine": "sequential", "accumulate_grad_batches": 3, "gradient_clip_val": clip}
        federated_trainer(tmp_path, FedProx(mu=0.5), local_epochs=2, **options).fit(module, federated_data(40))
        weights.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("mode", "window"), [("default", 3), ("max-autotune-no-cudagraphs", 3), ("reduce-overhead", 1)]
)
def test_only_windows_of_graphs_pay_for_it(tmp_path, monkeypatch, mode, window):
    calls = []
    collect = ParameterVector.collect_gradients
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    monkeypatch.setattr(
        ParameterVector, "collect_gradients", lambda self, more=False: (calls.append(more), collect(self, more))[1]
    )
    options = {"engine": "sequential", "compile": mode, "accumulate_grad_batches": window}
    federated_trainer(tmp_path, **options).fit(LateHead(), federated_data(40))
    assert calls
    assert not any(calls)
