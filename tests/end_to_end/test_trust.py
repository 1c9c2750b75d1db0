"""Nothing in a file of data, a checkpoint or a run's folder runs when it is read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed.core.client_states import ClientStates
from lightning_fed.data.readers.array_files import ArrayFile
from lightning_fed.data.readers.files import cached_tensors
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import read_checkpoint


class Payload:
    """Makes a file where it is unpickled, as a hostile one would run what it likes."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path / "ran")


def hostile(payload: Payload, path: Path) -> Path:
    """Writes the payload in the format of the file's name; one that trusts the file would run it."""
    if path.suffix == ".npy":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    elif path.suffix == ".npz":
        np.savez(path, x=np.array([payload], dtype=object))
    else:
        torch.save({"x": payload, "state_dict": payload}, path)
    return path


def test_the_payload_runs_where_it_is_trusted(payload: Payload, tmp_path: Path) -> None:
    torch.load(hostile(payload, tmp_path / "x.pt"), weights_only=False)
    assert payload.mark.exists()


@pytest.mark.parametrize("name", ["x.pt", "x.npy", "x.npz"])
def test_data(payload: Payload, tmp_path: Path, name: str) -> None:
    with pytest.raises(FederatedError, match="cannot be read"):
        ArrayFile(hostile(payload, tmp_path / name), "--data.file").read("x", "--data.x")
    assert not payload.mark.exists()


def test_a_checkpoint(payload: Payload, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="--ckpt_path"):
        read_checkpoint(hostile(payload, tmp_path / "last.ckpt"), "--ckpt_path")
    assert not payload.mark.exists()


def test_a_clients_state(payload: Payload, tmp_path: Path) -> None:
    states = ClientStates("disk", torch.zeros(1), tmp_path, {})
    states.store("Remembers", 0, torch.ones(1))
    states.dump()
    (file,) = tmp_path.rglob("*.npy")
    hostile(payload, file)
    with pytest.raises(FederatedError):
        states.recall("Remembers", 0, torch.zeros(1))
    assert not payload.mark.exists()


def test_decoded_images(payload: Payload, tmp_path: Path) -> None:
    path = hostile(payload, tmp_path / "images.pt")
    (read,) = cached_tensors(path, "1", lambda: [torch.ones(1)])
    assert read.item() == 1
    assert not payload.mark.exists()
