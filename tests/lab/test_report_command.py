import csv
import io
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.runs import Method, Summary
from lightning_fed.lab.report_command import as_study, at_budget, derived_columns, main, to_target
from lightning_fed.lab.studies.blocks import study_blocks
from lightning_fed.lab.studies.table import study_table
from lightning_fed.runs.statistics import known_goal
from tests.lab.report.parts import method, write_run

ROWS = "round,train/loss,val/acc,val/loss,comm/bytes_up\n0,,0.1,2.3,\n1,1.0,0.5,1.5,100\n2,0.9,{acc},{loss},200\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, acc in enumerate([0.7, 0.8]):
        write_run(tmp_path, "a", seed, name="quick/avg", text=ROWS.format(acc=acc, loss=0.4))
        better = ROWS.format(acc=acc + 0.1, loss=0.5)
        write_run(tmp_path, "b", seed, name="quick/gma", label="FedAvg+SignAgreement", text=better)
    return tmp_path / "runs"


def test_report_prints_the_table_and_writes_both_files(runs: Path, capsys) -> None:
    # GMA: final 0.8 and 0.9; means over rounds (0.1 + 0.5 + 0.8) / 3 and (0.1 + 0.5 + 0.9) / 3.
    assert main([str(runs)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^FedAvg\+SignAgreement +85\.00 ± 7\.07 +85\.00 ± 7\.07 +48\.33 ± 2\.36$", out, re.MULTILINE)
    assert out.index("FedAvg+SignAgreement") < out.index("FedAvg ")
    assert "different rounds" not in out
    assert (runs / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "report.csv").read_text().startswith("metric,method,")
    assert sorted(path.name for path in runs.iterdir()) == ["quick", "report.csv", "report.png"]


@pytest.mark.parametrize("width", [2.0, 6.75])
def test_vectors_have_the_width_of_a_paper_and_their_texts_are_text(runs: Path, width: float) -> None:
    def written(folder: Path) -> dict[str, bytes]:
        for kind in ("pdf", "svg", "png"):
            assert main([str(runs), "--format", kind, "--width", str(width), "--output", str(folder)]) == 0
        return {path.suffix: path.read_bytes() for path in folder.iterdir()}

    drawn = written(runs / "out")
    assert written(runs / "again") == drawn
    assert drawn.keys() == {".pdf", ".svg", ".png", ".csv"}
    svg = ElementTree.fromstring(drawn[".svg"])
    assert svg.get("width") == f"{72 * width:g}pt"
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"FedAvg (2 seeds)", "FedAvg+SignAgreement (2 seeds)", "round", "val/acc (%)"} <= {*texts}
    sizes = {float(found) for found in re.findall(rb"font(?:-size)?: ([\d.]+)px", drawn[".svg"])}
    assert sorted(sizes) == pytest.approx([6.664, 8])
    assert re.search(rb"/MediaBox \[ 0 0 (\S+) ", drawn[".pdf"])[1] == f"{72 * width:g}".encode()
    assert b"/Subtype /Type0" in drawn[".pdf"]  # of font type 42, whose letters can be searched and edited
    assert b"/Type3" not in drawn[".pdf"]
    assert b"CreationDate" not in drawn[".pdf"]
    assert Image.open(io.BytesIO(drawn[".png"])).width == 300 * width


@pytest.mark.parametrize("cell", ["1e308", "-1e308", "1e400", "-inf", "1.7e308"])
@pytest.mark.parametrize("metric", ["test/acc", "val/loss"])
def test_a_number_too_large_to_add_is_shown(tmp_path: Path, capsys, metric: str, cell: str) -> None:
    for seed, other in enumerate((cell, "1e308")):
        write_run(tmp_path, "a", seed, metric=metric, text=f"round,{metric}\n0,{cell}\n1,{other}\n2,{other}\n")
    write_run(tmp_path, "b", 0, [0.5, 0.25, 0.25], metric=metric, label="GMA")
    assert main([str(tmp_path), "--metric", metric]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("FedAvg"))
    assert re.search(r"-?inf ± nan|nan ± nan", row)


def test_no_control_character_of_a_file_reaches_the_terminal(tmp_path: Path, capsys) -> None:
    for name, text in (("\x1b[2Jfolder", "{}"), ("key", '{"\\u001b[31mred": 1}'), ("text", '{"label": "\x9b1m"')):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    write_run(tmp_path, "g\x1b]0;", 0, [0.5], label="A\x1b[2J\x07")
    write_run(tmp_path, "h", 0, [0.5], label="A\x1b[2J\x07")
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "red" in out
    assert all(letter.isprintable() or letter == "\n" for letter in out)


def test_rounds_of_the_last_ten_that_were_not_evaluated_are_counted(tmp_path: Path, capsys) -> None:
    write_run(tmp_path, "a", 0, {0: 0.1, 5: 0.2, 10: 0.4, 15: 0.6})
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith("test/acc (%), one seed\n")
    assert re.search(r"50\.00$", out, re.MULTILINE)
    assert "`last 10` is the mean of those of its rounds that were evaluated: up to 8 were not." in out


def test_default_metric_is_one_that_every_run_measured(runs: Path, tmp_path: Path, capsys) -> None:
    main([str(runs)])
    assert capsys.readouterr().out.startswith("val/acc (%),")
    write_run(tmp_path, "c", 0, metric="val/loss", values=[2.0, 1.0], label="Loss")
    main([str(runs)])
    assert capsys.readouterr().out.startswith("val/loss,")
    write_run(tmp_path, "d", 0, metric="mine", values=[2.0, 1.0], label="Mine")
    with pytest.raises(FederatedError, match=r"`--metric` of .*mine"):
        main([str(runs)])


def test_metric_x_and_output_options(runs: Path, tmp_path: Path, capsys) -> None:
    main([str(runs), "--metric", "val/loss", "--x", "comm/bytes_up", "--output", str(tmp_path / "out" / "deep")])
    assert re.search(r"^FedAvg +0\.4 ± 0 ", capsys.readouterr().out, re.MULTILINE)
    names = [path.name for path in sorted((tmp_path / "out" / "deep").iterdir())]
    assert names == ["report-val_loss-comm_bytes_up.csv", "report-val_loss-comm_bytes_up.png"]
    assert not (runs / "report.png").exists()


def test_budget_and_target_are_further_columns(runs: Path, capsys) -> None:
    # FedAvg ends at 0.7 and 0.8, GMA at 0.8 and 0.9, each after 200 bytes up.
    main([str(runs), "--x", "comm/bytes_up", "--budget", "150", "--target", "0.75"])
    out = capsys.readouterr().out
    assert re.search(r"at comm/bytes_up 150  comm/bytes_up to 0.75  round to 0.75$", out, re.MULTILINE)
    assert re.search(r"^FedAvg\+SignAgreement .* 50\.00 ± 0\.00 +200 ± 0 +2 ± 0$", out, re.MULTILINE)
    assert re.search(r"^FedAvg .* 50\.00 ± 0\.00 +1 of 2 seeds +1 of 2 seeds$", out, re.MULTILINE)
    header, first, second = (runs / "report-comm_bytes_up.csv").read_text().splitlines()
    assert header.endswith(
        "at_comm/bytes_up_150_std,comm/bytes_up_to_0.75_mean,comm/bytes_up_to_0.75_std,round_to_0.75_mean,round_to_0.75_std"
    )
    assert first.endswith(",0.5,0.0,200.0,0.0,2.0,0.0")
    assert second.endswith(",0.5,0.0,,,,")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "80"], r"`--target` to be in \[0, 1\], got 80"),
        (["--target", "nan"], "`--target`"),
        (["--target", "nan", "--metric", "val/loss"], "`--target`"),
        (["--budget", "-1"], "`--budget`"),
        (["--target", "much"], "argument --target"),
    ],
)
def test_a_wrong_budget_or_target_is_one_sentence(runs: Path, options: list[str], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        main([str(runs), *options])


def test_several_folders_write_here(runs: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    main([str(runs / "quick" / "avg"), str(runs / "quick" / "gma")])
    assert (tmp_path / "here" / "report.png").is_file()


def test_runs_of_different_lengths_are_said(runs: Path, tmp_path: Path, capsys) -> None:
    write_run(tmp_path, "a", 2, name="quick/avg", text="".join(ROWS.format(acc=0.1, loss=1).splitlines(True)[:3]))
    main([str(runs)])
    assert "The runs end at different rounds, 1 to 2: each counts" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--nonsense"], ["runs", "--metric"]])
def test_mistakes_in_the_options_are_one_sentence(argv: list[str], capsys) -> None:
    with pytest.raises(FederatedError, match="lightning-fed report"):
        main(argv)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--study", "quickstart", "--metric", "val/acc"], "`--metric` only without `--study`"),
        (["runs", "--from", "runs"], "`--from` only with `--study`"),
        (["a", "b", "--study", "quickstart"], "one folder of runs with `--study`, got 2"),
    ],
)
def test_an_option_of_the_other_report_is_not_ignored(argv: list[str], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        main(argv)


def test_an_output_that_cannot_be_written_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FederatedError, match="--output"):
        main([str(runs), "--output", str(tmp_path / "file" / "below")])


