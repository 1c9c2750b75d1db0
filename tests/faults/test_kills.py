"""Runs whose clients keep parts or whole models on disk, killed at a named point of a round, go on to the same bits."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.client_algorithms import APFL, MOON, ClientAlgorithm, Ditto, FedPer, FedRep, LocalOnly, PFedMe
from lightning_fed.core.hooks import FederatedCallback
from tests.faults.disks import Disk
from tests.faults.kills import in_a_child
from tests.faults.tiny import fit, same, versions
from tests.parts import CLASSES, FEATURES

METHODS: dict[str, Callable[[], ClientAlgorithm]] = {
    "FedPer": FedPer,
    "Ditto": lambda: Ditto(0.5),
    "FedRep": FedRep,
    "APFL": lambda: APFL(0.4, adaptive=True),
    "PFedMe": lambda: PFedMe(3.0, 2, 0.1),
    "LocalOnly": LocalOnly,
    "MOON": lambda: MOON(3.0),
}
# Where the process ends, in its third round: before any record of the round is written, after the first one is, after
# all are, and after the row is but not the checkpoint.
POINTS = ("on_client_start", "on_client_entered", "on_after_server_step", "on_save_checkpoint")
CASES = [(name, point, "sequential") for name in ("FedPer", "Ditto") for point in POINTS]
CASES += [(name, "on_client_entered", "vectorized") for name in ("FedPer", "Ditto")]
CASES += [(name, "on_client_entered", "sequential") for name in METHODS if name not in ("FedPer", "Ditto")]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES))


class EndsAt(FederatedCallback):
    """Kills the process in round 3, the first time that a hook is called there."""

    stacks = True

    armed = False  # not an argument, by which the run would be another one

    def __init__(self, point: str) -> None:
        setattr(self, point, self.end)

    def end(self, trainer: Any, *_: Any) -> None:
        if self.armed and trainer.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no other
    yield
    torch.set_num_threads(threads)


def records(run: Path) -> dict[str, np.ndarray]:
    """What a run's last checkpoint says that clients keep, by method and client."""
    kept = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["federated"]["client_states"]
    return {file.partition("-")[0]: np.load(run / "client_states" / file) for file in kept}


@pytest.mark.parametrize(("name", "point", "engine"), CASES)
@pytest.mark.quick(3)
def test_a_killed_run_goes_on_to_the_bit(
    name: str, point: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients' own models are evaluated in every round, so that each is compared by its metrics too."""
    models: Any = ["global", "own"] if METHODS[name]().has_own_model else ["global"]

    def parts() -> dict[str, Any]:
        method = lambda: (FedAvg(buffers="local"), METHODS[name]())  # noqa: E731  # a part of one call
        own = [ClientEvaluation(1, models=models), EndsAt(point)]
        return {"method": method, "net": layers, "own": own, "engine": engine, "local_epochs": 2}

    fit(tmp_path / "whole", **parts())
    with monkeypatch.context() as deadly:
        deadly.setattr(EndsAt, "armed", True)
        status, said = in_a_child(tmp_path / "killed", Disk(tmp_path / "killed"), **parts())
    assert status == -signal.SIGKILL, said
    (whole,), (killed,) = versions(tmp_path / "whole"), versions(tmp_path / "killed")
    rows = len((killed / "metrics.csv").read_text().splitlines()) - 2  # but for the header and round 0
    assert rows == (3 if point == "on_save_checkpoint" else 2)
    assert records(killed).keys() < records(whole).keys()
    written = {str(file.relative_to(killed / "client_states")) for file in killed.glob("client_states/*/*.npy")}
    saved = torch.load(killed / "checkpoints" / "last.ckpt", weights_only=True)["federated"]["client_states"]
    assert (written > set(saved)) == (point != "on_client_start"), "what the round wrote before it was lost"
    trainer = fit(tmp_path / "killed", ckpt_path="last", **parts())
    assert trainer.resumed
    assert versions(tmp_path / "killed") == [killed]
    assert same(killed, whole)
    found, wanted = records(killed), records(whole)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[each], wanted[each]) for each in wanted)
