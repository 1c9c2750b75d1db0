"""Writes small data sets in the formats of the official ones."""

import gzip
import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from lightning_fed.data.datasets import mnist

Images = npt.NDArray[np.uint8]

TINY_CLASSES = 200


def idx(array: npt.NDArray[Any]) -> bytes:
    """An idx file of an array."""
    codes = {"u1": 0x08, "i4": 0x0C, "f4": 0x0D}
    header = bytes([0, 0, codes[array.dtype.str[1:]], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def pixels(shape: tuple[int, ...], seed: int = 0) -> Images:
    """Random bytes; the first image of all is black and the last one white."""
    images = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    images[0], images[-1] = 0, 255
    return images


def write_emnist(
    root: Path, variant: str, classes: int, per_class: tuple[int, int], monkeypatch: pytest.MonkeyPatch, first: int = 0
) -> None:
    """Writes the four idx files of one variant, the training files packed, of which there should be as many."""
    names, _, statistics = mnist._VARIANTS[variant]
    monkeypatch.setitem(mnist._VARIANTS, variant, (names, tuple(classes * count for count in per_class), statistics))
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate(zip(("train", "test"), per_class, strict=True)):
        labels = (np.arange(classes * count) % classes + first).astype(np.uint8)
        for kind, array in (("images-idx3", pixels((len(labels), 28, 28), seed)), ("labels-idx1", labels)):
            path = raw / f"emnist-{variant}-{part}-{kind}-ubyte"
            if part == "train":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array), 1))
            else:
                path.write_bytes(idx(array))


def write_cifar(root: Path, name: str, per_class: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the Python batches of CIFAR10 or CIFAR100, and lets torchvision take them for the official ones."""
    import torchvision

    reader = getattr(torchvision.datasets, name)
    folder = root / reader.base_folder
    folder.mkdir(parents=True, exist_ok=True)
    classes, key = (10, "labels") if name == "CIFAR10" else (100, "fine_labels")
    names = [f"class {label}" for label in range(classes)]
    sums = {reader.meta["filename"]: _dump(folder / reader.meta["filename"], {reader.meta["key"]: names})}
    for seed, (files, count) in enumerate(zip((reader.train_list, reader.test_list), per_class, strict=True)):
        labels = np.arange(classes * count) % classes
        data = pixels((len(labels), 3072), seed)
        for part, (file, _) in enumerate(files):
            rows = np.array_split(np.arange(len(labels)), len(files))[part]
            sums[file] = _dump(folder / file, {"data": data[rows], key: labels[rows].tolist()})
    for attribute in ("train_list", "test_list"):
        listed = [[file, sums[file]] for file, _ in getattr(reader, attribute)]
        monkeypatch.setattr(reader, attribute, listed)
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": sums[reader.meta["filename"]]})


def write_tiny_imagenet(root: Path, per_class: tuple[int, int]) -> Path:
    """Writes the folders of the archive, 200 classes; the first validation image is black, the second white."""
    folder = root / "tiny-imagenet-200"
    ids = [f"n{number:08d}" for number in range(TINY_CLASSES)]
    lines: list[str] = []
    draws = np.random.default_rng(0)
    for name in ids:
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for number in range(per_class[0]):
            _jpeg(images / f"{name}_{number}.JPEG", draws.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    (folder / "val" / "images").mkdir(parents=True)
    for number in range(TINY_CLASSES * per_class[1]):
        file = f"val_{number}.JPEG"
        small = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        small[:] = {0: 0, 1: 255}.get(number, small)
        _jpeg(folder / "val" / "images" / file, small)
        lines.append(f"{file}\t{ids[-1 - number % TINY_CLASSES]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(reversed(ids)) + "\n")
    words = [f"{name}\tthing {number}, item {number}\n" for number, name in enumerate(ids[:-1])]
    (folder / "words.txt").write_text("".join(words))
    return folder


def _dump(path: Path, content: dict[str, Any]) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def _jpeg(path: Path, small: Images) -> None:
    Image.fromarray(small).resize((64, 64), Image.Resampling.NEAREST).save(path, format="JPEG")
