"""The page of a study: what it shows of the tables alone, and what of the runs' folders."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fed.lab.report.runs import MeasuredRun
from lightning_fed.lab.studies.blocks import heading, study_blocks, tuned_block, tuning_charts
from lightning_fed.lab.studies.page import study_page
from lightning_fed.lab.studies.results import Trial
from lightning_fed.lab.studies.study import Study, Tune
from lightning_fed.lab.studies.table import StudyTable, study_table
from tests.lab.report.parts import Page, fits_the_window
from tests.lab.studies.parts import some_results, some_study

STUDY = replace(
    some_study(), title="Two <rules>", source="A paper & [theirs](https://x.invalid)",
    open=["rounds: `10`", "<b>batch</b> size: *32*"],
)  # fmt: skip


@pytest.fixture(scope="module")
def table() -> StudyTable:
    pytest.importorskip("plotly", reason='the page needs plotly: pip install "lightning_fed[html]"')
    return replace(study_table(STUDY, some_results()), notes=("A note.",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, table: StudyTable) -> dict[str, MeasuredRun]:
    """Folders of all runs, which measured more than the study reports."""
    found = {}
    for run in some_results().runs:
        path = tmp_path_factory.mktemp("run")
        more = {"val/loss": {0: 2.0, 10: 1.0}, "agreement/mean": {5: 0.5, 10: 0.6}, "update/norm": {5: 1.0, 10: 0.5}}
        columns = {**run.curves, **more, "comm/bytes_up": {5: 50.0, 10: 100.0}}
        (path / "config.yaml").write_text(f"aggregator: {{lr: 1.0, note: {run.axes['rule']!r}}}")
        (path / "split.png").write_bytes(run.axes["data set"].encode())
        (path / "clients.csv").write_text("round,client\n10,0\n10,1\n")
        found[run.fingerprint] = MeasuredRun(path, run.fingerprint, "", "", "", run.seed, "", 0.0, columns)
    return found


def page_of(table: StudyTable, folders: dict[str, MeasuredRun]) -> str:
    cells = {
        key: replace(cell, runs=tuple(replace(run, folder=folders.get(run.fingerprint)) for run in cell.runs))
        for key, cell in table.cells.items()
    }
    table = replace(table, cells=cells)
    blocks, charts = study_blocks(STUDY, some_results(), table), tuning_charts(STUDY, some_results().trials)
    return study_page(heading(STUDY, some_results()), blocks, table, "round", charts)


def test_tables_alone_make_a_page_of_tables_curves_and_tuning(table: StudyTable) -> None:
    text = page_of(table, {})
    read = Page(text)
    title = "test/acc (%) at each run's best round, mean ± std over 2 seeds"
    others = ["Difference to rule FedAvg, percentage points", "Tuned options", "Tuning"]
    assert read.headings == ["Two <rules>", title, "Curves", *others]
    assert len(read.tables) == 3
    assert [figure[1]["xaxis"]["title"]["text"] for figure in read.figures()] == 2 * ["round"] + ["aggregator.lr"]
    assert text.index("<p>A note.</p>") < text.index("<h2>Curves</h2>") < text.index("<h2>Difference")


def test_the_description_is_rendered_and_no_tag_of_it_is_one(table: StudyTable) -> None:
    text = page_of(table, {})
    assert "<h1>Two &lt;rules&gt;</h1>" in text
    assert '<p>Source: A paper &amp; <a href="https://x.invalid">theirs</a>.</p>' in text
    assert "<li>rounds: <code>10</code></li>\n<li>&lt;b&gt;batch&lt;/b&gt; size: <em>32</em></li>" in text


def test_folders_add_what_a_page_of_runs_has(table: StudyTable, folders: dict[str, MeasuredRun]) -> None:
    read = Page(page_of(table, folders))
    details = ["Other metrics", "Agreement", "Updates", "What differs between the methods", "Clients", "Split"]
    assert read.headings[-6:] == details
    names = [f"{rule}, {data}" for rule in ("FedAvg", "FedAvg, masked") for data in ("mnist", "fmnist")]
    assert read.tables[3] == [["option", *names], ["aggregator.note", *2 * ["FedAvg"], *2 * ["FedAvg, masked"]]]
    assert len(read.tables) == 4 + len(names)
    assert len(read.links) == 3  # one picture for each split, and the source
    axes = {button["label"] for button in read.figures()[0][1]["updatemenus"][0]["buttons"]}
    assert axes == {"round", "comm/bytes_up"}


def test_one_method_has_one_colour_in_every_panel() -> None:
    """Also where a panel lacks another one."""
    pytest.importorskip("plotly")
    runs = [run for run in some_results().runs if run.axes != {"rule": "FedAvg", "data set": "fmnist"}]
    table = study_table(STUDY, replace(some_results(), runs=tuple(runs)))
    figures = Page(study_page(["T"], study_blocks(STUDY, some_results(), table)[:1], table, "round")).figures()
    colours = [{trace["name"]: trace["line"]["color"] for trace in traces} for traces, _ in figures]
    assert len(colours) == 2
    assert colours[1] == {"FedAvg, masked (2 seeds)": colours[0]["FedAvg, masked (2 seeds)"]}


def trial(seed: int, options: dict[str, str], **values: float) -> Trial:
    return Trial({"rule": "FedAvg", "data set": str(seed)}, seed, options, values)


def test_the_choice_is_by_means_over_whole_trials() -> None:
    trials = (
        *(trial(seed, {"lr": "0.1"}, acc=acc, loss=1.0) for seed, acc in enumerate([0.5, 0.6])),
        *(trial(seed, {"lr": "0.2"}, acc=acc, loss=2.0) for seed, acc in enumerate([0.5, 0.7])),
        *(trial(seed, {"lr": "0.3"}, acc=acc, loss=3.0) for seed, acc in enumerate([0.9, math.nan])),
        trial(0, {"lr": "0.4"}, acc=1.0, loss=0.1),
    )
    study = replace(STUDY, tune=Tune(per=["rule"], seeds=[0, 1]))
    block = tuned_block(study, trials)
    assert block.lines == [
        ["rule", "chosen", "acc", "best for loss", "loss"],
        ["FedAvg", "lr 0.2", "60.00 %", "lr 0.1", "1"],
    ]
    assert block.note.startswith("The runs use the chosen values, the best by acc, mean over 2 seeds; ")
    (chart,) = charts_of(study, trials)
    tried, chosen = chart[0]
    assert (tried["x"], tried["y"]) == ([0.1, 0.2], pytest.approx([0.55, 0.6]))
    assert (chosen["name"], chosen["x"], chosen["y"]) == ("chosen", [0.2], pytest.approx([0.6]))


def test_the_last_stage_chooses_whatever_an_earlier_one_came_to() -> None:
    found = [(1, {"mu": "1"}, 0.9), (2, {"mu": "1", "lr": "0.1"}, 0.5), (2, {"mu": "1", "lr": "0.2"}, 0.6)]
    trials = tuple(replace(trial(0, options, acc=acc), stage=stage) for stage, options, acc in found)
    study = replace(STUDY, tune=Tune(per=["rule"]))
    assert tuned_block(study, trials).lines[1] == ["FedAvg", "mu 1, lr 0.2", "60.00 %"]
    (((*_, chosen), _),) = charts_of(study, trials)
    assert (chosen["name"], chosen["x"]) == ("chosen", [0.2])


def charts_of(study: Study, trials: tuple[Trial, ...]) -> list[tuple[list[dict], dict]]:
    pytest.importorskip("plotly")
    return Page("".join(tuning_charts(study, trials))).figures()


def test_a_chart_of_the_tuning_has_a_line_for_each_of_the_other_options() -> None:
    study = replace(STUDY, tune=Tune(per=["rule"]))
    grid = [(rate, mu) for mu in ("1", "2") for rate in ("0.1", "0.001", "0.01")]
    trials = tuple(trial(0, {"mu": mu, "lr": rate}, acc=float(rate) + float(mu) / 10) for rate, mu in grid)
    ((traces, layout),) = charts_of(study, trials)
    assert [trace["name"] for trace in traces] == ["mu 1", "mu 2", "chosen"]
    assert traces[0]["x"] == [0.001, 0.01, 0.1]
    assert traces[1]["y"] == pytest.approx([0.201, 0.21, 0.3])
    assert (traces[2]["x"], traces[2]["y"]) == ([0.1], [pytest.approx(0.3)])
    assert layout["xaxis"]["type"] == "log"
    assert layout["xaxis"]["ticktext"] == ["0.001", "0.01", "0.1"]
    assert layout["yaxis"]["tickformat"] == "~%"


def test_options_without_numbers_and_many_trials_have_charts_too() -> None:
    study = replace(STUDY, tune=Tune(per=["rule"]))
    names = tuple(trial(0, {"rule": name}, loss=value) for name, value in {"b": 2.0, "a": 1.0}.items())
    ((traces, layout),) = charts_of(study, names)
    assert (layout["xaxis"]["type"], traces[-1]["x"]) == ("category", ["a"])
    drawn = tuple(trial(0, {"lr": str(1 + at / 10), "mu": str(at)}, loss=1.0 + at) for at in range(9))
    ((traces, layout),) = charts_of(study, drawn)
    # A legend of many would leave no place for the trials; their names are seen where one points.
    assert [trace["name"] for trace in traces] == [*(f"mu {at}" for at in range(9)), "chosen"]
    assert (layout["showlegend"], layout["xaxis"]["type"]) == (False, "linear")
    assert charts_of(study, (trial(0, {"lr": "1"}, loss=math.nan),)) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_is_as_wide_as_the_window(
    table: StudyTable, folders: dict[str, MeasuredRun], tmp_path: Path, width: int
) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(table, folders), encoding="utf-8")
    assert fits_the_window(page, tmp_path, width)
