"""The evaluation of clients: its figures by hand, that it changes nothing, and what it says of mistakes."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import ClientDatasets, FederatedDataModule
from lightning_fed.data.skews import ClientColors
from lightning_fed.errors import FederatedError
from lightning_fed.models import Classifier as LightningClassifier
from lightning_fed.models import ImageClassifier, LogisticRegression
from tests.callbacks.diagnostics.parts import Measured, Net, columns, net_data, trainer_for
from tests.parts import CLASSES, FEATURES, BySizes, Classifier, OneByOne, federated_data, points

SIZES = (20, 5, 0, 9, 30)


def net() -> Measured:
    torch.manual_seed(0)
    return Measured()


def table(trainer: Any) -> list[dict[str, str]]:
    with (trainer.run.path / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def by_hand(model: Measured, data: FederatedDataModule) -> dict[int, tuple[float, float]]:
    """Loss and accuracy of each client that has training samples."""
    x, y = data._load().datasets.train.tensors
    split, found = data.split, {}
    for client in range(split.num_clients):
        rows = split.index[split.offsets[client] : split.offsets[client + 1]]
        if len(rows):
            scores = model.cpu()(x[rows].to(model.net.weight.dtype)).detach()
            right = (scores.argmax(1) == y[rows]).double().mean()
            found[client] = (float(cross_entropy(scores, y[rows])), float(right))
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_the_table_and_the_figures_are_those_of_each_client_by_hand(
    engine: Any, in_memory: bool, tmp_path: Path
) -> None:
    data, model = federated_data(*SIZES, in_memory=in_memory), net()
    trainer = trainer_for(tmp_path, ClientEvaluation(), max_rounds=2, engine=engine, precision="64-true")
    trainer.fit(model, data)
    expected, rows, found = by_hand(model, data), table(trainer), columns(trainer)
    assert [(row["round"], int(row["client"]), int(row["samples"])) for row in rows] == [
        ("2", client, SIZES[client]) for client in (0, 1, 3, 4)
    ]
    counts = data.class_counts()
    assert counts is not None
    assert [int(row["classes"]) for row in rows] == [int((counts[i] > 0).sum()) for i in (0, 1, 3, 4)]
    sizes = [SIZES[i] for i in expected]
    for place, (name, worst) in enumerate((("loss", max), ("acc", min))):
        values = [each[place] for each in expected.values()]
        assert [float(row[name]) for row in rows] == pytest.approx(values, rel=1e-7)
        figures = {"": np.mean(values), "_weighted": np.average(values, weights=sizes), "_worst": worst(values)}
        for end, value in {**figures, "_std": np.std(values)}.items():
            assert found[f"per_client/{name}{end}"] == {2: pytest.approx(value, rel=1e-6)}


def test_only_due_rounds_and_the_last_one_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = Measured.validation_step
    monkeypatch.setattr(
        Measured, "validation_step", lambda self, *args: (steps.append(self.trainer.round), step(self, *args))[1]
    )
    trainer = trainer_for(tmp_path, ClientEvaluation(2), max_rounds=5, limit_val_batches=0)
    trainer.fit(net(), federated_data(20, 5))
    assert list(columns(trainer)["per_client/acc"]) == [2, 4, 5]
    assert steps == [2] * 4 + [4] * 4 + [5] * 4  # 20 samples in batches of 8, and 5 of the other client


class Stops(FederatedCallback):
    """Ends the run after round 3."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.round == 3


def test_where_a_callback_ends_the_run_the_table_is_that_of_the_final_model(tmp_path: Path) -> None:
    data, model = federated_data(20, 5), net()
    trainer = trainer_for(tmp_path, ClientEvaluation(2), Stops(), max_rounds=9)
    trainer.fit(model, data)
    assert list(columns(trainer)["per_client/acc"]) == [2]
    assert [(row["round"], float(row["loss"])) for row in table(trainer)] == [
        ("3", pytest.approx(loss, rel=1e-5)) for loss, _ in by_hand(model, data).values()
    ]


