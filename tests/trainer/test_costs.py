"""Communication rounds, bytes each way and gradient evaluations, against a table worked out by hand."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.aggregators import (
    AFL,
    CGW,
    TERM,
    CoordinateMedian,
    FedAvg,
    FedAvgM,
    FedDGGA,
    FedDynServer,
    FedGMA,
    QFedAvg,
)
from lightning_fed.client_algorithms import (
    APFL,
    SCAFFOLD,
    ClientAlgorithm,
    Ditto,
    FedCM,
    FedDyn,
    FedGA,
    FedGaLA,
    FedIIR,
    FedLC,
    FedLESAM,
    FedProx,
    FedSAM,
    GradAlign,
    LinearScaling,
    LocalOnly,
    MimeLite,
    PerFedAvg,
    PFedMe,
    StatelessSCAFFOLD,
)
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.masks import SignAgreement
from lightning_fed.sampling import ClientSampler
from lightning_fed.trainer import FederatedTrainer
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points

# Logistic regression: a weight for each feature and class and a bias for each class, as floats of 4 bytes.
D = 4 * (5 * 3 + 3)
SIZES = (6, 0, 10, 4)  # three clients that train, 20 samples in all
TRAINED, SAMPLES = 3, 20


class Looks(FederatedCallback):
    """A diagnostic that looks at gradients which no algorithm exchanges."""

    def __init__(self, level: Any) -> None:
        self.level = level

    def start_gradients(self, round: int) -> Any:
        return self.level


class Sends(ClientAlgorithm):
    """An algorithm of a user's own that sends two vectors more, and a number."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.send("Sends", torch.zeros(2, len(update.delta)))
        update.send("a number", torch.zeros(()))


def uniform(**options: Any) -> FedAvg:
    return FedAvg(weighting="uniform", **options)


