"""The same tables in every format, by hand and by their structure."""

import csv
import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_fed.lab.common import column_head, csv_text
from lightning_fed.lab.report.plots import panels_figure
from lightning_fed.lab.studies.blocks import heading, study_blocks, table_lines
from lightning_fed.lab.studies.formats import Block, as_latex, as_markdown, without_constants
from lightning_fed.lab.studies.page import panels_of
from lightning_fed.lab.studies.published import Figure
from lightning_fed.lab.studies.results import StudyResults
from lightning_fed.lab.studies.study import AxisValue, Report, Study
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

Profile `cpu`: fewer rounds.

Left open by the source:

- rounds: 10
- batch size: 32.

## test/acc (%) at each run's best round, mean ± std over 2 seeds

| rule | mnist | fmnist | average rank |
| --- | ---: | ---: | ---: |
| FedAvg | 80.65 ± 0.92 | 70.65 ± 0.92 | 2.00 |
| FedAvg, masked | 81.65 ± 0.92\\*\\*\\* | 71.65 ± 0.92\\*\\*\\* | 1.00 |

\\*, \\*\\*, \\*\\*\\*: p \\< 0.05, 0.01, 0.001 against rule FedAvg (paired t-test, Holm).

## Difference to rule FedAvg, percentage points

The same in all rows: rule = FedAvg, masked; 95 % interval (t) = [+1.00, +1.00]; p""")
    assert "; p (Holm) \\< 0.001; seeds = 2; seen at 80 % power = 0.00." in text
    assert "\n| data set | difference |\n| --- | ---: |\n| mnist | +1.00 |\n| fmnist | +1.00 |\n" in text
    assert (
        """## A paper, Table 1, and in brackets our mean minus it

The same in all cells: data set = mnist.

| rule | test/acc (%) |
| --- | ---: |
| FedAvg | 80.50 ± 0.25 [+0.15] |
"""
        in text
    )
    assert "| FedAvg, masked | 10 ± 0 | 0 of 2 seeds |" in text
    assert "| rule | data set | chosen | val/acc best | best for test/acc | test/acc |" in text
    assert "| FedAvg | mnist | aggregator.lr 1 | 60.00 % | model.optimizer.lr 0.1 | 90.00 % |" in text
    assert text.endswith("\n\nA note.\n")
    assert text == as_markdown(
        heading(STUDY, some_results()), study_blocks(STUDY, some_results(), table, "A paper, Table 1"), table.notes
    )


def test_only_a_study_with_profiles_names_the_one_that_was_run() -> None:
    assert "Profile `cpu`: fewer rounds." in heading(STUDY, some_results())
    full = replace(some_results(), profile="full")
    assert "Profile `full`." in heading(STUDY, full)
    assert not any("Profile" in line for line in heading(replace(STUDY, profiles={}), full))


def test_latex_has_whole_tables_and_escapes() -> None:
    lines = [["a_b & c", "50 %", "#{x}~^"], ["[1]", "-0.5 ± 0.1*", "non-iid"], ["$\\", "< 0.001", "1e-05"]]
    text = as_latex(["Title"], [Block("T_1", lines, 1, "*: 5 %.")], ["N"])
    assert (
        text
        == r"""% Title
% N
% \usepackage{booktabs,graphicx}

