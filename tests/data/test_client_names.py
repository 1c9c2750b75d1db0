"""Clients that are given by name keep it: in the data module, in the table of clients, and in messages."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_fed.callbacks.diagnostics import ClientEvaluation, FinalPictures
from lightning_fed.data import ClientDatasets, FederatedDataModule
from lightning_fed.data.loading import Datasets
from lightning_fed.data.partitioners import IID, ByUser
from lightning_fed.data.summary import SampleSheet, samples_figure, split_figure
from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.page import _clients
from lightning_fed.lab.report.runs import Method, load_runs
from tests.callbacks.diagnostics.parts import Measured
from tests.parts import Classifier, federated_trainer, points

SIZES = {"north": 8, "east": 12, "south": 4, "west": 16}


def parts() -> dict[str, TensorDataset]:
    x, y = points(sum(SIZES.values())).tensors
    ends = np.cumsum(list(SIZES.values()))
    return {
        name: TensorDataset(x[end - size : end], y[end - size : end])
        for (name, size), end in zip(SIZES.items(), ends, strict=True)
    }


class Hospitals(LightningDataModule):
    def train_dataloader(self) -> dict[str, DataLoader[Any]]:
        return {name: DataLoader(part, batch_size=4) for name, part in parts().items()}


def by_column(names: Any) -> FederatedDataModule:
    x, y = points(len(names)).tensors
    return FederatedDataModule(TensorDataset(x, y), ByUser(), None, users=names)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: FederatedDataModule(parts(), **options),
        lambda **options: FederatedDataModule(ClientDatasets(parts()), **options),
        lambda **options: FederatedDataModule(source=Hospitals(), **options),
    ],
)
@pytest.mark.parametrize("unseen", [0, 1, 2])
def test_names_follow_their_clients(make: Any, unseen: int) -> None:
    data = make(unseen_clients=unseen, split_seed=3)
    sizes, names = data.split.sizes.tolist(), data.client_names
    assert [SIZES[name] for name in names] == sizes
    assert len(names) == 4 - unseen


def test_users_in_a_column() -> None:
    assert by_column(np.repeat(["b", "a", "c"], 4)).client_names == ("a", "b", "c")
    assert by_column(np.repeat([1042, 7], 4)).client_names == ("7", "1042")
    assert by_column(np.repeat([0, 1], 4)).client_names is None  # its number says as much


def test_users_with_names_of_their_own() -> None:
    class Writers(FederatedDataModule):
        def load_datasets(self) -> Datasets:
            x, y = points(9).tensors
            return Datasets(TensorDataset(x, y), users=np.repeat([0, 1, 2], 3), user_names=["zoe", "ann", "bob"])

    assert Writers(partitioner=ByUser(), num_clients=None).client_names == ("zoe", "ann", "bob")


def test_clients_that_are_no_users_have_numbers() -> None:
    x, y = points(40).tensors
    assert FederatedDataModule(TensorDataset(x, y), IID(), 4).client_names is None
    assert FederatedDataModule(parts(), IID(), 4).client_names is None
    assert FederatedDataModule(list(parts().values())).client_names is None


def test_the_table_of_clients_has_them(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, ClientEvaluation(every_n_rounds=1), FinalPictures(), logger=None)
    trainer.fit(Measured(), FederatedDataModule(parts(), test_dataset=parts()["west"]))
    with (trainer.run.path / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:5] == ["round", "client", "name", "samples", "classes"]
    assert {row["name"]: int(row["samples"]) for row in rows} == SIZES
    assert (trainer.run.path / "clients.png").is_file()


@pytest.mark.parametrize("models", [("global",), ("tuned",)])
def test_unseen_clients_have_a_table_of_their_own_by_name(tmp_path: Path, models: Any) -> None:
    looks = ClientEvaluation(every_n_rounds=2, models=models)
    trainer = federated_trainer(tmp_path, looks, logger=None, max_rounds=3)
    data = FederatedDataModule(parts(), unseen_clients=2, split_seed=3)
    trainer.fit(Measured(), data)
    tables = {}
    for name in ("clients", "unseen"):
        with (trainer.run.path / f"{name}.csv").open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    clients, unseen = tables["clients"], tables["unseen"]
    assert list(unseen[0]) == ["round", "client", "name", "samples", "loss", "acc"]
    assert [(row["round"], row["client"]) for row in unseen] == [("3", "2"), ("3", "3")]
    assert {row["name"]: int(row["samples"]) for row in clients + unseen} == SIZES
    module = trainer.lightning_module
    for row in unseen:
        x, y = parts()[row["name"]].tensors
        assert float(row["loss"]) == pytest.approx(cross_entropy(module.net(x), y).item(), rel=1e-6)
    html = "".join(_clients([Method("FedAvg", (load_runs([tmp_path])[0][0],))]))
    assert "2 clients" in html
    assert "2 unseen clients" in html
    assert all(f"<td>{name}</td>" in html for name in SIZES)


def test_without_unseen_clients_there_is_no_such_table(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, ClientEvaluation(every_n_rounds=1), logger=None)
    trainer.fit(Measured(), FederatedDataModule(parts()))
    assert not (trainer.run.path / "unseen.csv").exists()


def test_pictures_of_the_split_have_names() -> None:
    counts = np.ones((4, 3), dtype=np.int64)
    axes = split_figure(counts, None, [*SIZES]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*SIZES]
    sheet = SampleSheet(np.array([3, 1]), np.zeros((2, 1, 2, 2, 3), np.float32))
    axes = samples_figure(sheet, [*SIZES]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["west", "east"]


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.client is not None and self.trainer.client.id == 2:
            raise RuntimeError("no such column")
        return super().training_step(batch, batch_idx)


class Diverges(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("nan") if len(batch[0]) == 4 else 1.0)


def test_a_mistake_names_the_client(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, engine="sequential")
    with pytest.raises(RuntimeError) as failed:
        trainer.fit(Fails(), FederatedDataModule(parts()))
    assert "In the training of client 2 (south): round 1" in failed.value.__notes__[0]


def test_divergence_names_the_client(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, engine="sequential")
    with pytest.raises(FederatedError, match=r"client 2 \(south\) diverged in round 1"):
        trainer.fit(Diverges(), FederatedDataModule(parts(), batch_size=32))


def test_an_empty_client_is_named() -> None:
    empty = {**parts(), "far": Subset(parts()["west"], [])}
    with pytest.raises(FederatedError, match="data set of client far"):
        FederatedDataModule(empty).setup("fit")
