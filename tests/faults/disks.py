"""A disk that refuses: each operation of a run that changes a file fails in turn, and later ones with it or not."""

import builtins
import errno
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_fed.core.files import WriteError
from tests.faults.counts import Counts, Outcome
from tests.faults.tiny import ROUNDS, beside_a_whole_run, fit, is_sentence, same, versions

TRIALS = 200
TRAINED = 2
KINDS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)
FOR_EVER = 10**9
Mode = Literal["stop", "continue"]


class Disk:
    """Counts what changes files below a folder, and refuses some of it.

    Args:
        folder: The folder.
        first: The operation that fails first, from 0; None for none.
        count: How many fail from there on.
        number: What the system says.
    """

    def __init__(self, folder: Path, first: int | None = None, count: int = 1, number: int = errno.ENOSPC) -> None:
        self.folder, self.first, self.count, self.number = str(folder), first, count, number
        self.done = 0
        self.files: set[int] = set()

    def touch(self, what: Any) -> None:
        """Lets an operation on a path, or on an open file, pass or fail."""
        below = (
            what in self.files if isinstance(what, int) else os.path.abspath(os.fspath(what)).startswith(self.folder)
        )
        if below:
            self.done += 1
            if self.first is not None and self.first < self.done <= self.first + self.count:
                raise OSError(self.number, os.strerror(self.number))


class File:
    """An open file that is written in two halves, the second of which a full disk may refuse."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk
        disk.files.add(file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *error: Any) -> None:
        self._disk.files.discard(self._file.fileno())
        self._file.close()

    def write(self, content: Any) -> int:
        half = len(content) // 2
        self._file.write(content[:half])
        self._disk.touch(self._file.fileno())
        self._file.write(content[half:])
        return len(content)


@contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Lets every function of Python that changes files ask the disk first."""
    real_open, kept = builtins.open, {}

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        changes = any(letter in mode for letter in "wax+") and not isinstance(path, int)
        if changes:
            disk.touch(path)
        file = real_open(path, mode, *args, **kwargs)
        return File(file, disk) if changes and os.path.abspath(os.fspath(path)).startswith(disk.folder) else file

    def asking(name: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_there = name == "mkdir" and os.path.isdir(args[place])
            if not is_there and (name != "open" or args[1] & os.O_CREAT):
                disk.touch(args[place])
            return None if name == "fsync" else function(*args, **kwargs)  # no power is lost here

        return call

    for name, place in (("replace", 1), ("link", 1), ("mkdir", 0), ("fsync", 0), ("open", 0)):
        kept[name] = getattr(os, name)
        setattr(os, name, asking(name, kept[name], place))
    builtins.open = open_file
    try:
        yield disk
    finally:
        builtins.open = real_open
        for name, function in kept.items():
            setattr(os, name, function)


def leftover(run: Path) -> str | None:
    """Says what is not whole in the folder of a run that has ended."""
    for path in run.rglob("*"):
        if path.suffix == ".tmp":
            return f"{path.name} is left"
        if path.suffix == ".ckpt":
            torch.load(path, weights_only=True)
        if path.name == "metrics.csv" and not path.read_bytes().endswith(b"\n"):
            return "metrics.csv ends within a row"
    return None


def judge(folder: Path, whole: Path, disk: Disk, mode: Mode, ckpt_path: str | None) -> tuple[Outcome, str]:
    """Trains on a disk that refuses, then, where that ended the run, goes on when it no longer does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with failing(disk):
                fit(folder, ckpt_path=ckpt_path, on_write_error=mode)
            failed = False
        except WriteError as error:
            failed = True
            if not is_sentence(error) or disk.folder not in str(error):
                return "traceback", str(error)
        except Exception as error:
            return "traceback", f"{type(error).__name__}: {error}"
    if not failed and mode == "stop" and not any("pictures of the split" in str(one.message) for one in said):
        return "wrong success", "nothing was said"
    for run in versions(folder):
        if (found := leftover(run)) is not None:
            return "wrong success", found
    kept = any(folder.glob("run/*/checkpoints/*.ckpt"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit(folder, ckpt_path="last")
    if not same(versions(folder)[-1], whole):
        return "wrong success", "other numbers"
    return ("right" if trainer.resumed or not kept else "lost"), ""


def run(trials: int, seed: int) -> Counts:
    """Runs the campaign: every operation of a new run and of a resumed one, as often as the trials go around."""
    counts = Counts()
    with beside_a_whole_run(TRAINED) as (root, whole):
        cases = [(None, place) for place in range(_count(root / "a", None, root / "made"))]
        cases += [("last", place) for place in range(_count(root / "b", "last", root / "made"))]
        chance = random.Random(seed)
        for number in range(trials):
            ckpt_path, place = cases[number % len(cases)]
            folder = root / f"{number}"
            if ckpt_path:
                shutil.copytree(root / "made", folder)
            kind, count = chance.choice(KINDS), chance.choice((1, 5, FOR_EVER))
            mode: Mode = "continue" if (number // len(cases) + number) % 2 else "stop"
            disk = Disk(folder, place, count, kind)
            outcome, said = judge(folder, whole, disk, mode, ckpt_path)
            counts.note(
                outcome,
                f"seed {seed}, trial {number}: operation {place} of {'a resumed' if ckpt_path else 'a new'} run and "
                f"{count - 1} after it, {errno.errorcode[kind]}, {mode}: {said}",
            )
            shutil.rmtree(folder, ignore_errors=True)
    return counts


def _count(folder: Path, ckpt_path: str | None, made: Path) -> int:
    """Returns the number of operations of a run that nothing disturbs."""
    if ckpt_path:
        shutil.copytree(made, folder)
    with failing(Disk(folder)) as disk:
        fit(folder, ROUNDS, ckpt_path=ckpt_path)
    return disk.done
