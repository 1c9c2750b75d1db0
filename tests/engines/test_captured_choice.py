"""The captured step as a candidate of `auto`, and on a GPU itself where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.client_algorithms import SCAFFOLD, FedProx
from lightning_fed.engines import choice, graphs
from lightning_fed.engines.capture_trial import CaptureTrial
from lightning_fed.hooks import FederatedCallback
from tests.engines.graph_parts import made  # noqa: F401  # a fixture
from tests.engines.parts import CLASSES, FEATURES, Model, agree, data, train

with_graphs = pytest.mark.usefixtures("made")
ALONE, GRAPH, TOGETHER = "alone", "captured", "together"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(choice, "rank_zero_info", lines.append)
    return lines


def clock(monkeypatch: pytest.MonkeyPatch, alone: float, captured: float, together: float) -> None:
    monkeypatch.setattr(choice.StepProbe, "seconds_alone", lambda probe: alone)
    monkeypatch.setattr(CaptureTrial, "seconds_alone", lambda trial: alone)
    monkeypatch.setattr(CaptureTrial, "seconds_captured", lambda trial: captured)
    monkeypatch.setattr(choice.StepProbe, "seconds_together", lambda probe, count: together * count)


class Branches(Model):
    """Does not go through vmap, whose control flow may not depend on tensors, nor into a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if loss > 1 else 2 * loss


class LeavesOut(Model):
    """Has parameters without a gradient, which is for one client."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net[:1](batch[0])[:, :CLASSES], batch[1])


@with_graphs
@pytest.mark.parametrize(
    ("seconds", "engine", "captured"),
    [((3e-4, 2e-4, 1e-4), "vectorized", False), ((3e-4, 1e-4, 2e-4), "sequential", True),
     ((1e-4, 3e-4, 2e-4), "sequential", False), ((1e-4, 1e-4, 1e-4), "sequential", False)],
)  # fmt: skip
def test_auto_takes_the_fastest_of_three(tmp_path, monkeypatch, told, seconds, engine, captured):
    clock(monkeypatch, *seconds)
    run = train(tmp_path, Model, "auto")
    chosen = run.trainer.engine_choice
    assert chosen["engine"] == engine
    assert chosen.get("cuda_graphs", False) is captured
    alone, graph, together = (f"{1e6 * s:.0f} µs" for s in seconds)
    assert f"{together} when 6 train at once, {graph} as a CUDA graph and {alone} alone" in chosen["reason"]
    (line,) = told
    assert line.startswith(f"Engine: {engine}{' with CUDA graphs' if captured else ''}, as a client's step takes")
    agree(train(tmp_path, Model, "sequential"), run, rtol=0 if engine == "sequential" else 1e-10)


@with_graphs
def test_auto_takes_graphs_where_many_cannot_train_at_once(tmp_path, monkeypatch, told):
    clock(monkeypatch, 3e-4, 1e-4, 0.0)
    run = train(tmp_path, LeavesOut, "auto")
    assert run.trainer.engine_choice["cuda_graphs"]
    assert run.trainer.engine_choice["engine"] == "sequential"
    (line,) = told
    assert "100 µs as a CUDA graph and 300 µs alone; many cannot train at once, as its parameter `net.2" in line
    agree(train(tmp_path, LeavesOut, "sequential"), run, rtol=0)


@with_graphs
def test_auto_says_why_neither_can_be(tmp_path, told):
    run = train(tmp_path, Branches, "auto")
    assert run.trainer.engine_choice["engine"] == "sequential"
    (line,) = told
    assert "torch.func.vmap" in line
    assert "; no CUDA graph, as `training_step` of Branches cannot be captured (called a synchronizing" in line


@with_graphs
@pytest.mark.parametrize("deterministic", [True, "warn"])
@pytest.mark.parametrize("make", [Model, LeavesOut])
def test_no_graph_is_tried_where_runs_must_be_deterministic(tmp_path, monkeypatch, deterministic, make, request):
    run = train(tmp_path, make, "auto", deterministic=deterministic)
    torch.use_deterministic_algorithms(False)
    assert "cuda_graphs" not in run.trainer.engine_choice
    assert "CUDA graph" not in run.trainer.engine_choice["reason"]
    assert not any(stand_in.tapes for stand_in in request.getfixturevalue("made"))


@with_graphs
def test_trials_are_really_timed_and_leave_nothing_changed(tmp_path, monkeypatch):
    def make() -> Model:
        return Model(nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, CLASSES)))

    timed: list[float] = []
    seconds = CaptureTrial.seconds_captured
    monkeypatch.setattr(CaptureTrial, "seconds_captured", lambda trial: timed.append(seconds(trial)) or 0.0)
    sizes = (8, 16, 24)
    runs = [
        train(tmp_path, make, engine, FedProx(0.1), datamodule=data(sizes=sizes)) for engine in ("sequential", "auto")
    ]
    assert runs[1].trainer.engine_choice["cuda_graphs"]
    assert timed[0] > 0
    agree(*runs, rtol=0)


class Looks(FederatedCallback):
    """Compares what training begins with to what the model was built with."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.moved = not torch.equal(trainer.vector.data, trainer.weights)
        self.stepped = len(trainer.local_optimizer.optimizer.state)
        self.flat_step = trainer.local_optimizer.flat_step
        self.gradient = float(trainer.vector.grad.abs().sum())


