"""Trials are kept below the runs' folder alone, and a damaged journal ends no study without a sentence."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.runner import command, worker
from lightning_fed.lab.runner.storage import optuna_storage
from lightning_fed.lab.runner.tuning import Group, groups_of, tune
from lightning_fed.lab.studies.cells import cells_of
from lightning_fed.lab.studies.study import Study, Tune
from tests.faults.damage import ANY, lose_a_line
from tests.lab.runner.test_tuning import trainer

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def groups(storage: str | None = None) -> list[Group]:
    one = Study("T", "t", tune=Tune(parameters={"lr": [0.1, 0.2, 1.0]}, statistic="final", storage=storage))
    return groups_of(one, cells_of(one), Path("runs/t"))


def choice(storage: str | None = None) -> object:
    """Tunes, where the largest rate is best, and returns what is chosen."""
    (group,) = groups(storage)
    tune([group], trainer(Path("runs/t"), lambda cell: float(cell.options["lr"])), 1)
    chosen = group.choice()
    return chosen and chosen.options


@pytest.mark.parametrize(
    "storage",
    [
        "../.bash_profile", "tuning.log", "runs/t/../../x", "runs/t", "~/x", "file:runs/t/x", "runs/t/out/x", "../x://y",
        "sqlite:///trials.db", "sqlite:///runs/t/../x.db", "sqlite:///runs/other/x.db", "sqlite:///%2e%2e/x.db",
        "sqlite:///file:runs/t/x.db?uri=true", "sqlite://", "sqlite:///:memory:", "sqlite+pysqlite:///x.db",
        "SQLITE:///x.db", "sqlite:///runs/t/out/x.db", "duckdb:///x.db", "sqlite:////{above}/x.db", "{above}/x",
    ],
)  # fmt: skip
def test_a_file_that_is_not_below_the_folder_of_the_runs_is_refused(tmp_path: Path, storage: str) -> None:
    Path("runs/t").mkdir(parents=True)
    Path("runs/t/out").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FederatedError, match="Expected `tune.storage` to be the address of .* below runs/t,"):
        groups(storage.replace("{above}", str(tmp_path)))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_journal_of_a_sent_folder_leads_nowhere_else(tmp_path: Path) -> None:
    Path("runs/t").mkdir(parents=True)
    Path("runs/t/tuning.log").symlink_to(tmp_path / ".bash_profile")
    with pytest.raises(FederatedError, match="below runs/t"):
        groups()


@pytest.mark.parametrize("storage", ["runs/t/own.log", "sqlite:///runs/t/own.db"])
def test_a_file_below_the_folder_of_the_runs_keeps_the_trials(storage: str) -> None:
    assert choice(storage) == {"lr": 1.0}
    assert sorted(path.name for path in Path("runs/t").glob("*.*")) == [storage.rpartition("/")[2], "tuning.lock"]
    assert [len(group.asked()) for group in groups(storage)] == [3]


@pytest.mark.parametrize("address", ["postgresql://user@host/name", "postgresql:///name", "mysql+pymysql://host/name"])
def test_a_database_on_a_server_is_no_file(address: str) -> None:
    assert groups(address)


def test_nothing_is_written_before_the_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "title: T\nconfigs: [quickstart]\naxes: {}\nset: {no.such: $(touch X)}\ntune: {parameters: {lr: [1, 2]}}\n"
    Path("t.yaml").write_text(text)
    monkeypatch.setattr(command.Pool, "mistake", lambda pool, cells: "There is no option `--no.such`.")
    with pytest.raises(FederatedError, match="no option"):
        command.main(["t.yaml", "--output", "runs"], lambda: None)
    assert os.listdir() == ["t.yaml"]


def journal() -> Path:
    assert choice() == {"lr": 1.0}
    return Path("runs/t/tuning.log")


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    whole = journal().read_bytes()
    for end in range(0, len(whole), 97):
        Path("runs/t/tuning.log").write_bytes(whole[:end])
        assert choice() == {"lr": 1.0}, whole[:end]
        lines = Path("runs/t/tuning.log").read_bytes().splitlines()
        assert all(json.loads(line) for line in lines)
        assert [len(group.asked()) for group in groups()] == [3]


@pytest.mark.parametrize("harm", dict.fromkeys((*ANY, lose_a_line)), ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.quick(12)
def test_damage_is_told_or_loses_no_result(harm: Callable[[Path, random.Random], None], seed: int) -> None:
    harm(journal(), random.Random(seed))
    told = ""
    try:
        chosen = choice()
    except FederatedError as error:
        told = str(error)
        os.rename("runs/t/tuning.log", "moved")
        chosen = choice()
    assert chosen == {"lr": 1.0}
    assert not told or re.search(
        "to be a journal of trials, .*that are done are kept|folder of the runs, got .*zero", told
    )


def test_a_full_disk_leaves_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    place = journal()
    whole, storage = place.read_bytes(), optuna_storage(str(place))
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FederatedError, match="tuning.log, but the system refuses"):
        storage.set_trial_user_attr(0, "key", "value")
    assert place.read_bytes().startswith(whole)


def test_a_process_that_was_killed_while_it_wrote_holds_no_lock() -> None:
    """Optuna waits for ever for the link that such a process has left, as it leads nowhere from the link's folder."""
    journal()
    Path("runs/t/tuning.log.lock").symlink_to("runs/t/tuning.log")
    assert choice() == {"lr": 1.0}
    assert Path("runs/t/tuning.log.lock").is_symlink()


@pytest.mark.parametrize("harm", [os.mkfifo, lambda path: path.symlink_to("../outside")])
def test_the_output_of_a_run_goes_into_no_pipe_and_no_link(harm: Callable[..., None], tmp_path: Path) -> None:
    log = Path("log.txt")
    harm(log)
    with pytest.raises(FederatedError, match="Expected to write log.txt, but the system refuses"):
        worker._write_to(log)
    assert not (tmp_path / "outside").exists()
