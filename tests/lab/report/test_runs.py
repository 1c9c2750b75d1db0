"""Reading run folders, and their numbers."""

import math
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.runs import (
    Summary,
    counted,
    group_runs,
    load_runs,
    notes_on_window,
    read_metrics,
    summarize,
    summarize_found,
)
from tests.lab.report.parts import write_run


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("", {}),
        ("round,val/acc", {}),
        ("loss,val/acc\n1,2\n", {}),
        (
            "round,val/acc,train/loss\n0,0.1,\n1,,2.5\n2,0.3,2.0\n",
            {"val/acc": {0: 0.1, 2: 0.3}, "train/loss": {1: 2.5, 2: 2}},
        ),
        ("round,val/acc\n0,0.1\n1,0.", {"val/acc": {0: 0.1}}),
        ("round,val/acc,loss\n0,0.1,1\n1,0.2\n2,0.3,1\n", {"val/acc": {0: 0.1, 2: 0.3}, "loss": {0: 1, 2: 1}}),
        ("round,val/acc\n0,0.1\n\0\0\0\n1,0.2\n", {"val/acc": {0: 0.1, 1: 0.2}}),
        ("round,val/acc\n0,0.1\n1,0.2\n1,0.4\n", {"val/acc": {0: 0.1, 1: 0.4}}),
        ("round,val/acc\n2,0.1\nround,val/acc\n1,0.2\n", {"val/acc": {1: 0.2, 2: 0.1}}),
    ],
    ids=["empty", "cut-header", "no-round", "empty-cells", "cut-number", "cut-line", "zeros", "twice", "order"],
)
def test_metrics_are_read_whatever_happened_to_the_file(tmp_path: Path, text: str, columns: dict) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    read = read_metrics(tmp_path / "metrics.csv")
    assert read == columns
    assert all(list(values) == sorted(values) for values in read.values())


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("round,test/acc\n0,0.1\n1,0.2\n2,0.3\n", None),
        ("round,test/acc\n4,0.1\n5,0.2\n6,0.", None),  # resumed in a new folder, and killed in its last row
        ('round,test/acc\n0,0.1\n"1,0.2\n2,0.3\n', "the row after round 0"),  # the quote takes in all that follows
        ("round,test/acc\n0,0.1\n10.2\n2,0.3\n", "the row after round 0"),
        ("round,test/acc\n0,0.1\n1,0.2\n3,0.3\n", "the row after round 1"),
        ("round,test/acc\n0,0.1\n5,0.2\n2,0.3\n", "the row after round 0"),
        ("round,test/acc\np,0.1\n1,0.2\n2,0.3\n", "the first row"),
    ],
    ids=["whole", "resumed", "quote", "comma", "hole", "back", "first"],
)
def test_a_table_that_is_not_as_it_was_written_is_said(tmp_path: Path, text: str, where: str | None) -> None:
    path = write_run(tmp_path, "a", 0, text=text) / "metrics.csv"
    said = f"{path} is damaged at {where}: later rounds count only as far as they can be read."
    assert load_runs([tmp_path])[1] == ([] if where is None else [said])


