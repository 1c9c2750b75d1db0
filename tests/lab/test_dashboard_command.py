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
    with pytest.raises(FederatedError, match="says: no such project; check"):
        command.main([runs, "--entity", "team"])
    with pytest.raises(FederatedError, match=r"Expected `lightning-fed dashboard` with options"):
        command.main(["--nothing"])


COLUMNS = ("round", "val/acc", "val/loss", "test/acc", "train/loss", "samples", "agreement/mean", "agreement/mean/a.b")


@pytest.fixture
def _library() -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install 'lightning_fed[dashboard]'")


@pytest.mark.usefixtures("_library")
def test_columns_are_in_sections_by_prefix() -> None:
    assert command.sections_of(COLUMNS) == {
        "test": ["test/acc"], "val": ["val/acc", "val/loss"], "train": ["train/loss"],
        "agreement": ["agreement/mean", "agreement/mean/a.b"], "others": ["samples"],
    }  # fmt: skip


@pytest.mark.usefixtures("_library")
def test_each_column_is_a_chart_over_rounds_with_a_line_for_each_group() -> None:
    spec = command.build_workspace("team", "lightning_fed", COLUMNS)._to_model().model_dump()["spec"]["section"]
    sections = spec["panel_bank_config"]["sections"]
    assert [(section["name"], section["is_open"]) for section in sections] == [
        ("test", True), ("val", True), ("train", False), ("agreement", False), ("others", False)
    ]  # fmt: skip
    for section, names in zip(sections, command.sections_of(COLUMNS).values(), strict=True):
        charts = [panel["config"] for panel in section["panels"]]
        assert [chart["metrics"] for chart in charts] == [[name] for name in names]
        assert {(chart["x_axis"], chart["aggregate"], chart["group_agg"]) for chart in charts} == {
            ("round", True, "mean")
        }
        assert {chart["group_area"] for chart in charts} == {"stddev"}
    (runs,) = spec["run_sets"]
    assert [key["name"] for key in runs["grouping"]] == ["group"]


@pytest.mark.usefixtures("_library")
def test_the_report_has_bars_of_best_values_and_a_grid_for_each_section() -> None:
    report: Any = command.build_report("team", "lightning_fed", COLUMNS, ["FedAvg", "FedAvg+SignAgreement"])
    grids = [block for block in report.blocks if type(block).__name__ == "PanelGrid"]
    assert {panel.metrics[0] for panel in grids[0].panels[:-1]} == {"test/acc.best", "val/acc.best", "val/loss.best"}
    assert [len(grid.panels) for grid in grids[1:]] == [len(names) for names in command.sections_of(COLUMNS).values()]
    assert "FedAvg+SignAgreement" in str(report.blocks[0].text)
