"""Many clients at once where nobody asked for it: only where it is the same and quicker, and never in the way."""

import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import core
from lightning_fed.client_algorithms import SCAFFOLD, FedGA
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import Augmentation, ClientRotation, CropFlip, FederatedDataModule
from lightning_fed.engines import choice as rule
from lightning_fed.engines.vectorized import preflight
from lightning_fed.engines.vectorized.lanes import Lanes
from lightning_fed.engines.vectorized.preflight import StepProbe
from lightning_fed.errors import FederatedError
from tests.engines.parts import CLASSES, FEATURES, HEARD, Model, agree, count_calls, data, train, vectors
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


class Shifts(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


class Flat(Model):
    """A classifier of small images."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)))


def images(**options: Any) -> FederatedDataModule:
    stream = torch.Generator().manual_seed(2)
    x, y = torch.rand(160, 1, 4, 4, generator=stream), torch.randint(CLASSES, (160,), generator=stream)
    return data(TensorDataset(x, y), TEN, **options)


class Brighter(Augmentation):
    """Changes a whole batch alike."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + torch.rand((), generator=generator)


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
    "a hook of batches": (Shifts, dict, "one by one"),
    "double precision": (Model, lambda: {"precision": "64-true"}, ""),
    "half precision": (Model, lambda: {"precision": "bf16-true"}, ""),
    "mixed precision": (Model, lambda: {"precision": "bf16-mixed"}, ""),
    "whole batches": (Flat, lambda: {"datamodule": images(augmentation=Brighter())}, "one by one"),
    "a hook": (hooked(lambda m: m.net.register_forward_hook(lambda *_: None)), dict, "forward or backward hooks"),
}


