"""The workspace and the report that are built for Weights & Biases, without sending them."""

from typing import Any

import pytest

from lightning_fed.lab.dashboard_command import build_report, build_workspace, sections_of

COLUMNS = ("round", "val/acc", "val/loss", "test/acc", "train/loss", "samples", "agreement/mean", "agreement/mean/a.b")


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install 'lightning_fed[dashboard]'")


def test_columns_are_in_sections_by_prefix() -> None:
    assert sections_of(COLUMNS) == {
        "test": ["test/acc"], "val": ["val/acc", "val/loss"], "train": ["train/loss"],
        "agreement": ["agreement/mean", "agreement/mean/a.b"], "others": ["samples"],
    }  # fmt: skip


def test_each_column_is_a_chart_over_rounds_with_a_line_for_each_group() -> None:
    spec = build_workspace("team", "lightning_fed", COLUMNS)._to_model().model_dump()["spec"]["section"]
    sections = spec["panel_bank_config"]["sections"]
    assert [(section["name"], section["is_open"]) for section in sections] == [
        ("test", True), ("val", True), ("train", False), ("agreement", False), ("others", False)
    ]  # fmt: skip
    for section, names in zip(sections, sections_of(COLUMNS).values(), strict=True):
        charts = [panel["config"] for panel in section["panels"]]
        assert [chart["metrics"] for chart in charts] == [[name] for name in names]
        assert {(chart["x_axis"], chart["aggregate"], chart["group_agg"]) for chart in charts} == {
            ("round", True, "mean")
        }
        assert {chart["group_area"] for chart in charts} == {"stddev"}
    (runs,) = spec["run_sets"]
    assert [key["name"] for key in runs["grouping"]] == ["group"]


def test_the_report_has_bars_of_best_values_and_a_grid_for_each_section() -> None:
    report: Any = build_report("team", "lightning_fed", COLUMNS, ["FedAvg", "FedAvg+SignAgreement"])
    grids = [block for block in report.blocks if type(block).__name__ == "PanelGrid"]
    assert {panel.metrics[0] for panel in grids[0].panels[:-1]} == {"test/acc.best", "val/acc.best", "val/loss.best"}
    assert [len(grid.panels) for grid in grids[1:]] == [len(names) for names in sections_of(COLUMNS).values()]
    assert "FedAvg+SignAgreement" in str(report.blocks[0].text)
