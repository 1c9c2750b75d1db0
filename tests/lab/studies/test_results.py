import csv
import gzip
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.studies.results import StudyResults, read_results, write_results
from tests.faults.damage import become_a_device, become_a_pipe, become_endless
from tests.lab.studies.parts import some_results, study_run

FILES = ("results.csv", "curves.csv", "tuning.csv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_results(some_results(), tmp_path)
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    read = read_results(folder)
    third = pytest.approx(1 / 3, abs=1e-7)
    assert all(run.curves.pop("val/loss") == {10: third} for run in read.runs)
    expected = some_results()
    assert all(run.curves.pop("val/loss") for run in expected.runs)
    assert read == expected
    assert list(read.runs[0].axes) == ["rule", "data set"]


@pytest.mark.parametrize("name", ["=1+1", "+GMA", "-mask", "'quoted", "'=1", "\tx"])
def test_names_that_a_spreadsheet_would_compute_are_themselves_when_read(tmp_path: Path, name: str) -> None:
    one = some_results()
    runs = tuple(replace(run, axes={**run.axes, "rule": f"{name}{run.axes['rule']}"}) for run in one.runs)
    write_results(replace(one, runs=runs, trials=()), tmp_path)
    assert [run.axes for run in read_results(tmp_path).runs] == [run.axes for run in runs]
    rules = [row["rule"] for row in csv.DictReader((tmp_path / "results.csv").open(newline=""))]
    assert all(rule.startswith(("'", '"')) for rule in rules)


def test_written_again_the_files_are_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    again = tmp_path_factory.mktemp("again")
    write_results(read_results(folder), again)
    for name in FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def pack(path: Path) -> Path:
    """Packs a file as ``gzip`` does: with the time, and the file itself is gone."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=12345))
    path.unlink()
    return packed


@pytest.mark.parametrize("names", [FILES, FILES[1:2]])
def test_packed_files_are_read_and_written_packed(folder: Path, names: tuple[str, ...]) -> None:
    before, plain = read_results(folder), {name: (folder / name).read_bytes() for name in FILES}
    packed = [pack(folder / name) for name in names]
    assert read_results(folder) == before
    contents = []
    for _ in range(2):
        write_results(before, folder)
        contents.append([path.read_bytes() for path in packed])
    assert contents[0] == contents[1]
    assert [content[4:8] for content in contents[0]] == [bytes(4)] * len(names)  # no time
    assert [gzip.decompress(content) for content in contents[0]] == [plain[name] for name in names]
    assert {path.name for path in folder.iterdir()} == {*FILES} - {*names} | {path.name for path in packed}


def test_without_tuning_a_packed_table_of_it_goes_too(folder: Path) -> None:
    pack(folder / "tuning.csv")
    write_results(replace(some_results(), trials=()), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["curves.csv", "results.csv"]


@pytest.mark.parametrize("harm", [lambda data: data[:-4], lambda data: b"no gzip", lambda data: data[:30] + b"#" * 40])
def test_a_damaged_packed_file_is_one_sentence(folder: Path, harm: Callable[[bytes], bytes]) -> None:
    packed = pack(folder / "curves.csv")
    packed.write_bytes(harm(packed.read_bytes()))
    with pytest.raises(FederatedError, match=r"^Expected the results of a study in .*curves.csv.gz, but it cannot be "):
        read_results(folder)


def test_statistics_stand_beside_each_run(folder: Path) -> None:
    with (folder / "results.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    fixed = ["study", "profile", "rule", "data set", "seed", "fingerprint", "rounds"]
    chosen = ["chosen model.optimizer.lr", "chosen aggregator.mask.threshold"]
    figures = [f"{metric} {name}" for metric in ("test/acc", "val/loss") for name in ("best", "final", "last 10")]
    assert header == fixed + chosen + figures
    assert rows[0][:5] == ["two_rules", "cpu", "FedAvg", "mnist", "0"]
    assert rows[0][7:] == ["0.1", "", "0.8", "0.8", "0.75", *["0.3333333"] * 3]


def test_odd_values_come_back(tmp_path: Path) -> None:
    curves = {"test/acc": {0: math.nan, 3: math.inf, 4: 1e-30}, 'a "b", c': {4: 0.1 + 1e-12}}
    run = study_run(0, curves, rule='FedAvg, "µ"\nsecond')
    write_results(StudyResults("odd", "full", (run,)), tmp_path)
    (read,) = read_results(tmp_path).runs
    assert read.axes == run.axes
    assert list(read.curves["test/acc"].values()) == pytest.approx([math.nan, math.inf, 1e-30], nan_ok=True)
    assert read.curves['a "b", c'] == {4: 0.1}


def test_without_tuning_there_is_no_table_of_it(folder: Path) -> None:
    write_results(replace(some_results(), trials=()), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["curves.csv", "results.csv"]
    assert read_results(folder).trials == ()


def test_no_runs_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"^Expected finished runs of the study empty \(profile cpu\).*found none"):
        write_results(StudyResults("empty", "cpu", ()), tmp_path)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_missing_file_is_one_sentence(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FederatedError, match=rf"^Expected the results of a study in .*{name}, but it cannot be read"):
        read_results(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        ("results.csv", "rounds", "lengths", "there are columns rounds"),
        ("results.csv", "cpu", "gpu", "of one study and profile"),
        ("results.csv", "mnist,13,", "mnist,0,", "no run stands there twice"),
        ("results.csv", "mnist,13,", "mnist,x,", "invalid literal"),
        ("results.csv", "cpu,FedAvg", "cpu,FedAvg,FedAvg", "all rows are whole"),
        ("curves.csv", "mnist,13,", "mnist,14,", "each of its runs is in results.csv"),
        ("curves.csv", "0.7", "0.7.7", "could not convert"),
        ("curves.csv", '"FedAvg', 'Fed"Avg', "all rows are whole"),
        ("tuning.csv", "0.5", "", "all rows are whole"),
        ("tuning.csv", "seed", "sead", "there are columns seed"),
    ],
)
def test_a_damaged_file_is_one_sentence(folder: Path, name: str, old: str, new: str, what: str) -> None:
    path = folder / name
    text = path.read_text().replace(old, new, 1)
    path.write_text(text.replace("0.6,0.7\n", "0.6,0.7") if not new else text)
    with pytest.raises(FederatedError, match=rf"^Expected .*{name} as `lightning-fed report --study` writes.*{what}"):
        read_results(folder)


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("harm", [become_a_pipe, become_a_device, become_endless], ids=lambda harm: harm.__name__)
def test_a_file_that_does_not_end_is_one_sentence(folder: Path, name: str, harm: Callable[..., None]) -> None:
    harm(folder / name, random.Random(0))
    with pytest.raises(FederatedError, match=rf"^Expected the results of a study in .*{name}, but it cannot be read"):
        read_results(folder)


def test_half_a_file_is_one_sentence(folder: Path) -> None:
    path = folder / "curves.csv"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FederatedError, match="all rows are whole"):
        read_results(folder)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FederatedError, match="cannot be read"):
        read_results(folder)
    path.write_bytes(b"")
    with pytest.raises(FederatedError, match="damaged"):
        read_results(folder)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("curves.csv", "FedAvg,mnist,13,10,0.813,0.3333333\n", ""),  # the end of a run
        ("curves.csv", "FedAvg,mnist,13,5,0.713,\n", ""),  # a round that counts in `last 10`
        ("curves.csv", "FedAvg,mnist,13,10,0.813,", "FedAvg,mnist,13,10,0.613,"),
        ("curves.csv", "FedAvg,mnist,13,10,", "FedAvg,mnist,13,18,"),
        ("curves.csv", ",val/loss\n", ",val/lost\n"),
        ("results.csv", ",10,0.1,,0.813,", ",9,0.1,,0.813,"),
        ("results.csv", ",10,0.1,,0.813,", ",10,0.1,,0.713,"),
    ],
)
def test_curves_that_are_not_those_of_the_results_are_refused(folder: Path, file: str, before: str, after: str) -> None:
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1))
    with pytest.raises(FederatedError, match=r"curves.csv as .* damaged \(not so that it agrees with the results.csv"):
        read_results(folder)


def test_a_goal_that_no_name_says_is_kept_in_the_tables(tmp_path: Path) -> None:
    known, unknown = (study_run(seed, {"val/x": {1: 3.0, 2: 5.0}}, rule="A") for seed in (0, 1))
    write_results(StudyResults("odd", "full", (replace(known, goals={"val/x": "min"}), unknown)), tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["goal of val/x"], row["val/x best"], row["val/x final"]) for row in rows] == [
        ("min", "3", "5"),
        ("", "", "5"),
    ]
    assert [run.goals for run in read_results(tmp_path).runs] == [{"val/x": "min"}, {}]