@pytest.mark.parametrize("name", RULE)
def test_it_follows_a_rule(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, options, reason = RULE[name]
    found = run(tmp_path, make, max_rounds=1, **options()).trainer.engine_choice
    assert found["engine"] == ("sequential" if reason else "vectorized"), found
    assert reason in found["reason"]
    assert len(said(caplog)) == 1


CHANGED: dict[str, dict[str, Any]] = {
    "crops": {"augmentation": CropFlip(1)},
    "rotations": {"skew": ClientRotation()},
    "rotated crops": {"skew": ClientRotation(), "augmentation": CropFlip(1)},
}


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("name", CHANGED)
def test_samples_that_are_changed_many_at_once_are_no_hindrance(tmp_path: Path, name: str, precision: str) -> None:
    alone, found = (
        run(tmp_path, Flat, engine, datamodule=images(**CHANGED[name]), precision=precision)
        for engine in ("sequential", "auto")
    )
    assert found.trainer.engine_choice["engine"] == "vectorized"
    agree(alone, found, rtol=1e-5 if precision == "32-true" else 1e-10)


@pytest.mark.parametrize(("precision", "most"), [("32-true", 53), ("64-true", 106)])
def test_a_weight_of_double_precision_counts_twice(tmp_path: Path, monkeypatch, precision: str, most: int) -> None:
    for bound, chosen in ((most - 1, "sequential"), (most, "vectorized")):
        monkeypatch.setattr(rule, "_MOST_WEIGHTS", {"cpu": bound})
        assert run(tmp_path, Model, max_rounds=1, precision=precision).trainer.engine_choice["engine"] == chosen


def test_why_it_would_be_no_quicker_is_for_the_debug_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = run(tmp_path, Model, max_rounds=1, **sizes(*[16] * 7)).trainer.engine_choice
    assert said(caplog) == ["Engine: sequential."]
    assert few.keys() == {"engine", "reason"}
    caplog.clear()
    caplog.set_level("DEBUG", logger=rank_zero.log.name)  # of the trainer or of fabric
    run(tmp_path, Model, max_rounds=1, **sizes(*[16] * 7))
    assert said(caplog) == [f"Engine: sequential, as {few['reason']}."]  # the line itself is no news
    caplog.clear()
    caplog.set_level("INFO", logger="lightning.pytorch")
    run(tmp_path, hooked(lambda m: m.net.register_forward_hook(lambda *_: None)), max_rounds=1)
    (line,) = said(caplog)
    assert line.startswith("Engine: sequential, as ")


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


class Late(Model):
    """Does nothing but compute until the second round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.round > 1:
            self.use()
        return super().training_step(batch, batch_idx)

    def use(self) -> None:
        raise NotImplementedError


class ReadsStep(Late):
    def use(self) -> None:
        assert self.trainer.global_step >= 0


class ReadsOwnStep(Late):
    def use(self) -> None:
        assert self.global_step >= 0


class Logs(Late):
    def use(self) -> None:
        if self.logger is not None:
            self.logger.log_metrics({"own": 1.0})


class LooksAtOptimizer(Late):
    def use(self) -> None:
        self.optimizers()


class LooksAtSchedules(Late):
    def use(self) -> None:
        self.lr_schedulers()


class Stops(Late):
    def use(self) -> None:
        self.trainer.should_stop = True


class LooksInVain(Late):
    """Catches whatever is raised."""

    def use(self) -> None:
        try:
            print("a step", self.trainer.sanity_checking)
        except Exception:
            return


class PrintsLate(Late):
    def use(self) -> None:
        print("a step")


class CountsOnClass(Late):
    steps = 0

    def use(self) -> None:
        CountsOnClass.steps += 1


class CountsInArray(Late):
    def use(self) -> None:
        COUNTS[0] += 1


class CountsWithin(Late):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Any] = {"train": [0]}

    def use(self) -> None:
        self.counts["train"][0] += 1


class CountsElsewhere(Late):
    """By a function of another file."""

    def use(self) -> None:
        count_calls()


class CountsTotal(Late):
    def use(self) -> None:
        count()


COUNTS = np.zeros(2)


class Measures(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.round > 1:
            self.seen.update(loss.detach())
        return loss


SCALE, TENSOR = 2.0, torch.zeros(())


class ReadsConstants(Model):
    """What does nothing but compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.activate, self.loss_function = 0.5, torch.tanh, nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = (1 + self.current_epoch) / self.trainer.max_epochs
        loss = self.loss_function(self.activate(self.net(batch[0])), batch[1]) * SCALE * self.scale * share
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
    "prints": (Prints, "`print`"), "global": (CountsGlobally, "`total`"),
    "list": (Appends, "`calls`"), "attribute": (Counts, "`calls`"), "object": (Notes, "`record`"),
    "trainer": (ReadsTrainer, "`trainer.is_last_batch`"), "metric": (Measures, "data-dependent"),
    "trainer later": (ReadsStep, "`trainer.global_step`"), "step later": (ReadsOwnStep, "`trainer.global_step`"),
    "logger later": (Logs, "`trainer.logger`"), "optimizer later": (LooksAtOptimizer, "`trainer.strategy`"),
    "schedules later": (LooksAtSchedules, "`trainer.lr_scheduler_configs`"),
    "stops later": (Stops, "`trainer.should_stop`"), "in vain": (LooksInVain, "`trainer.sanity_checking`"),
    "prints later": (PrintsLate, "`print`"), "class later": (CountsOnClass, "`steps`"),
    "array later": (CountsInArray, "`COUNTS`"), "nested later": (CountsWithin, "`counts`"),
    "elsewhere later": (CountsElsewhere, "`HEARD`"), "global later": (CountsTotal, "`total`"),
}  # fmt: skip


def trace(module: Any, printed: str) -> list[Any]:
    """Returns what steps have left behind."""
    own = {"record": lambda: module.record.steps, "counts": lambda: str(module.counts)}
    held = [read() for name, read in own.items() if hasattr(module, name)]
    metric = module.seen._update_count if hasattr(module, "seen") else 0
    return [*held, metric, printed.count("a step"), total, list(calls), list(HEARD), CountsOnClass.steps, COUNTS[0]]


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.quick(9)
def test_what_is_seen_from_outside_happens_once_for_each_step(tmp_path, capsys, name) -> None:
    make, what = SEEN[name]
    outcomes, traces = [], []
    for engine in ("sequential", "auto"):
        globals()["total"] = CountsOnClass.steps = COUNTS[0] = 0
        calls.clear()
        HEARD.clear()
        outcomes.append(run(tmp_path, make, engine))
        traces.append(trace(outcomes[-1].trainer.lightning_module, capsys.readouterr().out))
    assert what in outcomes[1].trainer.engine_choice["reason"]
    assert traces[0] == traces[1]
    agree(*outcomes, rtol=1e-4 if "later" in name or name in ("metric", "in vain") else 0)


class PrintsFromAThread(Late):
    """As the bar of a run does, whose thread has no part in the step."""

    def use(self) -> None:
        thread = Thread(target=print, args=("a step",))
        thread.start()
        thread.join()


