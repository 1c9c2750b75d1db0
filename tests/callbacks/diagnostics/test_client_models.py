"""The evaluation of clients' models: each by hand, in both engines, and that training notices nothing of it."""

import csv
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.client_algorithms import FedProx
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines import plain
from lightning_fed.engines.trial import random_states
from lightning_fed.engines.vectorized.refusals import CannotStack
from lightning_fed.errors import FederatedError
from tests.callbacks.diagnostics.parts import KeepsTrained, Measured, Net, columns, net_data, trainer_for
from tests.parts import CLASSES, FEATURES, federated_data

SIZES = (20, 5, 0, 9, 30)
HOLDERS = (0, 1, 3, 4)
ENGINES = ("sequential", "vectorized")
ALL = ("global", "trained", "tuned", "own")


class NotesModels(FederatedCallback):
    """Keeps what the clients of each round have trained, and the models between rounds."""

    def __init__(self) -> None:
        self.trained: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.started: dict[int, Tensor] = {}
        self.ended: dict[int, Tensor] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.trained[trainer.round], self.started[trainer.round] = {}, trainer.weights.clone()

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        model = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.trained[trainer.round][update.client.id] = model

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ended[trainer.round] = trainer.weights.clone()


class ScoredBySample(Measured):
    """Says what it measures of each sample."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def evaluate_samples(self, batch: Any) -> dict[str, Tensor]:
        scores = self(batch[0])
        return {"loss": cross_entropy(scores, batch[1], reduction="none"), "acc": (scores.argmax(1) == batch[1]) * 1.0}


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)


def net(kind: type[Measured] = Measured, layers: nn.Module | None = None, optimizer: Any = momentum) -> Measured:
    torch.manual_seed(0)
    return kind(layers, optimizer)


def table(trainer: Any) -> dict[int, dict[str, str]]:
    with (trainer.run.path / "clients.csv").open(newline="") as file:
        return {int(row["client"]): row for row in csv.DictReader(file)}


def samples(data: FederatedDataModule, client: int) -> tuple[Tensor, Tensor]:
    x, y = data._load().datasets.train.tensors
    rows = data.split.index[data.split.offsets[client] : data.split.offsets[client + 1]]
    return x[rows].double(), y[rows]


def measured(model: dict[str, Tensor], data: FederatedDataModule, client: int) -> tuple[float, float]:
    """Loss and accuracy of a linear model on a client's samples."""
    x, y = samples(data, client)
    scores = x @ model["net.weight"].T + model["net.bias"]
    return float(cross_entropy(scores, y)), float((scores.argmax(1) == y).double().mean())


def tuned_by_hand(
    model: dict[str, Tensor], data: FederatedDataModule, client: int, round: int, steps: int | None, epochs: int
) -> dict[str, Tensor]:
    """SGD with momentum 0.5 and rate 0.3 on a client's batches of 8, in the order that the seed gives."""
    x, y = samples(data, client)
    order = torch.Generator().manual_seed(seed_for(seed_for(0, Purpose.TUNE), Purpose.SHUFFLE, round, client))
    weights = [model["net.weight"].clone().requires_grad_(), model["net.bias"].clone().requires_grad_()]
    moments = [torch.zeros_like(each) for each in weights]
    batches = [rows for _ in range(steps or epochs) for rows in torch.randperm(len(x), generator=order).split(8)]
    for rows in batches[:steps]:
        gradients = torch.autograd.grad(cross_entropy(x[rows] @ weights[0].T + weights[1], y[rows]), weights)
        with torch.no_grad():
            for weight, moment, gradient in zip(weights, moments, gradients, strict=True):
                moment.mul_(0.5).add_(gradient)
                weight.sub_(0.3 * moment)
    return {"net.weight": weights[0].detach(), "net.bias": weights[1].detach()}


def linear(flat: Tensor) -> dict[str, Tensor]:
    """A flat vector as weight and bias."""
    return {"net.weight": flat[: CLASSES * FEATURES].view(CLASSES, FEATURES), "net.bias": flat[CLASSES * FEATURES :]}


def expect_values(rows: dict[int, dict[str, str]], model: str, expected: dict[int, tuple[float, float]]) -> None:
    found = {client: (row[f"{model}loss"], row[f"{model}acc"]) for client, row in rows.items()}
    assert {client for client, (loss, _) in found.items() if loss} == set(expected)
    for client, values in expected.items():
        loss, accuracy = map(float, found[client])
        assert loss == pytest.approx(values[0], rel=1e-9), (model, client)
        assert accuracy == pytest.approx(values[1], rel=1e-6), (model, client)  # the metric counts in single precision


