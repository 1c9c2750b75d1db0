"""Logs how good the global model, and those of the clients, are for each client, of a round or not."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.core import is_news
from lightning_fed.core.files import WriteError, csv_text, write_atomically
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.core.updates import Cohort, Update
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.split import count_labels
from lightning_fed.errors import FederatedError, expect_choice, expect_count
from lightning_fed.functional.clients import summarize_clients
from lightning_fed.runs.statistics import Goal, known_goal

__all__ = ["ClientEvaluation"]

_Model: TypeAlias = Literal["global", "trained", "tuned", "own"]
_Values: TypeAlias = dict[int, dict[str, float]]


class ClientEvaluation(FederatedCallback):
    """Evaluates models on each client's own samples, every k rounds and in the last one.

    They are one or more of these:

    - ``global``: w, with which the round ends
    - ``trained``: w_i, after the client's local training in the round; only clients that enter it have one
    - ``tuned``: w after local training of the client, without the run's method, on its training samples
    - ``own``: the client's own model, where the client algorithm gives it one; a client without a record has w

    Of each metric that ``validation_step`` logs, such as ``val/acc``, it logs ``per_client/acc``, the mean over
    clients, ``per_client/acc_weighted``, that weighted by samples, ``per_client/acc_worst``, the mean of the worst
    tenth of the clients, where the metric's object or name says which are worse, and ``per_client/acc_std``, the
    standard deviation over clients. Those of other models than the global one have its word between:
    ``per_client/tuned/acc``. The values of each client are in ``clients.csv`` in the run's folder, those of the last
    evaluation: a column for each metric, ``tuned/acc`` if there are several models. Where data hold out unseen clients,
    ``unseen.csv`` has the metrics of the global model on all samples of each of them.
    Training is the same with and without it, bit for bit.

    With ``participation`` it also logs ``per_client/acc_in`` and ``per_client/acc_out``, the means over the clients
    that train in the round and over the others, and ``per_client/acc_in_before`` and ``per_client/acc_out_before``, the
    same of the model that the round starts from; ``trained`` has none of them. Tenison et al., "Gradient Masked
    Averaging for Federated Learning", TMLR 2023, tables 4 and 5.

    Args:
        every_n_rounds: Rounds between evaluations, at least 1.
        data: The samples: those that a client trains on (``train``), or those held out of them, else those that the
            data's own set has of its users (``val``, ``test``).
        num_clients: How many clients are evaluated, drawn once by the run's seed; all if there are no more, or if not
            given. ``trained`` is over the clients of the round, whatever this says.
        participation: Whether to tell the clients of the round from the others, at twice the cost.
        models: What is evaluated.
        tune_steps: Local steps of ``tuned``.
        tune_epochs: Passes of ``tuned`` over the client's training samples, in place of steps; 1 by default.
    """

    def __init__(
        self,
        every_n_rounds: int = 10,
        data: Literal["train", "val", "test"] = "train",
        num_clients: int | None = None,
        participation: bool = False,
        models: Sequence[_Model] = ("global",),
        tune_steps: int | None = None,
        tune_epochs: int | None = None,
    ) -> None:
        name = type(self).__name__
        self.every_n_rounds = expect_count("every_n_rounds", every_n_rounds, of=name)
        self.data = expect_choice("data", data, ("train", "val", "test"), of=name)
        self.num_clients = expect_count("num_clients", num_clients, of=name, optional=True)
        self.participation = participation
        self._take_models(models, tune_steps, tune_epochs)

    def _take_models(self, models: Sequence[_Model], steps: int | None, epochs: int | None) -> None:
        """Checks what is evaluated, and how long ``tuned`` trains."""
        name = type(self).__name__
        if isinstance(models, str) or not models or len({*models}) < len(models):
            raise FederatedError(f"Expected `models` of {name} to be a list of different models, got {models!r}.")
        for model in models:
            expect_choice("models", model, get_args(_Model), of=name)
        given = {"tune_steps": steps, "tune_epochs": epochs}
        for option, value in given.items():
            if value is not None:
                expect_count(option, value, of=name)
                if "tuned" not in models:
                    raise FederatedError(
                        f"Expected `{option}` of {name} only with tuned in `models`, got {value}: add tuned, or leave "
                        f"`{option}` out."
                    )
        if steps is not None and epochs is not None:
            raise FederatedError(f"Expected `tune_steps` or `tune_epochs` of {name}, got both: leave one of them out.")
        self.models, self.tune_steps = tuple(models), steps
        self.tune_epochs = 1 if steps is None and epochs is None else epochs

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._expect_own(trainer)
        self._source = self._find_source(trainer)
        self._clients = self._draw(trainer, self._source)
        data = trainer.datamodule if isinstance(trainer.datamodule, FederatedDataModule) else None
        self._names = None if data is None else data._client_data().names
        self._unseen: Any = None
        if data is not None and len(data.division.unseen):
            self._unseen = data.held_out_source("unseen").to(trainer.fabric.device)
        labels, num_classes = (None, None) if data is None else (data.labels, data.num_classes)
        self._classes = None
        if data is not None and labels is not None and num_classes is not None:
            self._classes = np.diff(count_labels(data.split, labels, num_classes).indptr)
        self._round, self._warned = 0, False
        self._before: dict[str, float] = {}
        self._trained: _Values = {}

    def _draw(self, trainer: Any, source: Any) -> list[int]:
        """Returns the clients of a source that are evaluated, of those that have samples."""
        clients = np.flatnonzero(np.asarray(source.sizes))
        if self.num_clients is not None and self.num_clients < len(clients):
            rng = numpy_generator_for(trainer.seed, Purpose.SAMPLE)  # rounds draw theirs from 1 on
            clients = np.sort(rng.choice(clients, self.num_clients, replace=False))
        found: list[int] = clients.tolist()
        return found

    def _expect_own(self, trainer: Any) -> None:
        """Refuses ``own`` where not exactly one algorithm of the run gives clients models of their own."""
        having = [type(cb).__name__ for cb in trainer.callbacks if getattr(cb, "has_own_model", False)]
        if "own" in self.models and len(having) != 1:
            raise FederatedError(
                f"Expected one client algorithm with a model of each client's own for `models` own of "
                f"{type(self).__name__}, got {' and '.join(having) or 'none'}: leave own out of `models`, or change "
                "`--client`."
            )

    def _find_source(self, trainer: Any) -> Any:
        if self.data == "train":
            return getattr(trainer.source, "unaugmented", trainer.source)
        if not isinstance(trainer.datamodule, FederatedDataModule):
            raise FederatedError(
                f"Expected a FederatedDataModule for `data` {self.data} of {type(self).__name__}, got "
                f"{type(trainer.datamodule).__name__}: wrap it as `source`, or set `data` to train."
            )
        return trainer.datamodule.held_out_source(self.data).to(trainer.fabric.device)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for name in ("_source", "_unseen"):
            getattr(vars(self).pop(name, None), "close", lambda: None)()

    def on_round_start(self, trainer: Any, pl_module: LightningModule, cohort: Cohort) -> None:
        self._trained = {}
        if self.participation and self._is_due(trainer):
            self._cohort = {client.id for client in cohort.clients}
            self._before = self._halves(self._measure(trainer), "_before")

    def on_client_entered(self, trainer: Any, pl_module: LightningModule, update: Update) -> None:
        """Evaluates the model that a client has trained, which is the live one."""
        client = update.client.id
        if "trained" in self.models and self._is_due(trainer) and self._source.sizes[client]:
            self._trained |= self._named(trainer.evaluate_clients(self._source, [client]))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not self._is_due(trainer):
            return
        values = self._measure(trainer)
        halves = {**self._before, **self._halves(values, "")} if self.participation else {}
        if "trained" in self.models:
            everyone = trainer.processes.exchange(self._trained, "trained")
            values["trained"] = dict(sorted(pair for part in everyone for pair in part.items()))
        figures: dict[str, float] = {}
        for model in self.models:
            figures |= self._figures(model, values[model], trainer.metrics.goals)
        pl_module.log_dict({**figures, **self._missing(values), **halves})
        self._write(trainer, values)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Writes the table of the final model where a callback has ended the run in a round that was not due."""
        if trainer.should_stop and trainer.round != self._round:
            self._write(trainer, self._measure(trainer))

    def _is_due(self, trainer: Any) -> bool:
        return bool(trainer.round % self.every_n_rounds == 0 or trainer.round == trainer.max_rounds)

    def _measure(self, trainer: Any) -> dict[_Model, _Values]:
        """Returns the metrics of each client, by the model that is evaluated between two clients."""
        options: dict[_Model, tuple[Any, ...]] = {
            "global": (), "tuned": ("tuned", self.tune_steps, self.tune_epochs), "own": ("own",)
        }  # fmt: skip
        return {
            model: self._named(trainer.evaluate_clients(self._source, self._clients, *options[model]))
            for model in self.models
            if model != "trained"
        }

    def _named(self, found: _Values) -> _Values:
        """Calls metrics by the name that the module logs without its stage."""
        values = {client: {_bare(name): value for name, value in each.items()} for client, each in found.items()}
        if not any(values.values()):
            raise FederatedError(
                f"Expected `validation_step` to log metrics for {type(self).__name__}, got none: log them there, or "
                "leave the callback out."
            )
        return values

    def _figures(self, model: _Model, values: _Values, goals: dict[str, Goal]) -> dict[str, float]:
        """Returns the summary of each metric over the clients that have it, and adds its goal to those known."""
        logged, said = dict[str, float](), {_bare(name): goal for name, goal in goals.items()}
        for name in _names(values):
            having = _having(values, name)
            key, goal = f"per_client/{_of(model, name)}", known_goal(name, said.get(name))
            summary = summarize_clients(
                torch.tensor([values[client][name] for client in having], dtype=torch.float64),
                torch.tensor([int(self._source.sizes[client]) for client in having]),
                goal == "min",
            )._asdict()
            if goal is not None:
                goals |= dict.fromkeys((key, f"{key}_weighted", f"{key}_worst"), goal)
            elif summary.pop("worst") is not None and is_news("worst clients", key):
                rank_zero_warn(
                    f"`{key}_worst` is left out: whether less or more of {name!r} is better is not known by its name; "
                    "log it as a Metric that says `higher_is_better`."
                )
            logged |= {key + f"_{figure}" * (figure != "mean"): value.item() for figure, value in summary.items()}
        return logged

    def _missing(self, measured: dict[_Model, _Values]) -> dict[str, float]:
        """Counts the clients without a value of each metric, where there are any, and says once that there are."""
        counts = {
            f"per_client/{_of(model, name)}_missing": sum(np.isnan(each.get(name, np.nan)) for each in values.values())
            for model, values in measured.items()
            for name in _names(values)
        }
        logged = {name: float(count) for name, count in counts.items() if count}
        if logged and is_news("missing", set(logged)):
            rank_zero_warn(
                f"Some clients have no value of a metric ({', '.join(f'{k}: {n:.0f}' for k, n in logged.items())}): it "
                "is NaN in clients.csv, and means and spread are over the other clients."
            )
        return logged

    def _halves(self, measured: dict[_Model, _Values], suffix: str) -> dict[str, float]:
        """Returns the mean of each metric over the clients of the round and over the others, where there are any."""
        logged = {}
        for model, values in measured.items():
            for side, own in (("in", values.keys() & self._cohort), ("out", values.keys() - self._cohort)):
                for name in _names(values):
                    if having := _having({client: values[client] for client in sorted(own)}, name):
                        mean = np.mean([values[client][name] for client in having])
                        logged[f"per_client/{_of(model, name)}_{side}{suffix}"] = float(mean)
        return logged

    def _write(self, trainer: Any, measured: dict[_Model, _Values]) -> None:
        """Writes ``clients.csv``, and ``unseen.csv`` of the global model if there are unseen clients."""
        self._round = trainer.round
        unseen: _Values = {}
        if self._unseen is not None:
            unseen = self._named(trainer.evaluate_clients(self._unseen, self._draw(trainer, self._unseen)))
        if not trainer.is_global_zero or trainer.run is None:
            return
        found = [(model, name) for model in self.models for name in _names(measured.get(model, {}))]
        heads = [name if self.models == ("global",) else f"{model}/{name}" for model, name in found]
        rows = []
        for client in sorted({client for values in measured.values() for client in values}):
            classes = "" if self._classes is None else int(self._classes[client])
            cells = [measured[model].get(client, {}).get(name, "") for model, name in found]
            rows.append([*self._about(client, self._source, 0), classes, *cells])
        self._keep(trainer, "clients.csv", ["samples", "classes", *heads], rows)
        heads, rows = _names(unseen), []
        for client, values in unseen.items():
            about = self._about(client, self._unseen, len(self._source.sizes))
            rows.append([*about, *(values.get(name, "") for name in heads)])
        if rows:
            self._keep(trainer, "unseen.csv", ["samples", *heads], rows)

    def _about(self, client: int, source: Any, first: int) -> list[Any]:
        """Returns the first cells of a client's row: its number, its name if it has one, and its samples."""
        name = [self._names[first + client]] if self._names else []
        return [self._round, first + client, *name, int(source.sizes[client])]

    def _keep(self, trainer: Any, file: str, heads: list[str], rows: list[list[Any]]) -> None:
        """Writes a table of clients; where the system refuses it, the run goes on, which is said once."""
        head = ["round", "client", *(["name"] if self._names else []), *heads]
        try:
            write_atomically(trainer.run.path / file, csv_text([head, *rows]).encode())
        except WriteError as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"The run goes on without its table of clients: {error}")


def _bare(name: str) -> str:
    """Returns a name without the stage before it."""
    return name.removeprefix("val/").removeprefix("val_")


def _of(model: _Model, name: str) -> str:
    """Names a metric of a model: the global one has no word."""
    return name if model == "global" else f"{model}/{name}"


def _having(values: _Values, name: str) -> list[int]:
    """Returns the clients that have a value of a metric; where all are NaN, those."""
    named = [client for client in values if name in values[client]]
    return [client for client in named if not np.isnan(values[client][name])] or named


def _names(values: _Values) -> list[str]:
    return list(dict.fromkeys(name for each in values.values() for name in each))
