"""The framework as a side of a row."""

import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import TensorDataset

from benchmarks.contestants.contestant import Contestant
from benchmarks.race.turns import Turns
from benchmarks.workloads import Data, Work
from lightning_fed import Client, Cohort, FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.aggregators import (
    CGW,
    TERM,
    TIES,
    Bulyan,
    CoordinateMedian,
    FedACG,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedExP,
    FedFV,
    FedGMA,
    FedMGDA,
    FedOMG,
    FedYogi,
    PCGrad,
    QFedAvg,
    SignMajority,
)
from lightning_fed.callbacks.diagnostics import (
    ClientEvaluation,
    GradientDissimilarity,
    UpdateAgreement,
    UpdateGeometry,
)
from lightning_fed.client_algorithms import (
    APFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedCM,
    FedGA,
    FedLC,
    FedNTD,
    FedPer,
    FedProx,
    FedSAM,
    MimeLite,
    PerFedAvg,
    PFedMe,
)
from lightning_fed.data import ByUser, FederatedDataModule
from lightning_fed.masks import SANDMask, SignAgreement
from lightning_fed.models import ImageClassifier

__all__ = ["METHODS", "make_datamodule", "make_model", "make_trainer", "take_part", "refusal"]

METHODS: dict[str, Callable[[], list[Callback]]] = {
    "fedavg": lambda: [FedAvg()],
    "gma": lambda: [FedAvg(mask=SignAgreement(0.4))],
    "fedyogi+gma": lambda: [FedYogi(lr=0.01, mask=SignAgreement(0.4))],
    "fedprox": lambda: [FedProx(mu=0.01)],
    "scaffold": lambda: [SCAFFOLD(option="II")],
    "fedga": lambda: [FedGA(beta=0.025)],
    "agreement": lambda: [UpdateAgreement(by_layer=True)],
    "geometry": lambda: [UpdateGeometry()],
    "dissimilarity": lambda: [GradientDissimilarity()],
    "each-client": lambda: [ClientEvaluation(every_n_rounds=1)],
    "global-of-10": lambda: [ClientEvaluation(every_n_rounds=1, num_clients=10)],
    "trained": lambda: [ClientEvaluation(every_n_rounds=1, models=["trained"])],
    "tuned-of-10": lambda: [ClientEvaluation(every_n_rounds=1, models=["tuned"], num_clients=10)],
    "fedper": lambda: [FedPer()],
    "fedper+own-of-10": lambda: [FedPer(), ClientEvaluation(every_n_rounds=1, models=["own"], num_clients=10)],
    "ditto": lambda: [Ditto()],
    "pfedme": lambda: [PFedMe()],
    "apfl": lambda: [APFL()],
    "per-fedavg": lambda: [PerFedAvg()],
    "fedlc": lambda: [FedLC()],
    "moon": lambda: [MOON()],
    "fedntd": lambda: [FedNTD()],
    "fedsam": lambda: [FedSAM()],
    "fedcm": lambda: [FedCM()],
    "mimelite": lambda: [MimeLite()],
    "sand-mask": lambda: [FedAvg(mask=SANDMask(0.4))],
    "fedacg": lambda: [FedACG(), FedProx(mu=0.01)],
    "cgw": lambda: [CGW()],
    **{
        rule.__name__.lower(): lambda rule=rule: [rule()]
        for rule in (
            SignMajority,
            TIES,
            PCGrad,
            FedFV,
            FedMGDA,
            FedOMG,
            FedExP,
            QFedAvg,
            TERM,
            FedGMA,
            CoordinateMedian,
            Bulyan,
            FedAvgM,
            FedAdam,
        )
    },
}


class Clock(FederatedCallback):
    """Stops before every round until it is this side's turn, and tells the seconds from there to the next round.

    So everything counts that a round costs: the draw of the cohort, the server step, the row of metrics, the schedules.

    Args:
        turns: The turns.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.running = False

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Ends a round and begins the next one, in all processes at once."""
        self._end(trainer)
        barrier = trainer.strategy.barrier if trainer.world_size > 1 else None
        if trainer.is_global_zero:
            self.turns.begin(barrier)
        elif barrier is not None:
            barrier()
        self.running = True

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Ends the last round."""
        self._end(trainer)

    def _end(self, trainer: Any) -> None:
        if self.running and trainer.is_global_zero:
            self.turns.end()
        self.running = False


class ExcludeExchange(FederatedCallback):
    """Excludes what lies between the start of a round and its first client: the exchange of gradients.

    Args:
        turns: The turns.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns, self.opened = turns, 0.0

    def on_round_start(self, trainer: Any, pl_module: LightningModule, cohort: Cohort) -> None:
        """Begins the exchange."""
        self.opened = time.perf_counter()

    def on_client_start(self, trainer: Any, pl_module: LightningModule, client: Client) -> None:
        """Ends it, before the first client."""
        if self.opened:
            self.turns.excluded += time.perf_counter() - self.opened
        self.opened = 0.0


def make_datamodule(work: Work, data: Data) -> FederatedDataModule:
    """Gives each client the samples that it has in the loops written by hand."""
    dataset = TensorDataset(data.images, data.labels)
    return FederatedDataModule(dataset, ByUser(), users=data.users, num_clients=work.clients, batch_size=work.batch)


def make_model(work: Work) -> LightningModule:
    """Makes a module with the network and optimizer of the loops written by hand."""
    sgd = partial(torch.optim.SGD, lr=work.lr, momentum=work.momentum)
    return ImageClassifier(work.model(), optimizer=sgd)


def make_trainer(side: Contestant, callbacks: list[Callback], **options: Any) -> FederatedTrainer:
    """Makes a trainer that writes nothing, unless options say so.

    Raises:
        FederatedError: If it refuses an option.
    """
    if side.engine is not None and "engine" in signature(FederatedTrainer).parameters:
        options["engine"] = side.engine
    if side.memory_format is not None:
        options["memory_format"] = side.memory_format
    chosen: dict[str, Any] = {
        "accelerator": side.accelerator, "devices": side.devices, "precision": side.precision, "callbacks": callbacks,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **options,
    }  # fmt: skip
    return FederatedTrainer(**chosen)


def refusal(side: Contestant) -> str | None:
    """Says in one line why the installed framework cannot train a side; None if it can be tried."""
    # Without the argument there is one engine, the sequential one.
    if side.engine not in (None, "auto", "sequential") and "engine" not in signature(FederatedTrainer).parameters:
        return "the installed FederatedTrainer has no argument `engine`"
    try:
        make_trainer(side, [])
    except FederatedError as error:
        return f"the installed FederatedTrainer refuses it: {error}"
    return None


def take_part(turns: Turns, work: Work, side: Contestant, rounds: int) -> None:
    """Trains by turns."""
    callbacks = [*METHODS[side.method](), Clock(turns)]
    if side.method == "fedga":
        callbacks.append(ExcludeExchange(turns))
    trainer = make_trainer(side, callbacks, max_rounds=rounds, clients_per_round=work.per_round)
    trainer.fit(make_model(work), make_datamodule(work, work.data()))