def test_what_other_threads_print_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, PrintsFromAThread)
    assert found.trainer.engine_choice["engine"] == "vectorized"
    assert "a step" in capsys.readouterr().out


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("of the user's own")


def test_a_mistake_of_the_users_own_is_that_of_a_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="of the user's own") as caught:
        run(tmp_path, Fails)
    if sys.version_info >= (3, 11):  # which has notes
        assert "In the training of client 0: round 1, local step 0." in str(caught.value.__notes__)
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
        return loss if self.trainer.round < 2 else self.later(batch, loss)

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
@pytest.mark.quick(5)
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
    assert core._SAID["engine"] == "sequential from round 2 on", "so that a second run says its engine anew"


class AsksWhoHolds(FederatedCallback):
    """Keeps what says where clients' records are, before each round and after it."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.found.append(trainer.client_states.elsewhere)

    def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.found.append(trainer.client_states.elsewhere)


@pytest.mark.usefixtures("few_lanes_pay")
def test_who_holds_a_clients_records_is_known_when_clients_begin_to_train_alone(tmp_path: Path) -> None:
    asks = AsksWhoHolds()
    found = run(tmp_path, Branches, "auto", asks, max_rounds=3)
    assert found.trainer.engine_choice["engine"] == "sequential"
    assert len(asks.found) == 6
    assert all(each == asks.found[0] for each in asks.found), "one that knows nothing would say: all are here"


class RunsOut:
    """Stands for the optimizer of many clients at once, of which memory holds only so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> None:
        self.tried: list[int] = []
        step = Lanes.step

        def bounded(lanes: Lanes) -> None:
            if lanes.active > most:
                self.tried.append(lanes.active)
                raise error
            step(lanes)

        monkeypatch.setattr(Lanes, "step", bounded)


ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ...")
ON_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.slow
@pytest.mark.parametrize("error", [ON_GPU, ON_CPU, MemoryError()], ids=["GPU", "CPU", "Python"])
def test_fewer_at_once_are_tried_where_memory_runs_out(tmp_path, monkeypatch, error, caplog) -> None:
    forty = {"datamodule": data(sizes=(16,) * 40), "enable_checkpointing": True, "logger": [], "name": "run"}
    alone = run(tmp_path / "alone", Model, "sequential", SCAFFOLD(option="I"), max_rounds=3, **forty)
    memory = RunsOut(monkeypatch, 12, error)
    found = run(tmp_path, Model, "auto", SCAFFOLD(option="I"), **forty).trainer
    assert memory.tried == [40, 20]
    assert {k: found.engine_choice[k] for k in ("engine", "chunk_size")} == {"engine": "vectorized", "chunk_size": 10}
    assert said(caplog)[1:] == [
        f"Engine: vectorized in chunks of {size} from round 1 on, as memory does not hold {2 * size} clients at once."
        for size in (20, 10)
    ]
    resumed = run_on(found, 3, SCAFFOLD(option="I"), sizes=(16,) * 40)
    assert memory.tried == [40, 20], "a resumed run has what fits"
    assert resumed.engine_choice["chunk_size"] == 10
    for name, value in alone.state.items():
        torch.testing.assert_close(resumed.lightning_module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert alone.logged["gradients"] > alone.logged["samples"]
    for name in ("samples", "gradients"):
        assert resumed.logged_metrics[name] == alone.logged[name]


def test_a_fault_of_the_device_ends_the_run_at_once(tmp_path, monkeypatch, caplog) -> None:
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    memory = RunsOut(monkeypatch, 1, fault)
    with pytest.raises(RuntimeError) as raised:
        run(tmp_path, Model)
    assert raised.value is fault
    assert memory.tried == [10]
    assert len(said(caplog)) == 1, "it does not go on one client after another"


def test_one_after_another_where_memory_does_not_hold_the_fewest_that_pay(tmp_path, monkeypatch, caplog) -> None:
    alone = run(tmp_path, Model, "sequential")
    memory = RunsOut(monkeypatch, 7, ON_GPU)
    found = run(tmp_path, Model)
    assert memory.tried == [10, 8]
    assert said(caplog)[-1] == "Engine: sequential from round 1 on, as memory does not hold 8 clients at once."
    agree(alone, found, rtol=0)


def test_matrices_that_memory_does_not_hold_are_made_smaller(tmp_path, monkeypatch) -> None:
    made = Lanes.__init__

    def bounded(lanes: Lanes, state: Any, capacity: int) -> None:
        if capacity > 8:
            raise ON_GPU
        made(lanes, state, capacity)

    monkeypatch.setattr(Lanes, "__init__", bounded)
    assert run(tmp_path, Model).trainer.engine_choice["chunk_size"] == 8


@pytest.mark.parametrize("error", [ON_GPU, ON_CPU], ids=["GPU", "CPU"])
def test_who_asked_for_many_at_once_is_told_in_a_sentence_that_memory_ran_out(tmp_path, monkeypatch, error) -> None:
    RunsOut(monkeypatch, 7, error)
    sentence = r"but memory does not hold 10 clients at once: set `--trainer.chunk_size` to fewer\."
    with pytest.raises(FederatedError, match=sentence):
        run(tmp_path, Model, "vectorized")


@pytest.mark.parametrize("part", ["batches", "two at once", "one alone"])
@pytest.mark.parametrize("error", [ON_GPU, ON_CPU], ids=["GPU", "CPU"])
def test_memory_that_does_not_hold_the_trial_is_told_in_a_sentence(tmp_path, monkeypatch, part, error) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise error

    owner, name = {"batches": (preflight, "LaneBatches"), "two at once": (StepProbe, "_take")}.get(
        part, (StepProbe, "_loss_alone")
    )
    monkeypatch.setattr(owner, name, runs_out)
    reason = "memory does not hold 2 clients at once"
    with pytest.raises(FederatedError) as caught:
        run(tmp_path, Model, "vectorized")
    change = "lower `--data.batch_size`, or set `--trainer.engine sequential`"
    assert str(caught.value).endswith(f"`--trainer.engine vectorized`, but {reason}: {change}.")
    assert run(tmp_path, Model).trainer.engine_choice == {"engine": "sequential", "reason": reason}


def test_of_a_gpu_half_of_what_is_free_is_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds and does not use is free."""
    given = {"mem_get_info": (100_000, 1 << 30), "memory_reserved": 50_000, "memory_allocated": 30_000}
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(StepProbe, "_loss_alone", lambda probe: None)
    probe = object.__new__(StepProbe)
    vector = SimpleNamespace(all_numel=10, device=torch.device("cuda", 0))
    probe.state = SimpleNamespace(vector=vector, weights=torch.zeros(10))  # type: ignore[assignment]  # what it asks for
    probe.module, probe._read_ahead = nn.Linear(2, 2), 0  # type: ignore[assignment]
    assert probe.lanes_that_fit() == 60_000 // (8 * 10 * 4)
    assert probe.lanes_that_fit(second_gradients=True) == 60_000 // (16 * 10 * 4)


class Noise(FederatedCallback):
    """Adds noise to every update."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.delta.add_(torch.randn_like(update.delta))


def test_callbacks_of_single_clients_are_called_as_they_expect(tmp_path: Path) -> None:
    alone, found = (run(tmp_path, Model, engine, Noise()) for engine in ("sequential", "auto"))
    assert (
        "Noise does not say `stacks = True` (set it if its `on_client_end` works for many clients"
        in found.trainer.engine_choice["reason"]
    )
    agree(alone, found, rtol=0)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_resumed_run_keeps_its_engine(tmp_path, monkeypatch, engine, caplog) -> None:
    kept = {"enable_checkpointing": True, "logger": [], "name": "run"}
    whole = run(tmp_path / "whole", Model, engine, max_rounds=3, **kept)
    first = run(tmp_path, Model, engine, max_rounds=1, **kept).trainer
    used = first.engine_choice["engine"]
    # The other one is what would be chosen now.
    monkeypatch.setattr(rule, "FEWEST_LANES", 1 if used == "sequential" else 100)
    caplog.clear()
    core._SAID.clear()  # as in another process
    resumed = run_on(first, 3, engine="auto")
    assert resumed.engine_choice["engine"] == used
    assert len(said(caplog)) == 1
    for name, value in whole.state.items():
        assert torch.equal(resumed.lightning_module.state_dict()[name], value)
    assert run_on(first, 4, engine="sequential").engine_choice == {"engine": "sequential"}


def run_on(first: Any, rounds: int, *callbacks: Any, sizes: tuple[int, ...] = TEN, **options: Any) -> Any:
    from lightning_fed import FederatedTrainer

    trainer = FederatedTrainer(
        "cpu", default_root_dir=str(first.default_root_dir), name="again", seed=1, max_rounds=rounds, logger=[],
        enable_progress_bar=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(Model(), data(sizes=sizes), ckpt_path=str(first.run.checkpoints / "last.ckpt"))
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
