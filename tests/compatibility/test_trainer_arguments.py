"""Every argument of Lightning's Trainer is ours, an alias of ours, or answered by one sentence."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos import boring_classes

from lightning_fed import FederatedTrainer
from lightning_fed.cli import main
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.options import ALIASES, FOREIGN, INSTEAD, WITHOUT_EFFECT
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


@pytest.fixture
def printed(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file with what Lightning's own command line prints by --print_config."""
    monkeypatch.chdir(tmp_path)
    parts = [
        "--model",
        f"{boring_classes.__name__}.BoringModel",
        "--data",
        f"{boring_classes.__name__}.BoringDataModule",
    ]

    def write(command: str) -> Path:
        with pytest.raises(SystemExit):
            LightningCLI(args=[command, *parts, "--print_config"])
        file = tmp_path / f"{command}.yaml"
        file.write_text(capsys.readouterr().out)
        return file

    return write


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_file_that_lightnings_command_line_printed(printed: Any, tmp_path, command: str) -> None:
    file = printed(command)
    text = file.read_text()
    assert "limit_val_batches: null" in text
    assert ("weights_only: null" in text) == ("weights_only" in signature(Trainer.fit).parameters)
    main([command, "--config", str(file), "--trainer.logger", "false", "--trainer.max_epochs", "1"])
    assert (tmp_path / "runs").is_dir() == (command == "fit")


def test_all_that_is_not_lightnings_default_is_named_at_once(printed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file, wrong = printed("fit"), {"max_steps: -1": "max_steps: 9", "profiler: null": "profiler: simple"}
    for given, other in wrong.items():
        file.write_text(file.read_text().replace(given, other))
    words = [f"--trainer.{name}" for name in ("max_steps=9", "profiler=simple")]
    for given in (["--config", str(file)], words):
        with pytest.raises(SystemExit):
            main(["fit", *given])
        said = capsys.readouterr().err.splitlines()[-1]
        assert "`--trainer.max_steps` not to be set in a federated run, got 9: use `max_rounds` for" in said
        assert "; `--trainer.profiler` not to be set in a federated run, got 'simple': it times hooks" in said
    with pytest.raises(FederatedError, match=r"max_steps.* got 9: .*; `--trainer.profiler`.*got 'simple': "):
        FederatedTrainer(max_steps=9, profiler="simple")


def test_none_is_lightnings_default_in_python_too(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = {name: parameter.default for name, parameter in THEIRS.items()}
    with caplog.at_level("INFO"):
        trainer = FederatedTrainer(**{**theirs, "default_root_dir": str(tmp_path)})
    assert "changes nothing here" not in caplog.text
    own = vars(FederatedTrainer(default_root_dir=str(tmp_path)).options)
    assert {name: value for name, value in vars(trainer.options).items() if own[name] != value} == {}
    with pytest.raises(FederatedError, match="clients_per_round` to be a count .* got None"):
        FederatedTrainer(clients_per_round=None)


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
