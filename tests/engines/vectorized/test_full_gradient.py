"""Gradients over the full data of many clients at once are those of one client after another."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.aggregators import CGW, FedAvg, FedGMA
from lightning_fed.callbacks.diagnostics import GradientDissimilarity
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, FedProx, StatelessSCAFFOLD
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines import choice
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.vectorized import full_gradient
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.full_gradient import StackedFullGradient
from tests.engines.parts import SIZES, Model, agree, both, data, train
from tests.engines.vectorized.test_lanes import Explodes, poisoned
from tests.engines.vectorized.test_models import MODELS, OfDicts, Rows
from tests.parts import BySizes, graded

ASKING: dict[str, list[Any]] = {
    "own at the start": [lambda: SCAFFOLD("I")],
    "cohort": [lambda: FedGA(0.3), GradientDissimilarity],
    "cohort at a displaced point": [lambda: FedGA(0.3, form="step")],
    "at the end": [CGW],
    "at the end of a displaced start": [lambda: FedGMA(gradient_at="end"), lambda: FedGA(0.3)],
}
# BatchNorm has no statistics of one sample, in batches of 8 and of 10.
EVEN = (8, 19, 0, 26, 16, 13)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the clients whose gradient is computed alone."""
    found: list[int] = []
    compute = FullGradient.compute
    monkeypatch.setattr(FullGradient, "compute", lambda self, c, out: (found.append(c.id), compute(self, c, out))[1])
    return found


def same(folder: Any, alone: list[int], make: Any, *callbacks: Any, **options: Any) -> None:
    """Trains under both engines; only one client after another is computed alone."""
    runs, make_data, rtol = [], options.pop("make_data", data), options.pop("rtol", 1e-10)
    for engine in ("sequential", "vectorized"):
        alone.clear()
        parts = [callback() for callback in callbacks]
        runs.append(train(folder, make, engine, *parts, datamodule=make_data(), max_rounds=2, **options))
        assert bool(alone) == (engine == "sequential")
    agree(*runs, rtol=rtol)


def decayed(model: Model) -> Any:
    groups = [{"params": model.net[0].weight, "weight_decay": 0.1}, {"params": model.net[2].parameters()}]
    return torch.optim.SGD(groups, lr=0.1)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "small": {"full_gradient_batch_size": 3},
    "large": {"full_gradient_batch_size": 99, "chunk_size": 2},
    "decay": {"full_gradient_weight_decay": True, "full_gradient_mode": "train", "precision": "32-true"},
}


@pytest.mark.parametrize(("asking", "options"), graded(product(ASKING, OPTIONS)))
def test_every_option(tmp_path, alone, asking, options):
    options = OPTIONS[options]
    rtol = 1e-10 if "precision" not in options else 1e-5
    same(tmp_path, alone, lambda: Model(optimizer=decayed), *ASKING[asking], rtol=rtol, **options)


OWN = ["batch norm", "replaces buffers", "logs", "reads batch_idx", "not all trained"]


@pytest.mark.parametrize(("model", "asking", "mode"), graded(product(OWN, ASKING, ["eval", "train"])))
def test_modules_of_the_users_own(tmp_path, alone, model, asking, mode):
    options = {"full_gradient_mode": mode, "full_gradient_batch_size": 10}
    same(tmp_path, alone, MODELS[model], *ASKING[asking], make_data=lambda: data(sizes=EVEN), **options)


def test_a_diagnostic_may_take_more_than_the_method_asks_for(tmp_path):
    """The cohort's gradients are then there already, from which each client is given its own."""
    both(tmp_path, Model, lambda: SCAFFOLD("I"), GradientDissimilarity, chunk_size=2)


@pytest.mark.parametrize("buffers", ["local", "keep"])
def test_each_client_has_its_own_buffers(tmp_path, alone, buffers):
    parts = [lambda: FedAvg(buffers=buffers), StatelessSCAFFOLD]
    same(tmp_path, alone, MODELS["batch norm"], *parts, make_data=lambda: data(sizes=EVEN), chunk_size=2)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}])
def test_samples_that_a_data_loader_reads(tmp_path, alone, options):
    def make() -> FederatedDataModule:
        return FederatedDataModule(Rows(), BySizes(*SIZES), len(SIZES), batch_size=8, **options)

    same(tmp_path, alone, OfDicts, lambda: FedGA(0.3), make_data=make, full_gradient_batch_size=5)


def test_a_client_without_a_gradient_is_left_out(tmp_path, alone):
    same(tmp_path, alone, Explodes, lambda: FedGA(0.1), make_data=poisoned, max_diverged=0.4)
    same(tmp_path, alone, Explodes, lambda: SCAFFOLD("I"), make_data=poisoned, max_diverged=0.4)
    same(tmp_path, alone, Explodes, CGW, make_data=poisoned, max_diverged=0.4)


