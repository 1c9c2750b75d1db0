"""Many clients at once where nobody asked for it: only where it is the same and quicker, and never in the way."""

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed.client_algorithms import FedGA
from lightning_fed.core import seeding
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines import trial
from lightning_fed.engines.automatic import engine as automatic_engine
from lightning_fed.engines.automatic import rule
from lightning_fed.errors import FederatedError
from tests.engines.parts import CLASSES, FEATURES, Model, agree, data, train, vectors
from tests.engines.pretended_device import DEVICE
from tests.parts import BySizes

TEN = (16,) * 10
calls: list[int] = []
total = 0


def run(folder: Path, make: Callable[[], Any], engine: str = "auto", *callbacks: Any, **options: Any) -> Any:
    given = {"precision": "32-true", "max_rounds": 2, **options}
    return train(folder, make, engine, *callbacks, datamodule=given.pop("datamodule", None) or data(sizes=TEN), **given)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Engine:")]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level("INFO", logger="lightning.pytorch")
    calls.clear()


def test_it_is_the_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    from lightning_fed import FederatedTrainer

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer("cpu", default_root_dir=str(tmp_path), max_rounds=1, **quiet)
    trainer.fit(Model(), data(sizes=TEN))
    assert trainer.engine_choice == {
        "engine": "vectorized", "chunk_size": 10,
        "reason": "the model is small and its step goes through torch.func.vmap",
    }  # fmt: skip
    assert said(caplog) == [f"Engine: vectorized, as {trainer.engine_choice['reason']}."]


def sizes(*counts: int) -> dict[str, Any]:
    return {"datamodule": data(sizes=counts)}


def lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(FEATURES, 4, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x[:, None])[0][:, -1])

    return Model(Last())


def hooked(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Model()
        change(module)
        return module

    return make


def read_one_by_one() -> dict[str, Any]:
    class Rows(TensorDataset):
        def __getitem__(self, row: Any) -> Any:
            return super().__getitem__(row)

    return {"datamodule": FederatedDataModule(Rows(*vectors(TEN).tensors), BySizes(*TEN), 10, batch_size=8)}


RULE: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]], str]] = {
    "few clients": (Model, lambda: sizes(*[16] * 7), "only 7.0 clients on average"),
    "enough": (Model, lambda: sizes(*[16] * 8), ""),
    "few in a round": (Model, lambda: {"clients_per_round": 5}, "only 5.0 clients on average"),
    "small chunks": (Model, lambda: {"chunk_size": 3}, "only 3.0 clients on average"),
    "one that trains for long": (Model, lambda: sizes(800, *[8] * 20), "only 1.2 clients on average"),
    "last batches of many sizes": (Model, lambda: sizes(*range(9, 25)), "clients on average"),
    "as many steps for all": (Model, lambda: {**sizes(800, *[80] * 20), "local_steps": 3}, ""),
    "large batches": (Model, lambda: {"datamodule": data(sizes=(301,) * 10, batch_size=301)}, "a step on 301 samples"),
    "an LSTM": (lstm, dict, "LSTM is not known to be quicker"),
    "another reader": (Model, read_one_by_one, "one by one"),
    "double precision": (Model, lambda: {"precision": "64-true"}, "one by one"),
    "a hook": (hooked(lambda m: m.net.register_forward_hook(lambda *_: None)), dict, "hooks on its passes"),
}


