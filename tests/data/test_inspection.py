"""Data sets whose labels mean different classes are refused, however the data come; those that agree train."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import FakeData, ImageFolder

from lightning_fed.data import ClientDatasets, FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.callbacks.diagnostics.parts import trainer_for

SITES = {"north": ["cat", "dog", "owl"], "south": ["cat", "owl"], "west": ["cat", "dog"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sites")
    for site, names in SITES.items():
        for name in names:
            (root / site / name).mkdir(parents=True)
            for number in range(2):
                FakeData(2, (3, 4, 4))[number][0].save(root / site / name / f"{number}.png")
    return root


@pytest.fixture
def sites(folder: Path) -> tuple[ImageFolder, ...]:
    return tuple(ImageFolder(str(folder / site)) for site in SITES)


class Wrapper(Dataset[Any]):
    """A user's data set around another one, whose attributes say nothing of classes."""

    def __init__(self, of: Any, **known: Any) -> None:
        self.samples_of = of
        vars(self).update(known)

    def __len__(self) -> int:
        return len(self.samples_of)

    def __getitem__(self, index: int) -> Any:
        return self.samples_of[index]


def known(**facts: Any) -> Any:
    """Four samples of two classes, with attributes."""
    data = TensorDataset(torch.zeros(4, 2), torch.arange(4) % 2)
    vars(data).update(facts)
    return data


def setup(*args: Any, **options: Any) -> int | None:
    data = FederatedDataModule(*args, **options)
    data.setup()
    return data.num_classes


BOTH = r"got 1 for dog in .* \(cat, dog, owl\) and 1 for owl in .* \(cat, owl\): number the classes alike"


@pytest.mark.parametrize(
    "make",
    [
        lambda north, south: [north, south],
        lambda north, south: {"north": north, "south": south},
        lambda north, south: [Subset(north, [0, 4]), Subset(Subset(south, [0, 3]), [1])],
        lambda north, south: [north, ConcatDataset([south, south])],
        lambda north, south: ConcatDataset([north, south]),
        lambda north, south: Subset(ConcatDataset([north, south]), range(6)),
        lambda north, south: [Wrapper(north), Wrapper(Wrapper(Subset(south, [0, 1])))],
        lambda north, south: [Wrapper(north, targets=north.targets), Wrapper(south, targets=south.targets)],
        lambda north, south: [Wrapper(north), Wrapper(south, targets=south.targets[:2])],
        lambda north, south: ClientDatasets(lambda client: (north, south)[client], 2),
        lambda north, south: Subset(ClientDatasets(lambda client: (north, south)[client], 2), range(8)),
    ],
    ids=["list", "dict", "subsets", "concat", "joined", "subset of joined", "wrapped", "targets", "part", "function",
         "subset of clients"],
)  # fmt: skip
def test_clients_of_other_classes_are_refused(make: Any, sites: tuple[ImageFolder, ...]) -> None:
    with pytest.raises(FederatedError, match=BOTH):
        setup(make(*sites[:2]), num_clients=2)
    assert setup(make(sites[0], sites[2]), num_clients=2) in (3, None), "fewer classes that are numbered alike train"


def test_the_message_names_the_clients(sites: tuple[ImageFolder, ...]) -> None:
    with pytest.raises(FederatedError) as caught:
        setup([sites[0], sites[2], sites[1]])
    assert str(caught.value) == (
        "Expected a label to mean one class in all data sets, got 1 for dog in client 0 of the training data (cat, "
        "dog, owl) and 1 for owl in client 2 of the training data (cat, owl): number the classes alike, for example by "
        "a `target_transform`, or set `--data.class_labels false` if targets are not class labels."
    )


@pytest.mark.parametrize("option", ["val_dataset", "test_dataset"])
def test_so_are_validation_and_test_sets(option: str, sites: tuple[ImageFolder, ...]) -> None:
    north, south, west = sites
    with pytest.raises(FederatedError, match=f"dog in the training data .* owl in `--data.{option}` "):
        setup(north, num_clients=2, **{option: Subset(south, [0])})
    assert setup(north, num_clients=2, **{option: west}) == 3
    if option == "test_dataset":
        with pytest.raises(FederatedError, match="owl in `--data.test_dataset` far "):
            setup(north, num_clients=2, test_dataset={"near": west, "far": south})


def test_so_are_loaders(sites: tuple[ImageFolder, ...], tmp_path: Path) -> None:
    north, south = (DataLoader(part, batch_size=2) for part in sites[:2])
    trainer = trainer_for(tmp_path)
    with pytest.raises(FederatedError, match="client 1 of the training data"):
        trainer.fit(BoringModel(), [north, south])
    for loaders in (south, [north, south], {"far": south}):
        with pytest.raises(FederatedError, match="in the val data of `train_dataloaders` "):
            trainer.fit(BoringModel(), north, loaders)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"classes": ["a", "b"]}, {"classes": ["b", "a"]}),
        ({"classes": ("a", "b")}, {"classes": np.array(["a", "c"], dtype=object)}),
        ({"class_to_idx": {"a": 0, "b": 1}}, {"class_to_idx": {"b": 0, "a": 1}}),
        ({"class_to_idx": {"a": 0}}, {"class_to_idx": {"a": 1}}),
        ({"class_to_idx": {"a": 0, "b": 1}}, {"classes": ["b", "a"]}),
        ({"features": {"label": SimpleNamespace(names=["a", "b"])}},
         {"features": {"labels": SimpleNamespace(names=["b", "a"])}}),
    ],
    ids=["order", "array", "numbers", "one number", "both", "table"],
)  # fmt: skip
def test_every_way_to_name_classes_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match="Expected a label to mean one class"):
        setup([known(**one), known(**other)])
    assert setup([known(**one), known(**one)]) == 2
    assert setup([known(**one), known(**other)], class_labels=False) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"classes": 2}, {"classes": 3}),
        ({"classes": [0, 1]}, {"classes": [5, 7]}),
        ({"classes": "train"}, {"classes": "val"}),
        ({"features": ["height"]}, {"features": ["weight"]}),
        ({"features": {"text": SimpleNamespace(names=["a"])}}, {"features": {"text": SimpleNamespace(names=["b"])}}),
    ],
    ids=["counts", "numbers", "word", "columns", "other column"],
)
def test_what_names_no_classes_is_not_compared(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert setup([known(**one), known(**other)]) == 2


def test_labels_that_are_changed_to_agree_train(sites: tuple[ImageFolder, ...], folder: Path) -> None:
    north, south, _ = sites
    places = {0: 0, 1: 2}
    assert setup([north, ImageFolder(str(folder / "south"), target_transform=places.get)]) == 3
    setup([north, Wrapper(south, targets=[places[target] for target in south.targets])])
    setup([north, Wrapper(south, class_to_idx={"cat": 0, "owl": 2})])
    with pytest.raises(FederatedError, match=BOTH):
        setup([north, ImageFolder(str(folder / "south"), target_transform=torch.tensor)])
