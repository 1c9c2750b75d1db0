"""The bars: shown on a terminal alone, with the newest metrics, and closed before the last message."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.models import ImageClassifier, LogisticRegression


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_quiet_without_a_terminal_or_when_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Rounds" not in _fit(tmp_path, io.StringIO(), monkeypatch, [])
    assert "Rounds" not in _fit(tmp_path, Terminal(), monkeypatch, [], enable_progress_bar=False)
