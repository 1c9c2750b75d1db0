"""Every argument of Lightning's Trainer is ours, an alias of ours, or answered by one sentence."""

from inspect import signature
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_fed import FederatedTrainer
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.lightning_arguments import ALIASES, FOREIGN, INSTEAD, WITHOUT_EFFECT
from tests.parts import Classifier, federated_data, federated_trainer

THEIRS = signature(Trainer).parameters
OURS = set(signature(FederatedTrainer).parameters) - {"lightning"}
OTHER: dict[str, Any] = {
    "min_epochs": 3, "max_steps": 100, "min_steps": 5, "limit_train_batches": 0.5, "overfit_batches": 1,
    "val_check_interval": 0.25, "profiler": "simple", "barebones": True, "plugins": ["x"],
    "reload_dataloaders_every_n_epochs": 1, "model_registry": "models",
}  # fmt: skip


def test_every_name_is_known_once() -> None:
    assert set(THEIRS) - OURS <= FOREIGN
    assert not OURS & FOREIGN
    assert {path.partition(".")[0] for path in ALIASES.values()} <= OURS
    assert len(ALIASES) + len(WITHOUT_EFFECT) + len(INSTEAD) == len(FOREIGN)


def test_what_lightning_does_by_default_is_taken(tmp_path) -> None:
    defaults = {name: THEIRS[name].default for name in FOREIGN & set(THEIRS)}
    trainer = federated_trainer(tmp_path, **{**defaults, "limit_train_batches": 1.0, "val_check_interval": 1.0})
    assert trainer.max_rounds == 1


def test_aliases(tmp_path) -> None:
    trainer = FederatedTrainer(max_epochs=7, check_val_every_n_epoch=2, default_root_dir=str(tmp_path))
    assert (trainer.max_rounds, trainer.check_val_every_n_rounds) == (trainer.max_epochs, 2) == (7, 2)
    with pytest.raises(FederatedError, match=r"`--trainer\.max_rounds` under one name, got 3 and 7"):
        FederatedTrainer(max_rounds=3, max_epochs=7)


@pytest.mark.parametrize("name", INSTEAD)
def test_what_has_no_meaning_is_refused_with_what_to_use(tmp_path, name: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--trainer\.{name}` not to be set in a federated run, got .*: \w+"):
        federated_trainer(tmp_path, **{name: OTHER[name]})


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_changes_nothing_is_taken_and_said(tmp_path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        federated_trainer(tmp_path, **{name: 5})
    assert f"`--trainer.{name}` changes nothing here: " in caplog.text


def test_a_misspelt_name() -> None:
    with pytest.raises(FederatedError, match=r"got `max_round`: did you mean `max_rounds`\?"):
        FederatedTrainer(max_round=3)


def test_help_shows_ours_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_fed.cli import main

    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = capsys.readouterr().out
    assert "--trainer.enable_model_summary" in shown
    assert not any(f"--trainer.{name}" in shown for name in (*FOREIGN, "lightning"))


def test_what_torch_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen = []

    class Asks(Classifier):
        def on_train_start(self) -> None:
            seen.append((torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()))

    federated_trainer(tmp_path, benchmark=True, detect_anomaly=True).fit(Asks(), federated_data())
    assert seen == [(True, True)]
    assert not torch.is_anomaly_enabled()