# Of one round: communication rounds, vectors down to and up from each client, passes over a client's full data.
Row = tuple[Callable[[], list[Any]], int, int, int, int]
TABLE: dict[str, Row] = {
    "FedAvg": (lambda: [FedAvg()], 1, 1, 1, 0),
    "FedAvgM masked": (lambda: [FedAvgM(mask=SignAgreement())], 1, 1, 1, 0),
    "CoordinateMedian": (lambda: [CoordinateMedian()], 1, 1, 1, 0),
    "FedProx": (lambda: [FedProx()], 1, 1, 1, 0),
    "FedDyn": (lambda: [FedDyn(), FedDynServer()], 1, 1, 1, 0),
    # m goes down with the model.
    "FedCM": (lambda: [FedCM()], 1, 2, 1, 0),
    # m goes down with the model, g_i up with the update, unless an exchange has it.
    "MimeLite": (lambda: [MimeLite()], 1, 2, 2, 1),
    "MimeLite at 0": (lambda: [MimeLite(0.0)], 1, 1, 1, 0),
    "MimeLite, FedGMA": (lambda: [MimeLite(), FedGMA()], 1, 2, 2, 1),
    "MimeLite, FedGMA end": (lambda: [MimeLite(), FedGMA(gradient_at="end")], 1, 2, 3, 2),
    "FedGA on MimeLite": (lambda: [MimeLite(), FedGA()], 2, 3, 2, 1),
    # What a client knows itself costs nothing.
    "FedLC": (lambda: [FedLC()], 1, 1, 1, 0),
    "FedIIR": (lambda: [FedIIR()], 2, 2, 2, 1),
    # A pass more over each batch, or more of them; what is a client's own goes nowhere.
    "FedSAM": (lambda: [FedSAM()], 1, 1, 1, 1),
    "FedSAM at 0": (lambda: [FedSAM(0.0)], 1, 1, 1, 0),
    # The server's last step goes down with the model; what a client got before it keeps.
    "FedLESAM": (lambda: [FedLESAM()], 1, 1, 1, 0),
    "FedLESAM last": (lambda: [FedLESAM(since="last")], 1, 2, 1, 0),
    "FedGaLA": (lambda: [FedGaLA()], 1, 2, 1, 0),
    "MoFedSAM": (lambda: [FedSAM(), FedCM()], 1, 2, 1, 1),
    "PFedMe": (lambda: [PFedMe(inner_steps=4)], 1, 1, 1, 3),
    "PerFedAvg": (lambda: [PerFedAvg()], 1, 1, 1, 1),
    "Ditto": (lambda: [Ditto()], 1, 1, 1, 1),
    "APFL": (lambda: [APFL(adaptive=True)], 1, 1, 1, 1),
    "LocalOnly": (lambda: [LocalOnly()], 0, 0, 0, 0),
    # c goes down with the model, the change of c_i up with the update.
    "SCAFFOLD": (lambda: [SCAFFOLD()], 1, 2, 2, 0),
    "SCAFFOLD I": (lambda: [SCAFFOLD("I")], 1, 2, 2, 1),
    # The model goes down, g_i up, their mean down, the update up.
    "StatelessSCAFFOLD": (lambda: [StatelessSCAFFOLD()], 2, 2, 2, 1),
    "FedGA": (lambda: [FedGA()], 2, 2, 2, 1),
    "FedGA step": (lambda: [FedGA(form="step")], 2, 2, 2, 1),
    "GradAlign": (lambda: [GradAlign()], 2, 2, 2, 1),
    "LinearScaling": (lambda: [LinearScaling(), uniform()], 2, 2, 2, 1),
    # D_i goes up with the update; so does g_i.
    "CGW": (lambda: [CGW()], 1, 1, 2, 1),
    "FedGMA start": (lambda: [FedGMA()], 1, 1, 2, 1),
    "FedGMA end": (lambda: [FedGMA(gradient_at="end")], 1, 1, 2, 1),
    "FedGMA last step": (lambda: [FedGMA(gradient_at="last_step")], 1, 1, 2, 0),
    # A loss at w is a number, by a pass over the data unless one for gradients is there.
    "QFedAvg": (lambda: [QFedAvg()], 1, 1, 1, 1),
    "AFL": (lambda: [AFL()], 1, 1, 1, 1),
    # Losses at w_i and at the new model, which all clients get for their next round anyway.
    "FedDGGA": (lambda: [FedDGGA(losses_over="train")], 1, 1, 1, 2),
    "FedDGGA at 0": (lambda: [FedDGGA(0.0, losses_over="train")], 1, 1, 1, 1),
    "SCAFFOLD I, TERM": (lambda: [SCAFFOLD("I"), TERM()], 1, 2, 2, 1),
    "FedGA, TERM": (lambda: [FedGA(), TERM()], 2, 2, 2, 1),
    # Sums; an exchange and a gradient at w are there once.
    "FedGA on FedProx": (lambda: [FedProx(), FedGA()], 2, 2, 2, 1),
    "FedGA on SCAFFOLD": (lambda: [SCAFFOLD(), FedGA()], 2, 3, 3, 1),
    "FedGA on SCAFFOLD I": (lambda: [SCAFFOLD("I"), FedGA()], 2, 3, 3, 1),
    "FedGA on stateless": (lambda: [StatelessSCAFFOLD(), FedGA()], 2, 2, 2, 1),
    "FedGA on FedDyn": (lambda: [FedDyn(), FedGA(), FedDynServer()], 2, 2, 2, 1),
    "FedGA, FedGMA start": (lambda: [FedGA(), FedGMA()], 2, 2, 2, 1),
    "FedGA, FedGMA end": (lambda: [FedGA(), FedGMA(gradient_at="end")], 2, 2, 3, 2),
    "FedGA, FedGMA last step": (lambda: [FedGA(), FedGMA(gradient_at="last_step")], 2, 2, 3, 1),
    "FedGA, CGW": (lambda: [FedGA(), CGW()], 2, 2, 3, 2),
    "SCAFFOLD, CGW": (lambda: [SCAFFOLD(), CGW()], 1, 2, 3, 1),
    "one of a user's own": (lambda: [Sends()], 1, 1, 3, 0),
    # Diagnostics change nothing, whatever else there is.
    "FedAvg, looked at": (lambda: [Looks("cohort")], 1, 1, 1, 0),
    "FedAvg, glanced at": (lambda: [Looks("client")], 1, 1, 1, 0),
    "SCAFFOLD I, looked at": (lambda: [SCAFFOLD("I"), Looks("cohort")], 1, 2, 2, 1),
    "TERM, looked at": (lambda: [TERM(), Looks("cohort")], 1, 1, 1, 1),
    "TERM, glanced at": (lambda: [TERM(), Looks("client")], 1, 1, 1, 1),
    "FedGA, looked at": (lambda: [FedGA(), Looks("cohort")], 2, 2, 2, 1),
    "FedGMA start, looked at": (lambda: [FedGMA(), Looks("cohort")], 1, 1, 2, 1),
}


