"""One process trains in a run's folder at a time, and sweeps what killed ones have left there."""

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
# What is there only while a process writes: files before they are moved into place, client state that nothing keeps.
_LEFTOVERS = (".*.tmp", "checkpoints/.*.tmp", "client_states/*/.*.tmp", "client_states-*")
_held: set[int] = set()


def _let_go() -> None:
    """Closes the locked files of the parent: a worker that outlives a killed run must not keep its lock."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """Keeps the folder of a run to one process, from ``take`` to the end of the block or of the process.

    The lock is the operating system's, on a file that stays: a process that is killed holds it no more.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the folder back."""
        file, self._file = self._file, None
        if file in _held:
            _held.remove(file)
            with suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)

    def take(self, folder: Path, surely: bool = False) -> None:
        """Takes a folder, once.

        Args:
            folder: The run's folder.
            surely: Whether to give up, rather than warn, where the file system has no locks.

        Raises:
            FederatedError: If another process trains in it.
            OSError: If it cannot be taken for sure.
            WriteError: If the system refuses to make the file.
        """
        path = folder / _FILE
        with writing(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            free = lock_descriptor(file, blocking=False)
        except OSError as error:
            if surely:
                os.close(file)
                raise
            from lightning.pytorch.utilities import rank_zero_warn  # reports need no Lightning

            rank_zero_warn(
                f"The file system of {folder} has no locks ({error.strerror}): see to it that no second start with "
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
        with suppress(OSError):  # a full disk: the lock holds without the words
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} of {socket.gethostname()}, started {time.ctime()},".encode())


def remove_leftovers(parent: Path) -> None:
    """Removes what processes that were killed were writing, from the run folders of a name that nobody trains in."""
    for folder in parent.glob("version_*"):
        if left := [path for pattern in _LEFTOVERS for path in folder.glob(pattern)]:
            with suppress(FederatedError, OSError), RunLock() as lock:
                lock.take(folder, surely=True)
                for path in left:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
