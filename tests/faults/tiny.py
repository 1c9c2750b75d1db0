"""A run that takes a moment and writes files of every kind, and how one that was disturbed is compared with it."""

import csv
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvgM
from lightning_fed.client_algorithms import SCAFFOLD
from tests.parts import Classifier, built, federated_data, federated_trainer

ROUNDS = 4


def fit(
    folder: Path,
    rounds: int = ROUNDS,
    ckpt_path: str | None = None,
    own: Sequence[Callback] = (),
    method: Callable[[], Sequence[Callback]] = lambda: (FedAvgM(beta=0.5), SCAFFOLD()),
    net: Callable[[], nn.Module | None] = lambda: None,
    **options: Any,
) -> FederatedTrainer:
    """Trains five clients, two of them a round, with state on the server and state of clients on disk."""
    given = {
        "client_states": "disk",
        "clients_per_round": 2,
        "max_rounds": rounds,
        "name": "run",
        "logger": [],
        **options,
    }
    trainer = federated_trainer(folder, *method(), *own, enable_checkpointing=True, **given)
    said = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = said.level
    said.setLevel(logging.WARNING)  # a campaign is hundreds of runs
    try:
        trainer.fit(built(lambda: Classifier(net())), federated_data(8, 8, 8, 8, 8), ckpt_path=ckpt_path)
    finally:
        said.setLevel(level)
    return trainer


def versions(folder: Path) -> list[Path]:
    """The run folders, the oldest first."""
    return sorted((folder / "run").glob("version_*"), key=lambda path: int(path.name[8:]))


@contextmanager
def beside_a_whole_run(trained: int) -> Iterator[tuple[Path, Path]]:
    """A folder with runs of so many rounds in `made`, which trials begin with, and a whole run to compare with."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        fit(root / "whole")
        fit(root / "made", trained)
        (whole,) = versions(root / "whole")
        yield root, whole


def left_by(run: Path) -> tuple[list[dict[str, str]], list[torch.Tensor]]:
    """What a run has come to: its rows without times, and the weights and server state of its last checkpoint."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return rows, [*checkpoint["state_dict"].values(), *tensors_in(checkpoint["callbacks"])]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors within nested dicts."""
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in tensors_in(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def same(one: Path, other: Path) -> bool:
    """Whether two runs have come to the same bits."""
    return not differences(one, other)


def differences(one: Path, other: Path) -> list[str]:
    """What two runs have come to that is not the same to the bit."""
    (rows, held), (other_rows, other_held) = left_by(one), left_by(other)
    found = [
        f"{name} of round {row.get('round')}: {row.get(name)} and {other_row.get(name)}"
        for row, other_row in zip(rows, other_rows, strict=False)
        for name in dict.fromkeys([*row, *other_row])
        if row.get(name) != other_row.get(name)
    ]
    found += [f"{len(rows)} rows and {len(other_rows)}"] * (len(rows) != len(other_rows))
    equal = len(held) == len(other_held) and all(map(torch.equal, held, other_held))
    return found + ["tensors of the last checkpoint"] * (not equal)


def is_sentence(error: BaseException) -> bool:
    """Whether an error is what a user should see: one line, with what was expected and an option to change."""
    return "\n" not in str(error) and str(error).startswith("Expected ") and "`" in str(error)
