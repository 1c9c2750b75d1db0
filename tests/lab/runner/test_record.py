"""A run of a study is done while its words, the files that these name and its folder are as they were."""

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_fed.cli.yaml_loader import read_yaml
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.options import COLUMNS, AttackOptions
from lightning_fed.lab.runner import command, record, worker
from lightning_fed.lab.runner.command import main, rounds_of
from lightning_fed.lab.runner.record import done_run, hash_of, measured_run, write_record
from lightning_fed.lab.runner.report import collect
from lightning_fed.lab.studies.cells import Cell, cells_of
from lightning_fed.lab.studies.study import AxisValue, Name, Report, Study
from lightning_fed.runs.folder import RunFolder, create_run
from lightning_fed.runs.lock import RunLock
from tests.cli.test_yaml import ENDLESS
from tests.faults.damage import become_a_device, become_a_pipe, become_endless, delete

RATES = {str(rate): AxisValue(set={"model.optimizer.lr": rate}) for rate in (0.1, 0.2)}


def study(folder: Path, rounds: int = 3) -> Study:
    (folder / "part.yaml").write_text("class_path: Digits\n")
    (folder / "base.yaml").write_text(f"trainer: {{max_rounds: {rounds}}}\ndata: part.yaml\n")
    return Study(
        "T", "t", configs=["base.yaml"], axes={"rate": RATES}, report=Report([Name("test/acc"), Name("train/loss")])
    )


def train(root: Path, cell: Cell) -> RunFolder:
    with RunLock() as lock:
        run = create_run(root, cell.folder, {"words": cell.words}, "label", cell.seed, lock)
    run.metrics.write_text("round,test/acc,train/loss,time/round\n0,0.1,,1.5\n2,0.5,0.25,2.5\n")
    write_record(root, cell, run)
    return run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record._values_of.cache_clear()
    command._trainer_of.cache_clear()


def test_what_is_done_is_found_while_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, (cell, other) = tmp_path / "runs", cells_of(study(tmp_path))
    assert done_run(root, cell) is None
    run = train(root, cell)
    assert done_run(root, cell) == run
    assert done_run(root, other) is None
    for file, added in (("base.yaml", "weights: a"), ("part.yaml", "init_args: {}"), ("base.yaml", "# part.yaml")):
        former = (tmp_path / file).read_text()
        (tmp_path / file).write_text(f"{former}{added}\n")
        record._values_of.cache_clear()
        assert (done_run(root, cell) is None) == (added[0] != "#")
        (tmp_path / file).write_text(former)
        record._values_of.cache_clear()
    assert done_run(root, cell) == run
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_ROUNDS", "5")
    assert done_run(root, cell) is None


@pytest.mark.parametrize("damage", ["", "3", "{}", "[]", "[" * 100_000, "pipe"])
def test_a_damaged_record_is_none(tmp_path: Path, damage: str) -> None:
    (cell, _) = cells_of(study(tmp_path))
    train(tmp_path, cell)
    path = tmp_path / cell.folder / "done.json"
    if damage == "pipe":  # which nobody writes to
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_text(damage)
    assert done_run(tmp_path, cell) is None


@pytest.mark.slow
def test_no_flipped_bit_of_a_record_counts(tmp_path: Path) -> None:
    (cell, _) = cells_of(study(tmp_path))
    run = train(tmp_path, cell)
    write_record(tmp_path, cell, run, rounds=2)
    path, whole = tmp_path / cell.folder / "done.json", measured_run(tmp_path, cell)
    content = path.read_bytes()
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert done_run(tmp_path, cell) is None or measured_run(tmp_path, cell) == whole
    assert path.write_bytes(content.replace(b'"rounds": 2', b'"rounds": 0'))
    assert done_run(tmp_path, cell) is None


def test_a_damaged_table_of_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell, _) = cells_of(study(tmp_path))
    run = train(tmp_path, cell)
    run.metrics.write_text("round,test/acc\n0,0.1\n1,0.2\n6,0.3\n")
    for _ in range(2):
        measured_run(tmp_path, cell)
    assert capsys.readouterr().out.count("is damaged at the row after round 1") == 1


def test_other_weights_under_the_same_name_make_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("start.pt").write_bytes(b"one")
    (cell, _) = cells_of(replace(study(tmp_path), set={"weights": "start.pt"}))
    first = record.hash_of(cell)
    Path("start.pt").write_bytes(b"two")
    record._values_of.cache_clear()
    assert record.hash_of(cell) != first


