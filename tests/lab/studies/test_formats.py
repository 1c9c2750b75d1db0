"""The same tables in every format, by hand and by their structure."""

import csv
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from lightning_fed.lab.common import csv_text
from lightning_fed.lab.studies.blocks import (
    Block,
    as_latex,
    as_markdown,
    column_head,
    heading,
    study_blocks,
    study_figure,
    study_page,
    table_lines,
)
from lightning_fed.lab.studies.published import Figure
from lightning_fed.lab.studies.results import StudyResults, Trial
from lightning_fed.lab.studies.study import AxisValue, Report, Study, Tune
from lightning_fed.lab.studies.table import StudyTable, study_table
from tests.lab.studies.parts import some_results, some_study, study_run

STUDY = replace(some_study(target=0.75), source="A paper, Table 1", open=["rounds: 10", "batch size: 32."])


@pytest.fixture(scope="module")
def table() -> StudyTable:
    table = study_table(STUDY, some_results())
    key = (("FedAvg",), ("mnist",))
    cells = {**table.cells, key: replace(table.cells[key], published=Figure(80.5, 0.25))}
    return replace(table, cells=cells, notes=("A note.",))


@pytest.fixture(scope="module")
def blocks(table: StudyTable) -> list[Block]:
    return study_blocks(STUDY, some_results(), table, "A paper, Table 1")


def test_markdown_by_hand(table: StudyTable, blocks: list[Block]) -> None:
    # FedAvg: 0.8 and 0.813 on mnist, mean 0.8065 and deviation 0.013 / √2; the mask gains 0.01 on each seed.
    text = as_markdown(heading(STUDY, some_results()), blocks, table.notes)
    assert text.startswith("""# Two rules

Source: A paper, Table 1.

Left open by the source: rounds: 10; batch size: 32.

Profile `cpu`: fewer rounds.

## test/acc (%), best, mean ± std over 2 seeds

| rule | mnist | fmnist | average rank |
| --- | ---: | ---: | ---: |
| FedAvg | 80.65 ± 0.92 [80.50 ± 0.25, +0.15] | 70.65 ± 0.92 | 2.00 |
| FedAvg, masked | 81.65 ± 0.92\\*\\*\\* | 71.65 ± 0.92\\*\\*\\* | 1.00 |

In brackets: A paper, Table 1, and our difference to it. \\*, \\*\\*, \\*\\*\\*: other than rule FedAvg""")
    assert "| FedAvg, masked | mnist | +1.00 | [+1.00, +1.00] | [+1.00, +1.00] | \\< 0.001 | 2 |" in text
    assert "| FedAvg, masked | 10 ± 0 | 0 of 2 seeds |" in text
    assert "| rule | data set | by val/acc best | val/acc best | by test/acc best, not to choose by | test/" in text
    assert "| FedAvg | mnist | aggregator.lr 1 | 60.00 % | model.optimizer.lr 0.1 | 90.00 % |" in text
    assert text.endswith("\n\nA note.\n")
    assert text == as_markdown(
        heading(STUDY, some_results()), study_blocks(STUDY, some_results(), table, "A paper, Table 1"), table.notes
    )


def test_latex_has_whole_tables_and_escapes() -> None:
    lines = [["a_b & c", "50 %", "#{x}~^"], ["[1]", "-0.5 ± 0.1*", "non-iid"], ["$\\", "< 0.001", "1e-05"]]
    text = as_latex(["Title"], [Block("T_1", lines, 1, "*: 5 %.")], ["N"])
    assert (
        text
        == r"""% Title
% N
% \usepackage{booktabs}

\begin{table}
\centering
\caption{T\_1. *: 5 \%.}
\begin{tabular}{lrr}
\toprule
a\_b \& c & 50 \% & \#\{x\}\textasciitilde{}\textasciicircum{} \\
\midrule
{[}1] & $-$0.5 $\pm$ 0.1$^{*}$ & non-iid \\
\$\textbackslash{} & $<$ 0.001 & 1e-05 \\
\bottomrule
\end{tabular}
\end{table}
"""
    )


def test_latex_of_a_study_is_balanced(table: StudyTable, blocks: list[Block]) -> None:
    text = as_latex(heading(STUDY, some_results()), blocks, table.notes)
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == len(blocks) == 4
    plain = re.sub(r"\\[\\{}%&_$#]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    for columns, body in re.findall(r"\\begin{tabular}{(\w+)}\n(.*?)\\end{tabular}", text, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}


def test_csv_has_the_numbers_as_measured(table: StudyTable) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(table_lines(table)))))
    assert [(row["rule"], row["data set"]) for row in rows[:2]] == [("FedAvg", "mnist"), ("FedAvg", "fmnist")]
    first, last = rows[0], rows[-1]
    assert (first["metric"], first["statistic"], first["seeds"], first["mean"]) == ("test/acc", "best", "2", "0.8065")
    assert (first["published"], first["published_std"], first["difference"]) == ("0.805", "0.0025", "")
    assert (last["difference"], last["p_holm"], last["average_rank"]) == ("0.01", "0", "1")
    assert (first["rounds_to_target"], last["rounds_to_target"]) == ("10", "")


def test_losses_and_single_seeds_have_no_percent_and_no_deviation() -> None:
    study = some_study(metric=["val/loss"])
    results = some_results()
    table = study_table(study, replace(results, runs=tuple(run for run in results.runs if run.seed == 0)))
    main, differences, _ = study_blocks(study, results, table)
    assert main.title == "val/loss, best, one seed"
    assert main.lines[1][1:3] == ["0.3333", "0.3333"]
    assert differences.lines[1][2:] == ["+0", "", "", "", "1", ""]


