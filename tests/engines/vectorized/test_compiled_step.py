"""The compiled step of many clients computes what the plain one does."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, FedProx
from lightning_fed.engines.vectorized import compiled_step
from lightning_fed.engines.vectorized.compiled_step import common_batch_sizes
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.engines.package_models import PACKAGE, images
from tests.engines.parts import CLASSES, FEATURES, SIZES, Model, agree, both, compiled_agrees, data, train
from tests.engines.vectorized.test_models import MODELS
from tests.parts import quick_first

pytest_plugins = ["tests.engines.vectorized.compiled_parts"]

# BatchNorm has no statistics of one sample.
EVEN = tuple(size if size != 25 else 26 for size in SIZES)
compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="torch.compile needs a C++ compiler"
)


class Logs(Model):
    """Logs in every way, and hands ``batch_idx`` on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        logits = self.net(batch[0])
        self.log("train/hits", (logits.argmax(1) == batch[1]).sum(), reduce_fx="sum")
        self.log("train/acc", (logits.argmax(1) == batch[1]).double().mean(), on_step=True, on_epoch=True)
        self.log_dict({"train/least": logits.min(), "train/five": 5.0}, reduce_fx="min")
        self.log("train/most", logits.max(), reduce_fx=torch.max)
        self.log("train/a", loss, batch_size=1)
        return {"loss": loss, "logits": logits}