@pytest.mark.parametrize("name", RULE)
def test_it_follows_a_rule(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, options, reason = RULE[name]
    found = run(tmp_path, make, max_rounds=1, **options()).trainer.engine_choice
    assert found["engine"] == ("sequential" if reason else "vectorized"), found
    assert reason in found["reason"]
    assert len(said(caplog)) == 1


def test_a_clock_or_a_chance_has_no_say(tmp_path: Path) -> None:
    found = [run(tmp_path, Model, max_rounds=1, seed=seed).trainer.engine_choice for seed in (1, 2)]
    assert found[0] == found[1]


def count() -> None:
    global total
    total += 1


class Prints(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        print("a step")
        return super().training_step(batch, batch_idx)


class Writes(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx)

    def note(self) -> None:
        with Path("steps.txt").open("a") as file:
            file.write("a step\n")


class CountsGlobally(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        count()
        return super().training_step(batch, batch_idx)


class Appends(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls.append(batch_idx)
        return super().training_step(batch, batch_idx)


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx) / self.calls


class Record:
    """A part of a module that is none."""

    def __init__(self) -> None:
        self.steps = 0

    def note(self) -> None:
        self.steps += 1


class Notes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.record.note()
        return super().training_step(batch, batch_idx)


class ReadsTrainer(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.trainer.is_last_batch)


class Measures(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch > 1:
            self.seen.update(loss.detach())
        return loss


SCALE, TENSOR = 2.0, torch.zeros(())


class ReadsConstants(Model):
    """What does nothing but compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.activate, self.loss_function = 0.5, torch.tanh, nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_function(self.activate(self.net(batch[0])), batch[1]) * SCALE * self.scale
        self.log("train/scaled", halved(loss), prog_bar=True)
        return loss


def halved(loss: Tensor) -> Tensor:
    with torch.no_grad():
        return loss.detach() / 2


def test_code_that_computes_alone_trains_many_clients_at_once(tmp_path: Path) -> None:
    alone, found = (run(tmp_path, ReadsConstants, engine) for engine in ("sequential", "auto"))
    assert found.trainer.engine_choice["engine"] == "vectorized"
    agree(alone, found, rtol=1e-4)


class AddsToTensor(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        TENSOR.add_(1)
        return super().training_step(batch, batch_idx)


class Stores(Model):
    def __init__(self) -> None:
        super().__init__()
        self.outs: dict[str, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outs["calls"] = self.outs.get("calls", 0) + 1
        return super().training_step(batch, batch_idx)


SEEN = {
    "tensor": (AddsToTensor, "mutate a captured Tensor"), "dict": (Stores, "`outs`"),
    "prints": (Prints, "`print`"), "writes": (Writes, "`open`"), "global": (CountsGlobally, "`total`"),
    "list": (Appends, "`calls`"), "attribute": (Counts, "`calls`"), "object": (Notes, "`record`"),
    "trainer": (ReadsTrainer, "`trainer`"), "metric": (Measures, "`seen`"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen_from_outside_happens_once_for_each_step(tmp_path, monkeypatch, capsys, name) -> None:
    make, what = SEEN[name]
    monkeypatch.chdir(tmp_path)
    outcomes, traces = [], []
    for engine in ("sequential", "auto"):
        globals()["total"] = 0
        calls.clear()
        Path("steps.txt").unlink(missing_ok=True)
        outcomes.append(run(tmp_path, make, engine))
        text = Path("steps.txt").read_text() if Path("steps.txt").exists() else ""
        module = outcomes[-1].trainer.lightning_module
        steps = module.record.steps if name == "object" else 0
        traces.append((capsys.readouterr().out.count("a step"), text, total, list(calls), steps))
    assert what in outcomes[1].trainer.engine_choice["reason"]
    assert traces[0] == traces[1]
    agree(*outcomes, rtol=0)


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("of the user's own")


def test_a_mistake_of_the_users_own_is_that_of_a_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="of the user's own") as caught:
        run(tmp_path, Fails)
    assert "In the training of client 0: round 1, local step 0." in str(getattr(caught.value, "__notes__", ""))
    assert len(said(caplog)) == 1


class SetsUpLate(Model):
    def on_train_start(self) -> None:
        self.scale = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


def test_what_hooks_make_before_training_is_there_on_trial(tmp_path: Path) -> None:
    assert run(tmp_path, SetsUpLate).trainer.engine_choice["engine"] == "vectorized"


class Later(Model):
    """Does something else from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else self.later(batch, loss)

    def later(self, batch: Any, loss: Tensor) -> Tensor:
        raise NotImplementedError


class Branches(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss if loss > 0 else -loss


class Skips(Later):
    def later(self, batch: Any, loss: Tensor) -> Any:
        return None if len(batch[0]) < 8 else loss


class Draws(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss * (1 + torch.rand(()))


class DrawsFromNumPy(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss * (1 + np.random.rand())


class DrawsFromPython(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss * (1 + random.random())


class EndsGradients(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return F.cross_entropy(self.net[2](self.net[0](batch[0]).detach()), batch[1])


class OwnParameters(Later):
    def __init__(self) -> None:
        super().__init__()
        self.decayed = tuple(self.parameters())

    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss + 0.1 * sum((p**2).sum() for p in self.decayed)


class Reads(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss * float(np.asarray(loss.detach()) > -1)


LATER = {
    "branches": (Branches, "data-dependent"), "skips": (Skips, "returns None"), "draws": (Draws, "draws random"),
    "draws from NumPy": (DrawsFromNumPy, "draws random"), "draws from Python": (DrawsFromPython, "draws random"),
    "ends gradients": (EndsGradients, "gets no gradient"), "own parameters": (OwnParameters, "in another way"),
    "reads": (Reads, "each time"),
}  # fmt: skip


@pytest.mark.usefixtures("few_lanes_pay")
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_a_chunk_that_fails_later_trains_one_after_another(tmp_path, name, chunk_size, caplog) -> None:
    make, reason = LATER[name]
    split = (*TEN, 13, 13)
    alone, found = (
        run(tmp_path, make, engine, max_rounds=3, chunk_size=chunk_size, datamodule=data(sizes=split))
        for engine in ("sequential", "auto")
    )
    agree(alone, found, rtol=1e-4)
    first, second = said(caplog)
    assert first.startswith("Engine: vectorized, as ")
    assert second.startswith("Engine: sequential from round 2 on, as ")
    assert reason in second
    assert found.trainer.engine_choice == {"engine": "sequential", "reason": second.partition(" as ")[2][:-1]}


ON_DEVICE = torch.Generator()


class DrawsOnDevice(Later):
    def later(self, batch: Any, loss: Tensor) -> Tensor:
        return loss * (1 + torch.rand((), generator=ON_DEVICE))


def test_draws_from_the_stream_of_a_device_are_noticed_later(tmp_path, monkeypatch) -> None:
    """A generator of its own stands for the stream of an accelerator that trains."""
    monkeypatch.setattr(seeding, "seed_devices", ON_DEVICE.manual_seed)
    monkeypatch.setattr(trial, "device_streams", lambda: [ON_DEVICE.get_state()])
    looks = partial(trial.next_numbers, DEVICE)
    monkeypatch.setattr(automatic_engine, "next_numbers", lambda device: looks())
    alone, found = (run(tmp_path, DrawsOnDevice, engine, max_rounds=3) for engine in ("sequential", "auto"))
    assert "draws random" in found.trainer.engine_choice["reason"]
    agree(alone, found, rtol=1e-4)


class Noise(FederatedCallback):
    """Adds noise to every update."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.delta.add_(torch.randn_like(update.delta))


def test_callbacks_of_single_clients_are_called_as_they_expect(tmp_path: Path) -> None:
    alone, found = (run(tmp_path, Model, engine, Noise()) for engine in ("sequential", "auto"))
    assert "Noise overrides `on_client_end` without saying `stacks = True`" in found.trainer.engine_choice["reason"]
    agree(alone, found, rtol=0)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_resumed_run_keeps_its_engine(tmp_path, monkeypatch, engine, caplog) -> None:
    kept = {"enable_checkpointing": True, "logger": [], "name": "run"}
    whole = run(tmp_path / "whole", Model, engine, max_rounds=3, **kept)
    first = run(tmp_path, Model, engine, max_rounds=1, **kept).trainer
    used = first.engine_choice["engine"]
    # The other one is what would be chosen now.
    monkeypatch.setattr(rule, "_FEWEST_LANES", 1 if used == "sequential" else 100)
    caplog.clear()
    resumed = run_on(first, 3, engine="auto")
    assert resumed.engine_choice["engine"] == used
    assert len(said(caplog)) == 1
    for name, value in whole.state.items():
        assert torch.equal(resumed.lightning_module.state_dict()[name], value)
    assert run_on(first, 4, engine="sequential").engine_choice == {"engine": "sequential"}


def run_on(first: Any, rounds: int, **options: Any) -> Any:
    from lightning_fed import FederatedTrainer

    trainer = FederatedTrainer(
        "cpu", default_root_dir=str(first.default_root_dir), name="again", seed=1, max_rounds=rounds, logger=[],
        enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(Model(), data(sizes=TEN), ckpt_path=str(first.run.checkpoints / "last.ckpt"))
    return trainer


def test_a_damaged_name_of_an_engine_is_told_in_a_sentence(tmp_path: Path) -> None:
    first = run(tmp_path, Model, max_rounds=1, enable_checkpointing=True, logger=[], name="run").trainer
    path = first.run.checkpoints / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["federated"]["engine"] = "vectorized"
    torch.save(checkpoint, path)
    with pytest.raises(FederatedError, match=r"`federated\.engine\.engine` is missing or not as it was"):
        run_on(first, 2)


def test_it_takes_gradients_over_all_data_at_once_too(tmp_path: Path) -> None:
    """The module's own change to eval mode for such a gradient is none that clients would share."""
    found = run(tmp_path, Model, "auto", FedGA()).trainer.engine_choice
    assert found["engine"] == "vectorized"
    assert "full_gradients" not in found


stream = np.random.default_rng(3)


class DrawsFrom(Model):
    """Draws a number in each step from a stream that the module holds, or that is a global variable."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.draw(self.own if self.own is not None else stream)
        return super().training_step(batch, batch_idx) * (1 + drawn)

    @staticmethod
    def draw(held: Any) -> float:
        return torch.rand((), generator=held).item() if isinstance(held, torch.Generator) else held.random()


STREAMS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1), "NumPy": lambda: np.random.default_rng(1),
    "random": lambda: random.Random(1), "global": lambda: None,
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_the_modules_own_is_where_it_was_after_the_trial(tmp_path, monkeypatch, name) -> None:
    both = []
    for engine in ("sequential", "auto"):
        monkeypatch.setitem(globals(), "stream", np.random.default_rng(3))
        both.append(run(tmp_path, lambda: DrawsFrom(STREAMS[name]()), engine))
    assert both[1].trainer.engine_choice["engine"] == "sequential"
    agree(*both, rtol=0)
