"""A part of the campaigns over files that is run every time, and each promise by itself."""

import errno
import os
import random
import re
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import lock_descriptor
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed.core import files
from lightning_fed.core.files import WriteError, append_whole, write_atomically
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import expect_layout, read_checkpoint, seal_of
from lightning_fed.runs.folder import read_run
from lightning_fed.runs.lock import RunLock, remove_leftovers
from tests.faults import damage, disks, folders, hooks, kills, studies
from tests.faults.tiny import ROUNDS, fit, same, versions
from tests.parts import Classifier, built, federated_data, federated_trainer


@pytest.mark.parametrize(
    ("campaign", "quick", "trials"),
    [(damage, 6, 100), (disks, 4, 60), (kills, 3, 20), (hooks, 8, 100), (studies, 30, 500), (folders, 60, 500)],
    ids=["damage", "disks", "kills", "hooks", "studies", "folders"],
)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["part", "more"])
def test_nothing_is_lost(campaign: Any, quick: int, trials: int, whole: bool) -> None:
    counts = campaign.run(trials if whole else quick, seed=7)
    assert counts.wrong == []
    assert counts.tried == (trials if whole else quick)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    fit(folder / "whole")
    fit(folder / "begun", 2)
    return folder


@pytest.fixture
def begun(made: Path, tmp_path: Path) -> Path:
    """The folder of a run of two rounds."""
    shutil.copytree(made / "begun", tmp_path, dirs_exist_ok=True)
    return versions(tmp_path)[0]


def go_on(run: Path, ckpt_path: str = "last") -> Any:
    return fit(run.parents[1], ckpt_path=ckpt_path)


def test_a_second_start_says_who_trains_and_a_dead_process_holds_nothing(begun: Path, made: Path) -> None:
    end, start = os.pipe()
    other = os.fork()
    if not other:
        with RunLock() as lock:
            lock.take(begun)
            os.write(start, b"held")
            time.sleep(600)
    assert os.read(end, 4) == b"held"
    with pytest.raises(FederatedError, match=rf"process {other} of .*, started .* trains in it: wait"):
        go_on(begun)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    go_on(begun)
    assert same(begun, versions(made / "whole")[0])


def test_a_folder_is_free_after_each_end_and_workers_hold_nothing(begun: Path) -> None:
    with RunLock() as lock:
        lock.take(begun)
        child = os.fork()
        if not child:
            os._exit(0 if not os.path.exists(f"/proc/self/fd/{lock._file}") else 1)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(FederatedError, match="trains in it"):
            go_on(begun)
    go_on(begun)
    with RunLock() as lock:
        lock.take(begun)


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    (tmp_path / ".lock").symlink_to(mine)
    with RunLock() as lock, pytest.raises(WriteError, match=r"\.lock"):
        lock.take(tmp_path)
    assert mine.read_text() == "kept"


def test_two_new_runs_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    fit(tmp_path, 1)
    assert len(versions(tmp_path)) == 2


def test_a_new_folder_is_taken_before_anything_is_written_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes) -> None:
        half = path.with_name(f".{path.name}.1.tmp")
        half.write_bytes(content)
        remove_leftovers(path.parents[1])  # another start
        half.rename(path)

    monkeypatch.setattr("lightning_fed.runs.folder.write_atomically", write)
    fit(tmp_path, 1)


