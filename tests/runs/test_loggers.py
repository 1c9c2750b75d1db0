"""What a module sends to its logger by itself, beside the rows of rounds."""

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.core.files import WriteError
from lightning_fed.runs.loggers import RoundCSVLogger, RoundWandbLogger
from tests.parts import Classifier, federated_data, federated_trainer


class Experiment:
    """Stands in for a W&B run: what goes to an earlier step than the newest one is lost."""

    resumed = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.config = self.summary = {}
        self.step = 0

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        if (step is None or step >= self.step) and commit:
            self.rows.append(data)
        self.step = self.step + 1 if step is None else max(self.step, step)

    def finish(self, exit_code: int) -> None:
        pass


class LogsItself(Classifier):
    """Numbers its own rows by samples, say, which grow faster than rounds."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logger.log_metrics({"mine": 0.5}, step=10_000 * (1 + self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"mine": 1.5})


def rounds_of(trainer: FederatedTrainer) -> list[str]:
    assert trainer.run is not None
    with trainer.run.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert "mine" not in rows[0]
    return [row["round"] for row in rows]


def test_rounds_after_a_large_step_reach_wandb_and_own_rows_stay_out_of_the_table(tmp_path, monkeypatch):
    experiment = Experiment()
    monkeypatch.setattr(WandbLogger, "experiment", experiment)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = federated_trainer(tmp_path, logger=None, enable_checkpointing=True, max_rounds=3)
    trainer.fit(LogsItself(), federated_data(8, 8))
    assert [row["round"] for row in experiment.rows if "round" in row] == [0, 1, 2, 3]
    assert all("train/loss" in row for row in experiment.rows if row.get("round"))
    assert [row["mine"] for row in experiment.rows if "mine" in row] == [0.5, 0.5, 1.5] * 3
    assert rounds_of(trainer) == ["0", "1", "2", "3"]
    assert trainer.loggers != []
    assert not any(isinstance(logger, RoundWandbLogger) for logger in trainer.loggers), "a closed run takes no rows"


@pytest.mark.parametrize("failing", ["open", "define_metric", "log", "finish"])
def test_wandb_that_fails_is_one_warning_and_the_numbers_are_kept(tmp_path, monkeypatch, failing):
    class Broken(Experiment):
        pass

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("the server\nis unreachable")

    setattr(Broken, failing, refuse)
    opened = property(refuse) if failing == "open" else Broken()
    monkeypatch.setattr(WandbLogger, "experiment", opened)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = federated_trainer(tmp_path, logger=None, enable_checkpointing=True, max_rounds=2)
    with pytest.warns(UserWarning, match="W&B: the run goes on without it, as the server is unreachable; ") as caught:
        trainer.fit(LogsItself(), federated_data(8, 8))
    assert sum("W&B" in str(warning.message) for warning in caught) == 1
    assert rounds_of(trainer) == ["0", "1", "2"]
    assert (trainer.run.checkpoints / "last.ckpt").is_file()


def test_the_summary_has_best_values_means_of_the_last_rounds_and_the_table_of_clients(tmp_path, monkeypatch):
    class Evaluates(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("val/acc", [0.5, 0.9, 0.7][self.trainer.round - 1])
            self.log_dict({"val/rmse": float(self.trainer.round), "val/odd": float(self.trainer.round)})

    class Tabulates(FederatedCallback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            (trainer.run.path / "clients.csv").write_text("round,client,name,loss\n3,0,7,0.5\n3,1,b,\n")
            (trainer.run.path / "unseen.csv").write_text("round,client,loss\n3,2,0.25\n")

    experiment = Experiment()
    monkeypatch.setattr(WandbLogger, "experiment", experiment)
    monkeypatch.setattr("wandb.Table", lambda columns, data: (columns, data))
    trainer = federated_trainer(tmp_path, Tabulates(), logger=None, enable_checkpointing=True, max_rounds=3)
    trainer.fit(Evaluates(), federated_data(8, 8))
    logged = ("val/acc", "val/rmse", "val/odd")
    found = {name: value for name, value in experiment.summary.items() if name.startswith(logged)}
    assert found == pytest.approx({  # nobody knows which odd value is the best
        "val/acc.best": 0.9, "val/acc.last10": 0.7, "val/rmse.best": 1.0, "val/rmse.last10": 2.0, "val/odd.last10": 2.0
    })  # fmt: skip
    assert {
        "clients": (["round", "client", "name", "loss"], [[3.0, 0.0, "7", 0.5], [3.0, 1.0, "b", None]])
    } in experiment.rows
    assert {"unseen": (["round", "client", "loss"], [[3.0, 2.0, 0.25]])} in experiment.rows


@pytest.mark.parametrize("step", [None, 0, 10**9])
def test_own_rows_stay_out_of_the_table_where_it_is_the_only_logger(tmp_path, step):
    class Logs(Classifier):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"mine": 1.5}, step=step)

    trainer = federated_trainer(tmp_path, logger=[], enable_checkpointing=True, max_rounds=2)
    trainer.fit(Logs(), federated_data())
    assert rounds_of(trainer) == ["0", "1", "2"]


@pytest.mark.parametrize("call", ["log_hyperparams", "log_metrics", "save", "finalize"])
def test_a_logger_whose_disk_is_full_is_a_sentence_and_the_table_has_its_rows(tmp_path, monkeypatch, call):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    logger = CSVLogger(tmp_path / "theirs")
    monkeypatch.setattr(logger, call, refuse)
    trainer = federated_trainer(tmp_path, logger=[logger], enable_checkpointing=True, max_rounds=2)
    with pytest.raises(WriteError, match=r"theirs.*No space left.*`--trainer\.logger`"):
        trainer.fit(Classifier(), federated_data())
    if call == "log_metrics":
        assert rounds_of(trainer) == ["0"]


def test_a_run_without_loggers_has_none(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Asks(Classifier):
        def on_train_epoch_end(self) -> None:
            seen.append(self.logger)

    federated_trainer(tmp_path).fit(Asks(), federated_data())
    assert seen == [None]


def test_the_round_is_the_first_column(tmp_path: Path) -> None:
    table = RoundCSVLogger(tmp_path / "metrics.csv")
    for row in ({"acc": 1.0, "round": 0}, {"zeal": 2.0, "round": 1, "bias": 3.0}):
        table.log_round(row)
    assert table.path.read_text().splitlines() == ["round,acc,bias,zeal", "0,1.0,,", "1,,3.0,2.0"]


def test_a_removed_run_folder_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")  # of another run, below which it was
    table = RoundCSVLogger(tmp_path / "run" / "metrics.csv")
    with pytest.raises(WriteError):
        table.log_round({"round": 0})
    assert not table.path.parent.exists()