@pytest.mark.slow
def test_no_flipped_bit_loses_a_row_without_a_word(tmp_path: Path) -> None:
    text = "round,test/acc\r\n" + "".join(f"{at},0.{at}5\r\n" for at in range(12))
    path = write_run(tmp_path, "a", 0, text=text) / "metrics.csv"
    content, begin = path.read_bytes(), text.index("\n") + 1
    for at in range(8 * begin, 8 * (len(content) - 2)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        notes = list[str]()
        rounds = [*read_metrics(path, notes).get("test/acc", {})]
        assert notes or set(rounds) == set(range(12)) or len(rounds) == 11, damaged  # one cell is no number


def test_a_measured_nan_is_no_empty_cell(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,val/loss\n0,1.0\n1,nan\n2,\n")
    values = read_metrics(tmp_path / "metrics.csv")["val/loss"]
    assert list(values) == [0, 1]
    assert math.isnan(values[1])


def test_runs_group_over_seeds_and_the_newest_of_a_seed_counts(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 1, [0.1, 0.2])
    write_run(tmp_path, "a", 0, [0.1, 0.9], created=1.0)
    newest = write_run(tmp_path, "a", 0, [0.1, 0.3], created=2.0)
    write_run(tmp_path, "b", 0, [0.5], label="GMA")
    runs, notes = load_runs([tmp_path / "runs"])
    assert notes == []
    methods, notes = group_runs(runs, "test/acc")
    assert {m.label: [run.seed for run in m.runs] for m in methods} == {"FedAvg": [0, 1], "GMA": [0]}
    first = next(m for m in methods if m.label == "FedAvg").runs[0]
    assert first.path == newest
    assert first.columns["test/acc"] == {0: 0.1, 1: 0.3}
    assert notes == ["Left out older runs of the same configuration and seed: 1."]


def test_an_unfinished_newer_run_without_the_metric_does_not_hide_an_older_one(tmp_path: Path) -> None:
    older = write_run(tmp_path, "a", 0, [0.5])
    newer = write_run(tmp_path, "a", 0, text="round,train/loss\n1,2.0\n")
    methods, notes = group_runs(load_runs([tmp_path])[0], "test/acc")
    assert [run.path for run in methods[0].runs] == [older]
    assert notes == [f"Left out {newer}, which did not measure test/acc."]


def test_equal_labels_are_told_apart_by_name_then_by_hash(tmp_path: Path) -> None:
    write_run(tmp_path, "aaaaaaaaa1", 0, [0.5], name="low")
    write_run(tmp_path, "bbbbbbbbb2", 0, [0.5], name="high")
    write_run(tmp_path, "ccccccccc3", 0, [0.5], name="high")
    write_run(tmp_path, "d", 0, [0.5], label="GMA", name="high")
    methods, _ = group_runs(load_runs([tmp_path])[0], "test/acc")
    assert {m.label for m in methods} == {"FedAvg (low)", "FedAvg (high) (bbbbbbbb)", "FedAvg (high) (cccccccc)", "GMA"}


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", 0, [0.5])
    assert len(load_runs([tmp_path, path, tmp_path / "runs"])[0]) == 1


def test_damaged_and_empty_runs_are_left_out_and_said(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 0, [0.5])
    cut, empty, lost = (write_run(tmp_path, "a", seed, [0.5]) for seed in (1, 2, 3))
    (cut / "run.json").write_text('{"group": "a", "lab')
    (empty / "metrics.csv").write_text("round,test/acc\n")
    (lost / "metrics.csv").unlink()
    runs, notes = load_runs([tmp_path])
    assert [run.seed for run in runs] == [0]
    assert len(notes) == 3
    assert all(any(str(path) in note for note in notes) for path in (cut, empty, lost))


def test_nothing_to_report_on_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"no run with measurements in .*--trainer\.default_root_dir"):
        load_runs([tmp_path])
    with pytest.raises(FederatedError, match="nowhere"):
        load_runs([tmp_path / "nowhere"])
    write_run(tmp_path, "a", 0, [])
    with pytest.raises(FederatedError, match="holds no measurement yet"):
        load_runs([tmp_path])


def test_an_unknown_metric_names_the_columns(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 0, [0.5])
    write_run(tmp_path, "b", 0, [0.5], metric="val/acc")
    with pytest.raises(FederatedError, match="--metric.* one of test/acc, val/acc, got 'x'.$"):
        group_runs(load_runs([tmp_path])[0], "x")
    with pytest.raises(FederatedError, match=r"one of test/acc, val/acc, got 'val/ac': did you mean val/acc\?$"):
        group_runs(load_runs([tmp_path])[0], "val/ac")


def test_deviation_is_that_of_a_sample() -> None:
    # Mean 4; squared deviations 4 + 1 + 9 = 14, over 2.
    assert summarize([2, 3, 7]) == Summary(4.0, math.sqrt(7))
    assert summarize([2]) == Summary(2.0, None)
    assert math.isnan(summarize([0.1, math.nan]).std)
    assert summarize([0.1, 0.1, 0.1]).std == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (12345, "12,345 runs")])
def test_plurals(number: int, text: str) -> None:
    assert counted(number, "run") == text


@pytest.mark.parametrize(("first", "missing"), [({0: 0.1, 1: 0.2, 2: 0.2}, []), ({0: 0.1, 2: 0.2}, ["1 was not"])])
def test_one_round_that_was_not_evaluated_was_not(first: dict[int, float], missing: list[str]) -> None:
    assert [note.rpartition("up to ")[2] for note in notes_on_window([first], "last 10")] == [f"{m}." for m in missing]


def test_one_of_a_thing_is_not_several() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert summarize_found([0.5, math.nan]).text(1, False) == "1 of 1 seed"