def measured(label: str, *curves: list[float], metric: str = "test/acc") -> Method:
    return method(label, *({metric: dict(enumerate(curve))} for curve in curves))


def summaries(methods: list[Method], metric: str, derived=()) -> dict[str, dict[str, Summary]]:
    """By method and statistic, in the order of the table."""
    table = study_table(*as_study(methods, metric, known_goal(metric), dict(derived)))
    return {
        row: {column: table.cells[(row,), (column,)].summary for (column,) in table.columns} for (row,) in table.rows
    }


def shown(methods: list[Method], metric: str, derived=(), **options) -> tuple[str, list[list[str]]]:
    """The title and the lines of the table."""
    study, results = as_study(methods, metric, known_goal(metric), dict(derived), **options)
    block = study_blocks(study, results, study_table(study, results))[0]
    return block.title, block.lines


@pytest.mark.parametrize(
    ("metric", "goal", "best"), [("val/mae", None, 1), ("val/x", "min", 1), ("val/auroc", None, 3)]
)
def test_the_best_in_latex_is_the_smallest_of_an_error(
    tmp_path: Path, metric: str, goal: str | None, best: int
) -> None:
    for value in (1, 2, 3):
        write_run(tmp_path, f"g{value}", 0, [value, value], metric=metric, label=f"M{value}")
    main([str(tmp_path), "--metric", metric, "--format", "tex", "--best", *(["--goal", goal] if goal else [])])
    text = (tmp_path / f"report-{metric.replace('/', '_')}.tex").read_text()
    assert rf"M{best} & \textbf{{{best}}} & " in text
    assert r"M2 & \underline{2} & " in text
    assert r"\label{tab:runs}" in text


