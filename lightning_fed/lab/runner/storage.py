"""Where the trials of a tuning are kept: a journal in the runs' folder, or a database that Optuna reaches."""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from lightning_fed.core.files import append_whole, open_regular, writing
from lightning_fed.errors import FederatedError, expect, import_extra

__all__ = ["expect_below", "optuna_storage"]

_LARGEST = 1 << 30
_HOSTS_BY_DEFAULT = ("postgresql", "mysql", "mariadb")  # without a host, their address names a server on this machine


class _Journal:
    """Optuna's journal, a line for each operation, with a checksum of it and its number.

    Optuna's own class reads nothing with half a line in it, as a full disk leaves one, and waits for ever for the lock
    of a killed process.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._ends = path, [0]

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yields the whole lines from a number on."""
        if not self._path.exists():
            return
        del self._ends[log_number_from + 1 :]
        with open_regular(self._path, _LARGEST) as file:
            file.seek(self._ends[-1])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                log = json.loads(line)
                if log.pop("crc32", None) not in (None, _crc32(log, len(self._ends))):  # Optuna writes none
                    raise ValueError(f"line {len(self._ends)} is another one")
                self._ends.append(self._ends[-1] + len(line))
                yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends lines, all or none, in the place of half a line at the end."""
        with writing(self._path, "--output"), open(self._path, "ab+") as file:
            lock_descriptor(file.fileno())  # until the file is closed
            file.seek(self._ends[-1])
            others = file.read()
            file.truncate(self._ends[-1] + others.rfind(b"\n") + 1)
            numbered = enumerate(logs, len(self._ends) + others.count(b"\n"))
            lines = "".join(json.dumps({**log, "crc32": _crc32(log, number)}) + "\n" for number, log in numbered)
            append_whole(self._path, lines.encode(), "--output")
            os.fsync(file.fileno())


def _crc32(log: dict[str, Any], line: int) -> int:
    return zlib.crc32(json.dumps(log).encode(), line)


def optuna_storage(place: str) -> Any:
    """Opens a database by its address, or a journal by its path."""
    from optuna.storages import JournalStorage, get_storage

    if "://" in place:
        return get_storage(place)
    backend: Any = _Journal(Path(place))
    try:
        return JournalStorage(backend)
    except Exception as error:  # a damaged line may raise anything
        raise FederatedError(
            f"Expected {place} to be a journal of trials, but it cannot be read ({error}): move it away, and the next "
            f"start asks for the trials again; runs that are done are kept."
        ) from error


def expect_below(root: Path, place: str) -> Path | None:
    """Returns the file that keeps the trials, None for a database on a server.

    Raises:
        FederatedError: If the file is not below the runs' folder: a study that somebody sent could write anywhere.
    """
    file = place
    if "://" in place:
        sqlalchemy, file = import_extra("sqlalchemy", "study", "a study that is tuned"), ""
        with suppress(sqlalchemy.exc.ArgumentError):
            url = sqlalchemy.make_url(place)
            if url.host or url.get_backend_name() in _HOSTS_BY_DEFAULT:
                return None
            file = url.database or ""
    real = Path(os.path.realpath(file))
    expect(
        not file.startswith("file:") and Path(os.path.realpath(root)) in real.parents,
        "Expected `tune.storage` to be the address of a database, as `postgresql://user@host/name`, or a file below "
        f"{root}, the folder of the runs, got {place!r} ({real}).",
    )
    return Path(file)