class Images(Measured):
    """Classifies colored images."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16, 3)))


def images(**options: Any) -> FederatedDataModule:
    x = torch.rand(80, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(x, torch.arange(80) % 3)
    return FederatedDataModule(
        samples, BySizes(40, 25, 15), num_clients=3, batch_size=8, eval_batch_size=16, skew=ClientColors(), **options
    )


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("part", ["val", "test"])
def test_held_out_samples_are_those_of_the_pooled_set(part: Any, in_memory: bool, tmp_path: Path) -> None:
    """Weighted by samples, clients give what the set of all of them together gives, in each client's own colors."""
    held = {"val_split": "per_client", "val_fraction": 0.4} if part == "val" else {"client_test_fraction": 0.4}
    data, model = images(**held, in_memory=in_memory, drop_last=True), Images()
    model.test_step = lambda batch, batch_idx: model.log("test/loss", model.loss(batch))
    trainer = trainer_for(
        tmp_path, ClientEvaluation(1, part), max_rounds=2, check_test_every_n_rounds=1, precision="64-true"
    )
    trainer.fit(model, data)
    found = columns(trainer)
    pooled = found["val/loss" if part == "val" else "test/loss/clients"]
    assert [int(row["samples"]) for row in table(trainer)] == [16, 10, 6]
    assert found["per_client/loss_weighted"] == {r: pytest.approx(pooled[r], rel=1e-6) for r in (1, 2)}


def test_clients_with_test_sets_of_their_own_are_evaluated_on_these(tmp_path: Path) -> None:
    parts = [points(size, seed) for seed, size in enumerate((9, 4, 13))]
    data = FederatedDataModule(ClientDatasets(parts), test_dataset=ClientDatasets(parts[::-1]), batch_size=8)
    model, trainer = net(), trainer_for(tmp_path, ClientEvaluation(1, "test"), max_rounds=1, precision="64-true")
    trainer.fit(model, data)
    found = [(int(row["samples"]), float(row["loss"])) for row in table(trainer)]
    for (size, loss), part in zip(found, reversed(parts), strict=True):
        x, y = part.tensors
        expected = float(cross_entropy(model.cpu()(x.double()).detach(), y))
        assert (size, loss) == (len(y), pytest.approx(expected, rel=1e-7))


def test_a_sample_of_clients_is_drawn_by_the_seed_and_stays(tmp_path: Path) -> None:
    drawn = []
    for number, seed in enumerate((1, 1, 2, 3)):
        trainer = trainer_for(tmp_path / f"{number}", ClientEvaluation(1, num_clients=3), max_rounds=1, seed=seed)
        trainer.fit(net(), federated_data(*[4] * 12))
        drawn.append([int(row["client"]) for row in table(trainer)])
    assert all(each == sorted(set(each)) and len(each) == 3 for each in drawn)
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn))) > 1


class Careless(Net):
    """Validates with a metric of training, counts, draws random numbers, and logs at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.validated = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.seen.append(batch[1])
        self.accuracy.update(self.layers(batch[0]) * torch.rand(()), batch[1])
        self.log("val/step", float(np.random.rand()), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/seen", float(sum(map(len, self.seen))))
        self.log("val/acc", self.accuracy.compute())
        self.seen.clear()


class Hears(Callback):
    """Notes the hooks of validation."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        for name in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
            setattr(self, f"on_validation_{name}", lambda *_, name=name: self.heard.append(name))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_and_other_columns_are_the_same_with_and_without(engine: Any, tmp_path: Path) -> None:
    runs = []
    for name, diagnostics in (("without", []), ("with", [ClientEvaluation(2, participation=True)])):
        hears, data = Hears(), net_data(val_fraction=0.2)
        trainer = trainer_for(tmp_path / name, hears, *diagnostics, clients_per_round=3, engine=engine)
        torch.manual_seed(0)
        model = Careless()
        model.trains_metric = engine == "sequential"  # one that trains one client after another alone
        trainer.fit(model, data)
        found = columns(trainer)
        kept = {key: value for key, value in found.items() if not key.startswith(("per_client/", "time/"))}
        runs.append((model.state_dict(), kept, hears.heard, model.validated, model.seen))
    (weights, kept, *others), (other_weights, other_kept, *other_others) = runs
    assert all(torch.equal(other_weights[key], value) for key, value in weights.items())
    assert kept == other_kept
    assert {"val/acc", "val/seen", "val/step_epoch", "train/loss"} <= kept.keys()
    assert others == other_others
    assert found["per_client/seen"] == {2: 10.0, 3: 10.0}  # of four clients with 40 samples


class Half(FederatedCallback):
    """Notes who trains."""

    def __init__(self) -> None:
        self.cohorts: dict[int, set[int]] = {}

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.cohorts[trainer.round] = {client.id for client in cohort.clients}


def test_clients_of_the_round_and_the_others_before_and_after(tmp_path: Path) -> None:
    data, model, cohorts = federated_data(*SIZES), net(), Half()
    trainer = trainer_for(
        tmp_path, ClientEvaluation(1, participation=True), cohorts, clients_per_round=2, precision="64-true"
    )
    trainer.fit(model, data)
    found, values = columns(trainer), by_hand(model, data)
    for place, name in enumerate(("loss", "acc")):
        for side, own in (("in", cohorts.cohorts[3]), ("out", values.keys() - cohorts.cohorts[3])):
            expected = np.mean([values[client][place] for client in own & values.keys()])
            assert found[f"per_client/{name}_{side}"][3] == pytest.approx(expected, rel=1e-6)
        # The model that a round starts from is the one that the last round ended with.
        for round in (2, 3):
            n = len(cohorts.cohorts[round])
            own, rest = (found[f"per_client/{name}_{side}_before"][round] for side in ("in", "out"))
            before = found[f"per_client/{name}"][round - 1]
            assert (n * own + (4 - n) * rest) / 4 == pytest.approx(before, rel=1e-9)


