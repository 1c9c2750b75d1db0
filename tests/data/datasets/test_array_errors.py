"""Every mistake in a user's own arrays ends in one sentence that names the file and the option."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.data import Arrays
from lightning_fed.errors import FederatedError

X, Y = np.zeros((6, 2), dtype=np.float32), np.arange(6) % 3
SOUND = {"x_train": X, "y_train": Y}


def sentence(**options: Any) -> str:
    with pytest.raises(FederatedError) as caught:
        Arrays(**options).load_datasets()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    assert sentence(path="own.npz", root=tmp_path) == (
        f"Expected the file {tmp_path}/own.npz, found none: change `--data.path`, or set `--data.root` (or the "
        "environment variable LIGHTNING_FED_DATA) to the folder that it lies in."
    )
    np.save(tmp_path / "x.npy", X)
    said = sentence(x_train="x.npy", y_train="y.npy", root=tmp_path)
    assert f"{tmp_path}/y.npy, found none: change `--data.y_train`" in said


def test_no_path_at_all() -> None:
    assert sentence().startswith("Expected `--data.path` to name the file that holds x_train, got none: set it, or set")


SAVES: dict[str, Callable[[Path], None]] = {
    ".npz": lambda path: np.savez(path, **SOUND),
    ".npy": lambda path: np.save(path, X),
    ".pt": lambda path: torch.save({name: torch.from_numpy(array) for name, array in SOUND.items()}, path),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "foreign": lambda content: b"no arrays here " * 40,
}


@pytest.mark.parametrize("suffix", SAVES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"own{suffix}"
    SAVES[suffix](path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    said = sentence(path=path)
    assert said.startswith(f"The file {path} cannot be read as arrays (")
    assert said.endswith("it is truncated, damaged, or holds other objects; write it again, or change `--data.path`.")


@pytest.mark.parametrize("large", [1, 10**9])
def test_a_truncated_file_in_a_folder(large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.data.readers.array_files._LARGE", large)
    np.save(tmp_path / "x_train.npy", X)
    np.save(tmp_path / "y_train.npy", Y)
    (tmp_path / "y_train.npy").write_bytes((tmp_path / "y_train.npy").read_bytes()[:-8])
    assert "cannot be read as arrays (ValueError)" in sentence(path=tmp_path)


def test_a_flipped_byte_in_an_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **SOUND)
    content = bytearray((tmp_path / "own.npz").read_bytes())
    content[content.index(Y.tobytes())] ^= 1
    (tmp_path / "own.npz").write_bytes(content)
    assert "cannot be read as arrays (BadZipFile)" in sentence(path=tmp_path / "own.npz")


class Opens:
    """Leaves a trace if it is ever unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_objects_are_refused_and_not_executed(tmp_path: Path) -> None:
    objects = np.array([Opens(tmp_path / "trace")] * 6, dtype=object)
    np.savez(tmp_path / "own.npz", x_train=objects, y_train=Y)
    torch.save({"x_train": Opens(tmp_path / "trace")}, tmp_path / "own.pt")
    for name in ("own.npz", "own.pt"):
        assert "holds other objects" in sentence(path=tmp_path / name)
    assert not (tmp_path / "trace").exists()


def test_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("1,2\n")
    assert sentence(path=tmp_path / "own.csv") == (
        f"Expected `--data.path` to name a file that ends in .npz, .npy, .pt, .pth or a folder of .npy files, got "
        f"{tmp_path}/own.csv."
    )


def test_a_missing_name_lists_those_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", images=X, labels=Y)
    path = tmp_path / "own.npz"
    assert sentence(path=path) == (
        f"Expected an array named x_train in {path}, which holds images, labels: set `--data.x_train` to the name of "
        "one of these."
    )
    assert "set `--data.y_train` to" in sentence(path=path, x_train="images")
    chosen = {"x_train": "images", "y_train": "labels"}
    assert "named x_test in" in sentence(path=path, **chosen, y_test="labels")
    assert "named more in" in sentence(path=path, **chosen, x_val=f"{path}:more")
    np.savez(path, **{f"part{number:02}": X for number in range(15)})
    assert "part10, part11 and 3 others: set" in sentence(path=path)


def test_half_of_a_part_is_no_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **SOUND, y_test=Y)
    assert "Expected an array named x_test" in sentence(path=tmp_path / "own.npz")


def test_a_file_of_several_arrays_needs_a_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **SOUND)
    path = tmp_path / "own.npz"
    assert sentence(x_train=str(path), y_train="own.npz:y_train", root=tmp_path) == (
        f"Expected one array in {path}, which holds x_train, y_train: write `--data.x_train {path}:NAME`."
    )


def test_as_many_targets_as_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **SOUND, x_test=X, y_test=Y[:-1])
    path = tmp_path / "own.npz"
    assert sentence(path=path) == (
        f"Expected as many targets as inputs, got 6 inputs in x_test of {path} and 5 targets in y_test of {path}: "
        "change `--data.x_test` or `--data.y_test`."
    )