def test_differences_say_which_of_them_are_points() -> None:
    for metric, unit in (
        (["test/acc"], ", percentage points"),
        (["test/acc", "val/loss"], ", percentage points where in %"),
        (["val/loss"], ""),
    ):
        study = some_study(metric=metric, rows=["rule", "metric"])
        titles = [block.title for block in study_blocks(study, some_results(), study_table(study, some_results()))]
        assert titles[1] == f"Difference to rule FedAvg{unit}"


@pytest.mark.parametrize(
    ("values", "heads"),
    [(["0.1", "1e-05"], ["rate 0.1", "rate 1e-05"]), (["AVG", "x2"], ["AVG", "x2"]), (["1e+30"], ["rate 1e+30"])],
)
def test_numbers_are_named_in_heads(values: list[str], heads: list[str]) -> None:
    assert [column_head(["rate"], [value]) for value in values] == heads


def test_the_picture_has_a_panel_for_each_column_and_is_the_same_each_time(table: StudyTable) -> None:
    figures = [study_figure(table, "round") for _ in range(2)]
    drawn = [io.BytesIO(), io.BytesIO()]
    for figure, file in zip(figures, drawn, strict=True):
        figure.savefig(file, format="png", dpi=50)
    assert drawn[0].getvalue() == drawn[1].getvalue()
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == ["mnist", "fmnist"]
    assert panels[0].lines[0].get_ydata().tolist() == pytest.approx([10, 70.65, 80.65])
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg (2 seeds)", "FedAvg, masked (2 seeds)"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_the_page_has_all_tables_and_curves(table: StudyTable, blocks: list[Block]) -> None:
    page = study_page(["Two <rules>", "By us & them."], blocks, table.notes, table, "round")
    assert "<h1>Two &lt;rules&gt;</h1>\n<p>By us &amp; them.</p>\n<p>A note.</p>" in page
    tags = Tags()
    tags.feed(page[page.index("<body>") :])
    assert tags.found.count("table") == 4
    assert tags.found.count("h3") == 2


def test_the_choice_is_by_means_over_whole_trials() -> None:
    def trial(rate: str, seed: int, **values: float) -> Trial:
        return Trial({"rule": "FedAvg", "data set": str(seed)}, seed, {"lr": rate}, values)

    trials = (
        *(trial("0.1", seed, acc=acc, loss=1.0) for seed, acc in enumerate([0.5, 0.6])),
        *(trial("0.2", seed, acc=acc, loss=2.0) for seed, acc in enumerate([0.5, 0.7])),
        *(trial("0.3", seed, acc=acc, loss=3.0) for seed, acc in enumerate([0.9, math.nan])),
        trial("0.4", 0, acc=1.0, loss=0.1),
    )
    study = replace(STUDY, tune=Tune(per=["rule"], seeds=[0, 1]))
    results = replace(some_results(), trials=trials)
    block = study_blocks(study, results, study_table(study, results))[-1]
    assert block.lines == [
        ["rule", "by acc", "acc", "by loss", "loss"],
        ["FedAvg", "lr 0.2", "60.00 %", "lr 0.1", "1"],
    ]


def test_methods_may_be_columns() -> None:
    """Then they are ranked, and each of them is a line of every panel."""
    study = some_study(columns=["rule"], rows=["data set"])
    table = study_table(study, some_results())
    assert table.ranks == (2.0, 1.0)
    (block, *_) = study_blocks(study, some_results(), table)
    assert block.lines[0] == ["data set", "FedAvg", "FedAvg, masked"]
    assert block.lines[-1] == ["average rank", "2.00", "1.00"]
    assert [line[table_lines(table)[0].index("average_rank")] for line in table_lines(table)[1:]] == [
        "2",
        "1",
        "2",
        "1",
    ]
    figure = study_figure(table, "round")
    assert [axes.get_title() for axes in figure.axes] == ["mnist", "fmnist"]
    assert len(figure.legends[0].get_texts()) == 2


def test_of_many_rows_the_methods_alone_are_lines() -> None:
    rates = [f"{rate}" for rate in range(8)]
    axes = {"rate": dict.fromkeys(rates, AxisValue()), "rule": dict.fromkeys(["A", "B"], AxisValue())}
    runs = [study_run(0, {"test/acc": {1: 0.5}}, rate=rate, rule=rule) for rate in rates for rule in "AB"]
    study = Study("T", axes=axes, report=Report(baseline={"rule": "A"}))
    figure = study_figure(study_table(study, StudyResults("t", "full", tuple(runs))), "round")
    assert [axes.get_title() for axes in figure.axes] == [f"rate {rate}" for rate in rates]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A (1 seed)", "B (1 seed)"]


def test_runs_that_have_diverged_are_not_drawn() -> None:
    """Their last losses would set the scale for all others."""
    axes = {"rate": dict.fromkeys("01", AxisValue())}
    study = Study("T", axes=axes, seeds=[0, 1], report=Report(metric=["test/loss"]))
    good, lost = {"test/loss": {1: 2.0, 2: 1.0}}, {"test/loss": {1: 1e30, 2: math.nan}}

    def figure(*curves: dict[str, dict[int, float]]) -> Any:
        runs = [study_run(at % 2, curve, rate="01"[at // 2]) for at, curve in enumerate(curves)]
        return study_figure(study_table(study, StudyResults("t", "full", tuple(runs))), "round")

    some = figure(good, lost, good, good)
    assert some.axes[0].get_ylim()[1] < 3
    assert [text.get_text() for text in some.legends[0].get_texts()] == ["rate 0 (1 seed)", "rate 1 (2 seeds)"]
    assert figure(lost, lost, lost, lost).axes == []
