"""What a module may do that many clients at once would get wrong: it is refused, or comes out right."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.core.devices import cudnn_layer
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client
from lightning_fed.data import FederatedDataModule, TensorSource
from lightning_fed.engines import choice
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.errors import FederatedError
from lightning_fed.models import ResNet18
from tests.engines.parts import CLASSES, FEATURES, Model, agree, both, data, train, vectors
from tests.parts import federated_data


class OwnList(Model):
    """Reaches its parameters by a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [p for p in self.parameters() if p.ndim > 1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum((p**2).sum() for p in self.decayed)


class Clamped(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.3, 0.3) for p in self.parameters()])
        return optimizer


class OtherStep(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        step = optimizer.step
        optimizer.step = lambda *a, **k: (step(*a, **k), [p.data.clamp_(-0.3, 0.3) for p in self.parameters()])
        return optimizer


class ReadsClient(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        client = self.trainer.client
        return super().training_step(batch, batch_idx) * (1 if client is None else 1 + client.id)


class MixesUp(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * np.random.beta(1, 1)


class KeepsLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = super().training_step(batch, batch_idx)
        return self.last


class Collects(Model):
    """Lightning's usual pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/own", torch.stack(self.outs).mean())
        self.outs.clear()


REFUSED = {
    "own list": (OwnList, "reaches its parameters in another way than as attributes"),
    "hook": (Clamped, "has hooks, or another `step`"),
    "step": (OtherStep, "has hooks, or another `step`"),
    "client": (ReadsClient, r"uses `trainer.client.id`"),
    "numpy": (MixesUp, "NumPy's or Python's random stream"),
    "tensor": (KeepsLoss, "keeps tensors in its attribute `last`"),
    "list": (Collects, "keeps tensors in its attribute `outs`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_auto_trains_one_after_another_from_where_it_was(tmp_path, name):
    make, message = REFUSED[name]
    with pytest.raises(FederatedError, match=message) as caught:
        train(tmp_path, make, "vectorized")
    assert str(caught.value).count(". ") == 0
    fallen = train(tmp_path, make, "auto")
    assert fallen.trainer.engine_choice["engine"] == "sequential"
    agree(train(tmp_path, make, "sequential"), fallen, rtol=0)


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.seen[self.calls] = batch_idx
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else -loss


def test_trying_changes_no_attribute(tmp_path):
    module = Counts()
    with pytest.raises(FederatedError, match="does not go through"):
        train(tmp_path, lambda: module, "vectorized")
    assert (module.calls, module.seen) == (0, {})


class Part(nn.Module):
    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - self.mean


def sharing() -> Model:
    shared = torch.zeros(FEATURES)
    return Model(nn.Sequential(Part(shared), Part(shared), nn.Linear(FEATURES, CLASSES)))


def test_a_buffer_in_two_places_is_one(tmp_path):
    both(tmp_path, sharing, precision="32-true", rtol=1e-5)


class LogsLate(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.log("train/loss", loss, reduce_fx="min")
        return loss


def test_clients_that_log_nothing_have_not_diverged(tmp_path):
    both(tmp_path, LogsLate)


class LogsStart(FederatedCallback):
    stacks = True

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        pl_module.log("starts", 1.0, reduce_fx="sum")
        if client.id == 4:
            trainer.vector.data.fill_(torch.nan)


def test_what_a_client_that_diverges_has_logged_at_its_start_is_forgotten(tmp_path):
    runs = [train(tmp_path, Model, engine, LogsStart(), max_diverged=0.3) for engine in ("sequential", "vectorized")]
    agree(*runs)
    assert runs[1].logged["starts"] == 4


class Late(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        return F.cross_entropy(self.net[2](hidden.detach() if self.trainer.round >= 2 else hidden), batch[1])


def test_a_gradient_that_ends_later_is_told_in_a_sentence(tmp_path):
    with pytest.raises(FederatedError, match=r"`net.0.weight` gets no gradient.*`--trainer.engine sequential`"):
        train(tmp_path, Late, "vectorized")


class Decides(Model):
    """Looks at a value from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 or loss > 0 else -loss


def test_what_vmap_refuses_in_a_later_step_is_told_in_a_sentence(tmp_path):
    with pytest.raises(FederatedError, match=r"but the step does not go through torch.func.vmap each time \(.*seq"):
        train(tmp_path, Decides, "vectorized")


class Trims(Model):
    """Its batches have as many columns as their first label says."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return [x[:, : 3 + int(y[0])], y]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = F.pad(batch[0], (0, FEATURES - batch[0].shape[1]))
        return F.cross_entropy(self.net(x), batch[1])


def test_batches_of_other_shapes_are_apart(tmp_path):
    both(tmp_path, Trims)


class GivesNone(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)


def test_batches_that_cannot_be_side_by_side_are_told_in_a_sentence(tmp_path):
    with pytest.raises(FederatedError, match="batches cannot be stacked"):
        train(tmp_path, GivesNone, "vectorized")
    assert train(tmp_path, GivesNone, "auto").trainer.engine_choice["engine"] == "sequential"


class Counted(Dataset):
    def __init__(self) -> None:
        self.inner, self.reads = vectors((24, 24)), 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        return self.inner[row]


def test_no_more_is_read_than_trained_on():
    counted = Counted()
    source = FederatedDataModule(counted, num_clients=2, batch_size=8).train_source()
    state: Any = SimpleNamespace(seed=1, source=source, transfer=None)
    clients = (Client(0, 24, 1), Client(1, 24, 1))
    batches = LaneBatches(state, LocalOptions(local_steps=4), clients, by_index=False)
    for step in range(4):
        list(batches.groups(step))
    assert counted.reads == 2 * 4 * 8


class Another(TensorSource):
    """Yields other batches than its sizes promise: the last is dropped, or comes twice, or there is none at all."""

    def __init__(self, source: TensorSource, kind: str) -> None:
        vars(self).update(vars(source))
        self.kind = kind

    def batches(self, *args: Any) -> Iterator[Any]:
        found = list(super().batches(*args))
        return iter({"fewer": found[:-1], "more": found + found[-1:], "none": []}[self.kind])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("options", [{"local_epochs": 2}, {"local_steps": 9}])
@pytest.mark.parametrize(("kind", "got"), [("fewer", "2"), ("more", "more"), ("none", "0")])
def test_another_number_of_batches_than_promised_is_told_in_a_sentence(tmp_path, engine, options, kind, got):
    split = data(sizes=(20, 20))
    source = Another(split.train_source(), kind)
    split.train_source = lambda: source
    sentence = f"Expected 3 batches of client 0 from the Another of `--data`, for its 20 samples .* got {got}: let"
    with pytest.raises(FederatedError, match=sentence):
        train(tmp_path, Model, engine, datamodule=split, **options)


def test_no_more_batches_than_steps_are_asked_for(tmp_path):
    """A source that would be short of batches which nobody needs is no mistake: one step of three batches."""
    split = data(sizes=(20, 20))
    source = Another(split.train_source(), "fewer")
    split.train_source = lambda: source
    one, other = (
        train(tmp_path, Model, kind, datamodule=split, local_steps=1) for kind in ("sequential", "vectorized")
    )
    agree(one, other)


class Ends(FederatedCallback):
    def on_train_batch_end(self, *args: Any) -> None:
        self.called = True


@pytest.mark.usefixtures("few_lanes_pay")
def test_a_resumed_run_is_checked_again(tmp_path):
    options = {"enable_checkpointing": True, "logger": [], "precision": "32-true"}
    first = train(tmp_path, Model, "auto", max_rounds=2, **options)
    assert first.trainer.engine_choice["engine"] == "vectorized"
    trainer, ends = first.trainer, Ends()
    trainer.max_rounds, trainer.chunk_size = 3, 2
    trainer.fit(Model(), data(), ckpt_path=str(trainer.run.checkpoints / "last.ckpt"))
    assert trainer.engine_choice["chunk_size"] == 2
    trainer.max_rounds = 4
    trainer.callbacks.insert(0, ends)
    trainer.fit(Model(), data(), ckpt_path=str(trainer.run.checkpoints / "last.ckpt"))
    assert trainer.engine_choice["engine"] == "sequential"
    assert ends.called


class Frozen(Model):
    """Has a frozen parameter, which may hold anything."""

    def __init__(self, value: float = float("nan")) -> None:
        super().__init__()
        self.fr = nn.Parameter(torch.full((2,), value), requires_grad=False)


def test_a_frozen_parameter_of_nan_is_not_moved(tmp_path):
    assert train(tmp_path, Frozen, "vectorized").trainer.engine_choice["engine"] == "vectorized"


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_rounding_alone_is_no_other_gradient(tmp_path, precision):
    """Under autocast two clients at once differ from one alone by 0.11 of the gradient, more than is allowed."""

    class Deep(Model):
        def __init__(self) -> None:
            super().__init__(ResNet18())

    generator = torch.Generator().manual_seed(2)
    images, labels = torch.randn(16, 3, 16, 16, generator=generator), torch.arange(16) % 10
    options = {"precision": precision, "max_rounds": 1, "local_steps": 1}
    clients = federated_data(8, 8, dataset=TensorDataset(images, labels), val_dataset=None)
    outcome = train(tmp_path, Deep, "vectorized", datamodule=clients, **options)
    assert outcome.trainer.engine_choice["engine"] == "vectorized"


PRECISION: list[str] = []


class Asks(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        PRECISION.append(torch.get_float32_matmul_precision())
        return super().training_step(batch, batch_idx)


def test_the_trial_computes_in_full_precision_and_training_as_the_user_says(tmp_path):
    PRECISION.clear()
    torch.set_float32_matmul_precision("medium")
    try:
        assert train(tmp_path, Asks, "vectorized").trainer.engine_choice["engine"] == "vectorized"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    trial = PRECISION.index("medium")
    assert set(PRECISION[:trial]) == {"highest"}
    assert set(PRECISION[trial:]) == {"medium"}


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_norms_in_mixed_precision_are_refused_by_what_torch_cannot(tmp_path, norm):
    def normed() -> Model:
        return Model(nn.Sequential(nn.Linear(FEATURES, 8), norm(8), nn.ReLU(), nn.Linear(8, CLASSES)))

    with pytest.raises(FederatedError, match=r"but under bf16-mixed .* such as BatchNorm .*engine sequential`\.$"):
        train(tmp_path, normed, "vectorized", precision="bf16-mixed")
    outcome = train(tmp_path, normed, "auto", precision="bf16-mixed", datamodule=data(sizes=(16,) * 10))
    assert outcome.trainer.engine_choice["engine"] == "sequential"


class Recurrent(Model):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.lstm, self.out = kind(FEATURES, 4, batch_first=True), nn.Linear(4, CLASSES)
        self.net = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.out(self.lstm(batch[0][:, None])[0][:, -1]), batch[1])


def test_recurrent_layers_are_refused_where_they_lay_out_their_weights_for_cudnn(tmp_path, monkeypatch):
    """As on a GPU, where the layer asks for the addresses of its weights whenever it is given others."""
    assert train(tmp_path, Recurrent, "vectorized").trainer.engine_choice["engine"] == "vectorized"

    def lay_out(self: nn.RNNBase) -> None:
        assert len({weight.data_ptr() for weight in self._flat_weights}) == 4

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lay_out)
    with pytest.raises(FederatedError, match=r"Recurrent does not go through torch.func.vmap .*engine sequential`\.$"):
        train(tmp_path, Recurrent, "vectorized")
    assert train(tmp_path, Recurrent, "sequential").entered


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_cudnn_computes_trains_one_client_after_another(tmp_path, monkeypatch, kind):
    """What decides is the kind of the device, and whether cuDNN may be used: it comes before any trial."""
    monkeypatch.setattr(choice, "cudnn_layer", lambda module, _: cudnn_layer(module, torch.device("cuda")))
    reason = f"on a GPU cuDNN computes the model's {kind.__name__} for one client at a time"
    with pytest.raises(FederatedError) as caught:
        train(tmp_path, partial(Recurrent, kind), "vectorized")
    assert str(caught.value).endswith(f"vectorized`, but {reason}: set `--trainer.engine sequential`.")
    fallen = train(tmp_path, partial(Recurrent, kind), "auto")
    assert fallen.trainer.engine_choice == {"engine": "sequential", "reason": reason}
    agree(train(tmp_path, partial(Recurrent, kind), "sequential"), fallen, rtol=0)


def test_without_cudnn_a_recurrent_layer_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "cudnn_layer", lambda module, _: cudnn_layer(module, torch.device("cuda")))
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert train(tmp_path, Recurrent, "vectorized").trainer.engine_choice["engine"] == "vectorized"
    assert cudnn_layer(Model(), torch.device("cuda")) is None