def trained(folder: Path, callbacks: list[Any], net: nn.Module | None = None, **options: Any) -> FederatedTrainer:
    data = federated_data(*SIZES, batch_size=options.pop("batch_size", 10))
    trainer = federated_trainer(folder, *callbacks, **options)
    trainer.fit(Classifier(net), data)
    return trainer


def totals(rounds: int, down: int, up: int, gradients: int, samples: int = SAMPLES) -> dict[str, int]:
    counts = {"comm/rounds": rounds, "comm/bytes_down": down, "comm/bytes_up": up}
    return {"samples": samples, "gradients": gradients, **counts}


def test_the_model_is_the_one_of_the_table() -> None:
    assert (FEATURES, CLASSES, sum(SIZES), np.count_nonzero(SIZES)) == (5, 3, SAMPLES, TRAINED)
    assert sum(p.numel() for p in Classifier().parameters()) * 4 == D


@pytest.mark.parametrize("name", TABLE)
def test_one_round_is_that_of_the_table(name: str, tmp_path: Path) -> None:
    make, rounds, down, up, passes = TABLE[name]
    expected = totals(rounds, TRAINED * down * D, TRAINED * up * D, SAMPLES * (1 + passes))
    trainer = trained(tmp_path, make())
    assert trainer.totals == expected
    assert {key: float(trainer.logged_metrics[key]) for key in expected} == expected


@pytest.mark.parametrize("name", ["FedAvg", "FedGA on SCAFFOLD", "SCAFFOLD I", "CGW", "FedGA, FedGMA start"])
def test_totals_add_up_over_rounds_epochs_and_small_batches(name: str, tmp_path: Path) -> None:
    make, rounds, down, up, passes = TABLE[name]
    options = {"max_rounds": 3, "local_epochs": 2, "batch_size": 4, "full_gradient_batch_size": 5}
    expected = totals(3 * rounds, 9 * down * D, 9 * up * D, 3 * SAMPLES * (2 + passes), samples=3 * 2 * SAMPLES)
    assert trained(tmp_path, make(), **options).totals == expected


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedGA"])
@pytest.mark.parametrize(("policy", "factor"), [("average", 1), ("local", 0), ("keep", 0)])
def test_buffers_go_both_ways_once_a_round_if_they_are_averaged(
    name: str, policy: Any, factor: int, tmp_path: Path
) -> None:
    """BatchNorm over 4 features: mean and variance of 4 bytes each, and a count of 8 bytes."""
    make, rounds, down, up, passes = TABLE[name]
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    vector = 4 * ((5 * 4 + 4) + (4 + 4) + (4 * 3 + 3))
    buffers = factor * (2 * 4 * 4 + 8)
    callbacks = [callback for callback in make() if not isinstance(callback, FedAvg)] + [FedAvg(buffers=policy)]
    trainer = trained(tmp_path, callbacks, net)
    each_way = [TRAINED * (vectors * vector + buffers) for vectors in (down, up)]
    assert trainer.totals == totals(rounds, *each_way, SAMPLES * (1 + passes))


class Places(nn.Linear):
    """Has buffers that are no part of its state: places and angles, and a count that changes if it ``counts``."""

    def __init__(self, counts: bool) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("places", torch.arange(7), persistent=False)
        self.register_buffer("angles", torch.arange(7) / 7, persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int32), persistent=False)
        self.register_buffer("kept", torch.ones(3))
        self.counts = counts

    def forward(self, x: Any) -> Any:
        self.count += self.counts
        return super().forward(x)


