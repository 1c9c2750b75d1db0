"""What every personalised method sends in a round, counted by hand, and that evaluating its models sends nothing."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import client_algorithms
from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.client_algorithms import (
    APFL,
    Ditto,
    FedBN,
    FedPer,
    FedRep,
    LGFedAvg,
    LocalOnly,
    PerFedAvg,
    PersonalParameters,
    PFedMe,
    own_models,
    personal_parameters,
)
from tests.callbacks.diagnostics.parts import Measured
from tests.parts import federated_data, federated_trainer

# In single precision: 5 x 4 weights and 4 biases, γ and β, 4 x 3 weights and 3 biases; of each 4 bytes.
FIRST, NORM, LAST = 4 * (20 + 4), 4 * (4 + 4), 4 * (12 + 3)
WHOLE = FIRST + NORM + LAST
# Mean and variance of 4 features, and a count of 8 bytes, where they are averaged.
STATISTICS = 4 * (4 + 4) + 8
# What a client gets and what it sends in a round, in bytes; and what the server does with buffers.
SENT: dict[str, tuple[Any, int, Any]] = {
    "FedBN": (FedBN, FIRST + LAST, "local"),
    "FedPer": (FedPer, FIRST + NORM + STATISTICS, "average"),
    "FedPer of two layers": (lambda: FedPer(2), FIRST, "local"),
    "FedPer of none": (lambda: FedPer(0), WHOLE + STATISTICS, "average"),
    "FedRep": (FedRep, FIRST + NORM + STATISTICS, "average"),
    "LGFedAvg": (LGFedAvg, LAST, "keep"),
    "PersonalParameters": (lambda: PersonalParameters(["*.bias"]), 4 * (20 + 4 + 12) + STATISTICS, "average"),
    "Ditto": (Ditto, WHOLE + STATISTICS, "average"),
    "PFedMe": (PFedMe, WHOLE + STATISTICS, "average"),
    "APFL": (lambda: APFL(adaptive=True), WHOLE, "local"),
    "PerFedAvg": (lambda: PerFedAvg(form="hessian_free"), WHOLE + STATISTICS, "average"),
    "LocalOnly": (LocalOnly, 0, "local"),
    "fine-tuning": (None, WHOLE + STATISTICS, "average"),
}


def models_of(name: str) -> Any:
    """All models that clients of a method have."""
    make = SENT[name][0]
    return ["global", "trained", "tuned", *(["own"] if make is not None and make().has_own_model else [])]


def train(folder: Path, name: str, engine: Any, *more: Any) -> tuple[list[dict[str, str]], list[Any]]:
    """Trains two rounds; client 1 has no samples. Returns the rows of the table, and what the run leaves otherwise."""
    make, _, buffers = SENT[name]
    torch.manual_seed(0)
    net = Measured(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    trainer = federated_trainer(
        folder, FedAvg(buffers=buffers), *more, *([] if make is None else [make()]), max_rounds=2, local_epochs=2,
        engine=engine, logger=[], name="run", client_states="disk", enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(net, federated_data(6, 0, 12, 7, batch_size=12))
    assert trainer.run is not None
    with trainer.run.metrics.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    held = torch.load(trainer.run.checkpoints / "last.ckpt", weights_only=True)
    # The name of a client's record ends with a checksum of its numbers.
    return rows, [*held["state_dict"].values(), held["federated"]["client_states"], held["federated"]["buffers"]]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", SENT)
@pytest.mark.quick(2)
def test_the_bytes_of_a_round_are_those_by_hand_whatever_is_evaluated(name: str, engine: Any, tmp_path: Path) -> None:
    """Three of four clients train in each round. Evaluating all their models changes no bit of what the run leaves."""
    each, models = SENT[name][1], models_of(name)
    rows, left = train(tmp_path / "seen", name, engine, ClientEvaluation(1, models=models))
    found = [[row[f"comm/{what}"] for what in ("bytes_up", "bytes_down", "rounds")] for row in rows]
    by_hand = [[3 * each, 3 * each, int(each > 0)], [6 * each, 6 * each, 2 * int(each > 0)]]
    assert [[float(value) for value in row] for row in found[1:]] == by_hand
    assert {f"per_client/{model}/acc".replace("global/", "") for model in models} <= rows[-1].keys()
    unseen, wanted = train(tmp_path / "unseen", name, engine)
    assert [{k: v for k, v in row.items() if not k.startswith("per_client/")} for row in rows] == unseen
    assert all(map(same, left, wanted))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_every_personal_method_is_counted() -> None:
    counted = {type(make()).__name__ for make, *_ in SENT.values() if make is not None}
    own = {own_models.__name__, personal_parameters.__name__}
    assert counted == {name for name in client_algorithms.__all__ if getattr(client_algorithms, name).__module__ in own}
