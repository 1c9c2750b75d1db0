"""The bars: shown on a terminal and in a notebook, with the newest metrics, and closed before the last message."""

import io
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.models import ImageClassifier, LogisticRegression


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    """Stderr of a kernel, which is known by the module of its class."""

    __module__ = "ipykernel.iostream"


class Widget:
    """A bar in the place of one that tqdm chooses for a notebook."""

    made: ClassVar[list[str]] = []

    def __init__(self, desc: str, **options: Any) -> None:
        self.desc, self.shown, self.count = desc, {}, 0
        self.made.append(desc)

    def set_postfix(self, shown: dict[str, str], refresh: bool) -> None:
        self.shown = shown

    def reset(self, total: int) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.made.append(f"{self.desc} {self.count} {', '.join(self.shown)}".strip())


def _fit(tmp_path: Path, stream: Any, monkeypatch: pytest.MonkeyPatch, said: list[str], **options: Any) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("lightning_fed.trainer.bookkeeping.rank_zero_info", lambda text: said.append(stream.getvalue()))
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=3, clients_per_round=2, logger=[], default_root_dir=str(tmp_path), **options
    )
    x = torch.randn(40, 4)
    data = FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=5)
    trainer.fit(ImageClassifier(LogisticRegression(4, 2), num_classes=2), data)
    return str(stream.getvalue())


def test_a_terminal_shows_rounds_clients_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    shown = _fit(tmp_path, Terminal(), monkeypatch, said)
    assert "Rounds: 100%" in shown
    assert "3/3" in shown
    assert "Clients:" in shown
    assert "train/loss=" in shown
    assert said == [shown], "the bars are closed before the message with the run's folder"


class Diverges(LightningModule):
    """Asks for no metric in the bar; client 1 diverges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train/loss", 0.5)
        return loss * torch.nan if self.trainer.client.id == 1 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 0.25)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Client 1 diverged")
def test_clients_left_out_are_counted_and_a_metric_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=3, max_diverged=0.5, logger=[], default_root_dir=str(tmp_path)
    )
    x = torch.randn(40, 4)
    samples = TensorDataset(x, (x.sum(1) > 0).long())
    trainer.fit(Diverges(), FederatedDataModule(samples, IID(), num_clients=4, batch_size=5, val_dataset=samples))
    assert ", train/loss=0.5, val/acc=0.25, clients left out=3]" in stream.getvalue()


def test_quiet_when_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (Terminal(), io.StringIO()):
        assert "ound" not in _fit(tmp_path, stream, monkeypatch, [], enable_progress_bar=False)


class Clock:
    """Tells each time a number of seconds more."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now


