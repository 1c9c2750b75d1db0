"""Which engine a run gets, why, and what is said where many clients cannot train at once."""

import json
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.client_algorithms import ClientAlgorithm, Ditto, FedProx, LossAlgorithm
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.engines import SequentialTrainer, choice
from lightning_fed.engines.choice import AutomaticTrainer
from lightning_fed.engines.vectorized.preflight import StepProbe
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from tests.engines.parts import CLASSES, FEATURES, Model, agree, data, train


class Branches(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if loss > 1 else 2 * loss


class KeepsMetric(Model):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy.update(1.0)
        return super().training_step(batch, batch_idx)


class LogsMetric(Model):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/mean", self.accuracy)
        return super().training_step(batch, batch_idx)


class LeavesOut(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net[:1](batch[0])[:, :CLASSES], batch[1])


class OwnBackward(Model):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Watches(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Starts(FederatedCallback):
    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        self.client = client


class Adds(ClientAlgorithm):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trainer.vector.add_to_gradient(trainer.vector.data)


class AddsToAll(Adds):
    stacks = True


class CallsItself(Model):
    """Computes its scores in ``forward``, where losses read them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Doubles(LossAlgorithm):
    """A loss of a user's own, which has written no hook."""

    def term(self, call: Any, own: dict[str, Tensor]) -> Tensor:
        return call.loss


class Peeks(pl.Callback):
    """Looks at the gradients, as a callback of Lightning's."""

    stacks = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert len(trainer.vector.grad)


class StartsGPU(Model):
    """Looks at a GPU beside the CPU that it trains on, which starts the GPU and its random streams."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.cuda.is_initialized = lambda: True
        return super().training_step(batch, batch_idx)


REFUSED = {
    "control flow": (Branches, [], {}, r"Branches does not go through torch.func.vmap \(.*data-dependent"),
    "metric": (KeepsMetric, [], {}, "updates torchmetrics objects"),
    "logged metric": (LogsMetric, [], {}, "logs torchmetrics objects"),
    "no gradient": (LeavesOut, [], {}, r"`net.2.weight` gets no gradient"),
    "own hook": (OwnBackward, [], {}, "OwnBackward overrides `backward`"),
    "callback": (Model, [Watches], {}, "Watches overrides `on_train_batch_end`"),
    "start": (Model, [Starts], {}, r"Starts does not say `stacks = True` \(set it if its `on_client_start` works for"),
    "algorithm": (Model, [Adds], {}, r"Adds does not say `stacks = True` \(set it if its `on_before_optimizer_step`"),
    "loss": (CallsItself, [Doubles], {}, r"Doubles does not say `stacks = True` \(set it if its `logits` and `term`"),
    "of Lightning": (Model, [Peeks], {}, r"Peeks is no FederatedCallback that says `stacks = True` \(set it if its `o"),
    "optimizer": (
        lambda: Model(optimizer=lambda m: torch.optim.Adafactor(m.parameters())), [], {}, "Adafactor is not known",
    ),
    "LBFGS": (
        lambda: Model(optimizer=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1)), [], {}, "LBFGS is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("few_lanes_pay")
@pytest.mark.quick(5)
def test_what_cannot_train_at_once_is_refused_in_one_sentence_and_auto_falls_back(tmp_path, name, monkeypatch):
    make, callbacks, options, message = REFUSED[name]
    options = {**options, "precision": "32-true"}
    told: list[str] = []
    monkeypatch.setattr(choice, "rank_zero_info", told.append)
    with pytest.raises(FederatedError, match=message) as caught:
        train(tmp_path, make, "vectorized", *[callback() for callback in callbacks], **options)
    assert "\n" not in str(caught.value)
    assert "`--trainer.engine sequential`" in str(caught.value)
    fallen = train(tmp_path, make, "auto", *[callback() for callback in callbacks], **options)
    assert fallen.trainer.engine_choice["engine"] == "sequential"
    (line,) = told
    assert "\n" not in line
    agree(train(tmp_path, make, "sequential", *[callback() for callback in callbacks], **options), fallen, rtol=0)


def test_an_algorithm_of_the_users_own_that_says_so_works_on_all_at_once(tmp_path):
    agree(*(train(tmp_path, Model, engine, AddsToAll()) for engine in ("sequential", "vectorized")))
    plain = train(tmp_path, Model, "vectorized")
    assert not torch.allclose(plain.deltas[0], train(tmp_path, Model, "vectorized", AddsToAll()).deltas[0])


def conv() -> Model:
    image = nn.Unflatten(1, (1, FEATURES))
    return Model(nn.Sequential(image, nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES)))


def dropout() -> Model:
    return Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)))


@pytest.mark.parametrize(
    ("make", "most", "chosen", "reason"),
    [(Model, 10**7, "vectorized", "small"), (Model, 52, "sequential", "more than 52 weights"),
     (Model, 53, "vectorized", "small"), (conv, 10**7, "sequential", "Conv1d is not known to be quicker"),
     (dropout, 10**7, "sequential", "random numbers")],
)  # fmt: skip
@pytest.mark.usefixtures("few_lanes_pay")
def test_auto_chooses_by_a_rule(tmp_path, monkeypatch, make, most, chosen, reason):
    monkeypatch.setattr(choice, "_MOST_WEIGHTS", {"cpu": most})
    used: list[str] = []
    for kind, name in ((SequentialTrainer, "sequential"), (AutomaticTrainer, "vectorized")):
        monkeypatch.setattr(kind, "train", _noting(kind, name, used))
    run = train(tmp_path, make, "auto", precision="32-true")
    assert run.trainer.engine_choice["engine"] == chosen
    assert reason in run.trainer.engine_choice["reason"]
    assert set(used) == {chosen}


def _noting(kind: type, name: str, used: list[str]) -> Any:
    train_them = kind.train

    def noting(self: Any, clients: Any) -> Any:
        used.append(name)
        return train_them(self, clients)

    return noting


def test_the_choice_is_written_below_the_config(tmp_path, capsys):
    from lightning_fed.cli import main

    name = "auto"
    main([
        "fit", "--config", "configs/quickstart.yaml", "--trainer.clients_per_round", "20", "--trainer.max_rounds", "1",
        "--trainer.default_root_dir", str(tmp_path), "--trainer.name", name,
        "--trainer.logger", "[]", "--trainer.enable_progress_bar", "false",
    ])  # fmt: skip
    (folder,) = (tmp_path / name).iterdir()
    text = (folder / "config.yaml").read_text()
    assert "# engine chosen by auto: engine vectorized" in text
    assert "# memory format chosen by auto: preserve" in text
    (split,) = re.findall(r"^# split ([0-9a-f]{64})$", text, flags=re.MULTILINE)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["federated"]["split_hash"] == split
    assert json.loads((folder / "run.json").read_text())["name"] == name


@pytest.mark.usefixtures("few_lanes_pay")
def test_trying_leaves_nothing_changed(tmp_path):
    def norm() -> Model:
        return Model(nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))

    sizes = (8, 16, 24)
    runs = [
        train(tmp_path, norm, engine, FedProx(0.1), datamodule=data(sizes=sizes), precision="32-true", **options)
        for engine, options in (("auto", {}), ("vectorized", {}), ("auto", {"chunk_size": 1}))
    ]
    agree(runs[0], runs[1], rtol=0)
    agree(runs[0], runs[2], rtol=1e-5)


@pytest.mark.usefixtures("few_lanes_pay")
def test_a_gpu_that_is_started_meanwhile_draws_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    streams = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [streams])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    assert train(tmp_path, StartsGPU, "auto", precision="32-true").trainer.engine_choice["engine"] == "vectorized"


def test_second_gradients_take_memory_too(tmp_path, monkeypatch):
    monkeypatch.setattr(StepProbe, "lanes_that_fit", lambda _, second_gradients: 2 if second_gradients else 5)
    for algorithm, size in ((FedProx(0.1), 5), (Ditto(), 2)):
        run = train(tmp_path, Model, "vectorized", algorithm, max_rounds=1, datamodule=data(sizes=(8,) * 6))
        assert run.trainer.engine_choice["chunk_size"] == size


def test_a_resumed_run_keeps_its_chunks_whatever_the_memory(tmp_path, monkeypatch):
    options = {"enable_checkpointing": True, "logger": [], "name": "run", "datamodule": data(sizes=(8,) * 6)}
    monkeypatch.setattr(StepProbe, "lanes_that_fit", lambda *_: 2)
    first = train(tmp_path, Model, "vectorized", max_rounds=1, **options).trainer
    assert first.engine_choice["chunk_size"] == 2
    monkeypatch.setattr(StepProbe, "lanes_that_fit", lambda *_: 5)
    assert train(tmp_path / "other", Model, "vectorized", **options).trainer.engine_choice["chunk_size"] == 5
    trainer = FederatedTrainer(
        "cpu", default_root_dir=str(tmp_path), name="run", seed=1, max_rounds=2, logger=[], engine="vectorized",
        precision="64-true", enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Model(), options["datamodule"], ckpt_path=str(first.run.checkpoints / "last.ckpt"))
    assert trainer.engine_choice["chunk_size"] == 2
