"""Image files of users or domains: in folders, in lists, with domains that do not train, and every mistake named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fed.cli import main
from lightning_fed.data import ImageFolders
from lightning_fed.data.datasets.bundled import UserDataModule
from lightning_fed.errors import FederatedError

DOMAINS, CLASSES = ("art_painting", "cartoon", "photo", "sketch"), ("dog", "horse", "person")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """PACS in small: the images of a domain and a class have one colour, and there are 4, 5 and 6 of each class."""
    for domain, name in ((domain, name) for domain in range(4) for name in range(3)):
        folder = tmp_path / "PACS" / DOMAINS[domain] / CLASSES[name]
        folder.mkdir(parents=True)
        for number in range(4 + name):
            color = (60 * domain, 100 * name, 20 * number)
            Image.new("RGB", (8, 8), color).save(folder / f"pic_{number}.png")
    return tmp_path


def pacs(root: Path, **options: Any) -> ImageFolders:
    plain: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1), "size": 8, "split_seed": 0}
    return ImageFolders("PACS", root=root, cache_dir=root / "cache", **{**plain, **options})


def colors(batch: Any) -> Any:
    """The colour of each image, of one colour, and its label."""
    inputs, labels = batch
    assert inputs.amin(dim=(2, 3)).equal(inputs.amax(dim=(2, 3)))
    return (inputs[:, :, 0, 0] * 255).round().int(), labels


def test_domains_are_clients(root: Path) -> None:
    data = pacs(root)
    assert data.split.sizes.tolist() == [15] * 4
    assert (data.class_names, data.input_shape, data.split_by) == (CLASSES, (3, 8, 8), "ByUser")
    for client in range(4):
        [batch] = data.train_source().batches(client, torch.arange(15), 0)
        color, labels = colors(batch)
        assert color[:, 0].tolist() == [60 * client] * 15
        assert color[:, 1].tolist() == (100 * labels).tolist()
        assert labels.tolist() == [0] * 4 + [1] * 5 + [2] * 6
    assert data.test_dataloader() == []


@pytest.mark.parametrize("storage", ["float32", "uint8"])
def test_one_domain_is_left_out(root: Path, storage: Any) -> None:
    data = pacs(root, unseen_users=["photo"], client_test_fraction=0.2, storage=storage)
    assert data.split.sizes.tolist() == [12] * 3
    tests = data.test_dataloader()
    assert isinstance(tests, dict)
    assert set(tests) == {"unseen", "clients"}
    [(color, labels)] = map(colors, tests["unseen"])
    assert color[:, 0].tolist() == [120] * 15
    assert labels.tolist() == [0] * 4 + [1] * 5 + [2] * 6
    assert set(next(iter(colors(batch) for batch in tests["clients"]))[0][:, 0].tolist()) == {0, 60, 180}
    assert data.split_hash != pacs(root, unseen_users=["sketch"], client_test_fraction=0.2).split_hash


def test_lists_of_files_say_what_trains(root: Path) -> None:
    """As DomainNet has them; a number counted from 1, as in PACS' own lists, changes no label."""
    for domain in DOMAINS[:3]:
        for part, numbers in (("train", (0, 2)), ("test", (1,))):
            lines = [f"{domain}/{name}/pic_{i}.png {at + 1}" for at, name in enumerate(CLASSES) for i in numbers]
            (root / "PACS" / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")
    data = pacs(root, train_files="*_train.txt", test_files="*_test.txt")
    assert data.split.sizes.tolist() == [6] * 3
    [(color, labels)] = map(colors, data.train_dataloader())
    assert set(color[:, 2].tolist()) == {0, 40}
    assert set(labels.tolist()) == {0, 1, 2}
    [(color, _)] = map(colors, data.test_dataloader())
    assert set(color[:, 2].tolist()) == {20}
    left = pacs(root, train_files="*_train.txt", test_files="*_test.txt", unseen_users=["cartoon"])
    tests = left.test_dataloader()
    assert isinstance(tests, dict)
    assert {name: loader.num_samples for name, loader in tests.items()} == {"test": 6, "unseen": 9}


def test_parts_in_folders(root: Path) -> None:
    for domain in DOMAINS:
        part = "test" if domain == "sketch" else "train"
        (root / "PACS" / part).mkdir(exist_ok=True)
        (root / "PACS" / domain).rename(root / "PACS" / part / domain)
    data = pacs(root, train_files="train/*/*/*", test_files="test/*/*/*")
    assert data.split.sizes.tolist() == [15] * 3
    tests = data.test_dataloader()
    assert isinstance(tests, dict)
    assert list(tests) == ["unseen"]


def test_images_are_resized_and_decoded_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "PACS" / "art_painting" / "dog" / "pic_0.png"
    Image.new("L", (30, 20), 77).save(path)
    [(color, _)] = map(colors, pacs(root).train_source().batches(0, torch.arange(15), 0))
    assert color[0].tolist() == [77, 77, 77]
    small = pacs(root, size=5)
    assert small.input_shape == (3, 5, 5)
    assert len(list((root / "cache").iterdir())) == 2
    monkeypatch.setattr(Image, "open", lambda file: pytest.fail("decoded again"))
    assert pacs(root).split.sizes.tolist() == [15] * 4


def test_a_domain_may_be_split_like_any_data(root: Path) -> None:
    from lightning_fed.data import Shards

    data = pacs(root, partitioner=Shards(), num_clients=5)
    assert data.split.num_clients == 5
    assert isinstance(data, UserDataModule)


@pytest.mark.parametrize(
    ("options", "damage", "said"),
    [
        ({"unseen_users": ["drawing"]}, lambda root: None, "name some, not all, of 4 users (art_painting, cartoon, "),
        ({"unseen_users": DOMAINS}, lambda root: None, "not all, of 4 users"),
        (
            {"train_files": "*.txt"},
            lambda root: None,
            "Expected images USER/CLASS/FILE in {root}/PACS/*.txt, found none",
        ),
        (
            {"train_files": "*.txt"},
            lambda root: (root / "PACS" / "list.txt").write_text("photo/dog/none.jpg 3\n"),
            "Expected images USER/CLASS/FILE in {root}/PACS/photo/dog/none.jpg, found none: change `--data.t",
        ),
        (
            {},
            lambda root: (root / "PACS" / "photo" / "dog" / "pic_1.png").write_bytes(b"<html>"),
            "The file {root}/PACS/photo/dog/pic_1.png is not a sound PNG image (",
        ),
        (
            {"mean": (0.5,)},
            lambda root: None,
            "`--data.mean` and `--data.std` to be 3 numbers, std above 0, got (0.5,)",
        ),
        ({"size": 0}, lambda root: None, "Expected `--data.size` to be an integer of at least 1, got 0."),
    ],
)
def test_mistakes(options: dict[str, Any], damage: Callable[[Path], object], said: str, root: Path) -> None:
    damage(root)
    with pytest.raises(FederatedError) as caught:
        pacs(root, **options).setup()
    assert said.format(root=root) in str(caught.value)


def test_plain_yaml(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(root)
    (root / "pacs.yaml").write_text(
        "data:\n  class_path: ImageFolders\n  init_args:\n    path: PACS\n    unseen_users: [sketch]\n    size: 8\n"
    )
    with pytest.raises(SystemExit):
        main(["data", "--config", "pacs.yaml", "--data.root", ".", "--data.cache_dir", "cache"])
    said = capsys.readouterr().out
    assert "clients             3, none of them empty\n" in said
    assert "test unseen         15 samples\n" in said
    assert np.array(Image.open("data-ImageFolders/samples.png")).ndim == 3
