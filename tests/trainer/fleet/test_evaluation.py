"""Nodes evaluate on what they hold out: what the server makes of their counts is one evaluation over all samples."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from torchmetrics import MaxMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.client_algorithms import Ditto, FedPer
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.fleet.packets import pack, unpack
from lightning_fed.trainer.fleet import LocalFleet, Node, SummingFleet
from tests.composition.composition_parts import make_samples
from tests.parts import BySizes, Classifier, federated_trainer, points, quick_first
from tests.trainer.fleet.fleets import SHARES
from tests.trainer.fleet.test_faults import named

# Samples for validation and test at each node: very unequal, and node b holds nothing out for validation.
HELD = {"a": (37, 5), "b": (0, 3), "c": (3, 9)}
SIZES = (6, 24, 0, 15, 10, 31)


class Classes(Classifier):
    """Logs a mean, a metric, a collection, and at the end of the epoch what a metric with bins computes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.others = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="val/")
        self.pair = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        self.area, self.table = MulticlassAUROC(3, thresholds=20), MulticlassConfusionMatrix(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, labels = self(batch[0]), batch[1]
        self.log("val/loss", self.loss(batch), prog_bar=True)
        self.accuracy(scores, labels)
        self.log("val/acc", self.accuracy)
        self.others(scores, labels)
        self.log_dict(self.others)
        self.pair.update(scores, labels)
        self.area.update(scores.softmax(1), labels)  # torchmetrics itself would do so in some batches only

    def on_validation_epoch_start(self) -> None:
        self.started = self.trainer.current_epoch  # as it is on the server too

    def on_validation_epoch_end(self) -> None:
        self.log("val/area", self.area.compute())
        self.log_dict({f"val/pair/{name}": value for name, value in self.pair.compute().items()})
        self.pair.reset()
        self.area.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))
        self.log("test/most", self(batch[0]).max(), reduce_fx="max", on_step=False, on_epoch=True)


class Smoothed(Metric):
    """Counts from 1 on, so that what nodes count has one beginning too many for each but the first."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.ones((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.double().sum()

    def compute(self) -> Tensor:
        return self.total


class Prices(Classifier):
    """A regression with a loss of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 1))
        self.error, self.largest, self.smoothed = MeanSquaredError(), MaxMetric(), Smoothed()
        for metric in (self.error, self.largest):
            metric.set_dtype(torch.float64)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self(x)[:, 0], y.to(x)).sqrt()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.error.update(self(x)[:, 0], y.to(x))
        self.largest.update(self(x).max())
        self.smoothed.update(y)
        self.log_dict({"val/mse": self.error, "val/largest": self.largest, "val/smoothed": self.smoothed})
        self.log("val/huge", (y > 1).double().sum(), reduce_fx="sum")
        return self.loss(batch)