def test_where_all_clients_train_there_are_no_others(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, ClientEvaluation(participation=True), clients_per_round=1.0, max_rounds=1)
    trainer.fit(net(), federated_data(6, 7))
    found = columns(trainer)
    assert found["per_client/acc_in"] == found["per_client/acc"]
    assert not any("_out" in name for name in found)


def test_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    found = []
    for stops in ((4,), (3, 4)):
        for rounds in stops:
            trainer = trainer_for(
                tmp_path / f"{len(stops)}", ClientEvaluation(2, participation=True, num_clients=2),
                max_rounds=rounds, clients_per_round=2, enable_checkpointing=True, name="run",
            )  # fmt: skip
            trainer.fit(net(), federated_data(*SIZES), ckpt_path="last")
        assert trainer.run is not None
        kept = columns(trainer)
        found.append({key: value for key, value in kept.items() if not key.startswith("time/")})
    assert {key: value[4] for key, value in found[0].items()} == {key: value[4] for key, value in found[1].items()}


def test_a_table_that_cannot_be_written_is_said_once_and_the_figures_stay(tmp_path: Path) -> None:
    class Blocks(FederatedCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (trainer.run.path / "clients.csv").mkdir()

    trainer = trainer_for(tmp_path, ClientEvaluation(1), Blocks())
    with pytest.warns(UserWarning, match="goes on without its table of clients: Expected to write") as said:
        trainer.fit(net(), federated_data(20, 5))
    assert len([each for each in said if "table of clients" in str(each.message)]) == 1
    assert list(columns(trainer)["per_client/acc"]) == [1, 2, 3]


class Sampled(Measured):
    """Says what it measures of each sample."""

    passes: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def evaluate_samples(self, batch: Any) -> dict[str, Tensor]:
        self.passes.append(len(batch[1]))
        scores = self(batch[0])
        return {"loss": cross_entropy(scores, batch[1], reduction="none"), "acc": (scores.argmax(1) == batch[1]) * 1.0}


class LogsMore(Sampled):
    """Logs more than its base measures of samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val/more", 1.0)


class LogsLater(Sampled):
    """Logs more at the end of an epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/more", 1.0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples went through a model at once."""
    found: list[int] = []
    monkeypatch.setattr(Sampled, "passes", found)
    return found


def patched() -> Sampled:
    model = Sampled()
    model.validation_step = lambda batch, batch_idx: model.log("val/more", 1.0)
    return model


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("size", "sizes", "expected"),
    [(512, SIZES, [64]), (24, SIZES, [20, 14, 24, 6]), (8, (3, 3, 3, 8, 1), [6, 3, 8, 1])],
)
def test_samples_of_several_clients_go_through_the_model_at_once(
    size: int, sizes: tuple[int, ...], expected: list[int], in_memory: bool, passes: list[int], tmp_path: Path
) -> None:
    data, model = federated_data(*sizes, in_memory=in_memory, eval_batch_size=size), Sampled()
    trainer = trainer_for(tmp_path, ClientEvaluation(), max_rounds=1, precision="64-true")
    trainer.fit(model, data)
    assert passes == expected
    found = [(float(row["loss"]), float(row["acc"])) for row in table(trainer)]
    assert found == [pytest.approx(each, rel=1e-12) for each in by_hand(model, data).values()]