def test_of_a_run_that_has_more_rounds_than_it_is_to_have_the_first_ones_count(tmp_path: Path) -> None:
    (cell, _) = cells_of(one := study(tmp_path))
    run = train(tmp_path, cell)
    assert list(measured_run(tmp_path, cell).columns["test/acc"]) == [0, 2]
    write_record(tmp_path, cell, run, rounds=1)
    assert measured_run(tmp_path, cell).columns["test/acc"] == {0: 0.1}
    assert collect(one, "full", tmp_path)[0].runs[0].rounds == 0
    write_record(tmp_path, cell, run, rounds=2)
    assert list(measured_run(tmp_path, cell).columns["test/acc"]) == [0, 2]


FOUND = """attack,members,others,accuracy,accuracy_low,auc,tpr_at_0.01,tpr_at_0.001
logistic regression,20,20,0.57,0.5,0.6,0.02,0.002
loss,20,20,0.61,0.6,0.64,0.03,0.003
"""


def attacked(folder: Path, **options: int) -> Study:
    """A study that reports an attack on its runs."""
    report = Report([Name("attack/logistic_regression/accuracy"), Name("test/acc")])
    return replace(study(folder), attack=AttackOptions(**options), report=report)


def test_an_attack_on_its_model_is_part_of_a_run(tmp_path: Path) -> None:
    one = attacked(tmp_path)
    cell, plain, other = (cells_of(s)[0] for s in (one, study(tmp_path), attacked(tmp_path, samples=40)))
    assert len({record.hash_of(each) for each in (cell, plain, other)}) == 3
    run = train(tmp_path, cell)
    assert done_run(tmp_path, cell) is None  # nobody has attacked it yet
    (run.path / "attack.csv").write_text(FOUND)
    assert done_run(tmp_path, cell) == run
    assert (done_run(tmp_path, plain), done_run(tmp_path, other)) == (run, None)  # no attack is asked for: it is done
    columns = measured_run(tmp_path, cell).columns
    assert columns["attack/logistic_regression/accuracy"] == {2: 0.57}
    assert columns["attack/loss/auc"] == {2: 0.64}
    assert columns["attack/loss/tpr_at_0.01"] == {2: 0.03}
    assert columns["test/acc"] == {0: 0.1, 2: 0.5}
    (found,) = collect(one, "full", tmp_path)[0].runs
    assert found.curves["attack/logistic_regression/accuracy"] == {2: 0.57}


def test_a_run_that_diverged_is_not_attacked_and_lost_there_too(tmp_path: Path) -> None:
    cell = cells_of(attacked(tmp_path))[0]
    write_record(tmp_path, cell, train(tmp_path, cell), diverged=True)
    columns = measured_run(tmp_path, cell).columns
    assert all(math.isnan(columns[name][3]) for name in (*COLUMNS, "test/acc"))


@pytest.mark.parametrize("damage", ["", "attack\nloss\n", FOUND.replace("0.57", "x"), FOUND.replace("auc", "area")])
def test_figures_of_an_attack_that_cannot_be_read_are_told(tmp_path: Path, damage: str) -> None:
    cell = cells_of(attacked(tmp_path))[0]
    run = train(tmp_path, cell)
    (run.path / "attack.csv").write_text(damage)
    with pytest.raises(FederatedError, match="attack.csv as `lightning-fed attack` writes it, but it cannot be read"):
        measured_run(tmp_path, cell)


def test_the_model_of_more_rounds_than_a_run_is_to_have_is_not_attacked(tmp_path: Path) -> None:
    run = train(tmp_path, cells_of(attacked(tmp_path))[0])
    said = "Expected a model of 2 rounds to attack, but .* has been trained for 3: give the study another"
    with pytest.raises(FederatedError, match=said):
        worker._attack(AttackOptions(), run, SimpleNamespace(round=3, max_rounds=2))  # type: ignore[arg-type]


def test_what_no_run_has_measured_is_no_report(tmp_path: Path) -> None:
    one = study(tmp_path)
    train(tmp_path, cells_of(one)[0])
    columns = r"\(comm/bytes, round, test/acc, time, time/round, train/loss\)"
    for report, said in (
        (
            Report([Name("test/accuracy")]),
            rf"Expected `report.metric` to name .* {columns}, got 'test/accuracy'",
        ),
        (Report(x="rounds"), rf"Expected `report.x` to name a column that was measured {columns}, got 'rounds'"),
    ):
        with pytest.raises(FederatedError, match=said):
            collect(replace(one, report=report), "full", tmp_path)


def test_runs_are_collected_with_the_columns_that_are_reported(tmp_path: Path) -> None:
    one = study(tmp_path)
    run = train(tmp_path, cells_of(one)[0])
    results, missing = collect(one, "full", tmp_path)
    assert (results.name, results.profile) == ("t", "full")
    assert [cell.axes for cell in missing] == [{"rate": "0.2"}]
    (found,) = results.runs
    assert (found.axes, found.seed, found.fingerprint, found.rounds) == ({"rate": "0.1"}, 0, run.fingerprint, 2)
    assert found.curves == {"test/acc": {0: 0.1, 2: 0.5}, "train/loss": {2: 0.25}}