def test_a_run_killed_before_its_run_json_leaves_nothing_to_the_next(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each operation on a file up to then: the run's folder, its lock, the text in it and half of `run.json`."""
    at, found = 0, set[tuple[str, ...]]()
    while True:
        folder = tmp_path / str(at)
        status, said = kills.in_a_child(folder, kills.Deadly(folder, at))
        assert status == -signal.SIGKILL, said
        if (folder / "run" / "version_0" / "run.json").exists():
            break
        found.add(tuple(sorted(path.name.split(".")[1] for path in folder.glob("run/version_0/*"))))
        fit(folder, ckpt_path="last" if at % 2 else None)
        assert [path.name for path in (folder / "run").iterdir()] == ["version_0"]
        assert same(versions(folder)[0], versions(made / "whole")[0])
        at += 1
    assert {("lock",), ("lock", "run")} <= found


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a start at the same moment: before the lock's file is there, or between opening and locking it."""
    swept: list[str] = []

    def sweep(parent: Path, when: str) -> None:
        if when not in swept:
            swept.append(when)
            shutil.rmtree(parent / "version_0")

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        original(path, *args, **options)
        if path.name == "version_0":
            sweep(path.parent, "before")

    def lock(file: int, *, blocking: bool) -> bool:
        if "before" in swept:
            sweep(tmp_path / "run", "between")
        return lock_descriptor(file, blocking=blocking)

    original = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr("lightning_fed.runs.lock.lock_descriptor", lock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fed.runs.folder.count", lambda start: iter([0, 0, 0]))
        fit(tmp_path, 1)
    assert swept == ["before", "between"]
    assert [path.name for path in versions(tmp_path)] == ["version_0"]


@pytest.mark.parametrize("kind", ["pipe", "endless", "large", "folder"])
def test_a_run_json_that_is_none_is_passed_over(begun: Path, made: Path, kind: str) -> None:
    """A later start neither waits for it nor reads it without end, and leaves its results where they are."""
    path = begun / "run.json"
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "large":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "folder":
            path.mkdir()
    with pytest.raises(OSError, match="regular file|more than|directory"):
        read_run(begun)
    with pytest.raises(FederatedError, match=r"run\.json to describe its run, but it cannot be read"):
        go_on(begun)


def test_without_locks_nothing_is_swept(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be about to write it."""

    def no_locks(file: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("lightning_fed.runs.lock.lock_descriptor", no_locks)
    half = begun / "checkpoints" / ".last.ckpt.1.tmp"
    half.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remove_leftovers(begun.parent)
    assert half.exists()
    with pytest.warns(UserWarning, match="has no locks"):
        go_on(begun)


@pytest.mark.parametrize("name", damage.NAMES)
def test_names_in_a_checkpoint_leave_no_folder(begun: Path, name: str) -> None:
    last = begun / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["federated"]["client_states"].append(name)
    checkpoint["federated"]["seal"] = seal_of(checkpoint)  # as somebody would who forges it
    torch.save(checkpoint, last)
    before = sorted(begun.parents[1].rglob("*"))
    with pytest.raises(FederatedError, match="KEY/CLIENT-VERSION"):
        go_on(begun, str(last))
    assert sorted(begun.parents[1].rglob("*")) == before


def test_names_that_would_be_removed_leave_no_folder(tmp_path: Path) -> None:
    def keeps_two(rounds: int, **options: Any) -> None:
        keeper = ModelCheckpoint(monitor="val/loss", save_top_k=2, filename="{epoch}")
        trainer = federated_trainer(
            tmp_path / "runs", keeper, enable_checkpointing=True, logger=[], name="run", max_rounds=rounds
        )
        trainer.fit(built(Classifier), federated_data(), **options)

    keeps_two(3)
    precious = tmp_path / "precious.ckpt"
    precious.write_text("of somebody else")
    last = versions(tmp_path / "runs")[0] / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    (state,) = (state for key, state in checkpoint["callbacks"].items() if key.startswith("ModelCheckpoint"))
    forged = str(last.parent / ".." / ".." / ".." / ".." / "precious.ckpt")
    state.update(best_k_models=dict.fromkeys([forged, str(last)], torch.tensor(9.0)), kth_best_model_path=forged)
    checkpoint["federated"]["seal"] = seal_of(checkpoint)
    torch.save(checkpoint, last)
    with pytest.raises(FederatedError, match=r"name checkpoints in .*precious"):
        keeps_two(5, ckpt_path="last")
    assert precious.exists()


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_checkpoint(tmp_path / "a.ckpt", "--weights")["weight"], torch.ones(3))


def test_rows_are_on_the_disk_before_a_checkpoint_counts_on_them(tmp_path: Path, monkeypatch: Any) -> None:
    synced, sync = [], os.fsync

    def noting(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2])
        sync(file)

    monkeypatch.setattr(os, "fsync", noting)
    fit(tmp_path, 1)
    last = max(at for at, name in enumerate(synced) if name.startswith(".last.ckpt"))
    assert "metrics.csv" in synced[last - 2 : last]  # `best` may come between


def test_every_byte_of_a_checkpoint_is_watched(begun: Path) -> None:
    last, chance = begun / "checkpoints" / "last.ckpt", random.Random(0)
    content, reference = last.read_bytes(), damage.places_in(torch.load(last, weights_only=True), 9)
    noticed = 0
    for at in range(0, len(content), 23):
        changed = bytearray(content)
        changed[at] ^= chance.randrange(1, 256)
        last.write_bytes(changed)
        try:
            assert damage.places_in(read_checkpoint(last, "--ckpt_path"), 9) == reference
        except FederatedError:
            noticed += 1
    assert noticed > len(content) / 23 / 2


def test_a_flipped_number_is_refused_and_best_goes_on(begun: Path, made: Path) -> None:
    last = begun / "checkpoints" / "last.ckpt"
    weights = torch.load(last, weights_only=True)["state_dict"]["net.weight"].numpy().tobytes()
    content = last.read_bytes()
    at = content.index(weights)
    last.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(FederatedError, match="cannot be read"):
        federated_trainer(begun).validate(Classifier(), federated_data(), weights=str(last), verbose=False)
    with pytest.warns(UserWarning, match=r"last\.ckpt cannot be read: going on from best\.ckpt of round \d"):
        go_on(begun)
    assert same(begun, versions(made / "whole")[0])


def test_rows_without_a_checkpoint_are_no_new_run(begun: Path) -> None:
    shutil.rmtree(begun / "checkpoints")
    for ckpt_path, words in (("last", "3 rows"), ("best", "no whole|none")):
        with pytest.raises(FederatedError, match=words):
            go_on(begun, ckpt_path)
    assert versions(begun.parents[1]) == [begun]


@pytest.mark.parametrize("text", ["{}", "no json", None], ids=["empty", "text", "changed"])
def test_a_run_that_cannot_be_told_is_no_new_run(begun: Path, text: str | None) -> None:
    facts = begun / "run.json"
    facts.write_text(facts.read_text().replace(read_run(begun).fingerprint[:8], "0" * 8) if text is None else text)
    with pytest.raises(FederatedError, match=r"run\.json to describe its run"):
        go_on(begun)
    assert versions(begun.parents[1]) == [begun]


@pytest.mark.parametrize("harm", ["header", "row", "cell", "all", "bytes"])
def test_rows_must_be_as_they_were(begun: Path, harm: str) -> None:
    table = begun / "metrics.csv"
    lines = table.read_bytes().splitlines(keepends=True)
    changed = {
        "header": lines[1:], "row": [*lines[:2], *lines[3:]], "cell": [*lines[:3], lines[3].replace(b"0.", b"9.", 1)],
        "all": [], "bytes": [*lines[:3], b"\xff\xfe" + lines[3]],
    }  # fmt: skip
    table.write_bytes(b"".join(changed[harm]))
    with pytest.raises(FederatedError, match="rows of all rounds up to 2"):
        go_on(begun)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = go_on(begun, str(begun / "checkpoints" / "last.ckpt"))
    assert any("begins with round 3" in str(warning.message) for warning in said)
    assert trainer.run.metrics.read_text().splitlines()[1].startswith("3,")


def test_each_part_of_a_checkpoint_is_checked(begun: Path) -> None:
    """What is left out, or of another type, is said by its name."""
    last = begun / "checkpoints" / "last.ckpt"
    for *parents, key in damage.places_in(torch.load(last, weights_only=True)["federated"], 2):
        checkpoint = torch.load(last, weights_only=True)
        part = checkpoint["federated"]
        for parent in parents:
            part = part[parent]
        for wrong in (object(), torch.zeros(3)):  # a tensor is neither equal to a number nor other than it
            part[key] = wrong
            if isinstance(key, str) and key not in ("format", "values"):
                named = key if parents == ["seal"] else ".".join(["federated", *parents, key])
                with pytest.raises(FederatedError, match=re.escape(f"`{named}")):
                    expect_layout(checkpoint, "it")


def test_leftovers_go_with_the_next_start(begun: Path) -> None:
    other = begun.with_name("version_7")
    left = [begun / ".run.json.1.tmp", begun / "checkpoints" / ".last.ckpt.1.tmp", other / ".run.json.3.tmp"]
    left.append(begun / "client_states-abc")
    (other / "checkpoints").mkdir(parents=True)
    left[-1].mkdir()
    for path in left[:-1]:
        path.write_text("half")
    go_on(begun)
    assert not any(path.exists() for path in left)


def test_last_good_goes_with_the_next_checkpoint_and_pins_nothing(begun: Path) -> None:
    good = begun / "checkpoints" / "last_good.ckpt"
    torch.save(Classifier().state_dict(), good)
    trainer = go_on(begun)
    assert not good.exists()
    named = [torch.load(path, weights_only=True)["federated"]["client_states"] for path in trainer.run.kept()]
    there = {f"{path.parent.name}/{path.name}" for path in begun.glob("client_states/*/*")}
    assert there == {file for files in named for file in files}


def test_run_folders_are_not_for_everybody(begun: Path) -> None:
    fit(begun.parents[1], 1, clients_per_round=1)
    assert versions(begun.parents[1])[-1].stat().st_mode & 0o007 == 0


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one\n")
    append_whole(path, b"two\n")

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(WriteError, match=rf"{path}.*No space left.*`--output`"):
        write_atomically(path, b"three\n", "--output")
    assert path.read_bytes() == b"one\ntwo\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_ends_a_run_or_is_said_each_round(tmp_path: Path, made: Path) -> None:
    first = disks.Disk(tmp_path)
    with disks.failing(first):
        fit(tmp_path, 1)
    for mode in ("stop", "continue"):
        folder = tmp_path / mode
        disk = disks.Disk(folder, first.done, 10)
        with disks.failing(disk), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if mode == "stop":
                with pytest.raises(WriteError, match="No space left on device"):
                    fit(folder)
            else:
                fit(folder, on_write_error=mode)
        rounds = {str(w.message)[:8] for w in said if "--trainer.tolerance.on_write_error" in str(w.message)}
        assert (len(rounds) > 1) == (mode == "continue")
        if mode == "stop":
            fit(folder, ckpt_path="last")
        assert same(versions(folder)[0], versions(made / "whole")[0])
        assert len(versions(folder)) == 1
    assert ROUNDS > 2
