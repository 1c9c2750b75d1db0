"""A study's results from several folders: to the bit those of one folder with all runs."""

import shutil
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report_command import main
from lightning_fed.lab.runner.file import load_study
from lightning_fed.lab.runner.gather import in_order, joined
from lightning_fed.lab.runner.record import write_record
from lightning_fed.lab.studies.cells import Cell, cells_of
from lightning_fed.lab.studies.results import StudyResults, Trial
from lightning_fed.runs.folder import create_run
from lightning_fed.runs.lock import RunLock
from tests.lab.runner.parts import RATES

STUDY = (
    RATES
    + """\
report: {statistic: [final, at equal train/loss], rows: [rule], columns: [rate, statistic], baseline: {rule: FedAvg}}
"""
)
FILES = ("results.csv", "curves.csv", "table.md", "table.csv", "table.tex", "curves.png")


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.chdir(tmp_path)
    Path("rates.yaml").write_text(STUDY)
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
    for name in ("results.csv", "curves.csv"):
        shutil.copy(Path("c/rates") / name, "tables")
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
    Path("rates.yaml").write_text(STUDY.replace("configs: [quickstart]", "configs: [quickstart]\nset: {a: 1}"))
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
        STUDY.replace("  rate: {option: model.optimizer.lr, values: [0.01, 0.1]}\n", "").replace(
            "columns: [rate, statistic]", "columns: [statistic]"
        )
        + tune
    )
    study = load_study("tuned.yaml")
    left = [("GMA", 2), ("GMA", 1), ("FedAvg", 1), ("Krum", 1), ("FedAvg", 2)]
    trials = [Trial({"rule": rule}, 0, {"model.optimizer.lr": "0.1"}, {}, stage) for rule, stage in left]
    found = [(trial.axes["rule"], trial.stage) for trial in in_order(study, trials)]
    assert found == [("FedAvg", 1), ("FedAvg", 2), ("GMA", 1), ("GMA", 2)]
