"""Ctrl-C and SIGTERM at any moment: what is reported, what is saved, and what is left alone."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.trainer.bookkeeping import graceful_stop
from tests.parts import Classifier, federated_data, federated_trainer, points


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_an_interrupted_evaluation_returns_nothing(tmp_path, call):
    def interrupted(batch: Any, batch_idx: int) -> None:
        raise KeyboardInterrupt

    module, trainer = Classifier(), federated_trainer(tmp_path)
    setattr(module, f"{'validation' if call == 'validate' else call}_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, call)(module, federated_data(test_dataset=points(8)))
    assert trainer.state.status == "interrupted"


class Signals(FederatedCallback):
    """Sends signals the first time that a hook is called in a round."""

    def __init__(self, hook: str, round: int, times: int = 1) -> None:
        self.round, self.left = round, times
        setattr(self, hook, self._send)

    def _send(self, trainer: FederatedTrainer, *args: Any) -> None:
        while trainer.round == self.round and self.left:
            self.left -= 1
            signal.raise_signal(signal.SIGINT)


def saved_round(folder: Path) -> int:
    (path,) = folder.rglob("last.ckpt")
    return int(torch.load(path, weights_only=True)["epoch"])


def trained(folder: Path, *callbacks: Any, **options: Any) -> FederatedTrainer:
    options = {"logger": [], "enable_checkpointing": True, "max_rounds": 3, **options}
    trainer = federated_trainer(folder, *callbacks, **options)
    trainer.fit(Classifier(), federated_data(8, 8))
    return trainer


def test_a_second_ctrl_c_in_the_last_round_reports_the_last_finished_one(tmp_path, capsys):
    trainer = trained(tmp_path, Signals("on_client_start", round=3, times=2))
    assert trainer.interrupted == signal.SIGINT
    assert "after round 2;" in trainer.stop_message
    assert capsys.readouterr().err.strip().endswith(trainer.stop_message)
    assert saved_round(tmp_path) == 2


def test_a_first_ctrl_c_in_the_last_round_lets_the_run_end(tmp_path):
    trainer = trained(tmp_path, Signals("on_client_start", round=3))
    assert (trainer.interrupted, trainer.stop_message) == (None, "")
    assert saved_round(tmp_path) == 3


class SignalsAfterSaving(FederatedCheckpoint):
    """Sends a signal when what is due after a round has been saved."""

    def save(self, trainer: FederatedTrainer, final: bool) -> None:
        super().save(trainer, final)
        if trainer.round == 3 and not final:
            signal.raise_signal(signal.SIGTERM)


class SignalsWhileLogging(Logger):
    name = version = "none"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)


HOOKS = ["on_train_epoch_start", "on_client_start", "on_client_end", "on_round_end", "on_train_epoch_end"]
WHEN: dict[str, Callable[[], dict[str, Any]]] = {
    hook: lambda hook=hook: {"callbacks": [FederatedCheckpoint(every_n_rounds=5), Signals(hook, 3)]} for hook in HOOKS
}
WHEN["while_logging"] = lambda: {
    "callbacks": [FederatedCheckpoint(every_n_rounds=5)], "logger": [SignalsWhileLogging()]
}  # fmt: skip
WHEN["after_saving"] = lambda: {"callbacks": [SignalsAfterSaving(every_n_rounds=5)]}


@pytest.mark.parametrize("when", WHEN)
def test_a_run_that_saves_rarely_saves_the_round_that_it_stops_after(tmp_path, when):
    options = WHEN[when]()
    trainer = trained(tmp_path, *options.pop("callbacks"), max_rounds=9, **options)
    assert trainer.interrupted is not None
    assert saved_round(tmp_path) == trainer.finished_round == 3
    assert f"after round {trainer.finished_round};" in trainer.stop_message


def test_a_stop_asked_for_by_a_callback_saves_that_round(tmp_path):
    class Stops(FederatedCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.round == 3

    trained(tmp_path, FederatedCheckpoint(every_n_rounds=5), Stops(), max_rounds=9)
    assert saved_round(tmp_path) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_leaves_the_signal_to_the_trainer(capfd):
    with graceful_stop() as request:
        child = os.fork()
        if child == 0:
            try:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.raise_signal(number)
            finally:
                os._exit(0 if request.signum is None else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert capfd.readouterr().err == ""
        signal.raise_signal(signal.SIGINT)
    assert request.signum == signal.SIGINT
    assert "Stopping after this round" in capfd.readouterr().err