class Foreign(LightningModule):
    """A module of somebody else, which logs a mean and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.criterion = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.criterion(self.body(batch[0]), batch[1])}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self.body(batch[0]), batch[1])
        self.log("val_loss", loss, on_epoch=True, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(LightningDataModule):
    """The data of the server."""

    def val_dataloader(self) -> Any:
        return DataLoader(points(12, seed=3), batch_size=8)


def part(node: str, which: int) -> TensorDataset:
    return points(HELD[node][which], seed=10 * which + ord(node))


def data_of(clients: list[int], val: Any = None, test: Any = None, **options: Any) -> FederatedDataModule:
    """The training data of some clients, beside what is held out."""
    inputs, labels = make_samples("unequal").tensors
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    rows = torch.cat([torch.arange(ends[each] - SIZES[each], ends[each]) for each in clients])
    sizes = [SIZES[each] for each in clients]
    options = {"val_dataset": val, "test_dataset": test, "batch_size": 8, "eval_batch_size": 4, **options}
    return FederatedDataModule(TensorDataset(inputs[rows], labels[rows]), BySizes(*sizes), len(sizes), **options)


def nodes_of(make: Callable[[], FederatedTrainer], net: Callable[[], Any]) -> dict[str, Node]:
    held = {name: [part(name, which) if HELD[name][which] else None for which in (0, 1)] for name in SHARES}
    return {name: Node(make(), net(), data_of(own, *held[name]), own) for name, own in SHARES.items()}


def pooled(**options: Any) -> FederatedDataModule:
    """All of it in one process."""
    val, test = (ConcatDataset([part(name, which) for name in SHARES if HELD[name][which]]) for which in (0, 1))
    return data_of([*range(6)], val, test, **options)


def rows_of(trainer: FederatedTrainer) -> dict[str, float]:
    """What the last round logged, in float64, without times and what only a fleet says."""
    beside = ("time/", "fleet/", "clients/failed")
    return {name: value for name, value in trainer.metrics.logged.items() if not name.startswith(beside)}


def make(folder: Path, *callbacks: Callback, **options: Any) -> FederatedTrainer:
    return federated_trainer(folder, *callbacks, **{"max_rounds": 2, "precision": "64-true", **options})


def fit(trainer: FederatedTrainer, net: Any, data: Any, fleet: Any = None, **options: Any) -> FederatedTrainer:
    trainer.fleet = fleet
    try:
        trainer.fit(net, datamodule=data, **options)
    finally:
        if fleet is not None:
            fleet.close()
    return trainer


@pytest.mark.parametrize("net", [Classes, Prices, Foreign])
def test_what_nodes_count_is_one_evaluation_over_all_samples(net: Any, tmp_path: Path) -> None:
    tests = {"check_test_every_n_rounds": 1} if net is Classes else {}
    trainer = lambda: make(tmp_path, **tests)  # noqa: E731
    here = fit(trainer(), net(), pooled())
    there = fit(trainer(), net(), None, LocalFleet(nodes_of(trainer, net), evaluates="nodes"))
    assert torch.equal(here.weights, there.weights)
    one, other = rows_of(here), rows_of(there)
    if net is Foreign:  # of the last batch, which another node has
        one.pop("val_loss_step"), other.pop("val_loss_step")
    assert any("val" in name for name in one)
    assert one == pytest.approx(other, rel=1e-12)
    counts = {name: float(value) for name, value in there.logged_metrics.items() if name.startswith("fleet/")}
    assert counts["fleet/val_samples"] == 40
    assert counts["fleet/val_failed"] == 0
    assert counts.get("fleet/test_samples", 17) == 17


def test_what_a_larger_data_module_holds_out_of_a_nodes_clients_is_its_own(tmp_path: Path) -> None:
    split = {"val_fraction": 0.25, "val_split": "per_client", "client_test_fraction": 0.2}
    trainer = lambda: make(tmp_path, check_test_every_n_rounds=2)  # noqa: E731
    central = points(9, seed=4)  # belongs to no node
    nodes = {
        name: Node(trainer(), Classes(), data_of([*range(6)], **split, test=central), own)
        for name, own in SHARES.items()
    }
    here = fit(trainer(), Classes(), data_of([*range(6)], **split))
    there = fit(trainer(), Classes(), None, LocalFleet(nodes, evaluates="nodes"))
    assert {"val/acc", "test/loss/clients"} <= rows_of(here).keys()
    assert rows_of(here) == pytest.approx(rows_of(there), rel=1e-12)


def test_server_and_nodes_both_evaluate_under_names_of_their_own(tmp_path: Path) -> None:
    trainer = lambda *more: make(tmp_path, *more)  # noqa: E731
    heard: list[str] = []

    class Hears(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            heard.append("end")

    alone = fit(trainer(), Classes(), Own(), LocalFleet(nodes_of(trainer, Classes)))
    nodes = fit(trainer(), Classes(), None, LocalFleet(nodes_of(trainer, Classes), evaluates="nodes"))
    both = fit(trainer(Hears()), Classes(), Own(), LocalFleet(nodes_of(trainer, Classes), evaluates="both"))
    rows = rows_of(both)
    there = {name.removesuffix("/nodes"): value for name, value in rows.items() if name.endswith("/nodes")}
    assert {name: value for name, value in rows.items() if not name.endswith("/nodes")} == rows_of(alone)
    assert there == {name: value for name, value in rows_of(nodes).items() if name.startswith("val/")}
    assert len(heard) == 3  # once a round, though both have evaluated


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_nodes_evaluate_the_global_model_as_one_process_does(method: Any, tmp_path: Path) -> None:
    trainer = lambda: make(tmp_path, method())  # noqa: E731
    here = fit(trainer(), Foreign(), pooled())
    there = fit(trainer(), Foreign(), None, LocalFleet(nodes_of(trainer, Foreign), evaluates="nodes"))
    assert torch.equal(here.weights, there.weights)
    assert rows_of(here)["val_loss_epoch"] == pytest.approx(rows_of(there)["val_loss_epoch"], rel=1e-12)


class Exact(Classes):
    def __init__(self) -> None:
        super().__init__()
        self.area = MulticlassAUROC(3)


class Correlated(Prices):
    def __init__(self) -> None:
        super().__init__()
        self.pearson = PearsonCorrCoef()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pearson.update(self(batch[0])[:, 0], batch[1].to(batch[0]))


class Keeps(Classifier):
    """Keeps what it has found in a list until the end of the epoch, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", torch.stack(self.found).mean())
        self.found.clear()


