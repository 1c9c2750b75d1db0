"""The command that arranges runs at Weights & Biases."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab import dashboard_command as command
from tests.parts import Classifier, federated_data, federated_trainer


@pytest.fixture
def runs(tmp_path: Path) -> str:
    trainer = federated_trainer(tmp_path / "runs", logger=[], enable_checkpointing=True)
    trainer.fit(Classifier(), federated_data())
    return str(tmp_path / "runs")


class Saved:
    """Stands in for what the library saves."""

    def __init__(self, what: str, error: Exception | None = None) -> None:
        self.what, self.error = what, error

    def save(self) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(url=f"https://wandb.ai/{self.what}")


def _stand_in(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "logged_in", lambda: True)
    for name in ("workspace", "report"):
        monkeypatch.setattr(
            command, f"build_{name}", lambda *a, name=name: (asked.append((name, *a)), Saved(name, error))[1]
        )
    return asked


def test_both_are_built_of_the_columns_of_the_runs(runs: str, monkeypatch: Any, capsys: Any) -> None:
    asked = _stand_in(monkeypatch)
    assert command.main([runs, "--entity", "team", "--project", "mine"]) == 0
    assert [(name, entity, project) for name, entity, project, *_ in asked] == [
        ("workspace", "team", "mine"), ("report", "team", "mine")
    ]  # fmt: skip
    assert {"train/loss", "val/loss"} <= asked[0][3]
    assert asked[1][4] == ["FedAvg"]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "workspace: https://wandb.ai/workspace", "report: https://wandb.ai/report"
    ]  # fmt: skip


def test_mistakes_are_a_sentence(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "logged_in", lambda: False)
    with pytest.raises(FederatedError, match=r"Expected a login .* `wandb login`"):
        command.main([runs])
    _stand_in(monkeypatch, RuntimeError("no such\nproject"))
    with pytest.raises(FederatedError, match="says: no such project; see to"):
        command.main([runs, "--entity", "team"])
    with pytest.raises(FederatedError, match=r"Expected `lightning-fed dashboard` with options"):
        command.main(["--nothing"])