class Decides(Model):
    """Looks at a value in eval mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training or loss > 0 else -loss


class OwnList(Model):
    """Reaches its parameters by a list of its own in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.own = list(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss if self.training else loss + 0.1 * sum((p**2).sum() for p in self.own)


@pytest.mark.parametrize(("make", "why"), [(Decides, "go through torch.func.vmap"), (OwnList, "in another way")])
@pytest.mark.parametrize("asking", ["own at the start", "cohort", "at the end"])
def test_what_eval_mode_forbids_goes_one_after_another(tmp_path, monkeypatch, alone, make, why, asking):
    told: list[str] = []
    monkeypatch.setattr(choice, "rank_zero_info", told.append)
    run = both(tmp_path, make, *ASKING[asking], max_rounds=2)
    assert alone
    (line,) = told
    assert line.startswith("Gradients over a client's full data: one client after another, as in eval mode")
    assert why in line
    assert run.trainer.engine_choice["full_gradients"] in line
    told.clear()
    both(tmp_path, make, *ASKING[asking], max_rounds=1, full_gradient_mode="train")
    both(tmp_path, make, lambda: FedProx(0.1), max_rounds=1)
    assert not told


class RunsOut:
    """Stands for memory that holds a pass over the data of so many clients; notes the passes that it did not hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> None:
        self.tried: list[int] = []
        self.told: list[str] = []
        make = LaneBatches.__init__

        def bounded(batches: LaneBatches, *args: Any, **options: Any) -> None:
            if "whole" in options and len(args[2]) > most:
                self.tried.append(len(args[2]))
                raise error
            make(batches, *args, **options)

        monkeypatch.setattr(LaneBatches, "__init__", bounded)
        monkeypatch.setattr(full_gradient, "tell", self.told.append)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
@pytest.mark.parametrize("asking", ["own at the start", "cohort", "at the end"])
@pytest.mark.quick(2)
def test_half_as_many_go_at_once_where_memory_runs_out(tmp_path, monkeypatch, alone, asking, engine):
    def outcome(engine: str) -> Any:
        parts = [callback() for callback in ASKING[asking]]
        return train(tmp_path, Model, engine, *parts, datamodule=data(sizes=(16,) * 40), max_rounds=2)

    expected = outcome("sequential")
    alone.clear()
    memory = RunsOut(monkeypatch, 12, FULL)
    agree(expected, outcome(engine))
    assert memory.tried == [40, 20], "the second round begins with what fits"
    assert memory.told == [
        f"Gradients over a client's full data: in chunks of {size} from round 1 on, as memory does not hold {2 * size} "
        "clients at once."
        for size in (20, 10)
    ]
    assert not alone


def test_one_after_another_where_memory_does_not_hold_the_fewest_that_pay(tmp_path, monkeypatch, alone):
    expected = train(tmp_path, Model, "sequential", FedGA(0.3), datamodule=data(sizes=(16,) * 10))
    alone.clear()
    memory = RunsOut(monkeypatch, 7, FULL)
    agree(expected, train(tmp_path, Model, "vectorized", FedGA(0.3), datamodule=data(sizes=(16,) * 10)))
    assert memory.tried == [10, 8]
    assert memory.told[-1].endswith("after another from round 1 on, as memory does not hold 8 clients at once.")
    assert len(alone) == 30


def test_a_fault_of_the_device_is_no_reason_to_go_on(tmp_path, monkeypatch):
    memory = RunsOut(monkeypatch, 1, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(tmp_path, Model, "vectorized", FedGA(0.3))
    assert len(memory.tried) == 1
    assert not memory.told


def test_of_larger_batches_fewer_go_at_once(tmp_path, monkeypatch):
    counts: list[int] = []
    compute = StackedFullGradient._pass

    def noting(self: Any, weights: Tensor, buffers: Any, clients: Any, out: Tensor) -> Tensor:
        counts.append(len(clients))
        return compute(self, weights, buffers, clients, out)

    monkeypatch.setattr(StackedFullGradient, "_pass", noting)
    many = {"datamodule": data(sizes=(24,) * 8), "max_rounds": 1, "chunk_size": 6}
    train(tmp_path, Model, "vectorized", StatelessSCAFFOLD(), **many, full_gradient_batch_size=16)
    train(tmp_path, Model, "vectorized", StatelessSCAFFOLD(), **many, full_gradient_batch_size=10**6)
    assert counts == [3, 3, 2, *[2] * 4]