@pytest.mark.parametrize("make", [LogsMore, LogsLater, patched], ids=["overrides", "hook", "patched"])
def test_a_module_that_measures_more_than_its_samples_is_validated(
    make: Any, passes: list[int], tmp_path: Path
) -> None:
    model = make()
    trainer = trainer_for(tmp_path, ClientEvaluation(), max_rounds=1)
    trainer.fit(model, federated_data(20, 5))
    assert passes == []
    assert columns(trainer)["per_client/more"] == {1: 1.0}


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_the_classifier_of_the_package_says_of_samples_what_it_validates(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number in range(2):
        torch.manual_seed(0)
        model = ImageClassifier(LogisticRegression(FEATURES, CLASSES), CLASSES)
        trainer = trainer_for(tmp_path / f"{number}", ClientEvaluation(1), precision=precision)
        trainer.fit(model, federated_data(*SIZES, eval_batch_size=32))
        found.append({key: value for key, value in columns(trainer).items() if key.startswith("per_client/")})
        if not number:
            monkeypatch.delattr(LightningClassifier, "evaluate_samples")
    assert found[0].keys() == found[1].keys() >= {"per_client/acc", "per_client/loss_worst"}
    # A bfloat16 loss is a mean of rounded numbers on one side, and a rounded mean on the other.
    close = {"rel": 1e-6, "abs": 1e-7} if precision == "64-true" else {"rel": 0.02, "abs": 0.02}
    assert all(value == pytest.approx(found[1][key], **close) for key, value in found[0].items())


class Ragged(Sampled):
    """Sums the words of sentences; each batch is as wide as its longest sentence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sum(dim=1))


def test_batches_of_other_shapes_go_apart(passes: list[int], tmp_path: Path) -> None:
    x, y = points(12).tensors
    sentences = OneByOne(12, lambda i: (x[i].repeat(1 + i // 4, 1), y[i]), targets=y)  # as long as the client's number
    data = federated_data(4, 4, 4, dataset=sentences)
    trainer_for(tmp_path, ClientEvaluation(), max_rounds=1, limit_val_batches=0).fit(Ragged(), data)
    assert passes == [4, 4, 4]


class Halves:
    """A source of the user's own, which knows no other batches than its own, of two samples."""

    sizes, batch_size, reads_are_seeded = np.array([4, 0, 3]), 2, False

    def to(self, device: Any) -> Any:
        return self

    def batches(self, client: int, order: Tensor, seed: int) -> Any:
        x, y = points(12).tensors
        for rows in torch.split(4 * client + order, 2):
            yield [x[rows], y[rows]]


def test_a_source_of_the_users_own_is_read_in_its_batches(
    passes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = federated_data(4, 4, 4)
    monkeypatch.setattr(data, "train_source", Halves)
    trainer = trainer_for(tmp_path, ClientEvaluation(), max_rounds=1, limit_val_batches=0)
    trainer.fit(Sampled(), data)
    assert passes == [2, 2, 2, 1]
    assert [(row["client"], row["samples"]) for row in table(trainer)] == [("0", "4"), ("2", "3")]


class OfDicts(Sampled):
    """Takes dicts."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]))


class OfBatches(Measured):
    """Returns one loss of all samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def evaluate_samples(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(batch)}


class Silent(Classifier):
    """Validates without a word."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Unvalidated(Net):
    """Has no validation."""


@pytest.mark.parametrize(
    ("callbacks", "model", "words"),
    [
        ([ClientEvaluation(), ClientEvaluation()], Measured, "Expected each callback once, got ClientEvaluation twice"),
        ([ClientEvaluation(1, "val")], Measured, "--data.val_split per_client"),
        ([ClientEvaluation(1, "test")], Measured, "--data.client_test_fraction"),
        ([ClientEvaluation(1)], Silent, "Expected `validation_step` to log metrics for ClientEvaluation, got none"),
        ([ClientEvaluation(1)], OfDicts, "Expected batches that are lists of tensors for `evaluate_samples`, got dict"),
        ([ClientEvaluation(1)], OfBatches, "'loss' of each of 8 samples, got a tensor of shape"),
        ([ClientEvaluation(1)], Unvalidated, "got Unvalidated: No `validation_step\\(\\)` method defined"),
    ],
    ids=["twice", "val", "test", "silent", "dicts", "batches", "unvalidated"],
)
def test_mistakes_end_in_a_sentence(callbacks: list[Any], model: Any, words: str, tmp_path: Path) -> None:
    data = net_data() if model is Unvalidated else federated_data(20, 5)
    if model is OfDicts:
        x, y = points(25).tensors
        samples = OneByOne(25, lambda i: {"x": x[i], "y": y[i]}, targets=y)
        data = federated_data(20, 5, dataset=samples, val_dataset=None)
    with pytest.raises(FederatedError, match=words):
        trainer_for(tmp_path, *callbacks).fit(model(), data)


def test_data_of_another_kind_have_no_held_out_samples() -> None:
    callback = ClientEvaluation(1, "test")
    trainer: Any = SimpleNamespace(callbacks=[callback], datamodule=object())
    with pytest.raises(FederatedError, match="Expected a FederatedDataModule for `data` test"):
        callback.setup(trainer, None, "fit")


@pytest.mark.parametrize(
    "options", [{"every_n_rounds": 0}, {"data": "all"}, {"num_clients": 0}], ids=["rounds", "data", "clients"]
)
def test_arguments_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match=f"`{next(iter(options))}`"):
        ClientEvaluation(**options)