@pytest.mark.parametrize("counts", [True, False])
def test_buffers_that_are_no_state_are_not_sent(counts: bool, tmp_path: Path) -> None:
    each_way = 2 * TRAINED * (D + 3 * 4)
    trainer = trained(tmp_path, [FedAvg()], Places(counts), max_rounds=2)
    assert trainer.totals == totals(2, each_way, each_way, 2 * SAMPLES, samples=2 * SAMPLES)


def test_frozen_parameters_are_not_sent_and_narrow_ones_are_half_as_long(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3))
    assert trained(tmp_path, [SCAFFOLD()], net).totals == totals(1, TRAINED * 2 * D, TRAINED * 2 * D, SAMPLES)
    narrow = trained(tmp_path, [FedGA()], precision="bf16-true").totals
    assert narrow == totals(2, TRAINED * D, TRAINED * D, 2 * SAMPLES)


class OneByOne(ClientSampler):
    """Draws client 0, then client 1, which has no samples, then client 2."""

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.array([round - 1])


@pytest.mark.parametrize("name", ["FedAvg", "FedGA on SCAFFOLD"])
def test_a_round_that_nobody_enters_costs_nothing(name: str, tmp_path: Path) -> None:
    make, rounds, down, up, passes = TABLE[name]
    options: dict[str, Any] = {"sampler": OneByOne(), "clients_per_round": 1}
    for length, entered, samples in ((1, 1, 6), (2, 1, 6), (3, 2, 16)):
        expected = totals(
            entered * rounds, entered * down * D, entered * up * D, samples * (1 + passes), samples=samples
        )
        assert trained(tmp_path, make(), max_rounds=length, **options).totals == expected


class Spoils(FederatedCallback):
    """Makes the update of one client infinite."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.id == 2:
            update.delta.fill_(torch.inf)


def test_only_clients_that_entered_are_counted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Client 2 diverged"):
        trainer = trained(tmp_path, [FedGA(), Spoils()], max_diverged=0.5)
    assert trainer.totals == totals(2, 2 * 2 * D, 2 * 2 * D, 2 * SAMPLES)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("name", "samples", "gradients"), [("FedAvg", 20, 20), ("SCAFFOLD I", 20, 40), ("FedGA", 14, 34)]
)
def test_samples_of_who_diverged_are_those_it_took_steps_on(
    name: str, samples: int, gradients: int, engine: Any, tmp_path: Path
) -> None:
    """FedGA's exchange leaves client 0, of 6 samples, out before any step of it."""
    dataset = points(sum(SIZES))
    dataset.tensors[0][:6] = torch.nan
    trainer = federated_trainer(tmp_path, *TABLE[name][0](), max_diverged=0.5, engine=engine)
    with pytest.warns(UserWarning, match="Client 0 diverged"):
        trainer.fit(Classifier(), federated_data(*SIZES, dataset=dataset, batch_size=10))
    assert (trainer.totals["samples"], trainer.totals["gradients"]) == (samples, gradients)


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD I", "FedDyn", "FedGA on SCAFFOLD"])
def test_totals_go_on_in_a_resumed_run_and_stand_in_its_table(name: str, tmp_path: Path) -> None:
    make, rounds, down, up, passes = TABLE[name]
    kept: dict[str, Any] = {"logger": [], "enable_checkpointing": True, "name": "run"}
    trained(tmp_path, make(), max_rounds=1, **kept)
    trainer = federated_trainer(tmp_path, *make(), max_rounds=3, **kept)
    trainer.fit(Classifier(), federated_data(*SIZES, batch_size=10), ckpt_path="last")
    assert trainer.run is not None
    with trainer.run.metrics.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["round"] for row in table] == ["0", "1", "2", "3"]
    for at in (1, 2, 3):
        vectors = [at * TRAINED * count * D for count in (down, up)]
        expected = totals(at * rounds, *vectors, at * SAMPLES * (1 + passes), samples=at * SAMPLES)
        assert {key: float(table[at][key]) for key in expected} == expected
    assert trainer.totals == expected
    assert all(table[0][key] == "" for key in expected)
