"""Every mistake in the data ends in one sentence that names the option."""

import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_fed.data import MNIST, Digits, FashionMNIST, FederatedDataModule
from lightning_fed.data.datasets.mnist import read_idx
from lightning_fed.errors import FederatedError
from tests.official_files import idx

DATA = TensorDataset(torch.rand(30, 2), torch.arange(30) % 3)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small, sound copy of the four files, two packed and two not, which is taken for the official one."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, size in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (size, 28, 28)).astype("u1")
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels(size)))
    monkeypatch.setattr(MNIST, "counts", (40, 20))
    monkeypatch.setattr(
        MNIST, "label_digests", tuple(hashlib.sha256(labels(n).tobytes()).hexdigest() for n in (40, 20))
    )
    return tmp_path


def labels(size: int) -> npt.NDArray[np.uint8]:
    return np.arange(size, dtype=np.uint8) % np.uint8(10)


def test_the_sound_copy_loads(root: Path) -> None:
    data = MNIST(root=root, num_clients=4, split_seed=0)
    data.setup()
    assert data.class_counts().sum() == 40


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(raw: Path) -> None:
        (raw / name).write_bytes(change((raw / name).read_bytes()))

    return apply


def repack(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda content: gzip.compress(change(gzip.decompress(content)))


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"
AGAIN = "; delete it and set `--data.download true` to fetch it again."
CUT = "is truncated: its header promises 31360 bytes of data, it holds 31260"
NO_IDX = "is not an idx file of bytes in 1 dimension(s): expected it to start with 00000801, got "
OTHER = f"The file {{raw}}/{LABELS} is not the official one of MNIST: expected "
ALL_TEN = "40 labels, all from 0 to 9 among them, got "


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda raw: (raw / LABELS).unlink(), f"Expected the file {{raw}}/{LABELS} (or {LABELS}.gz), found none"),
        (edit(IMAGES, lambda b: b[: len(b) // 2]), f"{{raw}}/{IMAGES} is truncated: its gzip stream ends early{AGAIN}"),
        (edit(IMAGES, lambda b: b"no gzip" + b), f"{{raw}}/{IMAGES} is not a sound gzip file"),
        (edit(IMAGES, lambda b: b[:-30] + bytes(22) + b[-8:]), f"{{raw}}/{IMAGES} is not a sound gzip file"),
        (edit(IMAGES, repack(lambda b: b[:-100])), f"{{raw}}/{IMAGES} {CUT}{AGAIN}"),
        (edit(LABELS, lambda b: b + b"!"), f"{LABELS} is too long: its header promises 40 bytes of data, it holds 41"),
        (edit(LABELS, lambda b: b"\x89PNG" + b[4:]), f"{{raw}}/{LABELS} {NO_IDX}89504e47{AGAIN}"),
        (edit(LABELS, lambda b: b""), f"{NO_IDX}nothing"),
        (
            lambda raw: (raw / LABELS).write_bytes(gzip.decompress((raw / IMAGES).read_bytes())),
            f"{{raw}}/{LABELS} is not an idx file of bytes in 1 dimension(s)",
        ),
        (
            lambda raw: (raw / LABELS).write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes()),
            f"{OTHER}{ALL_TEN}20, 10 different ones from 0 to 9; delete it and set",
        ),
        (edit(LABELS, lambda b: b[:-1] + b"\x0a"), f"{OTHER}{ALL_TEN}40, 11 different ones from 0 to 10;"),
        (edit(LABELS, lambda b: b[:8] + bytes(40)), f"{OTHER}{ALL_TEN}40, 1 different ones from 0 to 0;"),
        (edit(LABELS, lambda b: b[:8] + b[9:] + b[8:9]), f"{OTHER}labels with the SHA-256 "),
        (
            edit(IMAGES, repack(lambda b: b[:7] + b"\x27" + b[8 : 16 + 39 * 784])),
            f"The file {{raw}}/{IMAGES} is not the official one of MNIST: expected 40 images of 28 x 28 in bytes, got "
            "images of shape (39, 28, 28); delete it and set",
        ),
        (
            lambda raw: (raw / IMAGES).write_bytes(gzip.compress(idx(np.zeros((40, 28, 28), dtype="f4")))),
            "is not an idx file of bytes in 3 dimension(s): expected it to start with 00000803, got 00000d03;",
        ),
    ],
)
def test_bad_files(root: Path, damage: Callable[[Path], object], sentence: str) -> None:
    raw = root / "MNIST" / "raw"
    damage(raw)
    with pytest.raises(FederatedError) as caught:
        MNIST(root=root).setup()
    assert sentence.format(raw=raw) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--data.download true" in str(caught.value)