def test_rounds_are_what_the_words_say_last(tmp_path: Path) -> None:
    (cell, _) = cells_of(study(tmp_path, rounds=7))
    assert rounds_of(cell) == 7
    more = Study("T", configs=["base.yaml"], set={"trainer.max_rounds": 9})
    assert rounds_of(cells_of(more)[0]) == 9
    assert rounds_of(cells_of(Study("T", set={"trainer": {"max_rounds": 4}}))[0]) == 4
    assert rounds_of(cells_of(Study("T"))[0]) == 100


def test_the_configuration_of_many_runs_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, read = cells_of(study(tmp_path, rounds=7)), list[str]()
    monkeypatch.setattr(command, "read_yaml", lambda path: read.append(path) or read_yaml(path))
    assert [rounds_of(cell) for cell in cells] == [7, 7]
    assert read == ["base.yaml"]


@pytest.mark.parametrize("harm", [delete, become_a_pipe, become_a_device], ids=lambda harm: harm.__name__)
def test_a_run_without_its_table_is_not_done(tmp_path: Path, harm: Callable[..., None]) -> None:
    """It counted as done, without a result: tuning left the best trial out."""
    (cell, _) = cells_of(study(tmp_path))
    harm(train(tmp_path / "runs", cell).metrics, random.Random(0))
    assert done_run(tmp_path / "runs", cell) is None


@pytest.mark.parametrize("harm", [become_a_pipe, become_a_device, become_endless], ids=lambda harm: harm.__name__)
def test_a_record_that_does_not_end_is_none(tmp_path: Path, harm: Callable[..., None]) -> None:
    (cell, _) = cells_of(study(tmp_path))
    train(tmp_path / "runs", cell)
    harm(tmp_path / "runs" / cell.folder / "done.json", random.Random(0))
    assert done_run(tmp_path / "runs", cell) is None


@pytest.mark.parametrize("text", ENDLESS)
def test_a_configuration_that_grows_when_it_is_read_has_a_hash(tmp_path: Path, text: str) -> None:
    hashes = set()
    for more in ("", "x: 1\n"):
        (tmp_path / "base.yaml").write_text(more + text)
        hashes.add(hash_of(cells_of(Study("T", configs=["base.yaml"]))[0]))
        record._values_of.cache_clear()
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: FILE"),
        (["quickstart", "--job", "2"], "unrecognized arguments: --job 2"),
        (["quickstart", "--jobs", "0"], "Expected `--jobs` to be an integer of at least 1, got 0"),
        (["quickstart", "--shard", "9/8"], "Expected `--shard` as `3/8`, the third of eight shares, got '9/8'"),
        (["quickstart", "--only", "a=b"], "axes of the study .rule, seed., got 'a=b'"),
        (["quickstart", "--profile", "a"], "Expected `--profile` to be one of full, got 'a'"),
    ],
)
def test_a_mistake_of_the_command(words: list[str], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        main(words, lambda: pytest.fail("no run is to be started"))


@pytest.mark.parametrize("tuning", ["", "tune: {parameters: {model.optimizer.lr: [0.1]}}\n"])
def test_an_output_that_is_a_file_is_said_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: str
) -> None:
    monkeypatch.setattr("lightning_fed.lab.runner.executors.Pool.mistake", lambda self, cells: "")
    (tmp_path / "one.yaml").write_text(f"title: T\nconfigs: [quickstart]\n{tuning}")
    (tmp_path / "taken").write_text("")
    with pytest.raises(FederatedError, match=r"Expected to write the folder taken/one, .*change `--output`"):
        main(["one.yaml", "--output", "taken"], lambda: None)


def test_a_file_that_is_edited_while_a_run_trains_makes_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, (cell, _) = tmp_path / "runs", cells_of(study(tmp_path))

    def edit_and_end(root: Path, cell: Cell) -> None:
        study(tmp_path, rounds=9)
        with RunLock() as lock:
            run = create_run(root, f"{cell.folder}/inner", {}, "label", cell.seed, lock)
        write_record(root, cell, run)

    monkeypatch.setattr(worker, "_train", edit_and_end)
    monkeypatch.setattr(worker, "_write_to", lambda path: None)
    monkeypatch.setattr(worker.os, "setpgid", lambda *of: None)
    monkeypatch.setattr(worker.torch, "set_num_threads", lambda count: None)
    before = record.hash_of(cell)
    record._values_of.cache_clear()  # as in a process that has just been forked
    worker.train_cell(root, cell, lambda: None)
    written = record._record(root, cell)
    assert written is not None
    assert written.words == before
    record._values_of.cache_clear()
    assert record.hash_of(cell) != before
