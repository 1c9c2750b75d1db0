"""Downloads come whole or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.data import CIFAR10, CIFAR100, EMNIST, FashionMNIST, ImageDataModule, TinyImageNet
from lightning_fed.errors import FederatedError
from tests.official_files import write_cifar, write_emnist, write_tiny_imagenet


class Downloads:
    """Stands for torchvision's class: writes two files, and stops between them if told to."""

    error: BaseException | None = None

    def __init__(self, root: Path, download: bool, **_: Any) -> None:
        assert download
        raw = Path(root) / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        (raw / "train-images-idx3-ubyte").write_bytes(b"new")
        if self.error is not None:
            (raw / "train-labels-idx1-ubyte").write_bytes(b"ha")
            raise self.error
        (raw / "train-labels-idx1-ubyte").write_bytes(b"new")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("checksum"), OSError("no network")])
def test_an_interrupted_download_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", Downloads)
    monkeypatch.setattr(Downloads, "error", error)
    data = FashionMNIST(root=tmp_path / "new", download=True)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FederatedError):
        data.prepare_data()
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(FederatedError, match="train-images-idx3-ubyte.*found none"):
        FashionMNIST(root=tmp_path / "new").setup()
    monkeypatch.setattr(Downloads, "error", None)
    data.prepare_data()
    assert sorted(path.name for path in data.place.iterdir()) == ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]


def test_what_a_killed_download_leaves_is_not_read(tmp_path: Path) -> None:
    left = tmp_path / ".download-x" / "FashionMNIST" / "raw"
    left.mkdir(parents=True)
    (left / "train-images-idx3-ubyte").write_bytes(b"ha")
    assert not FashionMNIST(root=tmp_path).is_complete()


def test_a_download_completes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", Downloads)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-labels-idx1-ubyte").write_bytes(b"old")
    (raw / "notes").write_bytes(b"mine")
    FashionMNIST(root=tmp_path, download=True).prepare_data()
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == {
        "notes": b"mine",
        "train-images-idx3-ubyte": b"new",
        "train-labels-idx1-ubyte": b"new",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["FashionMNIST"]


def test_what_each_set_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    asked: list[tuple[str, dict[str, Any]]] = []

    def stand_in(name: str) -> Callable[..., None]:
        def fetch(root: Path, **options: Any) -> None:
            asked.append((name, options))
            raise OSError("no network")

        return fetch

    monkeypatch.setattr(torchvision.datasets, "EMNIST", stand_in("EMNIST"))
    monkeypatch.setattr(torchvision.datasets.CIFAR100, "download", lambda self: stand_in("CIFAR100")(self.root))
    monkeypatch.setattr(
        torchvision.datasets.utils, "download_and_extract_archive",
        lambda url, root, **options: stand_in(url.rsplit("/", 1)[1])(root, md5=len(options["md5"])),
    )  # fmt: skip
    modules: list[ImageDataModule] = [
        EMNIST("digits", root=tmp_path, download=True),
        CIFAR100(root=tmp_path, download=True),
        TinyImageNet(root=tmp_path, download=True),
    ]
    for data in modules:
        with pytest.raises(FederatedError, match=r"failed \(no network\): put its files into .* yourself, or change"):
            data.setup()
    assert asked == [
        ("EMNIST", {"split": "balanced", "download": True}),
        ("CIFAR100", {}),
        ("tiny-imagenet-200.zip", {"md5": 32}),
    ]


def test_complete_sets_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "CIFAR10", (1, 1), monkeypatch)
    write_emnist(tmp_path, "letters", 26, (1, 1), monkeypatch, 1)
    write_tiny_imagenet(tmp_path, (1, 1))
    made = [CIFAR10(root=tmp_path), EMNIST("letters", root=tmp_path), TinyImageNet(root=tmp_path)]
    assert all(data.is_complete() for data in made)
    assert not EMNIST("digits", root=tmp_path).is_complete()