def test_row_by_hand() -> None:
    # Run 0: final 0.5, best 0.9, last ten of 0.9, 0.1 x 9, 0.5: (9 * 0.1 + 0.5) / 10 = 0.14.
    # Run 1: final 0.7, best 0.8, fewer than ten: (0.6 + 0.8 + 0.7) / 3 = 0.7.
    methods = [measured("FedAvg", [0.9] + [0.1] * 9 + [0.5], [0.6, 0.8, 0.7])]
    row = summaries(methods, "test/acc")["FedAvg"]
    assert [run.rounds for run in as_study(methods, "test/acc", "max", {})[1].runs] == [10, 2]
    assert row["final"].mean == pytest.approx(0.6)
    assert row["final"].std == pytest.approx(0.2 / math.sqrt(2))
    assert row["best"].mean == pytest.approx(0.85)
    assert row["best"].std == pytest.approx(0.1 / math.sqrt(2))
    assert row["last 10"].mean == pytest.approx(0.42)
    assert row["last 10"].std == pytest.approx(0.56 / math.sqrt(2))


def test_the_last_ten_are_rounds_not_evaluations() -> None:
    curve = {at: at / 100 for at in range(0, 31, 5)}
    row = summaries([method("FedAvg", {"test/acc": curve})], "test/acc")["FedAvg"]
    assert row["last 10"].mean == pytest.approx((0.25 + 0.30) / 2)


def test_order_follows_the_metric_and_puts_diverged_methods_last() -> None:
    curves = {"low": [0.3, 0.1], "nan": [0.4, math.nan], "high": [0.1, 0.3]}
    accuracies = summaries([measured(label, curve) for label, curve in curves.items()], "test/acc")
    assert list(accuracies) == ["high", "low", "nan"]
    assert [row["best"].mean for row in accuracies.values()] == [0.3, 0.3, pytest.approx(math.nan, nan_ok=True)]
    rows = summaries([measured(label, curve, metric="val/loss") for label, curve in curves.items()], "val/loss")
    assert list(rows) == ["low", "high", "nan"]
    assert [row["best"].mean for row in rows.values()] == [0.1, 0.1, pytest.approx(math.nan, nan_ok=True)]