@with_graphs
def test_weights_and_the_optimizer_are_as_before_a_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(choice.StepProbe, "seconds_alone", lambda probe: 1e9)
    monkeypatch.setattr(choice.StepProbe, "seconds_together", lambda probe, count: 0.0)
    looks = Looks()
    momentum = Model(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    run = train(tmp_path, lambda: momentum, "auto", looks)
    assert run.trainer.engine_choice["engine"] == "vectorized"
    assert (looks.moved, looks.stepped, looks.flat_step, looks.gradient) == (False, 0, None, 0.0)


@with_graphs
def test_a_resumed_run_keeps_graphs_as_long_as_they_can_be_had(tmp_path, monkeypatch, told):
    class Ends(FederatedCallback):
        def on_after_backward(self, *args: Any) -> None:
            pass

    clock(monkeypatch, 3e-4, 1e-4, 2e-4)
    kept = {"enable_checkpointing": True, "logger": [], "max_rounds": 1}
    trainer = train(tmp_path, Model, "auto", **kept).trainer
    chosen, last = trainer.engine_choice, str(trainer.run.checkpoints / "last.ckpt")
    clock(monkeypatch, 0.0, 1.0, 1.0)
    trainer.max_rounds = 2
    trainer.fit(Model(), data(), ckpt_path=last)
    assert trainer.engine_choice == chosen
    assert len(told) == 1
    monkeypatch.setattr(graphs, "graphs_for", lambda device: None)
    trainer.max_rounds = 3
    trainer.fit(Model(), data(), ckpt_path=last)
    assert trainer.engine_choice["engine"] == "sequential"
    assert "cuda_graphs" not in trainer.engine_choice
    assert told[-1] == "Engine: sequential, as the run before was captured, and this one is not on a GPU."


@with_graphs
def test_a_resumed_run_says_why_it_is_captured_no_more(tmp_path, monkeypatch, told):
    clock(monkeypatch, 3e-4, 1e-4, 2e-4)
    trainer = train(tmp_path, Model, "auto", enable_checkpointing=True, logger=[], max_rounds=1).trainer

    class Changed(Model):
        def on_after_backward(self) -> None:
            pass

    trainer.max_rounds = 2
    trainer.fit(Changed(), data(), ckpt_path=str(trainer.run.checkpoints / "last.ckpt"))
    assert trainer.engine_choice["engine"] == "sequential"
    assert "; no CUDA graph, as Changed overrides `on_after_backward`" in told[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU under CUDA")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("make_callback", [FedProx, SCAFFOLD])
def test_on_a_gpu(tmp_path, precision, make_callback):
    def make() -> Model:
        return Model(nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, CLASSES)))

    sizes = (8, 19, 0, 26, 16, 13)
    plain, captured = (
        train(
            tmp_path, make, "sequential", make_callback(), datamodule=data(sizes=sizes), accelerator="gpu",
            precision=precision, gradient_clip_val=1.0, cuda_graphs=on,
        )
        for on in (False, True)
    )  # fmt: skip
    assert captured.trainer.engine_choice["cuda_graphs"]
    agree(plain, captured, rtol=1e-4 if precision == "32-true" else 3e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU under CUDA")
def test_on_a_gpu_a_step_that_waits_is_refused_and_the_run_goes_on_drawing(tmp_path):
    class Waits(Model):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train/x", loss.item())
            return loss

    auto = train(tmp_path, Waits, "auto", accelerator="gpu", precision="32-true")
    assert "no CUDA graph" in auto.trainer.engine_choice["reason"]