class Sums(Keeps):
    """Adds up in place, in a tensor that stays the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sum += self.loss(batch)


class Unnamed(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        metric = MulticlassAccuracy(3)
        metric.update(self(batch[0]), batch[1])
        self.log("val/acc", metric)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Exact, r"got MulticlassAUROC \(area\), whose 'preds' is none of these, so that samples could leave"),
        (Correlated, r"got PearsonCorrCoef \(pearson\)"),
        (Keeps, "got found of Keeps, which stays at the node: `on_validation_epoch_end` on the server would not see"),
        (Sums, "got sum of Sums, which stays at the node"),
        (Unnamed, "every Metric that is logged to be an attribute of Unnamed"),
    ],
)
def test_what_cannot_be_added_up_ends_the_run_before_its_first_round(net: Any, words: str, tmp_path: Path) -> None:
    trainer = lambda: make(tmp_path)  # noqa: E731
    server = trainer()
    with pytest.raises(FederatedError, match=f"Node a cannot evaluate the model: .*{words}"):
        fit(server, net(), None, LocalFleet(nodes_of(trainer, net), evaluates="nodes"))
    assert server.round == 0


@pytest.mark.parametrize(
    ("kind", "where", "words"),
    [
        (SummingFleet, "nodes", "shows sums alone to evaluate on the server, got nodes"),
        (LocalFleet, "clients", "one of server, nodes, both, got 'clients'"),
    ],
)
def test_where_nobody_can_evaluate_is_refused(kind: Any, where: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=words):
        fit(make(tmp_path), Classes(), None, kind(nodes_of(lambda: make(tmp_path), Classes), evaluates=where))


def test_a_fleet_without_held_out_samples_is_refused(tmp_path: Path) -> None:
    nodes = {"a": Node(make(tmp_path), Classes(), data_of([0, 1]), [0, 1])}
    with pytest.raises(FederatedError, match="a node with samples to evaluate on, got none"):
        fit(make(tmp_path), Classes(), None, LocalFleet(nodes, evaluates="nodes"))


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "run" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


class Killed(Callback):
    lives = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.round == 3 and self.lives:
            self.lives = False
            raise KeyError("power cut")


def test_a_resumed_server_logs_and_monitors_what_nodes_count(tmp_path: Path) -> None:
    saving = {"enable_checkpointing": True, "name": "run", "logger": None, "check_test_every_n_rounds": 2}
    saving |= {"max_rounds": 5, "check_val_every_n_rounds": 1}
    killed = Killed()

    def server(folder: Path, *more: Callback) -> FederatedTrainer:
        stop = EarlyStopping("val/loss", patience=10)
        return make(folder, FederatedCheckpoint(monitor="val/acc"), stop, *more, **saving)

    trainer = lambda: make(tmp_path, **saving)  # noqa: E731
    fleet = LocalFleet(nodes_of(trainer, Classes), evaluates="nodes")
    with pytest.raises(KeyError, match="power cut"):
        fit(server(tmp_path / "there", killed), Classes(), None, fleet)
    resumed = fit(server(tmp_path / "there", killed), Classes(), None, fleet, ckpt_path="last")
    fit(server(tmp_path / "here"), Classes(), pooled())
    assert resumed.resumed
    one, other = rows_in(tmp_path / "here"), rows_in(tmp_path / "there")
    assert [bool(row["test/loss"]) for row in other] == [True, False, True, False, True, False]
    assert [bool(row["fleet/test_samples"]) for row in other] == [True, False, True, False, True, False]
    for name in ("val/loss", "val/acc", "val/area", "test/loss", "test/most"):
        assert [float(row[name] or 0) for row in other] == pytest.approx(
            [float(row[name] or 0) for row in one], rel=1e-12
        )
    best = [cb for cb in resumed.callbacks if isinstance(cb, FederatedCheckpoint)][0]
    assert best.best_score == max(float(row["val/acc"]) for row in other)


class Answering(LocalFleet):
    """Changes the reply of node c to one question for an evaluation."""

    edit: Callable[[bytes], Any] = staticmethod(lambda reply: reply)
    at = 1
    sizes: tuple[int, int] = (0, 0)

    def ask(self, packets: Any) -> Any:
        facts = [unpack(packet)[0] for packet in packets.values()]
        replies = super().ask(packets)
        if facts and facts[0]["kind"] == "evaluate" and facts[0]["round"] == self.at:
            replies["c"] = self.edit(replies["c"])
            self.sizes = (sum(map(len, packets.values())), sum(len(reply or b"") for reply in replies.values()))
        return {name: reply for name, reply in replies.items() if reply is not None}


def changed(edit: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Callable[[bytes], bytes]:
    def change(reply: bytes) -> bytes:
        facts, tensors = unpack(reply)
        edit(facts["sets"][""], tensors)
        return pack(facts, tensors)

    return change


def put(name: str, value: Any) -> Callable[[bytes], bytes]:
    return changed(lambda said, tensors: tensors.update({name: value}))


HOSTILE: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "lost": (lambda reply: None, "it has not replied in time"),
    "an error": (lambda reply: "no worker", "no worker"),
    "more samples than declared": (changed(lambda said, _: said.update(samples=4)), "at most 3 samples"),
    "negative samples": (changed(lambda said, _: said.update(samples=-1)), "at most 3 samples"),
    "NaN": (changed(lambda said, _: said["rest"][0].__setitem__(1, float("nan"))), "finite numbers of 'val/loss'"),
    "a mean over nothing": (changed(lambda said, _: said["rest"][0].__setitem__(2, -1.0)), "over nothing"),
    "an unknown metric": (changed(lambda said, _: said["updated"].append("mine")), "Metric objects that the server's"),
    "a foreign place": (changed(lambda said, _: said["metrics"]["val/acc"].__setitem__(0, "x")), "Metric objects"),
    "a table as a number": (
        changed(lambda said, _: said["metrics"].update(x=["table", ["x", "", False, True, False]])), "of another kind"
    ),
    "an integer without end": (changed(lambda said, _: said["rest"][0].__setitem__(1, 10**400)), "OverflowError"),
    "negative counts": (put("0.accuracy.tp", torch.tensor([-1])), "finite numbers or counts as MulticlassAccuracy"),
    "counts that are none": (put("0.accuracy.tp", torch.tensor([1.5])), "finite numbers or counts"),
    "another shape": (put("0.area.confmat", torch.zeros(2, 2).long()), "finite numbers or counts as MulticlassAUROC"),
    "a state that is missing": (changed(lambda said, tensors: tensors.pop("0.area.confmat")), "0.area.confmat"),
    "something else": (put("surprise", torch.zeros(3)), "nothing else of a node"),
    "another set": (
        lambda reply: pack({**unpack(reply)[0], "sets": {"mine": unpack(reply)[0]["sets"][""]}}, {}), "the node's sets"
    ),
    "a reserved name": (
        changed(lambda said, _: said["log"][0].__setitem__(slice(2), ["round", ["round", "", False, True, False]])),
        "a name of its own",
    ),
    "shown otherwise": (changed(lambda said, _: said["log"][0][1].__setitem__(0, "x")), "shown as its name says"),
    "another reduction": (changed(lambda said, _: said["log"][0].__setitem__(2, "sum")), "of another kind than most"),
    "too many bytes": (lambda reply: reply + bytes(1 << 26), "a reply of at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick_first(12, HOSTILE))
@pytest.mark.quick(3)
def test_a_node_that_is_away_or_hostile_is_named_and_counted(name: str, tmp_path: Path) -> None:
    edit, words = HOSTILE[name]
    trainer = lambda *more: make(tmp_path, *more)  # noqa: E731
    rows: list[dict[str, float]] = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    fleet = Answering(nodes_of(trainer, Classes), evaluates="nodes")
    fleet.edit = edit
    with named("Node c is left out of the val metrics of round 1", words):
        fit(trainer(Notes()), Classes(), None, fleet)
    without = LocalFleet({**nodes_of(trainer, Classes), "c": Node(trainer(), Classes(), data_of([4, 5]), [4, 5])})
    without.evaluates = "nodes"
    only = Notes()
    first = list(rows)
    rows.clear()
    fit(trainer(only), Classes(), None, without)
    counts = [(row["fleet/val_samples"], row["fleet/val_failed"], row["clients/failed"]) for row in first]
    assert counts == [(37, 1, 0), (40, 0, 0)]
    names = [name for name in first[0] if name.startswith("val/")]
    assert {name: first[0][name] for name in names} == {name: rows[0][name] for name in names}


def test_a_node_that_has_gone_and_is_back_under_another_name_evaluates_again(tmp_path: Path) -> None:
    trainer = lambda *more, **options: make(tmp_path, *more, max_rounds=3, max_diverged=0.9, **options)  # noqa: E731
    seen: list[tuple[float, float]] = []

    class Goes(LocalFleet):
        def ask(self, packets: Any) -> Any:
            facts = unpack(next(iter(packets.values())))[0]
            if facts["kind"] == "train" and facts["round"] < 3:
                held.setdefault("node", self.nodes.pop("c", None))
                self.nodes |= {"elsewhere": held["node"]} if facts["round"] == 2 else {}
            return super().ask(packets)

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            row = trainer.callback_metrics
            seen.append((float(row["fleet/val_samples"]), float(row["fleet/val_failed"])))

    held: dict[str, Any] = {}
    with named("Node c is left out of the val metrics of round 1: it is not there"):
        fit(trainer(Notes()), Classes(), None, Goes(nodes_of(trainer, Classes), evaluates="nodes"))
    assert seen == [(37, 1), (40, 0), (40, 0)]


def test_the_bytes_of_an_evaluation_are_counted(tmp_path: Path) -> None:
    trainer = lambda: make(tmp_path, max_rounds=1)  # noqa: E731
    alone = fit(trainer(), Classes(), None, LocalFleet(nodes_of(trainer, Classes)))
    fleet = Answering(nodes_of(trainer, Classes), evaluates="nodes")
    server = fit(trainer(), Classes(), None, fleet)
    for way, size in zip(("down", "up"), fleet.sizes, strict=True):
        assert server.logged_metrics[f"fleet/bytes_{way}"] - alone.logged_metrics[f"fleet/bytes_{way}"] == size > 0


def test_a_round_in_which_no_node_replies_has_no_metrics(tmp_path: Path) -> None:
    trainer = lambda *more: make(tmp_path, *more)  # noqa: E731
    nodes = nodes_of(trainer, Classes)
    fleet = Answering({**nodes, "a": Node(trainer(), Classes(), data_of(SHARES["a"]), SHARES["a"])}, evaluates="nodes")
    fleet.edit, fleet.at = (lambda reply: None), 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitors = FederatedCheckpoint(monitor="val/loss"), EarlyStopping("val/loss")
        server = fit(trainer(*monitors), Classes(), None, fleet)
    assert "val/loss" not in server.round_metrics
    assert server.logged_metrics["fleet/val_samples"] == 0
    assert server.logged_metrics["fleet/val_failed"] == 1


def test_what_training_has_counted_stays_at_the_node(tmp_path: Path) -> None:
    class Trains(Classes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.table.update(self(batch[0]), batch[1])
            return super().training_step(batch, batch_idx)

    def keep(reply: bytes) -> bytes:
        updated.append(unpack(reply)[0]["sets"][""]["updated"])
        return reply

    updated: list[list[str]] = []
    trainer = lambda: make(tmp_path)  # noqa: E731
    fleet = Answering(nodes_of(trainer, Trains), evaluates="nodes")
    fleet.edit = keep
    fit(trainer(), Trains(), None, fleet)
    assert len(updated) == 1
    assert "accuracy" in updated[0]
    assert "table" not in updated[0]


class Scaled(LightningDataModule):
    """Changes batches on their way to the device."""

    def train_dataloader(self) -> Any:
        return DataLoader(points(24), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(points(10, seed=2), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 3, batch[1]]


def test_a_node_calls_what_its_data_do_with_batches(tmp_path: Path) -> None:
    trainer = lambda: make(tmp_path)  # noqa: E731
    data = lambda: FederatedDataModule(source=Scaled(), num_clients=2)  # noqa: E731
    here = fit(trainer(), Foreign(), data())
    there = fit(trainer(), Foreign(), None, LocalFleet({"a": Node(trainer(), Foreign(), data(), [0, 1])}, "nodes"))
    assert torch.equal(here.weights, there.weights)
    assert rows_of(here) == pytest.approx(rows_of(there), rel=1e-12)


class Two(Foreign):
    """Has two validation sets, and says in which a batch is."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", (1 + dataloader_idx) * self.criterion(self.body(batch[0]), batch[1]))