class OwnLog(Model):
    """Has a ``log`` of its own."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(f"own/{name}", value, **options)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


MADE = {
    **{name: MODELS[name] for name in MODELS if name not in ("logs", "reads batch_idx")},
    "logs": Logs,
    "own log": OwnLog,
    "scalar weight": lambda: Model(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.PReLU())),
    "Adam": lambda: Model(optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01)),
}


@pytest.mark.parametrize("name", quick_first(1, MADE))
def test_all_ways_to_train_agree(tmp_path, traced, name):
    plain = both(tmp_path, MADE[name], make_data=lambda: data(sizes=EVEN))
    graphs = train(tmp_path, MADE[name], "vectorized", compile=True, datamodule=data(sizes=EVEN))
    agree(plain, graphs)
    assert traced[-1].blocks >= 3 * 4, "every step of every round is a graph's"


NORM, CNN_OF_8 = MODELS["batch norm"], PACKAGE["CNN"][0]
RUNS = {
    "epochs": (NORM, [], {"local_epochs": 2}),
    "accumulation": (NORM, [lambda: SCAFFOLD("I")], {"accumulate_grad_batches": 2}),
    "steps": (NORM, [], {"local_steps": 6}),
    "chunks": (NORM, [], {"chunk_size": 2}),
    "one alone": (NORM, [], {"chunk_size": 1}),
    "clipping": (NORM, [], {"gradient_clip_val": 0.1}),
    "SCAFFOLD": (NORM, [SCAFFOLD], {"clients_per_round": 3}),
    "FedProx": (NORM, [lambda: FedProx(0.5)], {}),
    "FedGA": (NORM, [lambda: FedGA(0.3)], {}),
    "GMA": (NORM, [lambda: FedAvg(mask=SignAgreement(0.6))], {}),
    "buffers of one's own": (NORM, [lambda: FedAvg(buffers="local")], {}),
    "channels_last": (CNN_OF_8, [], {"memory_format": "channels_last", "make_data": lambda: images(8)}),
    "float32": (NORM, [], {"precision": "32-true", "rtol": 1e-5}),
    "bf16-mixed": (Model, [], {"precision": "bf16-mixed", "rtol": 2e-2}),
}


@pytest.mark.parametrize("name", quick_first(1, RUNS))
def test_every_kind_of_run(tmp_path, traced, name):
    make, callbacks, options = RUNS[name]
    compiled_agrees(tmp_path, make, *callbacks, **{"make_data": lambda: data(sizes=EVEN), **options})
    assert traced[-1].blocks > 0


@pytest.mark.slow
def test_blocks_are_filled_up_with_copies_of_no_account(tmp_path, traced, monkeypatch):
    filled, fill = [], compiled_step._filled

    def noting(rows: Tensor, count: int) -> Tensor:
        filled.append((len(rows), count))
        return fill(rows, count)

    monkeypatch.setattr(compiled_step, "_filled", noting)
    sizes = (16, 16, 16, 8, 8, 8, 8, 8, 8)
    plain = compiled_agrees(tmp_path, NORM, make_data=lambda: data(sizes=sizes), chunk_size=7)
    # Of seven at once blocks are of seven and of two: three with a second batch are two and one, filled up.
    assert set(filled) == {(1, 2)}
    assert {width for _, _, width in traced[-1]._blocks(7)} == {7}
    assert list(traced[-1]._blocks(5)) == [(0, 2, 2), (2, 4, 2), (4, 5, 2)]
    agree(plain, train(tmp_path, NORM, "sequential", datamodule=data(sizes=sizes)))


@pytest.mark.slow
def test_a_block_is_never_larger_than_the_cohort(tmp_path, traced):
    train(tmp_path, Model, "vectorized", compile=True, chunk_size=100)
    assert traced[-1]._widths == [len(SIZES), 2]


def test_rare_sizes_of_batches_are_not_compiled(tmp_path, traced):
    assert common_batch_sizes(np.array([8 * 24, 3]), 8) == {8}
    assert common_batch_sizes(np.array([8 * 10, 3, 0]), 8) == {8, 3}
    assert common_batch_sizes(np.array([0, 0]), 8) == frozenset()
    compiled_agrees(tmp_path, Model, make_data=lambda: data(sizes=(8 * 12, 8 * 12, 3)), max_rounds=1)
    assert {key[0] for key in traced[-1]._graphs} == {8}
    assert traced[-1].blocks == 2 * 12


def drops() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES), nn.Dropout(0.2)))


@pytest.mark.slow
def test_what_is_drawn_differs_between_clients_and_not_between_runs(tmp_path, traced, monkeypatch):
    options = {"compile": True, "chunk_size": 3}
    one, other = (train(tmp_path, drops, "vectorized", datamodule=data(sizes=(8,) * 5), **options) for _ in range(2))
    agree(one, other, rtol=0)
    assert len({tuple(delta.tolist()) for delta in one.deltas}) == len(one.deltas)
    # Graphs that are traced anew before every step draw nothing while they are.
    monkeypatch.setattr(compiled_step.Constants, "changed", lambda self: set())
    call = compiled_step.CompiledStep.__call__

    def forgetting(self: Any, *args: Any) -> Any:
        self._graphs.clear()
        return call(self, *args)

    monkeypatch.setattr(compiled_step.CompiledStep, "__call__", forgetting)
    agree(one, train(tmp_path, drops, "vectorized", datamodule=data(sizes=(8,) * 5), **options), rtol=0)


def test_whole_blocks_draw_what_they_draw_uncompiled(tmp_path, traced):
    compiled_agrees(tmp_path, drops, make_data=lambda: data(sizes=(8,) * 5))


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_by_bit(tmp_path, traced):
    kept = {"enable_checkpointing": True, "name": "run", "compile": True, "chunk_size": 3}
    whole = train(tmp_path, drops, "vectorized", SCAFFOLD(), **kept)
    first = train(tmp_path, drops, "vectorized", SCAFFOLD(), **kept, max_rounds=2)
    torch.manual_seed(5)
    module, first.trainer.max_rounds = drops(), 3
    first.trainer.fit(module, data(), ckpt_path=str(first.trainer.run.checkpoints / "last.ckpt"))
    for name, value in module.state_dict().items():
        assert torch.equal(value, whole.state[name])


class Index(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (2.0 if batch_idx == 0 else 0.5)


class Reshapes(Model):
    """Every batch has more columns than the last one."""

    times = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.times += 1
        return [batch[0].repeat(1, self.times), batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0][:, :FEATURES]), batch[1])


def failing(graph: Any, **options: Any) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("no compiler was found. Install one.\nAt once.")

    return run if "dynamic" in options else graph  # not that of a client alone


def wrong(graph: Any, **options: Any) -> Any:
    def run(weights: Tensor, out: Tensor, *rest: Tensor) -> Any:
        logged = graph(weights, out, *rest)
        out[-1, -1] += 1e-2
        return logged

    return run if "dynamic" in options else graph  # not that of a client alone


def not_a_number(graph: Any, **options: Any) -> Any:
    def run(weights: Tensor, out: Tensor, *rest: Tensor) -> Any:
        logged = graph(weights, out, *rest)
        out[0, 0] = torch.nan
        return logged

    return run if "dynamic" in options else graph  # not that of a client alone


def miscounting(graph: Any, **options: Any) -> Any:
    def run(*args: Tensor) -> Any:
        return [2 * total for total in graph(*args)]

    return run if "dynamic" in options else graph  # not that of a client alone


REFUSED = {
    "no compiler": (Model, failing, r"torch.compile does not work here \(no compiler was found\): set"),
    "wrong": (Model, wrong, "torch.compile makes other gradients of it"),
    "wrong of draws": (drops, wrong, "torch.compile makes other gradients of it"),
    "not a number": (Model, not_a_number, "torch.compile makes other gradients of it"),
    "wrong logs": (Model, miscounting, "torch.compile makes other gradients of it"),
}


def expect_one_sentence(error: FederatedError) -> None:
    assert "\n" not in str(error)
    assert str(error).count(". ") == 0
    assert "`--trainer.compile false`, or `--trainer.engine sequential`" in str(error)


@pytest.mark.parametrize("name", quick_first(1, REFUSED))
def test_a_compiler_that_fails_is_refused_and_auto_falls_back(tmp_path, monkeypatch, name):
    make, compiler, message = REFUSED[name]
    monkeypatch.setattr(torch, "compile", compiler)
    with pytest.raises(FederatedError, match=message) as caught:
        train(tmp_path, make, "vectorized", compile=True)
    expect_one_sentence(caught.value)
    fallen = train(tmp_path, make, "auto", compile=True)
    assert fallen.trainer.engine_choice["engine"] == "sequential"
    agree(train(tmp_path, make, "sequential"), fallen, rtol=0)


@pytest.mark.usefixtures("few_lanes_pay")
def test_a_step_that_reads_the_number_of_its_batch_is_refused(tmp_path, traced):
    with pytest.raises(FederatedError, match="reads `batch_idx`") as caught:
        train(tmp_path, Index, "vectorized", compile=True)
    expect_one_sentence(caught.value)
    fallen = train(tmp_path, Index, "auto", compile=True, precision="32-true", max_rounds=1)
    assert fallen.trainer.engine_choice["reason"] in str(caught.value)


@pytest.mark.slow
def test_batches_of_ever_other_shapes_are_refused(tmp_path, traced):
    with pytest.raises(FederatedError, match="batches of 8 samples have more than 8 shapes") as caught:
        train(tmp_path, Reshapes, "vectorized", compile=True, datamodule=data(sizes=(8,) * 20))
    expect_one_sentence(caught.value)


class SaysItsSize(Model):
    """Fills its batches up to eight samples, of which the further ones have no weight."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        missing = 8 - len(y)
        return [F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, missing), value=-100)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/own", loss)
        return loss