@pytest.mark.parametrize(
    ("targets", "part"),
    [
        (np.array([0, 1, 2, 0, 1, 1.5]), "whole numbers of at least 0 as class labels in y_train of {}, got 1.5:"),
        (np.array([0, 1, 2, 0, -1, 2]), "whole numbers of at least 0 as class labels in y_train of {}, got -1:"),
        (np.array([0, 1, 2, 0, 1, np.nan]), "got nan: change `--data.y_train`, or set `--data.class_labels false`"),
        (np.eye(6), "Expected one class label for each sample in y_train of {}, got an array of shape (6, 6):"),
        (
            np.array(list("abcabc")),
            "Expected y_train in {} to be an array of real numbers with one row per sample, got <U1",
        ),
        (np.array(3), "got int64 values of shape (): change `--data.y_train`."),
        (np.arange(6) * 1j, "got complex128 values of shape (6,): change `--data.y_train`."),
    ],
)
def test_targets_that_are_no_labels(targets: Any, part: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=X, y_train=targets)
    assert part.format(tmp_path / "own.npz") in sentence(path=tmp_path / "own.npz")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"layout": "NHW"}, "3 dimensions for `--data.layout` NHW, got shape (6, 2): set `--data.layout as_is`"),
        ({"layout": "NHWC"}, "to have 4 dimensions for `--data.layout` NHWC, got shape (6, 2)"),
        ({"layout": "CHW"}, "Expected `--data.layout` to be one of auto, NHW, NHWC, as_is, got 'CHW'."),
        ({"mean": [1, 2, 3]}, "Expected `--data.mean` to be one value, or one for each channel of x_train of "),
        ({"std": [1, 2, 3]}, "(shape (6, 2), channels second), got 3 values."),
        ({"std": 0}, "Expected `--data.std` to be above 0, got 0."),
        ({"std": [1.0, -1.0]}, "Expected `--data.std` to be above 0, got [1.0, -1.0]."),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], part: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **SOUND)
    assert part in sentence(path=tmp_path / "own.npz", **options)


def test_tensors_that_are_no_real_numbers(tmp_path: Path) -> None:
    torch.save({"x_train": torch.zeros(6, 2, dtype=torch.complex64), "y_train": [0, 1]}, tmp_path / "own.pt")
    assert "got torch.complex64 values of shape (6, 2): change `--data.x_train`." in sentence(path=tmp_path / "own.pt")
    torch.save({"x_train": torch.zeros(2, 2), "y_train": [0, 1]}, tmp_path / "own.pt")
    assert "got list: change `--data.y_train`." in sentence(path=tmp_path / "own.pt")


@pytest.mark.filterwarnings("ignore")  # torch's, of kinds of tensors that it changes
@pytest.mark.parametrize("part", ["x_train", "y_train"])
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x: x.to_sparse(), "a torch.sparse_coo tensor"),
        (lambda x: x.reshape(6, -1).to_sparse_csr(), "a torch.sparse_csr tensor"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "torch.quint8 values of shape"),
        (lambda x: x.to("meta"), "a meta tensor"),
        (lambda x: torch.nested.nested_tensor([x[:2], x[2:]]), "a nested tensor"),
        (lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged), "a nested tensor"),
        (lambda x: x.to(torch.uint8).view(torch.bits8), "torch.bits8 values of shape"),
    ],
    ids=["sparse", "csr", "quantized", "meta", "nested", "jagged", "bits"],
)
def test_tensors_that_are_no_plain_arrays(make: Any, got: str, part: str, tmp_path: Path) -> None:
    sound = {name: torch.from_numpy(array).float() for name, array in SOUND.items()}
    torch.save(sound | {part: make(sound[part])}, tmp_path / "own.pt")
    said = sentence(path=tmp_path / "own.pt")
    if "(UnpicklingError)" not in said or got != "a nested tensor":  # of which torch 2.15 reads no file
        assert said.startswith(f"Expected {part} in {tmp_path / 'own.pt'} to be an array of real numbers")
        assert f"got {got}" in said


def test_arrays_without_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=np.zeros((0, 6)), y_train=np.zeros(0, dtype=np.int64))
    assert sentence(path=tmp_path / "own.npz") == (
        f"Expected training samples in x_train of {tmp_path / 'own.npz'}, got none: change `--data.x_train`."
    )


@pytest.mark.parametrize("name", ["own.npz", "own.npy", "own.pt", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        np.save(path / "x_train.npy", X)
    for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero")):
        pipe = path / "y_train.npy" if name == "folder" else path
        make(pipe)
        said = sentence(path=path)
        assert said.startswith("Expected `--data.path` to name a file" if name == "pipe" else f"The file {path} cannot")
        assert name == "pipe" or "(no regular file): " in said
        pipe.unlink()


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    np.savez(tmp_path / "own.npz", **SOUND)
    monkeypatch.setattr(np, "load", refuse)
    assert "cannot be read (Permission denied): change its permissions" in sentence(path=tmp_path / "own.npz")