def test_a_diverged_run_is_shown_and_counted_and_in_no_mean(tmp_path: Path, capsys) -> None:
    write_run(tmp_path, "a", 0, [0.5, 0.7])
    write_run(tmp_path, "a", 1, [0.5, math.nan])
    write_run(tmp_path, "b", 0, [0.9, math.nan], label="GMA")
    main([str(tmp_path), "--budget", "0", "--target", "0.6"])
    out = capsys.readouterr().out
    assert re.search(
        r"^FedAvg  70\.00 \(1 of 2 seeds\)( +\d\d\.00 \(1 of 2 seeds\)){3}  1 of 2 seeds$", out, re.MULTILINE
    )
    assert re.search(r"^GMA( +diverged){5}$", out, re.MULTILINE)
    assert "2 of 3 runs diverged." in out
    assert "Seeds: FedAvg 2, GMA 1." in out
    lines = (tmp_path / "report.csv").read_text().splitlines()
    assert lines[1:] == ["test/acc,FedAvg,2,1" + 10 * ",", "test/acc,GMA,1,1" + 10 * ","]


def test_text_of_accuracies_is_in_percent() -> None:
    methods = [measured("GMA", [0.5, 0.9]), measured("FedAvg+Mask", [0.5, 0.91], [0.5, 0.93])]
    assert shown(methods, "test/acc") == (
        "test/acc (%), mean ± std over 1 to 2 seeds",
        [
            ["method", "final", "best", "last 10"],
            ["FedAvg+Mask", "92.00 ± 1.41", "92.00 ± 1.41", "71.00 ± 0.71"],
            ["GMA", "90.00", "90.00", "70.00"],
        ],
    )


def test_text_of_losses_and_of_accuracies_in_percent_is_as_measured() -> None:
    _, loss = shown([measured("A", [1.23456, 0.5], metric="val/loss")], "val/loss")
    assert loss[1] == ["A", "0.5", "0.5", "0.8673"]
    title, percent = shown([measured("A", [50.0, 90.0])], "test/acc")
    assert title == "test/acc, one seed"
    assert percent[1] == ["A", "90", "90", "70"]


def test_the_title_has_the_number_of_seeds() -> None:
    two = [measured("A", [0.5], [0.6]), measured("B", [0.7], [0.8])]
    assert shown(two, "test/acc")[0] == "test/acc (%), mean ± std over 2 seeds"
    assert shown([two[0], measured("B", [0.7])], "test/acc")[0] == "test/acc (%), mean ± std over 1 to 2 seeds"
    assert shown([measured("B", [0.7])], "test/acc")[0] == "test/acc (%), one seed"


