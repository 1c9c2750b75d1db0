"""TinyImageNet: read as an image folder, decoded once, and every mistake in its files named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.data import ImageDataModule, TinyImageNet
from lightning_fed.data.readers import files as images_file
from lightning_fed.errors import FederatedError
from tests.official_files import TINY_CLASSES, write_tiny_imagenet
from tests.parts import same


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small TinyImageNet; tests that change it copy it."""
    root = tmp_path_factory.mktemp("tiny")
    write_tiny_imagenet(root, (2, 1))
    return root


@pytest.fixture
def own_root(tiny_root: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_root, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded."""
    files: list[Path] = []
    decode = images_file._decode
    monkeypatch.setattr(images_file, "_decode", lambda path, *more: (files.append(path), decode(path, *more))[1])
    return files


def everything(data: ImageDataModule) -> list[Tensor]:
    return [tensor for train in (True, False) for tensor in data.read(train)]


def test_tiny_imagenet_equals_an_image_folder(tiny_root: Path, tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    data = TinyImageNet(root=tiny_root, cache_dir=tmp_path)
    images, labels = data.read(train=True)
    reference = ImageFolder(str(tiny_root / "tiny-imagenet-200" / "train"))
    assert labels.tolist() == reference.targets
    assert torch.equal(
        images, torch.from_numpy(np.stack([np.array(image) for image, _ in reference])).permute(0, 3, 1, 2)
    )
    _, labels = data.read(train=False)
    assert labels.tolist() == list(range(TINY_CLASSES - 1, -1, -1)), "in the order of the annotations"
    assert data.num_classes == TINY_CLASSES
    assert data.class_names is not None
    assert data.class_names[:2] == ("thing 0", "thing 1")
    assert data.class_names[-1] == "n00000199", "there is no word for it"


def test_tiny_imagenet_is_decoded_once(tiny_root: Path, tmp_path: Path, decoded: list[Path]) -> None:
    before = sorted(tiny_root.rglob("*"))
    data = TinyImageNet(root=tiny_root, cache_dir=tmp_path / "new" / "cache")
    first = everything(data)
    assert len(decoded) == 3 * TINY_CLASSES
    assert same(everything(TinyImageNet(root=tiny_root, cache_dir=tmp_path / "new" / "cache")), first)
    assert len(decoded) == 3 * TINY_CLASSES
    assert sorted(tiny_root.rglob("*")) == before, "nothing is written to the data"
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 2


def test_the_cache_lies_in_the_users_cache_folder(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    TinyImageNet(root=tiny_root).read(train=False)
    assert [path.suffix for path in (tmp_path / "lightning_fed").iterdir()] == [".pt"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(b""),
        lambda path: torch.save([1, 2], path),
        lambda path: _pipe(path),
    ],
    ids=["truncated", "empty", "foreign", "pipe"],
)
def test_a_damaged_cache_is_made_anew(
    damage: Callable[[Path], object], tiny_root: Path, tmp_path: Path, decoded: list[Path]
) -> None:
    data = TinyImageNet(root=tiny_root, cache_dir=tmp_path)
    first = data.read(train=False)
    [cache] = tmp_path.iterdir()
    sound = cache.read_bytes()
    damage(cache)
    assert same(list(data.read(train=False)), list(first))
    assert len(decoded) == 2 * TINY_CLASSES
    assert cache.read_bytes() == sound


def test_a_changed_image_is_decoded_anew(own_root: Path, tmp_path: Path, decoded: list[Path]) -> None:
    data = TinyImageNet(root=own_root, cache_dir=tmp_path / "cache")
    images, _ = data.read(train=False)
    folder = own_root / "tiny-imagenet-200" / "val" / "images"
    (folder / "val_5.JPEG").write_bytes((folder / "val_1.JPEG").read_bytes())
    changed, _ = data.read(train=False)
    assert changed[5].min() == 255
    assert torch.equal(changed[:5], images[:5])
    assert len(decoded) == 2 * TINY_CLASSES
    os.utime(folder / "val_5.JPEG", ns=(1, 1))
    data.read(train=False)
    assert len(decoded) == 3 * TINY_CLASSES, "a later time may mean other content"


def test_an_interrupted_decoding_leaves_the_former_cache(
    own_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TinyImageNet(root=own_root, cache_dir=tmp_path / "cache")
    data.read(train=False)
    [cache] = (tmp_path / "cache").iterdir()
    before = cache.read_bytes()
    os.utime(own_root / "tiny-imagenet-200" / "val" / "images" / "val_0.JPEG", ns=(1, 1))

    def stop(content: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        data.read(train=False)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]
    assert cache.read_bytes() == before


def test_grey_images_get_three_channels(own_root: Path, tmp_path: Path) -> None:
    from PIL import Image

    path = own_root / "tiny-imagenet-200" / "val" / "images" / "val_3.JPEG"
    Image.new("L", (64, 64), 77).save(path)
    images, _ = TinyImageNet(root=own_root, cache_dir=tmp_path / "cache").read(train=False)
    assert images[3].unique().tolist() == [77]


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _small(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (32, 30)).save(path)


JPEG = "val/images/val_7.JPEG"
LIST = "val/val_annotations.txt"


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (JPEG, lambda path: path.unlink(), "Expected the file {path}, found none: set `--data.root`"),
        (JPEG, lambda path: path.write_bytes(path.read_bytes()[:400]), "The file {path} is not a sound JPEG image ("),
        (JPEG, lambda path: path.write_bytes(b"<html>"), "The file {path} is not a sound JPEG image ("),
        (
            "train/n00000004/images/n00000004_0.JPEG",
            _pipe,
            "The file {path} is not a sound JPEG image ([Errno 22",
        ),
        (JPEG, _small, "Expected the image {path} to have 64 x 64 pixels, got 32 x 30; delete it"),
        (LIST, lambda path: path.unlink(), "Expected the file {path}, found none"),
        (LIST, lambda path: path.write_text("val_0.JPEG n00000001\n"), "Expected line 1 of {path} to hold the name of"),
        ("wnids.txt", lambda path: path.unlink(), "Expected the file {path}, found none"),
        ("wnids.txt", _pipe, "Expected the file {path}, found none"),
        ("wnids.txt", lambda path: path.write_bytes(b"n\xff"), "Expected the file "),
        ("wnids.txt", lambda path: path.write_text(""), "Expected the file {path} to list the ids of 200 classes, got"),
        (
            "train/n00000004/images",
            lambda path: path.rename(path.with_name("pictures")),
            "Expected the file {path}/*.JPEG, found none",
        ),
    ],
)
@pytest.mark.quick(5)
def test_bad_tiny_imagenet_files(
    file: str, damage: Callable[[Path], object], said: str, own_root: Path, tmp_path: Path
) -> None:
    path = own_root / "tiny-imagenet-200" / file
    damage(path)
    with pytest.raises(FederatedError) as caught:
        TinyImageNet(root=own_root, cache_dir=tmp_path / "cache").setup()
    assert str(caught.value).startswith(said.format(path=path))
    assert "`--data.download true`" in str(caught.value)


def test_a_cache_that_cannot_be_written(tiny_root: Path, tmp_path: Path, decoded: list[Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FederatedError, match=r"keep decoded images in .*file.*: set `--data.cache_dir` to a folder"):
        TinyImageNet(root=tiny_root, cache_dir=tmp_path / "file" / "cache").setup()
    assert decoded == [], "found before the long work"


def test_a_folder_that_lacks_training_images_is_not_taken_for_whole(own_root: Path, tmp_path: Path) -> None:
    folder = own_root / "tiny-imagenet-200"
    next((folder / "train" / "n00000003" / "images").glob("*.JPEG")).unlink()
    with pytest.raises(FederatedError, match="as many images of each class in .*got 1 in .*n00000003"):
        TinyImageNet(root=own_root, cache_dir=tmp_path / "cache").read(train=True)
    (folder / "val" / "val_annotations.txt").write_text("")
    with pytest.raises(FederatedError, match="val_annotations.txt to list the validation images, got none"):
        TinyImageNet(root=own_root, cache_dir=tmp_path / "cache").read(train=False)
