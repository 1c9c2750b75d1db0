"""What a captured step would get wrong is refused in one sentence, before the first round or when it is met."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed import FederatedTrainer
from lightning_fed.engines import choice, graphs
from lightning_fed.engines.capturable import drawn_on_host, runs_between_steps
from lightning_fed.engines.module_watch import ModuleWatch
from lightning_fed.engines.trial import random_states
from lightning_fed.errors import FederatedError
from tests.engines.graph_parts import captured_as_plain, made  # noqa: F401  # a fixture
from tests.engines.parts import FEATURES, Model, agree, data, train

with_graphs = pytest.mark.usefixtures("made")


def stepping(change: Callable[[Any, Tensor, Any, Any], Any]) -> Callable[[], Model]:
    """Returns what makes a model whose step does something with its loss besides."""

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, []
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            result = change(self, loss, batch, batch_idx)
            return result if isinstance(result, Tensor) else loss

    return Other


def overriding(hook: str) -> Callable[[], Model]:
    def make() -> Model:
        plain = getattr(pl.LightningModule, hook)
        return type("Overrides", (Model,), {hook: lambda self, *a, **k: plain(self, *a, **k)})()

    return make


class Watches(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass


def set_trainer(module: Any, *args: Any) -> None:
    module.trainer.noted = 1


class SharedBuffer(Model):
    """A buffer in two places, replaced in one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.register_buffer("mean", torch.zeros(()))
        self.part.register_buffer("mean", self.mean)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean = self.mean + 1
        return super().training_step(batch, batch_idx)


class Words(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, "word"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)


class TakesAway(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{hook: (overriding(hook), f"Overrides overrides `{hook}`") for hook in (
        "backward", "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward", "on_after_backward",
        "optimizer_step",
    )},
    "batch_idx": (stepping(lambda m, loss, b, i: loss * (2.0 if i == 0 else 1.0)), "reads `batch_idx`"),
    "batch_idx of one": (stepping(lambda m, loss, b, i: loss * (i + 1)), "reads `batch_idx`"),
    "logged batch_idx": (stepping(lambda m, loss, b, i: m.log("i", i)), "reads `batch_idx`"),
    "client": (stepping(lambda m, loss, b, i: m.trainer.client), r"reads `trainer.client`, which a graph would keep"),
    "local step": (stepping(lambda m, loss, b, i: m.trainer.local_step), "reads `trainer.local_step`"),
    "global step": (stepping(lambda m, loss, b, i: m.global_step), "reads `trainer.global_step`"),
    "round": (stepping(lambda m, loss, b, i: m.current_epoch), "reads the round"),
    "learning rate": (stepping(lambda m, loss, b, i: m.optimizers()), "reads `trainer"),
    "logger": (stepping(lambda m, loss, b, i: m.logger), "reads `trainer.logger`"),
    "sets": (stepping(set_trainer), "sets `trainer.noted`"),
    "metric": (stepping(lambda m, loss, b, i: m.mean.update(1.0)), "updates torchmetrics objects"),
    "logged metric": (stepping(lambda m, loss, b, i: m.log("mean", m.mean)), "logs torchmetrics objects"),
    "counter": (stepping(lambda m, loss, b, i: setattr(m, "calls", m.calls + 1)), "changes its `calls`"),
    "new attribute": (stepping(lambda m, loss, b, i: setattr(m, "fresh", 1)), "changes its `fresh`"),
    "list": (stepping(lambda m, loss, b, i: m.seen.append(loss.detach())), "changes its `seen`"),
    "item": (stepping(lambda m, loss, b, i: m.log("x", loss.item())), r"cannot be captured \(called a synchronizing"),
    "branch": (stepping(lambda m, loss, b, i: loss if loss > 1 else 2 * loss), "cannot be captured"),
    "numpy": (stepping(lambda m, loss, b, i: loss * np.random.rand()), "draws from NumPy's random stream"),  # noqa: NPY002
    "python": (stepping(lambda m, loss, b, i: loss * random.random()), "draws from Python's random stream"),
    # Python that the stand-in does not see, and torch on a GPU would not either: the comparison does.
    "constant": (stepping(lambda m, loss, b, i: loss * float(b[0].numpy()[0, 0])), "gives another gradient in a graph"),
    "constant of the weights": (
        stepping(lambda m, loss, b, i: loss * float(m.net[0].weight.detach().numpy()[0, 0])),
        "gives another gradient in a graph",
    ),
    "logged constant": (
        stepping(lambda m, loss, b, i: m.log("x", float(b[0].numpy()[0, 0]))), "another value logged as `x` in a graph"
    ),
    "buffer": (SharedBuffer, "replaces its buffer `mean`"),
    "words": (Words, "its batches hold a str"),
    "taken away": (TakesAway, "takes gradients away"),
    "LBFGS": (lambda: Model(optimizer=lambda m: torch.optim.LBFGS(m.parameters())), "LBFGS may take the gradient"),
}  # fmt: skip


