"""Logs how good the global model is for each client, and for those of a round and the others."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.callbacks.diagnostics.round_table import csv_text, expect_alone
from lightning_fed.core.files import WriteError, write_atomically
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.core.updates import Cohort
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.errors import FederatedError, expect_choice, expect_count
from lightning_fed.functional.clients import summarize_clients
from lightning_fed.runs.statistics import lower_is_better

__all__ = ["ClientEvaluation"]

_Values = dict[int, dict[str, float]]


class EvaluatingTrainer(TrainerLike, Protocol):
    """What the evaluation of clients asks of the trainer beyond what every hook may."""

    datamodule: Any
    fabric: Any
    run: Any
    source: Any

    def evaluate_clients(self, source: Any, clients: Sequence[int]) -> _Values:
        """Returns what ``validation_step`` logs of the live model on each client's samples, by client and name."""


class ClientEvaluation(FederatedCallback):
    """Evaluates the global model on each client's own samples, every k rounds and in the last one.

    Of each metric that ``validation_step`` logs, such as ``val/acc``, it logs ``per_client/acc``, the mean over
    clients, ``per_client/acc_weighted``, that weighted by samples, ``per_client/acc_worst``, the mean of the worst
    tenth of the clients, and ``per_client/acc_std``, the standard deviation over clients. The values of each client are
    in ``clients.csv`` in the run's folder, those of the last evaluation. Training is the same with and without it, bit
    for bit.

    With ``participation`` it also logs ``per_client/acc_in`` and ``per_client/acc_out``, the means over the clients
    that train in the round and over the others, and ``per_client/acc_in_before`` and ``per_client/acc_out_before``, the
    same of the model that the round starts from. Tenison et al., "Gradient Masked Averaging for Federated Learning",
    TMLR 2023, tables 4 and 5.

    Args:
        every_n_rounds: Rounds between evaluations, at least 1.
        data: The samples: those that a client trains on (``train``), or those held out of them (``val``, ``test``).
        num_clients: How many clients are evaluated, drawn once by the run's seed; all if there are no more, or if not
            given.
        participation: Whether to tell the clients of the round from the others, at twice the cost.
    """

    def __init__(
        self,
        every_n_rounds: int = 10,
        data: Literal["train", "val", "test"] = "train",
        num_clients: int | None = None,
        participation: bool = False,
    ) -> None:
        name = type(self).__name__
        expect_count("every_n_rounds", every_n_rounds, of=name)
        expect_choice("data", data, ("train", "val", "test"), of=name)
        if num_clients is not None:
            expect_count("num_clients", num_clients, of=name)
        self.every_n_rounds, self.data, self.num_clients = every_n_rounds, data, num_clients
        self.participation = participation

    def setup(self, trainer: EvaluatingTrainer, pl_module: Any, stage: str) -> None:  # type: ignore[override]  # our trainer stands in
        """Finds the samples and draws the clients; refuses a second callback that would log under the same names."""
        if stage != "fit":
            return
        expect_alone(ClientEvaluation, trainer.callbacks)
        self._source = self._find_source(trainer)
        clients = np.flatnonzero(np.asarray(self._source.sizes))
        if self.num_clients is not None and self.num_clients < len(clients):
            rng = numpy_generator_for(trainer.seed, Purpose.SAMPLE)  # rounds draw theirs from 1 on
            clients = np.sort(rng.choice(clients, self.num_clients, replace=False))
        self._clients: list[int] = clients.tolist()
        data = trainer.datamodule if isinstance(trainer.datamodule, FederatedDataModule) else None
        labels = None if data is None else data.labels
        self._classes = None if data is None or labels is None else data.split.classes_held(labels)
        self._round, self._warned = 0, False
        self._before: dict[str, float] = {}

    def _find_source(self, trainer: EvaluatingTrainer) -> Any:
        if self.data == "train":
            return getattr(trainer.source, "unaugmented", trainer.source)
        if not isinstance(trainer.datamodule, FederatedDataModule):
            raise FederatedError(
                f"Expected a FederatedDataModule for `data` {self.data} of {type(self).__name__}, got "
                f"{type(trainer.datamodule).__name__}: wrap it as `source`, or set `data` to train."
            )
        return trainer.datamodule.held_out_source(self.data).to(trainer.fabric.device)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lets go of the samples."""
        self._source = None

    def on_round_start(self, trainer: EvaluatingTrainer, pl_module: LightningModule, cohort: Cohort) -> None:  # type: ignore[override]  # our trainer stands in
        """Evaluates the model that the round starts from, where its clients are told from the others."""
        if self.participation and self._is_due(trainer):
            self._cohort = {client.id for client in cohort.clients}
            self._before = self._halves(self._measure(trainer), "_before")

    def on_train_epoch_end(self, trainer: EvaluatingTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Evaluates the model that the round ends with."""
        if not self._is_due(trainer):
            return
        values = self._measure(trainer)
        halves = {**self._before, **self._halves(values, "")} if self.participation else {}
        pl_module.log_dict({**self._figures(values), **halves})
        self._write(trainer, values)

    def on_train_end(self, trainer: EvaluatingTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Writes the table of the final model where a callback has ended the run in a round that was not due."""
        if trainer.should_stop and trainer.round != self._round:
            self._write(trainer, self._measure(trainer))

    def _is_due(self, trainer: EvaluatingTrainer) -> bool:
        return trainer.round % self.every_n_rounds == 0 or trainer.round == trainer.max_rounds

    def _measure(self, trainer: EvaluatingTrainer) -> _Values:
        """Returns the metrics of each client, by the name that the module logs without its stage."""
        self._round = trainer.round
        found = trainer.evaluate_clients(self._source, self._clients)
        values = {
            client: {name.removeprefix("val/").removeprefix("val_"): value for name, value in each.items()}
            for client, each in found.items()
        }
        if not any(values.values()):
            raise FederatedError(
                f"Expected `validation_step` to log metrics for {type(self).__name__}, got none: log them there, or "
                "leave the callback out."
            )
        return values

    def _figures(self, values: _Values) -> dict[str, float]:
        """Returns the summary of each metric over the clients that have it."""
        logged = {}
        for name in _names(values):
            having = [client for client in values if name in values[client]]
            summary = summarize_clients(
                torch.tensor([values[client][name] for client in having], dtype=torch.float64),
                torch.tensor([int(self._source.sizes[client]) for client in having]),
                lower_is_better(name),
            )
            for figure, value in summary._asdict().items():
                logged[f"per_client/{name}" + (f"_{figure}" if figure != "mean" else "")] = value.item()
        return logged

    def _halves(self, values: _Values, suffix: str) -> dict[str, float]:
        """Returns the mean of each metric over the clients of the round and over the others, where there are any."""
        logged = {}
        for side, own in (("in", values.keys() & self._cohort), ("out", values.keys() - self._cohort)):
            for name in _names(values):
                if found := [values[client][name] for client in sorted(own) if name in values[client]]:
                    logged[f"per_client/{name}_{side}{suffix}"] = float(np.mean(found))
        return logged

    def _write(self, trainer: EvaluatingTrainer, values: _Values) -> None:
        """Writes ``clients.csv``; where the system refuses it, the run goes on, which is said once."""
        if not trainer.is_global_zero or trainer.run is None:
            return
        names = _names(values)
        rows: list[list[Any]] = [["round", "client", "samples", "classes", *names]]
        for client, each in values.items():
            classes = "" if self._classes is None else int(self._classes[client])
            cells = [each.get(name, "") for name in names]
            rows.append([trainer.round, client, int(self._source.sizes[client]), classes, *cells])
        try:
            write_atomically(trainer.run.path / "clients.csv", csv_text(rows))
        except WriteError as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"The run goes on without its table of clients: {error}")


def _names(values: _Values) -> list[str]:
    return list(dict.fromkeys(name for each in values.values() for name in each))