def test_missing_folder_says_how_to_get_the_data(tmp_path: Path) -> None:
    with pytest.raises(FederatedError) as caught:
        FashionMNIST(root=tmp_path / "nowhere").setup("fit")
    assert str(caught.value) == (
        f"Expected the file {tmp_path}/nowhere/FashionMNIST/raw/train-images-idx3-ubyte (or "
        "train-images-idx3-ubyte.gz), found none: set `--data.root` to the folder that holds FashionMNIST/raw, or set "
        "`--data.download true` to fetch it."
    )


def test_no_root_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_FED_DATA", raising=False)
    with pytest.raises(FederatedError, match=r"`--data.root` \(or the environment variable LIGHTNING_FED_DATA\)"):
        MNIST().setup()


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def fail(root: Path, download: bool) -> None:
        assert (root.parent, download) == (tmp_path, True)
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fail)
    with pytest.raises(FederatedError, match=r"download MNIST into .*failed \(no network\): .*`--data.root`"):
        MNIST(root=tmp_path, download=True).setup()


def test_read_idx_reads_bytes(tmp_path: Path) -> None:
    array = np.arange(6, dtype="u1").reshape(2, 3)
    (tmp_path / "file").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "file", ndim=2), array)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_clients": 0}, "`--data.num_clients` to be an integer of at least 1, got 0."),
        ({"num_clients": 2.5}, "`--data.num_clients` to be an integer of at least 1 and below 2**63, got 2.5."),
        ({"num_clients": 31}, "`--data.num_clients` to be at most the number of training samples, 30, got 31."),
        ({"batch_size": 0}, "`--data.batch_size` to be an integer of at least 1, got 0."),
        ({"eval_batch_size": -1}, "`--data.eval_batch_size` to be an integer of at least 1, got -1."),
        ({"num_workers": -1}, "`--data.num_workers` to be an integer of at least 0, got -1."),
        ({"split_seed": -1}, "`--data.split_seed` to be an integer of at least 0, got -1."),
        ({"val_fraction": 1.0}, "`--data.val_fraction` to be at least 0 and below 1, got 1.0."),
        ({"val_fraction": -0.1}, "`--data.val_fraction` to be at least 0 and below 1, got -0.1."),
        ({"val_fraction": float("nan")}, "`--data.val_fraction` to be at least 0 and below 1, got nan."),
        (
            {"val_fraction": 0.9, "num_clients": 4},
            "`--data.num_clients` to be at most the number of training samples, 3, got 4.",
        ),
        ({"targets": [1, 2]}, "`--data.targets` to hold one value for each of the 30 training samples, got 2."),
        ({"targets": "a"}, "targets` to hold one value for each of the 30 training samples, got something else."),
        (
            {"val_dataset": DATA, "val_fraction": 0.5},
            "Expected either `--data.val_dataset` or `--data.val_fraction`, got both (0.5)",
        ),
        ({"train_dataset": None}, "Expected `--data.train_dataset` to be a data set, got none"),
    ],
)
def test_impossible_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FederatedError, match=re.escape(sentence)):
        FederatedDataModule(**{"train_dataset": DATA, "num_clients": 3, **options}).setup()


def test_the_test_fraction_is_checked() -> None:
    with pytest.raises(FederatedError, match=r"`--data.test_fraction` to be at least 0 and below 1, got 1"):
        Digits(test_fraction=1)


class Stream(IterableDataset[Any]):
    """Not a map-style data set."""

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), object()])
def test_only_map_style_data_sets(dataset: Dataset[Any]) -> None:
    with pytest.raises(
        FederatedError, match=r"`--data.train_dataset` to be a .* got (Stream, a stream|object): give a"
    ):
        FederatedDataModule(dataset).setup()