@with_graphs
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_sentence_and_auto_trains_without(tmp_path, name, monkeypatch):
    make, message = REFUSED[name]
    told: list[str] = []
    monkeypatch.setattr(choice, "rank_zero_info", told.append)
    monkeypatch.setattr(choice.StepProbe, "seconds_together", lambda probe, count: 1e9)
    with pytest.raises(FederatedError, match=message) as caught:
        train(tmp_path, make, "sequential", cuda_graphs=True, precision="32-true")
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value)
    assert "set `--trainer.cuda_graphs false`" in str(caught.value)
    plain, auto = (
        train(tmp_path, make, engine, max_rounds=2, precision="32-true") for engine in ("sequential", "auto")
    )
    assert auto.trainer.engine_choice["engine"] == "sequential"
    assert "cuda_graphs" not in auto.trainer.engine_choice
    (line,) = told
    assert "no CUDA graph" in line
    assert "\n" not in line
    agree(plain, auto, rtol=0)


@with_graphs
def test_a_callback_within_the_captured_part_is_refused(tmp_path):
    with pytest.raises(FederatedError, match="Watches overrides `on_after_backward`"):
        train(tmp_path, Model, "sequential", Watches(), cuda_graphs=True)


@with_graphs
def test_compiling_and_scaling_are_refused(tmp_path):
    with pytest.raises(FederatedError, match="`--trainer.compile true` compiles the step"):
        train(tmp_path, Model, "sequential", cuda_graphs=True, compile=True)

    class Scaled(Model):
        def setup(self, stage: str) -> None:
            self.trainer.fabric.strategy.precision.scaler = SimpleNamespace()

    with pytest.raises(FederatedError, match="the precision scales the loss"):
        train(tmp_path, Scaled, "sequential", cuda_graphs=True)


def test_there_are_none_on_the_cpu(tmp_path):
    assert graphs.graphs_for(torch.device("cpu")) is None
    with pytest.raises(FederatedError, match=r"the run is on cpu, not on a GPU.*`--trainer.cuda_graphs false`"):
        train(tmp_path, Model, "sequential", cuda_graphs=True)


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_other_engines_are_refused(engine):
    with pytest.raises(FederatedError, match=rf"`--trainer.cuda_graphs true` with `--trainer.engine seq.*got {engine}"):
        FederatedTrainer(accelerator="cpu", engine=engine, cuda_graphs=True)


class WaitsLate(Model):
    """Waits for its loss where the batch is a single sample, which no trial has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) > 1 else loss * (1 + abs(loss.item()))


@with_graphs
def test_a_shape_that_comes_later_and_cannot_be_captured(tmp_path, monkeypatch):
    with pytest.raises(FederatedError, match=r"cannot be captured \(called a synchronizing.*cuda_graphs false"):
        train(tmp_path, WaitsLate, "sequential", cuda_graphs=True)
    monkeypatch.setattr(choice.CaptureTrial, "seconds_captured", lambda trial: 0.0)
    with pytest.warns(UserWarning, match="Some batches are trained on without a CUDA graph, as `training_step` of W"):
        auto = train(tmp_path, WaitsLate, "auto")
    assert auto.trainer.engine_choice["cuda_graphs"]
    agree(train(tmp_path, WaitsLate, "sequential"), auto, rtol=0)


class Trims(Model):
    """Its batches have as many columns as their first label says."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x[:, : 3 + int(y[0])], y, None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(F.pad(batch[0], (0, FEATURES - batch[0].shape[1]))), batch[1])


