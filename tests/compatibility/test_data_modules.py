"""Data of Lightning users, unchanged: data modules, data loaders, and models that bring theirs."""

import logging
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fed.cli import main
from lightning_fed.client_algorithms import FedGA
from lightning_fed.data import IID, ClientDatasets, FederatedDataModule, Shards, containers
from lightning_fed.data.source_module import GivenLoaders
from lightning_fed.errors import FederatedError
from tests.compatibility.data_modules import TextClassifier, TextData, Texts, TheirData, Watching, WithOwnData, padded
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points

ENGINES = ["sequential", "vectorized"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "split over" in record.getMessage()]


@pytest.mark.parametrize("engine", ENGINES)
def test_lightnings_demo(tmp_path, engine) -> None:
    trainer = federated_trainer(tmp_path, engine=engine, clients_per_round=3)
    trainer.fit(BoringModel(), BoringDataModule())
    assert (trainer.batch_size, trainer.client_sizes.tolist()) == (1, [7] * 4 + [6] * 6)
    assert len(trainer.test(BoringModel(), datamodule=BoringDataModule())) == 1
    assert len(trainer.predict(BoringModel(), BoringDataModule())) == 64


def test_a_data_module_is_split_over_the_default_number_of_clients(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    data, model = TheirData(), Watching()
    trainer = federated_trainer(tmp_path, max_rounds=2)
    trainer.fit(model, data)
    assert data.calls == ["prepare", "fit"]
    assert trainer.client_sizes.tolist() == [4] * 10
    assert {len(batch) for batch in model.seen} == {4}
    assert "val/loss" in trainer.callback_metrics
    (line,) = said(caplog)
    assert line.startswith("The training data of TheirData are split over 10 clients (IID): to choose how")
    rows = torch.cat(model.seen[:10]).sort(dim=0).values
    everything = torch.stack([2 * data.train[i][0] for i in range(40)]).sort(dim=0).values
    assert torch.equal(rows, everything)  # each sample once, through the module's own hook


@pytest.mark.parametrize(
    ("options", "sizes", "batch_size"),
    [({}, [8] * 5, 4), ({"batch_size": 8}, [8] * 5, 8), ({"drop_last": False, "batch_size": 3}, [8] * 5, 3)],
)
def test_options_of_the_split_go_with_any_data_module(tmp_path, caplog, options, sizes, batch_size) -> None:
    trainer = federated_trainer(tmp_path)
    data = FederatedDataModule(source=TheirData(), num_clients=5, partitioner=Shards(2), **options)
    trainer.fit(Classifier(), data)
    assert (trainer.client_sizes.tolist(), trainer.batch_size) == (sizes, batch_size)
    assert said(caplog) == []
    assert set(trainer.test(Watching(), data)[0]) != set(trainer.test(Watching(), data)[1])
    assert trainer.predict(Watching(), data) == [[3, 3], [2, 2]]


def test_what_is_held_out_stands_beside_the_sources_tests(tmp_path) -> None:
    data = FederatedDataModule(source=TheirData(), num_clients=5, unseen_clients=1, client_test_fraction=0.25)
    results = federated_trainer(tmp_path).test(Watching(), data, verbose=False)
    names = {name for result in results for name in result}
    assert names == {f"test/loss/{name}" for name in ("near", "far", "clients", "unseen")}


def test_without_a_set_to_predict_the_test_sets_are_predicted_and_saved_by_name(tmp_path) -> None:
    class Unpredicted(TheirData):
        predict_dataloader = LightningDataModule.predict_dataloader

    class Listed(Unpredicted):
        def test_dataloader(self) -> Any:
            return [*super().test_dataloader().values()]

    model, saved = Watching(), str(tmp_path / "predictions.pt")
    for data, wanted in (
        (Unpredicted(), {"near": [3, 3], "far": [2, 2]}),
        (Listed(), [[3, 3], [2, 2]]),
        (
            FederatedDataModule(source=Unpredicted(), num_clients=5, unseen_clients=1),
            {"near": [3, 3], "far": [2, 2], "unseen": [8]},
        ),
    ):
        trainer = federated_trainer(tmp_path)
        trainer.fit(model, data)
        by_set = [*wanted.values()] if isinstance(wanted, dict) else wanted
        assert trainer.predict(model, datamodule=data, output=saved) == by_set
        assert torch.load(saved) == wanted
        assert federated_trainer(tmp_path).predict(model, datamodule=data) == by_set  # without a fit before


def test_evaluation_alone_reads_no_training_data(tmp_path) -> None:
    class Untrained(TheirData):
        def train_dataloader(self) -> Any:
            raise AssertionError

    data = Untrained()
    federated_trainer(tmp_path).validate(Classifier(), data)
    assert data.calls == ["prepare", "validate"]


@pytest.mark.parametrize("by_name", [True, False])
def test_loaders(tmp_path, by_name) -> None:
    train, val = DataLoader(points(60), 5, drop_last=True), DataLoader(points(9, seed=1), 3)
    trainer = federated_trainer(tmp_path)
    if by_name:
        trainer.fit(Classifier(), train_dataloaders=train, val_dataloaders=val)
    else:
        trainer.fit(Classifier(), train, val)
    assert trainer.batch_size == 5
    assert trainer.client_sizes.tolist() == [6] * 10
    assert trainer.validate(Classifier(), dataloaders=val)[0].keys() == {"val/loss"}
    assert len(trainer.test(Watching(), [val, val])) == 2


def test_a_model_with_loaders_of_its_own(tmp_path) -> None:
    model = WithOwnData()
    trainer = federated_trainer(tmp_path)
    trainer.fit(model)
    assert trainer.client_sizes.tolist() == [3] * 10
    assert "val/loss" in trainer.callback_metrics
    assert trainer.validate(WithOwnData())[0].keys() == {"val/loss"}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_dicts_of_texts_of_any_length(tmp_path, num_workers) -> None:
    trainer = federated_trainer(tmp_path, max_rounds=3)
    trainer.fit(TextClassifier(), FederatedDataModule(source=TextData(), num_clients=3, num_workers=num_workers))
    assert trainer.batch_size == 4
    own = FederatedDataModule(Texts(), num_clients=3, batch_size=4, collate_fn=padded, val_fraction=0.2)
    trainer.fit(TextClassifier(), own)
    assert trainer.callback_metrics["val/loss"] < 1.5


def test_a_sampler_of_some_rows_says_which_samples_there_are(tmp_path) -> None:
    rows = list(range(0, 40, 2))
    trainer = federated_trainer(tmp_path)
    trainer.fit(Classifier(), DataLoader(points(40), 4, sampler=SubsetRandomSampler(rows)))
    assert trainer.client_sizes.sum() == 20
    with pytest.warns(UserWarning, match="WeightedRandomSampler of `train_dataloaders`'s training loader is not used"):
        trainer.fit(Classifier(), DataLoader(points(40), 4, sampler=WeightedRandomSampler([1.0] * 40, 40)))


def test_what_is_random_in_a_setup_depends_on_the_seed_alone(tmp_path) -> None:
    hashes = set()
    for _ in range(2):
        torch.rand(1)  # whatever was drawn before
        trainer = federated_trainer(tmp_path)
        trainer.fit(Classifier(), TheirData())
        hashes.add(trainer.datamodule.split_hash)
    assert len(hashes) == 1


def test_a_run_is_resumed_with_the_same_data(tmp_path) -> None:
    for rounds in (1, 2):
        trainer = federated_trainer(tmp_path, max_rounds=rounds, enable_checkpointing=True, name="run")
        trainer.fit(Classifier(), TheirData(), ckpt_path="last")
    assert trainer.resumed


class Silent(pl.LightningDataModule):
    """Gives nothing."""


class Batches(TheirData):
    """A loader whose data set makes the batches."""

    def train_dataloader(self) -> Any:
        return DataLoader(points(8), batch_size=None)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            Silent,
            "`--data` to be a FederatedDataModule, which splits a data set over clients, or a data module with a ",
        ),
        (BoringDataModuleNoLen, "got RandomIterableDataset, a stream: give it `__getitem__` and `__len__`"),
        (Batches, "Expected the training loader of Batches to have a `batch_size`, got none"),
        (lambda: [1, 2], "to be a LightningDataModule or data loaders, got list"),
        (
            lambda: FederatedDataModule(points(8), source=TheirData()),
            "either `--data.source` or `--data.train_dataset`",
        ),
        (lambda: FederatedDataModule(source=TheirData(), val_fraction=0.1), "either .* or `--data.val_fraction`"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(tmp_path, data, sentence) -> None:
    with pytest.raises(FederatedError, match=sentence) as caught:
        federated_trainer(tmp_path).fit(Classifier(), datamodule=data())
    assert "\n" not in str(caught.value)


def test_data_given_twice_are_refused(tmp_path) -> None:
    with pytest.raises(FederatedError, match="either a datamodule or data loaders, got TheirData and val loaders"):
        federated_trainer(tmp_path).fit(Classifier(), TheirData(), DataLoader(points(8)))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failing_collate_names_the_option(tmp_path, num_workers) -> None:
    data = FederatedDataModule(Texts(), num_clients=2, batch_size=4, num_workers=num_workers)
    with pytest.raises(FederatedError, match=r"^Expected `--data.collate_fn` .*default_collate failed") as caught:
        federated_trainer(tmp_path).fit(TextClassifier(), data)
    assert "\n" not in str(caught.value)


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_last_batch_of_one_under_batch_normalisation(tmp_path, engine) -> None:
    with pytest.raises(FederatedError, match="client 1 in round 1 .9 samples in batches of 8.: set `--data.drop_last"):
        federated_trainer(tmp_path, engine=engine).fit(Normed(), federated_data(8, 9))
    federated_trainer(tmp_path, engine=engine).fit(Normed(), federated_data(8, 9, drop_last=True))


def test_a_last_batch_of_one_in_a_full_gradient(tmp_path) -> None:
    options = {"full_gradient_mode": "train", "full_gradient_batch_size": 3}
    with pytest.raises(FederatedError, match="client 1 .* .10 samples in batches of 3.: .*full_gradients.batch"):
        federated_trainer(tmp_path, FedGA(), **options).fit(Normed(), federated_data(9, 10))
    options["full_gradient_mode"] = "eval"
    federated_trainer(tmp_path, FedGA(), **options).fit(Normed(), federated_data(9, 10, drop_last=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("steps", [{"local_epochs": 2}, {"local_steps": 3}])
def test_drop_last(tmp_path, engine, in_memory, steps) -> None:
    data = federated_data(8, 19, 5, drop_last=True, in_memory=in_memory)
    trainer = federated_trainer(tmp_path, engine=engine, **steps)
    model = Classifier()
    trainer.fit(model, data)
    assert trainer.client_sizes.tolist() == [8, 19, 0]
    assert trainer.num_training_batches == 2
    expected = Classifier()
    expected.load_state_dict(model.state_dict())
    with pytest.raises(FederatedError, match="a client with 8 samples, a whole batch, for `--data.drop_last true`"):
        trainer.fit(Classifier(), federated_data(5, 5, drop_last=True))


def test_the_engines_drop_the_same(tmp_path) -> None:
    weights = []
    for engine in ENGINES:
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path, engine=engine, local_epochs=2)
        trainer.fit(Classifier(), federated_data(8, 19, 26, drop_last=True))
        weights.append(trainer.weights.clone())
    assert torch.allclose(*weights, atol=1e-6)


RUN = ["--trainer.max_rounds=1", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
HERE = "tests.compatibility.data_modules"


@pytest.mark.parametrize(
    "words",
    [
        ["--model", f"{HERE}.Watching", "--data", f"{HERE}.TheirData"],
        ["--model", f"{HERE}.Watching", "--data", f"{HERE}.TheirData", "--data.batch_size", "2"],
        ["--model", f"{HERE}.Watching", "--data", "FederatedDataModule", "--data.source", f"{HERE}.TheirData",
         "--data.source.batch_size", "2", "--data.num_clients", "4", "--data.partitioner", "Shards"],
        ["--model", f"{HERE}.WithOwnData"],
        ["--model", f"{HERE}.TextClassifier", "--data", "FederatedDataModule", "--data.train_dataset", f"{HERE}.Texts",
         "--data.collate_fn", f"{HERE}.padded", "--data.num_clients", "3", "--data.drop_last", "true",
         "--data.batch_size", "4"],
    ],
)  # fmt: skip
def test_the_command_line(tmp_path, monkeypatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", *words, *RUN])
    assert list(Path().rglob("last.ckpt"))


def test_the_command_line_looks_at_any_data(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["data", "--data", f"{HERE}.TheirData"])
    shown = capsys.readouterr().out
    assert "TheirData, split by IID" in shown
    assert Path("data-TheirData/sizes.png").exists()
    assert "validation          10 samples" in shown


class PerClient(TheirData):
    """A loader for each client."""

    def train_dataloader(self) -> Any:
        return {name: DataLoader(points(size), 4) for name, size in (("ann", 9), ("bob", 4), ("cid", 6))}


class Stream(IterableDataset[Any]):
    """Samples that come in order, as many as it says."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return (points(self.size)[i] for i in range(self.size))


class Unmeasured(IterableDataset[Any]):
    """Samples in order, or without end, that does not say how many."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return (points(8)[i % 8] for i in (count() if self.size is None else range(self.size)))


class Once(Unmeasured):
    """Samples that are there for the first reader alone."""

    def __iter__(self) -> Any:
        size, self.size = self.size, 0
        return (points(8)[i] for i in range(size or 0))


SETS = [points(size) for size in (9, 4, 6)]
BY_NAME = dict(zip(("ann", "bob", "cid"), SETS, strict=True))


@pytest.mark.parametrize(
    "fit",
    [
        lambda trainer: trainer.fit(Classifier(), PerClient()),
        lambda trainer: trainer.fit(Classifier(), [DataLoader(data, 4) for data in SETS]),
        lambda trainer: trainer.fit(Classifier(), {n: DataLoader(Stream(len(data)), 4) for n, data in BY_NAME.items()}),
        lambda trainer: trainer.fit(Classifier(), SETS),
        lambda trainer: trainer.fit(Classifier(), BY_NAME),
        lambda trainer: trainer.fit(Classifier(), FederatedDataModule(SETS, batch_size=4)),
        lambda trainer: trainer.fit(Classifier(), FederatedDataModule(ClientDatasets(lambda i: SETS[i], 3))),
        lambda trainer: trainer.fit(Classifier(), FederatedDataModule(ClientDatasets(lambda i: Stream(9 - i), 3))),
        lambda trainer: trainer.fit(Classifier(), FederatedDataModule([Unmeasured(size) for size in (9, 4, 6)])),
    ],
    ids=["module", "list", "streams", "sets", "by name", "own", "function", "function of streams", "unmeasured"],
)
def test_data_sets_of_clients_are_clients(tmp_path, fit) -> None:
    trainer = federated_trainer(tmp_path, local_epochs=2)
    fit(trainer)
    assert trainer.client_sizes.tolist() in ([9, 4, 6], [9, 8, 7])
    assert trainer.datamodule.split_by == "ClientDatasets"


def test_clients_in_memory_train_as_one_set_does(tmp_path) -> None:
    weights = []
    for data in (federated_data(9, 4, 6, dataset=ConcatDataset(SETS)), FederatedDataModule(SETS, batch_size=8)):
        torch.manual_seed(0)
        trainer = federated_trainer(tmp_path)
        trainer.fit(Classifier(), data)
        weights.append(trainer.weights.clone())
    assert torch.equal(*weights)


def test_many_clients_are_made_when_they_are_read(tmp_path) -> None:
    made: list[int] = []

    def make(client: int) -> Any:
        made.append(client)
        return points(4, seed=client)

    data = FederatedDataModule(ClientDatasets(make, 200), batch_size=2)
    data.setup()
    assert made == list(range(200))  # once, for their sizes
    federated_trainer(tmp_path, clients_per_round=3).fit(Classifier(), data)
    assert len(made) <= 200 + 4  # those of the cohort, and the first sample


def test_clients_data_can_be_split_anew(tmp_path) -> None:
    data = FederatedDataModule(SETS, IID(), num_clients=2)
    data.setup()
    assert data.split.sizes.tolist() == [10, 9]
    held = FederatedDataModule(SETS, unseen_clients=1)
    held.setup()
    assert held.split.num_clients == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (lambda: FederatedDataModule(SETS, num_clients=5), "the number of data sets, 3, got 5"),
        (
            lambda: FederatedDataModule([points(4), Unmeasured(None)]),
            r"Unmeasured, the data set of client 1, to end or to say by `__len__`.* more than 50: add `__len__`",
        ),
        (
            lambda: FederatedDataModule([points(4), Once(4)]),
            "Expected the stream of client 1 to give 4 samples whenever it is read, got 0: let its `__iter__` begin",
        ),
        (lambda: FederatedDataModule([points(4), Subset(points(4), [])]), "client 1 .* got Subset without samples"),
        (
            lambda: GivenLoaders(None, train=[DataLoader(SETS[0], 2), DataLoader(SETS[1], 3)]),
            "one batch size, got 2",
        ),
    ],
)
def test_clients_that_do_not_fit(tmp_path, monkeypatch, data, sentence) -> None:
    monkeypatch.setattr(containers, "_MOST_COUNTED", 50)
    with pytest.raises(FederatedError, match=sentence) as caught:
        federated_trainer(tmp_path).fit(Classifier(), datamodule=data())
    assert "\n" not in str(caught.value)


def test_a_data_module_of_the_other_package(tmp_path) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningDataModule):
        width = FEATURES
        train_dataloader, val_dataloader = TheirData.train_dataloader, TheirData.val_dataloader
        on_after_batch_transfer = TheirData.on_after_batch_transfer

        def setup(self, stage: str) -> None:
            self.save_hyperparameters({"batch_size": 4})
            self.train, self.val = points(40), points(8)

    model = Watching()
    trainer = federated_trainer(tmp_path)
    trainer.fit(model, Other())
    assert trainer.client_sizes.tolist() == [4] * 10
    assert torch.isclose(torch.cat(model.seen).sum(), 2 * points(40).tensors[0].sum(), atol=1e-4)


class Episodes(BatchSampler):
    """Chooses the samples of a batch by itself."""


@pytest.mark.parametrize(("several", "owner"), [(False, "`train"), (True, "client 0 of `train")])
def test_a_batch_sampler_of_ones_own_is_refused(several: bool, owner: str, tmp_path) -> None:
    loader = DataLoader(points(40), batch_sampler=Episodes(RandomSampler(range(40)), 4, False))
    with pytest.raises(FederatedError, match=f"loader of {owner}.* its own Episodes, whose choice of samples is not"):
        federated_trainer(tmp_path).fit(Classifier(), [loader, loader] if several else loader)


def test_a_list_of_rows_as_sampler_says_which_samples_there_are(tmp_path) -> None:
    trainer = federated_trainer(tmp_path)
    trainer.fit(Classifier(), DataLoader(points(40), sampler=list(range(10, 30))))
    assert sum(trainer.client_sizes) == 20


def test_a_sampler_of_fewer_samples_is_told(tmp_path) -> None:
    loader = DataLoader(points(40), sampler=RandomSampler(range(40), num_samples=5))
    with pytest.warns(UserWarning, match="The RandomSampler of `train_dataloaders`'s training loader is not used"):
        federated_trainer(tmp_path).fit(Classifier(), loader)


def test_loaders_joined_batch_by_batch_do_not_evaluate(tmp_path) -> None:
    loader = DataLoader(points(40))
    joined = CombinedLoader({"a": loader, "b": loader}, "max_size")
    with pytest.raises(FederatedError, match="val loaders of `train_dataloaders` to be read one after the other"):
        federated_trainer(tmp_path).fit(Classifier(), loader, joined)


def test_what_is_no_data_module_is_no_source() -> None:
    with pytest.raises(FederatedError, match="`--data.source` to be a LightningDataModule, got DataLoader"):
        FederatedDataModule(source=DataLoader(points(8)))
    with pytest.raises(FederatedError, match="got the class LightningDataModule: give an instance of it"):
        FederatedDataModule(source=pl.LightningDataModule)
    with pytest.raises(FederatedError, match="got the data module LightningDataModule: give it as `source=`"):
        FederatedDataModule(pl.LightningDataModule())


@pytest.mark.parametrize("options", [{}, {"num_clients": 10}])
def test_how_many_clients_data_sets_make_is_told(options: dict, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data = FederatedDataModule(ClientDatasets([points(4) for _ in range(4)]), **options)
        assert data.split.num_clients == 4
    assert "Clients: 4, one for each data set." in caplog.text  # no word of a number that may not have been given