@pytest.mark.parametrize(("tick", "rounds"), [(30.0, "123"), (6.0, "13"), (1.0, "13")])
def test_a_log_file_has_lines_at_a_sensible_pace(
    tick: float, rounds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.callbacks.progress.time", Clock(tick))
    lines = _fit(tmp_path, io.StringIO(), monkeypatch, []).splitlines()
    found = [re.fullmatch(r"Round (\d) of 3, train/loss 0\.\d+; (\d+) s a round, (\S+) left", line) for line in lines]
    said = [match.groups() for match in found if match is not None]
    assert "".join(number for number, _, _ in said) == rounds
    assert {pace for _, pace, _ in said} == {f"{tick:.0f}"}
    assert [left for _, _, left in said][:: len(said) - 1] == [
        f"00:{2 * tick:02.0f}" if tick < 30 else "01:00",
        "00:00",
    ]


class Regression(Diverges):
    """Logs metrics under names of its own, none of them for the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val/mae": 0.25, "val/r2": 0.75})


@pytest.mark.parametrize(
    ("watched", "words"), [(None, "val/mae 0.25"), ("val/r2", "val/r2 0.75")], ids=["nothing watched", "r2 watched"]
)
def test_a_log_file_has_the_metrics_of_any_module(
    watched: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    callbacks = [] if watched is None else [EarlyStopping(watched, patience=1)]
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=5, logger=[], default_root_dir=str(tmp_path), callbacks=callbacks
    )
    samples = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    with caplog.at_level("INFO"):
        trainer.fit(Regression(), FederatedDataModule(samples, IID(), num_clients=4, val_dataset=samples))
    said = rf"train/loss \S+, {words}"
    assert re.match(rf"Round 1 of 5, {said}; ", stream.getvalue())
    assert any(re.match(rf"(5|2 of 5) rounds.*: {said}$", message) for message in caplog.messages)


class Stops(Callback):
    """Ends the run after a round, by itself or as a callback with a monitor."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.round == 2


class StopsItself(ImageClassifier):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.trainer.round == 2


@pytest.mark.parametrize(
    ("callbacks", "module", "words"),
    [
        ([EarlyStopping("train/loss", patience=1, min_delta=10)], ImageClassifier, "EarlyStopping on train/loss"),
        ([Stops()], ImageClassifier, "Stops"),
        ([], StopsItself, "StopsItself"),
    ],
)
def test_the_last_line_says_what_ended_the_run_early(
    callbacks: list[Callback], module: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fed.trainer.bookkeeping.rank_zero_info", said.append)
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=5, logger=[], default_root_dir=str(tmp_path), callbacks=callbacks
    )
    x = torch.randn(40, 4)
    data = FederatedDataModule(TensorDataset(x, (x.sum(1) > 0).long()), IID(), num_clients=4, batch_size=5)
    trainer.fit(module(LogisticRegression(4, 2), num_classes=2), data)
    assert said[0].startswith(f"2 of 5 rounds, ended by {words}, in "), said
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if callback not in callbacks]
    trainer.fit(ImageClassifier(LogisticRegression(4, 2), num_classes=2), data)
    assert said[1].startswith("5 rounds in "), "the next run of the trainer was ended by nothing"


def test_a_notebook_without_widgets_has_one_line_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.callbacks.progress.find_spec", lambda name: None)
    shown = _fit(tmp_path, Notebook(), monkeypatch, [])
    assert "Rounds: 100%" in shown
    assert "train/loss=" in shown
    assert "Clients" not in shown
    assert "\x1b" not in shown, "a cell cannot move the cursor"


def test_a_notebook_with_widgets_has_the_bars_that_tqdm_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.callbacks.progress.find_spec", lambda name: object())
    monkeypatch.setattr("tqdm.auto.tqdm", Widget)
    monkeypatch.setattr(Widget, "made", [])
    monkeypatch.setattr("lightning_fed.engines.choice.rank_zero_info", Widget.made.append)
    assert _fit(tmp_path, Notebook(), monkeypatch, []) == ""
    engine, *bars = Widget.made
    assert engine.startswith("Engine: "), "the bars are below what is said before the first round"
    assert bars == ["Rounds", "Clients", "Clients 2", "Rounds 3 train/loss"]


def test_a_second_fit_says_what_is_new_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = TensorDataset(torch.randn(40, 1, 4, 4), torch.arange(40) % 2)

    def said(hidden: int) -> list[str]:
        caplog.clear()
        layers = torch.nn.Sequential(torch.nn.Conv2d(1, hidden, 3), torch.nn.Flatten(), torch.nn.Linear(4 * hidden, 2))
        trainer = FederatedTrainer(accelerator="cpu", max_rounds=1, logger=[], default_root_dir=str(tmp_path))
        with caplog.at_level("INFO"):
            trainer.fit(ImageClassifier(layers, num_classes=2), DataLoader(samples, batch_size=5))
        return [record.getMessage().strip().partition(" ")[0] for record in caplog.records]

    first, second, wider = said(2), said(2), said(3)
    assert second == ["1"], "where the run lies"
    assert sorted(first) == sorted(["1", "|", "Engine:", "Memory", "The"])
    assert wider == ["|", "1"], "other layers are shown"