@with_graphs
def test_batches_of_too_many_shapes(tmp_path, monkeypatch):
    captured_as_plain(tmp_path, Trims)
    monkeypatch.setattr("lightning_fed.engines.captured_step._MOST_GRAPHS", 2)
    with pytest.raises(FederatedError, match="more than 2 shapes"):
        train(tmp_path, Trims, "sequential", cuda_graphs=True)


@with_graphs
def test_a_failed_capture_leaves_nothing_behind(tmp_path):
    class Spoils(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net[0].bias.grad = None
            self.noise = torch.rand(())
            if np.random.rand() < 2:  # noqa: NPY002
                raise ValueError("no. 3. Not this one.")
            return super().training_step(batch, batch_idx)

    module, before = Spoils(), {}

    class Notes(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            before["states"] = None

        def on_exception(self, trainer: Any, pl_module: Any, error: Any) -> None:
            before["states"] = random_states(), hasattr(module, "noise"), trainer.vector.grad.abs().sum().item()

    trainer = FederatedTrainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, cuda_graphs=True,
        callbacks=[Notes()], default_root_dir=str(tmp_path),
    )  # fmt: skip
    states = random_states()
    with pytest.raises(FederatedError, match=r"cannot be captured \(no\)"):
        trainer.fit(module, data())
    assert before["states"] == (states, False, 0.0)


def test_draws_on_the_host_are_named_by_their_stream():
    states = random_states()
    assert drawn_on_host(states, states, torch.device("cuda")) is None
    drawn = (b"", *states[1:])
    assert drawn_on_host(states, drawn, torch.device("cuda")) == "torch's"
    assert drawn_on_host(states, drawn, torch.device("cpu")) is None
    assert drawn_on_host(states, (*states[:3], b"gpu"), torch.device("cuda")) is None
    assert drawn_on_host(states, (states[0], b"", *states[2:]), torch.device("cpu")) == "NumPy's"


CHANGES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "nothing": (lambda m: None, None),
    "equal": (lambda m: setattr(m, "number", float("1.5")), None),
    "number": (lambda m: setattr(m, "number", 2.5), "number"),
    "kind": (lambda m: setattr(m, "flag", 1), "flag"),
    "entry": (lambda m: m.numbers.append(4), "numbers"),
    "same entry": (lambda m: m.table.update(a=1), None),
    "other entry": (lambda m: m.table.update(a=2), "table"),
    "removed": (lambda m: delattr(m, "number"), "number"),
    "value of a tensor": (lambda m: m.tensor.add_(1), None),
    "tensor": (lambda m: setattr(m, "tensor", torch.zeros(2)), "tensor"),
    "mode": (lambda m: m.net.eval(), "training"),
    "frozen": (lambda m: m.net[0].weight.requires_grad_(False), "weight"),
    "moved": (lambda m: setattr(m.net[0].weight, "data", m.net[0].weight.data.clone()), "weight"),
    "part": (lambda m: setattr(m, "net", nn.Linear(1, 1)), "net"),
    "metric": (lambda m: m.mean.update(1.0), None),
    "collection of metrics": (lambda m: m.scores.update(1.0), None),
    "log": (lambda m: vars(m).update(log=print), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_watch_names_what_has_changed(name):
    module: Any = Model()
    module.number, module.flag, module.numbers, module.table = 1.5, True, [1, 2], {"a": 1}
    module.tensor, module.mean = torch.zeros(2), torchmetrics.MeanMetric()
    module.scores = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])
    watch = ModuleWatch(module, torch.device("cpu"))
    change, expected = CHANGES[name]
    change(module)
    assert watch.changed() == expected


def test_a_watch_sees_new_values_of_tensors_that_a_step_on_another_device_reads_once():
    module: Any = Model()
    module.tensor = torch.zeros(())
    watch = ModuleWatch(module, torch.device("cuda"))
    module.tensor.add_(1)
    assert watch.changed() == "tensor"


def test_only_code_of_the_users_own_is_watched_for_between_steps(tmp_path):
    run = train(tmp_path, Model, "sequential", max_rounds=1)
    assert not runs_between_steps(run.trainer, Model())
    assert runs_between_steps(run.trainer, Trims())