def test_csv_holds_the_values_as_measured(tmp_path: Path) -> None:
    write_run(tmp_path, "b", 0, [0.5, 0.75], label="B")
    for seed, last in enumerate([0.25, 0.75]):
        write_run(tmp_path, "a", seed, [0.25, last], label="A, masked")
    main([str(tmp_path)])
    with (tmp_path / "report.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first["method"], second["method"]] == ["B", "A, masked"]
    assert (first["metric"], first["seeds"], first["rounds"]) == ("test/acc", "1", "1")
    assert (first["final_mean"], first["final_std"], first["last10_mean"]) == ("0.75", "", "0.625")
    assert float(second["final_std"]) == pytest.approx(0.5 / math.sqrt(2))


def test_a_baseline_adds_differences_with_intervals_and_other_formats_hold_them(runs: Path, capsys) -> None:
    # Each seed of GMA is 0.1 better than that of FedAvg at the end.
    main([str(runs), "--baseline", "FedAvg", "--format", "tex", "--best"])
    out = capsys.readouterr().out
    assert "Difference to method FedAvg, percentage points" in out
    assert re.search(r"^final +\+10\.00 +\[\+10\.00, \+10\.00\]", out, re.MULTILINE)
    assert r"\textbf{85.00 $\pm$ 7.07$^{***}$}" in (runs / "report.tex").read_text()
    main([str(runs), "--format", "md"])
    assert "| FedAvg | 75.00 ± 7.07 |" in (runs / "report.md").read_text()
    with pytest.raises(FederatedError, match="`--baseline` to be one of FedAvg.*, got 'GMA'"):
        main([str(runs), "--baseline", "GMA"])


COLUMNS = {
    "test/acc": {0: 0.1, 2: 0.6, 4: 0.5, 5: 0.8},
    "val/loss": {0: 2.0, 2: 0.7, 4: 0.9, 5: 0.4},
    "time/round": {1: 1.0, 2: 2.0, 3: 4.0, 4: 8.0, 5: 16.0},
    "gradients": {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 5: 50.0},
    "comm/bytes_up": {1: 5.0, 2: 10.0, 3: 15.0, 4: 20.0, 5: 25.0},
    "comm/bytes_down": {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0},
}
(RUN,) = method("A", COLUMNS).runs


@pytest.mark.parametrize(
    ("x", "to_06", "to_07", "budget", "within"),
    [
        ("round", 2, 5, 4, 0.5),
        ("round", 2, 5, 3.9, 0.6),
        ("time", 3, 31, 15, 0.5),
        ("time", 3, 31, 14.9, 0.6),
        ("gradients", 20, 50, 19, 0.1),
        ("comm/bytes", 12, 30, 1e9, 0.8),
        ("comm/bytes_up", 10, 25, 0, 0.1),
    ],
)
def test_by_hand(x: str, to_06: float, to_07: float, budget: float, within: float) -> None:
    assert to_target(RUN, "test/acc", x, 0.6) == to_06
    assert to_target(RUN, "test/acc", x, 0.7) == to_07
    assert math.isnan(to_target(RUN, "test/acc", x, 0.81))
    assert at_budget(RUN, "test/acc", x, budget) == within


def test_a_loss_reaches_its_target_from_above() -> None:
    assert [to_target(RUN, "val/loss", "round", target) for target in (2.5, 0.7, 0.5)] == [0, 2, 5]
    assert math.isnan(to_target(RUN, "val/loss", "round", 0.3))


def test_nothing_is_reached_before_the_first_evaluation_and_nan_is_no_target() -> None:
    (run,) = method("A", {"test/acc": {2: math.nan, 4: 0.5}}).runs
    assert math.isnan(at_budget(run, "test/acc", "round", 1))
    assert to_target(run, "test/acc", "round", 0.1) == 4
    with pytest.raises(FederatedError, match=r"--x.*'gradients'"):
        to_target(run, "test/acc", "gradients", 0.1)


def test_columns_of_the_table_and_seeds_that_do_not_arrive() -> None:
    half = {**COLUMNS, "test/acc": {0: 0.1, 5: 0.7}}
    methods = [method("A", COLUMNS, COLUMNS), method("B", COLUMNS, half)]
    derived = derived_columns(methods, "test/acc", "comm/bytes_up", 10, 0.8)
    assert list(derived) == [
        "at comm/bytes_up 10", "comm/bytes_up to 0.8", "round to 0.8", "comm/bytes to 0.8", "gradients to 0.8",
        "time to 0.8",
    ]  # fmt: skip
    rows = summaries(methods, "test/acc", derived)
    assert rows["A"]["at comm/bytes_up 10"] == Summary(0.6, 0)
    assert rows["B"]["at comm/bytes_up 10"].mean == pytest.approx(0.35)
    assert [summary.mean for summary in list(rows["A"].values())[4:]] == [25, 5, 30, 50, 31]
    assert {summary.found for summary in list(rows["B"].values())[4:]} == {1}
    _, (head, first, second) = shown(methods, "test/acc", derived)
    assert head[4:7] == ["at comm/bytes_up 10", "comm/bytes_up to 0.8", "round to 0.8"]
    assert first[-1] == "31 ± 0"
    assert second[-1] == "1 of 2 seeds"
    assert "35.00 ± 35.36" in second


def test_only_what_every_run_measured_is_counted() -> None:
    methods = [method("A", COLUMNS), method("B", {"test/acc": {0: 0.1}, "gradients": {1: 1.0}})]
    assert list(derived_columns(methods, "test/acc", "round", None, 0.5)) == ["round to 0.5", "gradients to 0.5"]
    assert derived_columns(methods, "test/acc", "round", None, None) == {}
