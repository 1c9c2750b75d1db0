"""Lets only one process train in a run's folder, and removes files that killed processes have left there."""

import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import lock_descriptor

from lightning_fed.core.files import writing
from lightning_fed.errors import FederatedError

__all__ = ["RunLock", "remove_leftovers"]

_FILE = ".lock"
# Temporary files of a process that writes: files before they are renamed, and client state that no checkpoint needs.
_LEFTOVERS = (".*.tmp", "checkpoints/.*.tmp", "client_states/*/.*.tmp", "client_states-*")
_held: set[int] = set()


def _let_go() -> None:
    """Closes the parent's locked files, so that a worker that outlives a killed run does not keep the lock."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """Reserves the folder of a run for one process, from ``take`` to the end of the block or of the process.

    It is a lock of the operating system on a file, so a killed process loses it. The file itself stays.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the folder."""
        file, self._file = self._file, None
        if file in _held:
            _held.remove(file)
            with suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)

    def take(self, folder: Path, surely: bool = False) -> None:
        """Locks a folder; call it once.

        Args:
            folder: The run's folder.
            surely: Whether to raise instead of warn if the file system has no locks.

        Raises:
            FederatedError: If another process trains in it.
            OSError: If ``surely`` and the file system has no locks.
            WriteError: If the system cannot make the file.
        """
        path = folder / _FILE
        with writing(path):
            # Not through a link in a sent folder, to a file that would be emptied.
            file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            free = lock_descriptor(file, blocking=False)
        except OSError as error:
            if surely:
                os.close(file)
                raise
            from lightning.pytorch.utilities import rank_zero_warn  # imported here, as reports do not need Lightning

            rank_zero_warn(
                f"The file system of {folder} has no locks ({error.strerror}): make sure that no second start with "
                "`--ckpt_path last` trains in this folder at the same time."
            )
            free = True
        if not free:
            holder = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            raise FederatedError(
                f"Expected to go on with the run in {folder}, but {holder or 'another process'} trains in it: wait "
                "until it has ended, or leave out `--ckpt_path` for a run of its own."
            )
        self._file = file
        _held.add(file)
        with suppress(OSError):  # on a full disk the lock works without this text
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} of {socket.gethostname()}, started {time.ctime()},".encode())


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes have left below a name, in run folders in which no process trains.

    Those are half-written files, and folders without ``run.json`` in which there is nothing else but the lock.
    """
    for folder in parent.glob("version_*"):
        left = [path for pattern in _LEFTOVERS for path in folder.glob(pattern)]
        if left or _is_dead(folder, left):
            with suppress(FederatedError, OSError), RunLock() as lock:
                lock.take(folder, surely=True)
                for path in [folder] if _is_dead(folder, left) else left:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_dead(folder: Path, left: list[Path]) -> bool:
    """Says whether a folder holds at most a lock and what is left to be removed."""
    return folder.is_dir() and {*folder.iterdir()} <= {folder / _FILE, *left}