class Lists(LightningDataModule):
    def __init__(self, *seeds: int) -> None:
        super().__init__()
        self.seeds = seeds

    def train_dataloader(self) -> Any:
        return DataLoader(ConcatDataset([points(12 + 4 * seed, seed) for seed in self.seeds]), batch_size=8)

    def val_dataloader(self) -> Any:
        sets = ([points(5 + 3 * seed, 10 + seed) for seed in self.seeds], [points(7, 20 + seed) for seed in self.seeds])
        return [DataLoader(ConcatDataset(each), batch_size=100) for each in sets]


def test_several_sets_keep_their_names_and_numbers(tmp_path: Path) -> None:
    def run(**options: Any) -> FederatedTrainer:
        trainer = lambda: make(tmp_path, max_rounds=1, **options)  # noqa: E731
        data = [FederatedDataModule(source=Lists(at), num_clients=1, batch_size=8) for at in (0, 1)]
        nodes = {f"{at}": Node(trainer(), Two(), own, [at]) for at, own in enumerate(data)}
        return fit(trainer(), Two(), None, LocalFleet(nodes, "nodes"))

    trainer = run()
    names = ["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    module, sums = trainer.lightning_module, []
    for at, loader in enumerate(Lists(0, 1).val_dataloader()):
        x, y = next(iter(loader))
        sums.append(float((1 + at) * module.criterion(module.body(x.double()), y).detach()))
    assert [trainer.metrics.logged[name] for name in names] == pytest.approx(sums, rel=1e-12)
    assert trainer.logged_metrics["fleet/val_samples/dataloader_idx_0"] == 13
    assert trainer.logged_metrics["fleet/val_samples/dataloader_idx_1"] == 14
    assert not [name for name in run(limit_val_batches=0).logged_metrics if "val" in name]
