import csv
import gzip
import io
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from lightning_fed.cli import main as command
from lightning_fed.errors import FederatedError
from lightning_fed.lab.report_command import main
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.runner.record import write_record
from lightning_fed.lab.runner.report import in_order, joined
from lightning_fed.lab.studies.cells import Cell, cells_of
from lightning_fed.lab.studies.results import StudyResults, Trial
from lightning_fed.runs.folder import create_run
from lightning_fed.runs.lock import RunLock
from tests.lab.report.parts import Page
from tests.lab.runner.drawn import RESULTS, digest, draw, kept, picture_digests
from tests.lab.runner.parts import RATES

DRAWN = ("curves.png", "table.csv", "table.md", "table.tex")
COMMITTED = sorted(RESULTS.rglob("results.csv"))

STUDY = (
    RATES
    + """\
report:
  statistic: [final, last 10]
  rows: [rule, statistic]
  columns: [rate]
  baseline: {rule: FedAvg}
  x: time
  published:
    file: gma_table10
    where: {server_lr: 1}
    axes: {rate: client_lr, rule: {FedAvg: {aggregation: avg}, GMA: {aggregation: gma}}}
profiles:
  cpu: {why: one rate, axes: {rate: [0.1], rule: [GMA, FedAvg]}}
"""
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A study, all of whose runs but one are done, in both profiles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.yaml").write_text(STUDY)
    for profile, folder in (("full", "rates"), ("cpu", "rates-cpu")):
        root = tmp_path / "runs" / "studies" / folder
        for at, cell in enumerate(cells_of(load_study("rates.yaml", profile))[:-1]):
            with RunLock() as lock:
                run = create_run(root, cell.folder, {"words": cell.words}, "label", cell.seed, lock)
            rows = "".join(f"{round_},{0.6 + at / 100 + round_ / 1e5},{round_ / 7},9\n" for round_ in range(5, 21, 5))
            run.metrics.write_text("round,test/acc,time/round,other\n" + rows)
            write_record(root, cell, run)
    return "rates.yaml"


def test_tables_are_drawn_from_runs_and_again_from_their_csvs(file: str, tmp_path: Path, capsys) -> None:
    root = tmp_path / "runs" / "studies" / "rates"
    assert main(["--study", file]) == 0
    out = capsys.readouterr().out
    # 0.6 at round 0 of the first run, 0.01 more in each; FedAvg at 0.01, 0.1, then GMA, two seeds each but the last.
    assert "| FedAvg | final | 60.52 ± 0.71 | 62.52 ± 0.71 |" in out
    assert "| GMA | last 10 | 64.52 ± 0.71\\*\\*\\* | 66.02 |" in out
    assert "| GMA | last 10 | 87.00 [-22.48] | 88.40 [-22.38] |" in out
    assert "| final | 0.1 | +4.00 |  |  | 1 |" in out
    assert "Results exist for 7 of 8 runs." in out
    assert "\nwritten: runs/studies/rates/table.md, runs/studies/rates/table.csv, " in out
    assert {path.name for path in root.glob("*.*") if path.is_file()} == {*DRAWN, "results.csv", "curves.csv"}
    with (root / "curves.csv").open() as lines:
        assert next(csv.reader(lines)) == ["rule", "rate", "seed", "round", "test/acc", "time/round"]
    again = tmp_path / "again"
    again.mkdir()
    for name in ("results.csv", "curves.csv"):
        shutil.copy(root / name, again)
    assert main(["--study", file, "--from", str(again)]) == 0
    for name in DRAWN:
        assert (again / name).read_bytes() == (root / name).read_bytes()
    for name in ("results.csv", "curves.csv"):
        (again / f"{name}.gz").write_bytes(gzip.compress((again / name).read_bytes()))
        (again / name).unlink()
    assert main(["--study", file, "--from", str(again), "--output", str(tmp_path / "packed")]) == 0
    for name in DRAWN:
        assert (tmp_path / "packed" / name).read_bytes() == (root / name).read_bytes()


def test_a_profile_and_one_format(file: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["report", "--study", file, "--profile", "cpu", "--format", "tex", "--output", "out"])
    assert ended.value.code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curves.csv", "results.csv", "table.tex"]
    # Runs in order: two of GMA, of which a profile changes the order, and one of FedAvg.
    assert r"GMA & final & 60.52 $\pm$ 0.71 \\" in (tmp_path / "out" / "table.tex").read_text()
    assert main(["--study", file, "--from", "out", "--format", "pdf", "--width", "3.25", "--output", "vectors"]) == 0
    assert [path.name for path in (tmp_path / "vectors").iterdir()] == ["curves.pdf"]
    assert main(["--study", file, "--from", "out", "--format", "html", "--output", "page"]) == 0
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["report.html"]


def test_the_page_shows_what_the_folders_of_runs_hold(file: str) -> None:
    """The runs are drawn over all that they measured, but from tables alone over what stands there."""
    pytest.importorskip("plotly")
    axes = []
    for words in ([], ["--from", "runs/studies/rates"]):
        main(["--study", file, "--format", "html", *words])
        (_, layout), *_ = Page(Path("runs/studies/rates/report.html").read_text(encoding="utf-8")).figures()
        menus = [menu["buttons"] for menu in layout["updatemenus"]]
        axes.append({button["label"] for buttons in menus for button in buttons} - {"bands", "no bands"})
    assert axes == [{"time", "round"}, set()]


def test_files_are_written_whatever_the_terminal_can_show(file: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    words = [sys.executable, "-m", "lightning_fed", "report", "--study", file]
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"| FedAvg | final | 60.52 ? 0.71 |" in done.stdout
    written = {name: (tmp_path / "runs/studies/rates" / name).read_bytes() for name in DRAWN}
    assert "± 0.71".encode() in written["table.md"]
    main(["--study", file])
    assert {name: (tmp_path / "runs/studies/rates" / name).read_bytes() for name in DRAWN} == written


def test_a_metric_whose_goal_nobody_knows_is_shown_but_not_ranked(file: str, tmp_path: Path) -> None:
    """Its goal is what the study's file says, else what the runs have recorded."""
    for table in (tmp_path / "runs").rglob("metrics.csv"):
        table.write_text(table.read_text().replace("test/acc", "test/x"))
    report = "report: {metric: test/x, rows: [rule], columns: [rate], baseline: {rule: FedAvg}, "

    def drawn(rest: str, *words: str) -> str:
        (tmp_path / file).write_text(f"{RATES}{report}{rest}}}\n")
        main(["--study", file, "--best", *words])
        return Path("runs/studies/rates/table.md").read_text().partition("## Difference")[0]

    plain = drawn("statistic: final")
    assert "| FedAvg | 0.6052 ± 0.0071 | 0.6252 ± 0.0071 |\n" in plain
    assert not any(mark in plain for mark in ("**", "<ins>", "average rank |"))
    for rest in ("statistic: best", "statistic: final, target: 0.7", "statistic: final, learned: 0.2, gain: 0.1"):
        with pytest.raises(FederatedError, match=r"Expected `report.goal` to say .* of 'test/x' is the best"):
            drawn(rest)
    least = "| FedAvg | **0.605 ± 0.0071** | **0.625 ± 0.0071** | 1.00 |\n"  # at the first round
    assert least in drawn("statistic: best, goal: min")
    assert least in drawn("statistic: best, goal: {test/x: min}", "--from", "runs/studies/rates")
    for run in (tmp_path / "runs").rglob("version_0"):
        (run / "goals.json").write_text('{"test/x": "min"}')
    assert least in drawn("statistic: best")
    assert least in drawn("statistic: best", "--from", "runs/studies/rates")
    assert "| **0.6602** | 1.00 |\n" in drawn("statistic: best, goal: max")


def test_the_best_are_marked_where_asked_for(file: str) -> None:
    main(["--study", file, "--best"])
    text, latex = (Path(f"runs/studies/rates/table.{kind}").read_text() for kind in ("md", "tex"))
    assert "| GMA | last 10 | **64.52 ± 0.71\\*\\*\\*** | **66.02** |" in text
    assert r" & last 10 & \textbf{64.52 $\pm$ 0.71$^{***}$} & \textbf{66.02} \\" in latex


def test_mistakes_are_one_sentence(file: str, tmp_path: Path) -> None:
    main(["--study", file])
    root = "runs/studies/rates"
    for words, sentence in (
        (["--study", file, "--profile", "x"], "Expected `--profile` to be one of full, cpu, got 'x'"),
        (["--study", file, "elsewhere"], "Expected finished runs of the study rates .*found none: run `lightning-fed"),
        (["--study", file, "--from", root, "--profile", "cpu"], "Expected `--profile` to be full, as in runs/"),
        (["--study", "quickstart", "--from", root], "Expected `--study` to be rates, as in runs/.*'quickstart'"),
        (["--study", file, "--from", "elsewhere"], "Expected the results of a study in elsewhere/results.csv"),
        (["--study"], "Expected `lightning-fed report` with options"),
        (["--study", file, "--width", "0"], r"Expected `--width` to be in \[1, 50\], got 0"),
        (["--study", file, "--width", "nan"], r"Expected `--width` to be in \[1, 50\], got nan"),
        (
            ["--study", file, "--format", "tex", "--width", "3"],
            "Expected `--width` with a picture .*`--format tex`",
        ),
        (["--study", file, "--format", "doc"], "Expected `lightning-fed report` with options .*'doc'"),
    ):
        with pytest.raises(FederatedError, match=sentence):
            main(words)
    (tmp_path / file).write_text(STUDY.replace("GMA", "FedGMA"))
    with pytest.raises(FederatedError, match="Expected the runs of rates, profile full, to have the axes"):
        main(["--study", file, "--from", root])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("results", "name"), list(product(COMMITTED, DRAWN)), ids=lambda value: getattr(value, "parent", value)
)
def test_what_is_committed_is_drawn_again_from_its_csvs(results: Path, name: str) -> None:
    """Pictures exactly where the same matplotlib draws them."""
    content = draw(results.parent, name)
    told = kept()[results.parent.relative_to(RESULTS).as_posix()]
    if name == "table.tex":
        assert digest(content) == told[name]
    elif name == "curves.png":
        found = picture_digests(content)
        exact = found["drawn by"] == told["drawn by"]
        assert {key: found[key] for key in (found if exact else ["size"])}.items() <= told.items()
        if (shown := results.with_name(name)).is_file() and exact:
            assert largest_difference(shown.read_bytes(), content) <= 32
    else:
        assert content == results.with_name(name).read_bytes()


def largest_difference(one: bytes, other: bytes) -> int:
    """Over all pixels and colours, of 255: pages show a picture in few colours."""
    pictures = (Image.open(io.BytesIO(content)).convert("RGB") for content in (one, other))
    return max(high for _, high in ImageChops.difference(*pictures).getextrema())


def test_digests_of_drawings_are_of_the_committed_studies() -> None:
    assert [*kept()] == [path.parent.relative_to(RESULTS).as_posix() for path in COMMITTED]


JOINED = (
    RATES
    + """\
report: {statistic: [final, at equal train/loss], rows: [rule], columns: [rate, statistic], baseline: {rule: FedAvg}}
"""
)
FILES = ("results.csv", "curves.csv", "table.md", "table.csv", "table.tex", "curves.png")


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.chdir(tmp_path)
    Path("rates.yaml").write_text(JOINED)
    return cells_of(load_study("rates.yaml"))


def train(root: Path, cell: Cell, more: float = 0.0) -> None:
    """Puts a run of known numbers into a folder, newer than all that are there."""
    with RunLock() as lock:
        run = create_run(root, cell.folder, {"words": cell.words}, "label", cell.seed, lock)
    lr, gma = float(cell.axes["rate"]), cell.axes["rule"] == "GMA"
    rows = (f"{at},{0.5 + lr + gma / 10 + cell.seed / 50 + at / 100 + more},{1 / (at + gma)}" for at in range(1, 6))
    run.metrics.write_text("round,test/acc,train/loss\n" + "\n".join(rows) + "\n")
    write_record(root, cell, run)


def report(*sources: object, output: str = "joined") -> dict[str, bytes]:
    assert main(["--study", "rates.yaml", "--from", *map(str, sources), "--output", output]) == 0
    return {name: (Path(output) / name).read_bytes() for name in FILES}


def test_three_folders_are_as_one(cells: list[Cell], tmp_path: Path, capsys) -> None:
    """The folder given to ``study``, that of the study itself, and the tables alone of a third."""
    for at, cell in enumerate(cells):
        train(tmp_path / "one" / "rates", cell)
        train(tmp_path / ("a/rates", "b", "c/rates")[at % 3], cell)
    whole = report("one")
    main(["--study", "rates.yaml", "c"])
    Path("tables").mkdir()
    shutil.copy(Path("c/rates/results.csv"), "tables")
    Path("tables/curves.csv.gz").write_bytes(gzip.compress(Path("c/rates/curves.csv").read_bytes()))
    capsys.readouterr()
    assert report("tables", "b", "a") == whole
    assert "holds" not in (said := capsys.readouterr().out)
    assert "several folders" not in said
    assert len(whole["results.csv"].splitlines()) == 1 + len(cells)


def test_of_one_run_in_two_folders_the_newest_counts(cells: list[Cell], tmp_path: Path, capsys) -> None:
    for at, cell in enumerate(cells):
        train(tmp_path / "a", cell)
        if at < 2:
            train(tmp_path / "b", cell, more=0.01 * at)
    said = (report("a"), report("a", "b"), capsys.readouterr().out)[2]
    assert "2 runs are in several folders with the same fingerprint: the newest finished one counts, 2 of b." in said
    assert "For 1 run the results differ between folders, although the fingerprint is the same: FedAvg, 0.01" in said
    # The second run is FedAvg's at 0.01 of seed 1: 0.5 + 0.01 + 0.02 + 0.05, and the 0.01 of b.
    assert b",5,0.59,0.59," in Path("joined/results.csv").read_bytes().splitlines()[2]


def test_a_trial_counts_for_the_later_stage_whichever_folder_comes_first(cells: list[Cell]) -> None:
    def part(stage: int) -> StudyResults:
        trial = Trial(dict(cells[0].axes), 0, {"mu": "1"}, {"val/acc": 0.5}, stage)
        return StudyResults("rates", "full", (), (trial,))

    for order in ((1, 2), (2, 1)):
        results, _ = joined(load_study("rates.yaml"), {Path(str(stage)): part(stage) for stage in order})
        assert [trial.stage for trial in results.trials] == [2]


def test_what_is_not_of_the_study_is_said(cells: list[Cell], tmp_path: Path, capsys) -> None:
    train(tmp_path / "old", cells[0])
    Path("rates.yaml").write_text(JOINED.replace("configs: [quickstart]", "configs: [quickstart]\nset: {a: 1}"))
    for cell in cells_of(load_study("rates.yaml"))[:-1]:
        train(tmp_path / "a", cell)
    Path("empty").mkdir()
    report("old", "empty", "a")
    said = capsys.readouterr().out
    assert "old holds 1 run of another version of the study, with unknown fingerprints, which is left out." in said
    assert "empty has no results of the study rates (profile full)." in said
    assert "Results exist for 7 of 8 runs." in said
    with pytest.raises(FederatedError, match="Expected finished runs of the study rates .* found none"):
        report("empty", "old")


def test_joined_trials_stand_choice_after_choice_and_stage_after_stage(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tune = "tune: {parameters: {model.optimizer.lr: [0.01, 0.1]}, metric: val/acc, per: [rule]}\n"
    Path("tuned.yaml").write_text(
        JOINED.replace("  rate: {option: model.optimizer.lr, values: [0.01, 0.1]}\n", "").replace(
            "columns: [rate, statistic]", "columns: [statistic]"
        )
        + tune
    )
    study = load_study("tuned.yaml")
    left = [("GMA", 2), ("GMA", 1), ("FedAvg", 1), ("Krum", 1), ("FedAvg", 2)]
    trials = [Trial({"rule": rule}, 0, {"model.optimizer.lr": "0.1"}, {}, stage) for rule, stage in left]
    found = [(trial.axes["rule"], trial.stage) for trial in in_order(study, trials)]
    assert found == [("FedAvg", 1), ("FedAvg", 2), ("GMA", 1), ("GMA", 2)]