\begin{table}
\centering
\caption{T\_1. *: 5 \%.}
\label{tab:runs}
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
\begin{tabular}{lrr}
\toprule
a\_b \& c & 50 \% & \#\{x\}\textasciitilde{}\textasciicircum{} \\
\midrule
{[}1] & $-$0.5 $\pm$ 0.1$^{*}$ & non-iid \\
\$\textbackslash{} & $<$ 0.001 & 1e-05 \\
\bottomrule
\end{tabular}}
\end{table}
"""
    )


def test_latex_of_a_study_is_balanced(table: StudyTable, blocks: list[Block]) -> None:
    text = as_latex(heading(STUDY, some_results()), blocks, table.notes, "two_rules")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == len(blocks) == 5
    labels = [f"tab:two-rules{end}" for end in ("", "-differences", "-published", "-target", "-tuned")]
    assert re.findall(r"^\\caption{.*}\n\\label{(.*)}$", text, re.MULTILINE) == labels
    plain = re.sub(r"\\[\\{}%&_$#]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    for columns, body in re.findall(r"\\begin{tabular}{(\w+)}\n(.*?)\\end{tabular}", text, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}


def test_text_is_on_the_left_and_numbers_are_on_the_right() -> None:
    lines = [
        ["rule", "rate", "mean", "interval", "p", "seeds", "verdict", "chosen", "lost"],
        [
            "[1] A",
            "0.1",
            "80.00 ± 1.00*",
            "[-1.00, +2.00]",
            "< 0.001",
            "3",
            "undecided",
            "lr 0.1 (largest)",
            "diverged",
        ],
        ["2 steps", "1e-05", "diverged", "", "0.5", "1,234", "", "lr 1", "–"],
    ]
    block = Block("T", lines, 2)
    assert r"\begin{tabular}{lrrrrrlll}" in as_latex(["T"], [block], [])
    assert "\n| --- | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |\n" in as_markdown(["T"], [block], [])


@pytest.mark.parametrize(
    ("statistic", "said"),
    [
        (["final"], "test/acc (%) at the last round, mean"),
        (["last 2"], "test/acc (%) over the last 2 rounds, mean"),
        (["rounds 1-10"], "test/acc (%) over rounds 1 to 10, mean"),
        (["final", "best"], "test/acc (%), mean"),
    ],
)
def test_the_title_says_the_statistic_in_words(statistic: list[str], said: str) -> None:
    study = some_study(statistic=statistic)
    block, *_ = study_blocks(study, some_results(), study_table(study, some_results()))
    assert block.title.startswith(said)


def test_csv_has_the_numbers_as_measured(table: StudyTable) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(table_lines(STUDY, table)))))
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
    assert main.title == "val/loss at each run's best round, one seed"
    assert main.lines[1][1:3] == ["0.3333", "0.3333"]
    # What a single seed does not tell has no column.
    assert differences.lines == [["data set", "difference"], ["mnist", "+0"], ["fmnist", "+0"]]
    assert differences.above == "The same in all rows: rule = FedAvg, masked; seeds = 1."


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
    figures = [panels_figure(panels_of(table), "round") for _ in range(2)]
    drawn = [io.BytesIO(), io.BytesIO()]
    for figure, file in zip(figures, drawn, strict=True):
        figure.savefig(file, format="png", dpi=50)
    assert drawn[0].getvalue() == drawn[1].getvalue()
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == ["mnist", "fmnist"]
    assert panels[0].lines[0].get_ydata().tolist() == pytest.approx([10, 70.65, 80.65])
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg (2 seeds)", "FedAvg, masked (2 seeds)"]


def test_methods_may_be_columns() -> None:
    """Then they are ranked, and each of them is a line of every panel."""
    study = some_study(columns=["rule"], rows=["data set"])
    table = study_table(study, some_results())
    assert table.ranks == (2.0, 1.0)
    (block, *_) = study_blocks(study, some_results(), table)
    assert block.lines[0] == ["data set", "FedAvg", "FedAvg, masked"]
    assert block.lines[-1] == ["average rank", "2.00", "1.00"]
    assert [line[table_lines(study, table)[0].index("average_rank")] for line in table_lines(study, table)[1:]] == [
        "2",
        "1",
        "2",
        "1",
    ]
    figure = panels_figure(panels_of(table), "round")
    assert [axes.get_title() for axes in figure.axes] == ["mnist", "fmnist"]
    assert len(figure.legends[0].get_texts()) == 2


def test_of_many_rows_the_methods_alone_are_lines() -> None:
    rates = [f"{rate}" for rate in range(8)]
    axes = {"rate": dict.fromkeys(rates, AxisValue()), "rule": dict.fromkeys(["A", "B"], AxisValue())}
    runs = [study_run(0, {"test/acc": {1: 0.5}}, rate=rate, rule=rule) for rate in rates for rule in "AB"]
    study = Study("T", axes=axes, report=Report(baseline={"rule": "A"}))
    figure = panels_figure(panels_of(study_table(study, StudyResults("t", "full", tuple(runs)))), "round")
    assert [axes.get_title() for axes in figure.axes] == [f"rate {rate}" for rate in rates]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A (1 seed)", "B (1 seed)"]


def test_runs_that_have_diverged_are_not_drawn() -> None:
    """Their last losses would set the scale for all others."""
    axes = {"rate": dict.fromkeys("01", AxisValue())}
    study = Study("T", axes=axes, seeds=[0, 1], report=Report(metric=["test/loss"]))
    good, lost = {"test/loss": {1: 2.0, 2: 1.0}}, {"test/loss": {1: 1e30, 2: math.nan}}

    def figure(*curves: dict[str, dict[int, float]]) -> Any:
        runs = [study_run(at % 2, curve, rate="01"[at // 2]) for at, curve in enumerate(curves)]
        return panels_figure(panels_of(study_table(study, StudyResults("t", "full", tuple(runs)))), "round")

    some = figure(good, lost, good, good)
    assert some.axes[0].get_ylim()[1] < 3
    assert [text.get_text() for text in some.legends[0].get_texts()] == ["rate 0 (1 seed)", "rate 1 (2 seeds)"]
    assert figure(lost, lost, lost, lost).axes == []


def test_what_all_rows_share_is_said_once_above() -> None:
    lines = [
        ["data", "rate", "rule", "gain", "seeds", "p", "word"],
        ["mnist", "0.1", "A", "+1", "3", "", ""],
        ["mnist", "0.1", "B", "+1", "3", "", "no"],
    ]
    block = without_constants(Block("T", lines, 3))
    # Of numbers the first one stays, whatever it is; an empty column is not worth a word.
    assert block.lines == [["rule", "gain", "word"], ["A", "+1", ""], ["B", "+1", "no"]]
    assert (block.labels, block.above) == (1, "The same in all rows: data = mnist; rate = 0.1; seeds = 3.")
    single = without_constants(Block("T", lines[:2], 3))
    assert single.lines == [["data", "rate", "rule", "gain", "seeds"], ["mnist", "0.1", "A", "+1", "3"]]
    assert single.above == ""
    text = as_markdown(["S"], [block], [])
    assert "## T\n\nThe same in all rows: data = mnist; rate = 0.1; seeds = 3.\n\n| rule |" in text
    assert r"\caption{T. The same in all rows: data = mnist; rate = 0.1; seeds = 3.}" in as_latex(["S"], [block], [])


def test_every_column_of_the_means_has_a_head() -> None:
    study = some_study(columns=[], rows=["rule"], baseline={})
    one = tuple(run for run in some_results().runs if run.axes["data set"] == "mnist")
    (main, _) = study_blocks(study, some_results(), study_table(study, replace(some_results(), runs=one)))
    assert main.lines[0] == ["rule", "test/acc (%)"]
    both = some_study(columns=[], rows=["metric"], metric=["test/acc", "val/loss"], baseline={})
    (main, _) = study_blocks(both, some_results(), study_table(both, replace(some_results(), runs=one)))
    assert main.lines[0] == ["metric", "rule", "best"]
    assert {line[0] for line in main.lines[1:]} == {"test/acc (%)", "val/loss"}
    assert main.title == "At each run's best round, mean ± std over 2 seeds"


def test_axes_that_the_runs_agree_in_are_no_columns() -> None:
    study = some_study(columns=["data set", "rule"], baseline={})
    one = tuple(run for run in some_results().runs if run.axes["data set"] == "mnist")
    (main, _) = study_blocks(study, some_results(), study_table(study, replace(some_results(), runs=one)))
    assert main.lines[0] == ["FedAvg", "FedAvg, masked"]
    assert main.above == "The same in all cells: data set = mnist."


BEST = {"FedAvg": (0.5, 3.0), "A": (0.7, 2.0), "B": (0.6, 1.0), "C": (math.nan, math.nan)}


@pytest.mark.parametrize(
    ("report", "marks"),
    [
        # By line and column: accuracies from the largest, losses from the smallest, no mark for what has diverged.
        ({"columns": ["metric"], "baseline": {"rule": "FedAvg"}}, {(2, 1): 1, (3, 1): 2, (3, 2): 1, (2, 2): 2}),
        ({"columns": ["metric"]}, {(2, 1): 1, (3, 1): 2, (3, 2): 1, (2, 2): 2}),
        (
            {"columns": ["rule"], "rows": ["metric"], "baseline": {"rule": "FedAvg"}},
            {(1, 2): 1, (1, 3): 2, (2, 3): 1, (2, 2): 2},
        ),
    ],
)
def test_the_best_are_marked_where_asked_for(report: dict[str, Any], marks: dict[tuple[int, int], int]) -> None:
    axes = {"rule": dict.fromkeys(BEST, AxisValue())}
    study = Study("T", axes=axes, report=Report(metric=["test/acc", "test/loss"], **report))
    runs = [
        study_run(0, {"test/acc": {1: acc}, "test/loss": {1: loss}}, rule=rule) for rule, (acc, loss) in BEST.items()
    ]
    results = StudyResults("t", "full", tuple(runs))
    table = study_table(study, results)
    assert study_blocks(study, results, table)[0].marks == {}
    block = study_blocks(study, results, table, best=True)[0]
    assert block.marks == marks
    assert "**70.00**" in as_markdown(["T"], [block], [])
    assert "<ins>60.00</ins>" in as_markdown(["T"], [block], [])
    assert r"\textbf{70.00}" in as_latex(["T"], [block], [])
    assert r"\underline{60.00}" in as_latex(["T"], [block], [])


def test_of_two_that_are_compared_the_second_has_no_mark() -> None:
    study = some_study()
    block = study_blocks(study, some_results(), study_table(study, some_results()), best=True)[0]
    assert block.marks == {(2, 1): 1, (2, 2): 1}
    assert "Bold: the best mean" in block.note


def test_latex_puts_shared_heads_over_their_columns_and_says_names_once() -> None:
    heads = (("A", "x"), ("A", "y"), ("B", "x"), ("", "rank"))
    lines = [
        ["data", "split", "A, x", "A, y", "B, x", "rank"],
        *([d, s, "1", "2", "3", "4"] for d in "ij" for s in "pq"),
    ]
    text = as_latex(["T"], [Block("T", lines, 2, heads=heads)], [])
    assert (
        r"""\toprule
 &  & \multicolumn{2}{c}{A} & \multicolumn{1}{c}{B} & \multicolumn{1}{c}{} \\
\cmidrule(lr){3-4}\cmidrule(lr){5-5}
data & split & x & y & x & rank \\
\midrule
i & p & 1 & 2 & 3 & 4 \\
 & q & 1 & 2 & 3 & 4 \\
\addlinespace
j & p & 1 & 2 & 3 & 4 \\
 & q & 1 & 2 & 3 & 4 \\
\bottomrule"""
        in text
    )