@pytest.mark.parametrize(("engine", "kind"), [("sequential", Measured), ("vectorized", ScoredBySample)])
@pytest.mark.parametrize(
    "tuning", [{}, {"tune_epochs": 2}, {"tune_steps": 1}, {"tune_steps": 5}], ids=["default", "epochs", "step", "steps"]
)
@pytest.mark.quick(4)
def test_each_model_is_that_of_a_loop_by_hand(
    engine: Any, kind: type[Measured], tuning: dict[str, int], tmp_path: Path
) -> None:
    """A method that changes the local step does not change ``tuned``, nor the samples, bytes and steps that count."""
    data, notes = federated_data(*SIZES), NotesModels()
    trainer = trainer_for(
        tmp_path, ClientEvaluation(2, models=ALL, **tuning), notes, KeepsTrained(), FedProx(mu=0.5), max_rounds=4,
        clients_per_round=2, engine=engine, precision="64-true", local_epochs=2,
    )  # fmt: skip
    trainer.fit(net(kind), data)
    final, rows = linear(trainer.weights), table(trainer)
    steps, epochs = tuning.get("tune_steps"), tuning.get("tune_epochs", 1)
    tuned = {i: tuned_by_hand(final, data, i, 4, steps, epochs) for i in HOLDERS}
    assert 0 < len(notes.trained[4]) < len(HOLDERS)
    own = dict.fromkeys(HOLDERS, final)
    for of_round in notes.trained.values():
        own |= of_round
    assert len({i for each in notes.trained.values() for i in each}) < len(HOLDERS)  # one has never trained
    models = {"global/": dict.fromkeys(HOLDERS, final), "trained/": notes.trained[4], "tuned/": tuned, "own/": own}
    for name, of_clients in models.items():
        expect_values(rows, name, {i: measured(model, data, i) for i, model in of_clients.items()})
    assert len({row["tuned/loss"] for row in rows.values()} | {row["global/loss"] for row in rows.values()}) == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_each_model_has_the_same_summaries(engine: Any, tmp_path: Path) -> None:
    sizes = [3 + i for i in range(11)]  # the worst tenth are two clients
    data = federated_data(*sizes)
    trainer = trainer_for(
        tmp_path, ClientEvaluation(models=ALL), KeepsTrained(), max_rounds=2, engine=engine, clients_per_round=5
    )
    trainer.fit(net(), data)
    found, rows = columns(trainer), table(trainer)
    for model, word in (("global", ""), ("trained", "trained/"), ("tuned", "tuned/"), ("own", "own/")):
        for name in ("loss", "acc"):
            having = {i: float(row[f"{model}/{name}"]) for i, row in rows.items() if row[f"{model}/{name}"]}
            assert len(having) == (5 if model == "trained" else 11)
            values = np.array(list(having.values()))
            worst = np.sort(values)[:: -1 if name == "loss" else 1][: -(-len(values) // 10)]
            expected = {
                "": values.mean(), "_weighted": np.average(values, weights=[sizes[i] for i in having]),
                "_worst": worst.mean(), "_std": values.std(),
            }  # fmt: skip
            for end, value in expected.items():
                assert found[f"per_client/{word}{name}{end}"] == {2: pytest.approx(value, rel=1e-5)}


@pytest.mark.parametrize("engine", ENGINES)
def test_models_of_clients_in_the_round_and_out_of_it_before_and_after(engine: Any, tmp_path: Path) -> None:
    data, notes = federated_data(*SIZES), NotesModels()
    trainer = trainer_for(
        tmp_path, ClientEvaluation(1, participation=True, models=("tuned", "own", "trained")), notes, KeepsTrained(),
        max_rounds=3, clients_per_round=2, engine=engine, precision="64-true",
    )  # fmt: skip
    trainer.fit(net(), data)
    found = columns(trainer)
    assert not any(name.startswith("per_client/") and name.count("/") == 1 for name in found)
    assert not any("trained" in name and ("_in" in name or "_out" in name) for name in found)
    for end, at, until in (("_before", notes.started, 2), ("", notes.ended, 3)):
        w, own = linear(at[3]), {i: linear(at[3]) for i in HOLDERS}
        for round in range(1, until + 1):
            own |= notes.trained[round]
        for side, clients in (("in", [*notes.trained[3]]), ("out", [i for i in HOLDERS if i not in notes.trained[3]])):
            tuned = [measured(tuned_by_hand(w, data, i, 3, None, 1), data, i)[0] for i in clients]
            assert found[f"per_client/tuned/loss_{side}{end}"][3] == pytest.approx(np.mean(tuned), rel=1e-9)
            kept = [measured(own[i], data, i)[0] for i in clients]
            assert found[f"per_client/own/loss_{side}{end}"][3] == pytest.approx(np.mean(kept), rel=1e-9)


class CarelessModels(Net):
    """Has what training moves beside its weights: an average, a count, a schedule; and looks at the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(4, 3, bias=False).requires_grad_(False)
        self.seen: list[int] = []
        self.places: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(len(batch[1]))
        self.places.append((self.trainer.round, self.trainer.local_step))
        self.average.weight.mul_(0.9).add_(0.1 * batch[0].mean())
        self.log("train/mean", batch[0].mean())
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()) + 0.01 * np.random.rand())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.layers(batch[0]) * torch.rand(()), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.05)
        schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        ]
        return [optimizer], [{"scheduler": schedules[0], "interval": "step"}, {"scheduler": schedules[1]}]


class CarelessStacked(Net):
    """Trains under vmap: BatchNorm, dropout and a schedule."""

    trains_metric = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class StepsByItself(CarelessStacked):
    """Optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


class Witness(FederatedCallback):
    """NotesModels, behind the evaluation, what a run holds between rounds, and the batches that callbacks hear of."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def _note(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(
            (
                random_states(torch.device("cpu")), repr(trainer.local_optimizer.state_dict()), dict(trainer.totals),
                [*(p.clone() for p in pl_module.state_dict().values()), trainer.vector.grad.clone()],
                (trainer.local_optimizer.flat_step is None, pl_module.training),
                [(len(optimizer.state), repr(optimizer.param_groups)) for optimizer in trainer.optimizers],
            )
        )  # fmt: skip

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self._note(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, pl_module)


class StackedWitness(Witness):
    """The same without a hook of batches."""

    on_train_batch_end = FederatedCallback.on_train_batch_end


@pytest.mark.parametrize(
    ("kind", "engine", "options", "models"),
    [
        *((CarelessModels, "sequential", {"buffers": "average"}, (model,)) for model in ALL[1:]),
        (CarelessModels, "sequential", {"buffers": "average"}, ALL),
        (CarelessModels, "sequential", {"buffers": "local", "local_schedule": "continue"}, ALL),
        (CarelessStacked, "vectorized", {"buffers": "average", "local_schedule": "continue"}, ALL),
        (CarelessStacked, "vectorized", {"buffers": "local", "max_diverged": 0.5}, ALL),
        (StepsByItself, "sequential", {"buffers": "average"}, ALL),
    ],
)
@pytest.mark.quick(2)
def test_training_is_the_same_bit_for_bit_whatever_is_evaluated(
    kind: Any, engine: Any, options: dict[str, Any], models: tuple[Any, ...], tmp_path: Path
) -> None:
    runs, options = [], dict(options)
    buffers = options.pop("buffers")
    method = [] if kind is StepsByItself else [FedProx(mu=0.1)]
    for name, diagnostics in (("without", []), ("with", [ClientEvaluation(1, participation=True, models=models)])):
        witness = Witness() if engine == "sequential" else StackedWitness()
        trainer = trainer_for(
            tmp_path / name, KeepsTrained(), *method, *diagnostics, witness, FedAvg(buffers=buffers),
            clients_per_round=3, engine=engine, local_epochs=2, **options,
        )  # fmt: skip
        torch.manual_seed(0)
        model = kind()
        trainer.fit(model, net_data(val_fraction=0.2))
        found = columns(trainer)
        kept = {key: value for key, value in found.items() if not key.startswith(("per_client/", "time/"))}
        held = {key: value for key, value in vars(model).items() if key in ("seen", "places")}
        runs.append((model.state_dict(), kept, witness.batches, held, witness.seen))
    (weights, kept, *others, seen), (other_weights, other_kept, *other_others, other_seen) = runs
    assert all(torch.equal(other_weights[key], value) for key, value in weights.items())
    assert kept == other_kept
    assert others == other_others
    for one, other in zip(seen, other_seen, strict=True):
        *plain, tensors, training, groups = one
        *other_plain, other_tensors, other_training, other_groups = other
        assert (plain, training, groups) == (other_plain, other_training, other_groups)
        assert all(torch.equal(a, b) for a, b in zip(tensors, other_tensors, strict=True))
    for model_name in models:
        word = "" if model_name == "global" else f"{model_name}/"
        values = found[f"per_client/{word}loss"]
        assert list(values) == [1, 2, 3]
        assert all(np.isfinite(value) for value in values.values())
    if models == ALL:  # that they differ says that all were there
        assert len({found[f"per_client/{word}loss"][3] for word in ("", "trained/", "tuned/", "own/")}) == 4


class CountsListeners(FederatedCallback):
    """Counts who is told of the optimizer's steps."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.counts.append(len(trainer.optimizers[0]._optimizer_step_post_hooks))


def test_an_evaluation_leaves_nobody_behind_who_listens_to_steps(tmp_path: Path) -> None:
    listeners = CountsListeners()
    trainer = trainer_for(tmp_path, ClientEvaluation(1, models=("tuned",)), listeners, max_rounds=3)
    trainer.fit(StepsByItself(), net_data())
    assert listeners.counts == [1, 1, 1]


class NormedClients(Measured):
    """Normalises its inputs by statistics of batches."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)), momentum)


def normed(state: dict[str, Tensor], x: Tensor) -> Tensor:
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
    model.load_state_dict({key.removeprefix("net."): value for key, value in state.items() if key.startswith("net.")})
    return model.eval()(x).detach()


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_keep_their_buffers_are_evaluated_with_them(engine: Any, tmp_path: Path) -> None:
    """The global model has its initial ones; ``tuned`` starts from the client's own and goes on with them."""
    data, notes = federated_data(*SIZES), NotesModels()
    torch.manual_seed(0)
    trainer = trainer_for(
        tmp_path, ClientEvaluation(models=ALL, tune_steps=1), notes, KeepsTrained(), FedAvg(buffers="local"),
        max_rounds=2, clients_per_round=2, engine=engine, precision="64-true", seed=0,
    )  # fmt: skip
    model = NormedClients()
    trainer.fit(model, data)
    rows, final = table(trainer), {key: value.clone() for key, value in model.state_dict().items()}
    kept = {**notes.trained[1], **notes.trained[2]}
    assert len(kept) < len(HOLDERS)
    for client in HOLDERS:
        x, y = samples(data, client)
        own = kept.get(client, final)
        expected = {"global/": final, "own/": own, **({"trained/": own} if client in notes.trained[2] else {})}
        for name, state in expected.items():
            loss = float(cross_entropy(normed(state, x), y))
            assert float(rows[client][f"{name}loss"]) == pytest.approx(loss, rel=1e-9), (client, name)
        order = torch.Generator().manual_seed(seed_for(seed_for(0, Purpose.TUNE), Purpose.SHUFFLE, 2, client))
        batch = torch.randperm(len(x), generator=order)[:8]
        tuning = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
        weights = {
            key: (own if "running" in key or "num_batches" in key else final)[f"net.{key}"]
            for key in tuning.state_dict()
        }
        tuning.load_state_dict(weights)
        optimizer = momentum(tuning)
        cross_entropy(tuning(x[batch]), y[batch]).backward()
        optimizer.step()
        loss = float(cross_entropy(tuning.eval()(x), y).detach())
        assert float(rows[client]["tuned/loss"]) == pytest.approx(loss, rel=1e-9), client


def test_a_client_without_a_batch_to_train_on_keeps_the_global_model(tmp_path: Path) -> None:
    """It has six samples to train on, which fill no batch of 8 and are left out, and three that are held out."""
    data = federated_data(40, 9, drop_last=True, client_test_fraction=0.4, test_dataset=None)
    models = ClientEvaluation(data="test", models=("global", "tuned"), tune_steps=3)
    trainer = trainer_for(tmp_path, models, max_rounds=1)
    trainer.fit(net(), data)
    rows = table(trainer)
    assert rows[1]["tuned/loss"] == rows[1]["global/loss"]
    assert rows[0]["tuned/loss"] != rows[0]["global/loss"]


def test_the_clients_of_the_round_are_trained_even_if_others_are_drawn_for_the_evaluation(tmp_path: Path) -> None:
    notes = NotesModels()
    trainer = trainer_for(
        tmp_path, ClientEvaluation(models=("global", "trained"), num_clients=1), notes, max_rounds=1,
        clients_per_round=3,
    )  # fmt: skip
    trainer.fit(net(), federated_data(*[6] * 5))
    rows = table(trainer)
    assert {client for client, row in rows.items() if row["trained/loss"]} == set(notes.trained[1])
    assert len([row for row in rows.values() if row["global/loss"]]) == 1


def of_plain_training(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Gives the evaluation trainers of classes of its own, so that the run's stay as they are."""
    kinds = tuple(type(name, (getattr(plain, name),), {}) for name in ("SequentialTrainer", "VectorizedTrainer"))
    for kind in kinds:
        monkeypatch.setattr(plain, kind.__name__, kind)
    return kinds


@pytest.mark.parametrize("breaks", ["one by one", "at once"])
def test_clients_are_tuned_at_once_where_the_run_trains_at_once(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its chunks; where that fails, the run says so and goes on with one after another."""

    def refuse(*_: Any) -> None:
        raise CannotStack("somebody says no")

    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    fits: list[int] = []
    alone, many = of_plain_training(monkeypatch)
    fit = many.train_chunk
    monkeypatch.setattr(many, "train_chunk", lambda self, chunk: (fits.append(len(chunk)), fit(self, chunk))[1])
    monkeypatch.setattr(*((alone, "train_client") if breaks == "one by one" else (many, "train_chunk")), refuse)
    evaluation, data = ClientEvaluation(models=("global", "tuned")), federated_data(*SIZES)
    trainer = trainer_for(tmp_path, evaluation, max_rounds=1, engine="vectorized", chunk_size=3, precision="64-true")
    trainer.fit(net(), data)
    final = linear(trainer.weights)
    tuned = {i: measured(tuned_by_hand(final, data, i, 1, None, 1), data, i) for i in HOLDERS}
    expect_values(table(trainer), "tuned/", tuned)
    said = "Clients are tuned one after another in round 1, as somebody says no." in caplog.text
    assert (fits, said) == (([3, 1], False) if breaks == "one by one" else ([], True))


def test_what_trained_at_once_is_freed_where_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of the failed chunk are not held beside the clients that are tuned one after another."""
    held: list[Any] = []
    alone, many = of_plain_training(monkeypatch)
    fit_alone = alone.train_client

    def fails(self: Any, *_: Any) -> None:
        held.append(weakref.ref(self.lanes.weights))
        raise CannotStack("somebody says no")

    def fit(self: Any, client: Any) -> None:
        assert held[0]() is None
        fit_alone(self, client)

    monkeypatch.setattr(many, "_run_steps", fails)
    monkeypatch.setattr(alone, "train_client", fit)
    evaluation, data = ClientEvaluation(models=("global", "tuned")), federated_data(*SIZES)
    trainer_for(tmp_path, evaluation, max_rounds=1, engine="vectorized", chunk_size=3).fit(net(), data)
    assert len(held) == 1


def test_what_trained_at_once_is_freed_when_the_evaluation_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    many = of_plain_training(monkeypatch)[1]
    steps = many._run_steps

    class LooksForLanes(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            left.append([each() is not None for each in held])

    def notes(self: Any, *args: Any) -> Any:
        held.append(weakref.ref(self.lanes.weights))
        return steps(self, *args)

    left: list[list[bool]] = []
    monkeypatch.setattr(many, "_run_steps", notes)
    evaluation, data = ClientEvaluation(models=("global", "tuned")), federated_data(*SIZES)
    trainer = trainer_for(tmp_path, evaluation, LooksForLanes(), max_rounds=1, engine="vectorized", chunk_size=3)
    gc.disable()
    try:
        trainer.fit(net(), data)
    finally:
        gc.enable()
    assert left == [[False, False]]


class RunsAway(Measured):
    """Fits a target by squares, at a rate by which some tens of steps run away."""

    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=100.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tuned_model_that_diverges_ends_no_run(engine: Any, tmp_path: Path) -> None:
    trainer = trainer_for(
        tmp_path, ClientEvaluation(models=("global", "tuned"), tune_steps=99), max_rounds=1, engine=engine,
        local_steps=1,
    )  # fmt: skip
    trainer.fit(net(RunsAway), federated_data(20, 5))
    found = columns(trainer)
    assert not np.isfinite(found["per_client/tuned/loss"][1])
    assert np.isfinite(found["per_client/loss"][1])
    assert torch.isfinite(trainer.weights).all()


class EndsEarly(FederatedCallback):
    """Ends the run after round 3."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.round == 3


def test_where_a_run_ends_early_the_table_has_all_models_but_the_trained_ones(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, ClientEvaluation(2, models=ALL), KeepsTrained(), EndsEarly(), max_rounds=9)
    trainer.fit(net(), federated_data(20, 5))
    rows = table(trainer)
    assert {row["round"] for row in rows.values()} == {"3"}
    assert all(float(row["tuned/loss"]) < float(row["global/loss"]) and row["own/loss"] for row in rows.values())
    assert "trained/loss" not in rows[0]


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.quick(2)
def test_a_resumed_run_evaluates_the_same_models(where: Any, tmp_path: Path) -> None:
    found = []
    for stops in ((4,), (3, 4)):
        for rounds in stops:
            trainer = trainer_for(
                tmp_path / f"{len(stops)}", ClientEvaluation(2, participation=True, models=ALL), KeepsTrained(),
                max_rounds=rounds, clients_per_round=2, enable_checkpointing=True, name="run", client_states=where,
            )  # fmt: skip
            trainer.fit(net(), federated_data(*SIZES), ckpt_path="last")
        kept = columns(trainer)
        found.append({key: value[4] for key, value in kept.items() if not key.startswith("time/")})
    assert found[0] == found[1]
    assert {"per_client/own/acc_worst", "per_client/tuned/loss_out_before", "per_client/trained/acc"} <= found[0].keys()


class CountsSamples(Measured):
    """Counts the samples of its passes."""

    trained = validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).trained += len(batch[1])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        type(self).validated += len(batch[1])
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("models", "trained", "validated"),
    [(("global",), 0, 64), (("trained",), 0, 64), (("tuned",), 2 * 64, 64), (("own",), 0, 64), (ALL, 2 * 64, 4 * 64)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_each_model_costs_the_passes_that_the_page_says(
    models: Any, trained: int, validated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountsSamples, "trained", 0)
    monkeypatch.setattr(CountsSamples, "validated", 0)
    trainer = trainer_for(
        tmp_path, ClientEvaluation(models=models, tune_epochs=2 if "tuned" in models else None), KeepsTrained(),
        max_rounds=1, engine="sequential", limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(net(CountsSamples), federated_data(*SIZES))
    assert (CountsSamples.trained - 64, CountsSamples.validated) == (
        trained,
        validated,
    )  # the round itself is one epoch
    assert columns(trainer)["gradients"] == {1: 64}


class AlsoOwn(KeepsTrained):
    """Another algorithm with models of the clients' own."""


@pytest.mark.parametrize(
    ("algorithms", "words"),
    [
        (
            [],
            "Expected one client algorithm with a model of each client's own for `models` own of .*, got none",
        ),
        ([KeepsTrained(), AlsoOwn()], "got AlsoOwn and KeepsTrained|got KeepsTrained and AlsoOwn"),
    ],
)
def test_own_needs_one_algorithm_that_has_such_models(algorithms: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=words):
        trainer_for(tmp_path, ClientEvaluation(models=("own",)), *algorithms).fit(net(), federated_data(20, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ["local"]}, "`models` of ClientEvaluation to be one of|`models`"),
        ({"models": []}, "`models` of ClientEvaluation to be a list of different models, got \\[\\]"),
        ({"models": ["own", "own"]}, "list of different models"),
        ({"models": "own"}, "list of different models, got 'own'"),
        ({"models": ["tuned"], "tune_steps": 0}, "`tune_steps`"),
        ({"models": ["tuned"], "tune_epochs": 0}, "`tune_epochs`"),
        ({"models": ["tuned"], "tune_epochs": 1, "tune_steps": 1}, "`tune_steps` or `tune_epochs` of .*, got both"),
        ({"tune_epochs": 1}, "`tune_epochs` of ClientEvaluation only with tuned in `models`, got 1"),
    ],
)
def test_models_and_lengths_out_of_range_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        ClientEvaluation(**options)
