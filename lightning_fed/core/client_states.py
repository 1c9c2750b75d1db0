"""What clients remember between their rounds: a tensor by key and client, on the device, in host memory or on disk."""

import os
import re
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.core.devices import copy_into, single_at_least
from lightning_fed.core.files import WriteError, write_atomically, writing
from lightning_fed.errors import FederatedError

__all__ = ["ClientStates", "FOLDER"]

FOLDER = "client_states"

# KEY/CLIENT-VERSION-CHECKSUM.npy; KEY/CLIENT is the name of a record. A checkpoint lists its files by name, and the
# checksum of the content is in the name, so that a run never resumes from a record of another client, round or run.
_FILE = re.compile(r"(?P<record>(?P<key>\w+)/\d+)-(?P<version>\d+)-(?P<checksum>[0-9a-f]{8})\.npy")


class ClientStates:
    """Keeps client state such as control variates or counters, zero until it is first stored.

    The first record of a key fixes the shape and dtype of all its records; narrower floats are kept as float32.

    Files written after a checkpoint get a higher version, so a file that a checkpoint refers to is never overwritten.
    A run that is killed at any moment resumes from the records of its checkpoint. Files that no checkpoint refers to
    are removed after the next one.

    Args:
        location: Where records live between rounds: ``device``, ``host`` or ``disk``. Checkpoints always have them on
            disk, so a resumed run may use another location.
        like: The global vector; under ``device`` records are beside it.
        run: The run's folder, None if there is none.
        pinned: The files that each checkpoint in the run's folder refers to, by the checkpoint's name. None instead of
            files if a checkpoint cannot be read: then every file that is there is kept. None instead of the mapping
            if the run makes no checkpoints and keeps nothing.
        tolerant: Whether a record that the disk refuses is kept in memory, without an error, until ``dump``.
        num_clients: How many clients there are, None if that is unknown.

    Attributes:
        elsewhere: Returns whether another process of the run holds a client's records.
    """

    def __init__(
        self,
        location: Literal["device", "host", "disk"],
        like: Tensor,
        run: Path | None = None,
        pinned: Mapping[str, list[str] | None] | None = None,
        tolerant: bool = False,
        num_clients: int | None = None,
    ) -> None:
        self.location, self._run = location, None if run is None else run.absolute()
        self._device = like.device if location == "device" else torch.device("cpu")
        # Copies between pinned memory and the GPU are queued there; the host waits only before it reads one.
        self._pins = location == "host" and like.device.type == "cuda"
        self._tolerant, self._num_clients = tolerant, num_clients
        self.elsewhere: Callable[[int], bool] = lambda client: False
        self._keeps = run is not None and pinned is not None
        self._temporary: TemporaryDirectory[str] | None = None
        self._held: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        self._kinds: dict[str, tuple[torch.Size, torch.dtype] | None] = {}
        self._changed: set[str] = set()
        self._dumped: list[str] = []
        self._version = 1
        present = self._present()
        self._pinned = {name: present if files is None else files for name, files in (pinned or {}).items()}
        self._pass_versions(present, *self._pinned.values())

    def recall(self, key: str, client: int, out: Tensor) -> bool:
        """Copies a client's record into ``out``, of its shape, or zeros if there is none; returns whether there is."""
        self._expect_record("recall", key, client)
        if self.elsewhere(client):
            raise FederatedError(
                f"Expected `client_states.recall` of a client that this process trains, got client {client}, whose "
                "records another process holds: call it while the client trains, or set `--trainer.devices` to 1."
            )
        record = f"{key}/{client}"
        value = self._held.get(record)
        if value is None and record in self._files:
            value = self._read(self._files[record])
            if self.location != "disk":
                value = self._hold(record, value)
        known = self._kinds.get(key) or (out.shape, out.dtype)
        _expect_shape(key, client, known[0] if value is None else value.shape, out)
        if value is None:
            out.zero_()
        else:
            copy_into(out, value)
        return value is not None

    def store(self, key: str, client: int, value: Tensor) -> None:
        """Keeps a copy of ``value``, a tensor of the key's shape, as a client's record; the key is an identifier."""
        self._expect_record("store", key, client)
        shape, dtype = self._kinds.get(key) or (value.shape, single_at_least(value.dtype))
        _expect_shape(key, client, shape, value)
        self._kinds[key] = shape, dtype
        record, value = f"{key}/{client}", value.detach().to(dtype)
        self._changed.add(record)
        if self.location != "disk":
            self._hold(record, value)
            return
        try:
            self._write(record, value)
        except WriteError:
            if not self._tolerant:
                raise
            self._hold(record, value)

    def _expect_record(self, call: str, key: Any, client: Any) -> None:
        """Refuses what is no key or no client: a run could not go on from a checkpoint that names such a record."""
        most, is_key = self._num_clients, isinstance(key, str) and key.isidentifier()
        is_id = isinstance(client, (int, np.integer)) and not isinstance(client, bool) and client >= 0
        if not (is_key and is_id) or (most is not None and client >= most):
            raise FederatedError(
                f"Expected `client_states.{call}` of a key that is an identifier, and of a client by its id, an "
                f"integer from 0{'' if most is None else f' below {most}'}, got {key!r:.100} and {client!r:.100}."
            )

    @property
    def in_use(self) -> bool:
        """Whether there is any record."""
        return bool(self._kinds)

    def move_out(self, client: int) -> dict[str, Tensor]:
        """Removes and returns a client's records, for the process that trains it next: CPU copies, by key."""
        taken = {}
        self._await_copies()
        for record in self._of(client):
            held = self._held.get(record)
            taken[record.partition("/")[0]] = self._read(self._files[record]) if held is None else held.cpu()
        self.drop(client)
        return taken

    def move_in(self, client: int, records: dict[str, Tensor]) -> None:
        """Keeps records of a client that come from another process."""
        for key, value in records.items():
            self.store(key, client, value)

    def drop(self, client: int) -> None:
        """Drops a client's records, which have changed elsewhere; files that a checkpoint refers to stay."""
        for record in self._of(client):
            self._held.pop(record, None)
            self._files.pop(record, None)
            self._changed.discard(record)

    def _of(self, client: int) -> list[str]:
        names = [f"{key}/{client}" for key in sorted(self._kinds)]
        return [name for name in names if name in self._held or name in self._files]

    def dump(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> list[str]:
        """Makes the records changed since the last call durable, for a checkpoint that is about to be written.

        Args:
            gather: Collects an object from every process; each process holds the records of some clients.

        Returns:
            The files that the checkpoint refers to, as KEY/CLIENT-VERSION-CHECKSUM.npy.

        Raises:
            WriteError: If the disk of any process refuses a file; the next call tries all of them again.
        """
        self._await_copies()
        try:
            for record in sorted(self._changed):
                if record in self._held:
                    self._write(record, self._held[record])
                with writing(self._files[record]), open(self._files[record], "rb+") as file:
                    os.fsync(file.fileno())
            said: list[str] | WriteError = self._current()
        except WriteError as error:
            said = error
        everyone = gather(said)
        for refusal in everyone:
            if isinstance(refusal, WriteError):
                raise refusal
        self._changed.clear()
        self._version += 1
        self._dumped = everyone[0] if len(everyone) == 1 else _joined(everyone)
        return self._dumped

    def saved(self, name: str, present: Container[str]) -> None:
        """Notes that checkpoint ``name`` of the last dump is on disk; forgets checkpoints that are not ``present``."""
        named = {**self._pinned, name: self._dumped}
        self._pinned = {kept: files for kept, files in named.items() if kept in present}
        self.remove_unused()

    def remove_unused(self) -> None:
        """Removes the files that neither a checkpoint nor the last dump refers to."""
        used = {file for files in self._pinned.values() for file in files}.union(self._current(), self._dumped)
        for file in self._present():
            if file not in used:
                with suppress(OSError):  # it is tried again after the next checkpoint
                    (self._folder() / file).unlink()

    def restore(self, files: list[str], source: Path) -> None:
        """Registers the files that ``dump`` returned for a checkpoint, in folder ``source``; ``recall`` reads them."""
        for file in files:
            if (match := _FILE.fullmatch(file)) is None:  # a foreign checkpoint could name any file
                raise FederatedError(
                    "Expected the checkpoint to name client states as KEY/CLIENT-VERSION-CHECKSUM.npy, got "
                    f"{file[:100]!r}: it was not made by this package, give another `--ckpt_path`."
                )
            path = source / file
            if not path.is_file():
                raise _refusal(path, "there is no such file")
            if self._keeps and source != self._folder():
                path = _take_over(path, self._folder() / file)
            self._files[match["record"]] = path
            if self._kinds.setdefault(match["key"]) is None:
                with suppress(FederatedError):  # a damaged file is refused when its client is drawn
                    value = self._read(path)
                    self._kinds[match["key"]] = value.shape, value.dtype
        self._pass_versions(files)

    def close(self) -> None:
        """Drops all records, and removes the files that no run can resume from."""
        self._held, self._files, self._kinds = {}, {}, {}
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _hold(self, record: str, value: Tensor) -> Tensor:
        if self._pins:
            # Not overwritten: the GPU may still copy from it. Torch reuses its memory once that has ended.
            fresh = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._held[record] = fresh.copy_(value, non_blocking=True)
        elif record in self._held:
            self._held[record].copy_(value)
        else:
            self._held[record] = value.to(self._device, copy=True)
        return self._held[record]

    def _await_copies(self) -> None:
        """Waits for what the GPU writes into the host's memory, before the host reads it."""
        if self._pins:
            torch.cuda.synchronize()

    def _folder(self) -> Path:
        """The folder of this run's files; a temporary one in a run that makes no checkpoints."""
        if self._keeps:
            assert self._run is not None
            return self._run / FOLDER
        if self._temporary is None:
            with writing(self._run or Path(gettempdir())):
                self._temporary = TemporaryDirectory(prefix=f"{FOLDER}-", dir=self._run, ignore_cleanup_errors=True)
        return Path(self._temporary.name)

    def _write(self, record: str, value: Tensor) -> None:
        """Writes a record. No checkpoint refers to this version yet, so it need not be atomic or synced to disk."""
        array = value.cpu().contiguous().numpy()
        path = self._folder() / f"{record}-{self._version}-{_checksum(array)}.npy"
        with writing(path):
            (self._run or self._folder()).stat()  # a removed run folder is not made again
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(path, "wb") as file:
                    np.save(file, array)
            except OSError:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
        former, self._files[record] = self._files.get(record), path
        if former is not None and former != path and f"-{self._version}-" in former.name:
            with suppress(OSError):  # no checkpoint refers to a file of this version
                former.unlink()
        if self.location == "disk":
            self._held.pop(record, None)

    def _read(self, path: Path) -> Tensor:
        try:
            with open(path, "rb") as file:
                array, rest = np.load(file), file.read(1)
            value = torch.from_numpy(array)
        except Exception as error:  # whatever NumPy raises on a damaged file
            raise _refusal(path, f"it cannot be read ({type(error).__name__})") from error
        if rest or not path.name.endswith(f"-{_checksum(array)}.npy"):
            raise _refusal(path, "its content does not match its checksum")
        return value

    def _present(self) -> list[str]:
        paths = self._folder().glob("*/*") if self._keeps else ()
        return [file for path in paths if _FILE.fullmatch(file := f"{path.parent.name}/{path.name}")]

    def _current(self) -> list[str]:
        return [f"{path.parent.name}/{path.name}" for path in self._files.values()]

    def _pass_versions(self, *files: Iterable[str]) -> None:
        """Raises the next version above that of every file that exists or is referred to."""
        found = [int(match["version"]) for some in files for file in some if (match := _FILE.fullmatch(file))]
        self._version = max([self._version, *(version + 1 for version in found)])


def _expect_shape(key: str, client: int, shape: torch.Size, got: Tensor) -> None:
    if got.shape != shape:
        raise FederatedError(
            f"Expected client state {key!r} of client {client} to have the shape {tuple(shape)}, as when the key was "
            f"first stored, got {tuple(got.shape)}: use another key for tensors of another shape."
        )


def _joined(everyone: list[list[str]]) -> list[str]:
    """Brings together the files of all processes; refuses a client's record that several of them have stored."""
    files = sorted(set().union(*everyone))
    records = [file.partition("-")[0] for file in files]
    if twice := [one for one, other in pairwise(records) if one == other]:
        key, client = twice[0].split("/")
        raise FederatedError(
            f"Expected the state {key!r} of client {client} to be stored by the process that trains it, but several "
            "have stored it: call `client_states.store` while the client trains, or set `--trainer.devices` to 1."
        )
    return files


def _checksum(array: npt.NDArray[Any]) -> str:
    """Returns a checksum of an array's numbers, dtype and shape."""
    kind = zlib.crc32(f"{array.dtype.str}{array.shape}".encode())
    return f"{zlib.crc32(array.data, kind):08x}"


def _take_over(source: Path, target: Path) -> Path:
    """Links a file of another run, which is never overwritten, or copies it where links do not work."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:  # another process of the run has linked it
        pass
    except OSError:
        write_atomically(target, source.read_bytes())
    return target


def _refusal(path: Path, what: str) -> FederatedError:
    return FederatedError(
        f"Expected the client state {path} that the checkpoint refers to, but {what}: give another `--ckpt_path`."
    )
