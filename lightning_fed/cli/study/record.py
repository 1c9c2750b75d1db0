"""What says that a run of a study is done: a record beside its run folder, with a hash of all that its words name."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from lightning_fed.cli.configs_command import find_config
from lightning_fed.core.files import write_atomically
from lightning_fed.runs.folder import RunFolder, open_run
from lightning_fed.runs.studies.cells import Cell

__all__ = ["HELD", "LOG", "Guard", "done_run", "write_record"]

Guard = Callable[[], AbstractContextManager[None]]
"""What restricts the imports of a command, as ``--safe_imports`` asks for."""

HELD = 75
"""Exit code of a process whose run another process trains."""

LOG = "log.txt"
"""The file beside a run folder that has what its process printed."""

_RECORD = "done.json"
_FILE = re.compile(r"[\w./-]+\.ya?ml")


@dataclass(frozen=True)
class _Record:
    """The end of a run: hash of its words with the text of their files, name of its folder, and its fingerprint."""

    words: str
    run: str
    fingerprint: str


def done_run(root: Path, cell: Cell) -> RunFolder | None:
    """Returns the folder of the run that has been trained to its end with the words of today, None if there is none."""
    try:
        record = _Record(**json.loads((root / cell.folder / _RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    run = open_run(root / cell.folder / record.run)
    return run if run is not None and record == _Record(_hash(cell), record.run, run.fingerprint) else None


def write_record(root: Path, cell: Cell, run: RunFolder) -> None:
    """Records that a run has been trained to its end."""
    record = _Record(_hash(cell), run.path.name, run.fingerprint)
    write_atomically(root / cell.folder / _RECORD, json.dumps(asdict(record), indent=2).encode(), "--output")


def _hash(cell: Cell) -> str:
    """Hashes what the run's configuration is made of: its words, the files that these name, and variables."""
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("PL_FIT__"))
    parts = [*cell.words, *variables, *(text for word in cell.words for text in _texts(word))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _texts(word: str) -> tuple[str, ...]:
    """Returns the text of a file and of those that are named in it, () of a word that names none."""
    return tuple(_walk(find_config(word), set()))


def _walk(path: str, seen: set[str]) -> Iterator[str]:
    if path in seen or not os.path.isfile(path):
        return
    seen.add(path)
    yield (text := Path(path).read_text(encoding="utf-8", errors="replace"))
    for named in _FILE.findall(text):
        yield from _walk(named, seen)