@pytest.mark.slow
def test_graphs_of_batches_of_other_sizes_and_one_shape_are_apart(tmp_path, traced):
    agree(train(tmp_path, SaysItsSize, "sequential"), compiled_agrees(tmp_path, SaysItsSize))


@pytest.mark.slow
@pytest.mark.usefixtures("few_lanes_pay")
def test_auto_tries_the_compiled_step(tmp_path, traced):
    run = train(tmp_path, Model, "auto", compile=True, precision="32-true")
    assert run.trainer.engine_choice["engine"] == "vectorized"
    assert traced[-2].blocks == 1, "on trial"
    assert traced[-1].blocks > 0
    agree(train(tmp_path, Model, "sequential", precision="32-true"), run, rtol=1e-4)


@pytest.mark.parametrize("engine", quick_first(1, ["sequential", "vectorized"]))
@pytest.mark.parametrize(("asked", "tunes"), [(True, False), ("default", False), ("max-autotune", True)])
def test_the_mode_reaches_torch(tmp_path, monkeypatch, engine, asked, tunes):
    got: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: got.append(options) or graph)
    run = train(tmp_path, Logs, engine, compile=asked, max_rounds=1)
    agree(run, train(tmp_path, Logs, engine, max_rounds=1))
    for options in got:
        assert ("max_autotune" in options["options"] if engine == "vectorized" else "max-" in options["mode"]) == tunes
    assert got


@compiler
def test_a_step_that_is_really_compiled(tmp_path, steps):
    run = compiled_agrees(tmp_path, Logs, make_data=lambda: data(sizes=(8,) * 4), rtol=1e-8)
    assert steps[-1].blocks == 3
    assert len(run.entered) == 12


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("name", ["epochs", "draws", "bf16-mixed", "channels_last", "FedGA"])
def test_further_steps_that_are_really_compiled(tmp_path, steps, name):
    make, callbacks, options = (drops, [], {}) if name == "draws" else RUNS[name]
    sizes = (8,) * 5 if name == "draws" else EVEN  # others leave blocks that draw for copies too
    options = {"rtol": 1e-8, "make_data": lambda: data(sizes=sizes), **options}
    compiled_agrees(tmp_path, make, *callbacks, **options)
    assert steps[-1].blocks > 0
