"""The record that a run of a study is done: a file next to its run folder, with a hash of its configuration."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.cli.configs_command import find_config
from lightning_fed.cli.yaml_loader import PlainLoader
from lightning_fed.core import is_news, one_line
from lightning_fed.core.files import write_atomically
from lightning_fed.lab.attack.options import COLUMNS, TABLE, attack_columns
from lightning_fed.lab.report.runs import MeasuredRun, read_metrics
from lightning_fed.lab.studies.cells import Cell
from lightning_fed.runs.folder import RunFolder, open_run, read_rows, sealed, unsealed

__all__ = [
    "Guard", "LOG", "RECORD", "done_run", "hash_of", "measured_run", "rounds_trained",
    "write_record",
]  # fmt: skip

Guard = Callable[[], None]
"""Restricts the imports of a process, see ``--safe_imports``."""

HELD, PRUNED, DIVERGED = 75, 76, 77
"""Exit codes of a process: another process trains the run; a better trial ended it early; it diverged."""

LOG = "log.txt"
"""The file next to a run folder with the output of its process."""

RECORD = "done.json"
"""The file next to a run folder that says that the run is done."""

_CONFIGS, _WEIGHTS = (".yaml", ".yml"), (".ckpt", ".pt", ".pth")


@dataclass(frozen=True)
class _Record:
    """The end of a run."""

    words: str  # hash of its arguments and the content of their files
    run: str  # name of its folder
    fingerprint: str
    diverged: bool = False  # whether losses or updates were not finite
    rounds: int | None = None  # rounds that count; the run has more if an earlier start asked for more
    trained: str | None = None  # hash without the attack, as trials of a tuning are not attacked


def done_run(root: Path, cell: Cell) -> RunFolder | None:
    """Returns the folder of a run that was trained to its end with the current options, None if there is none."""
    record = _record(root, cell)
    run = None if record is None else open_run(root / cell.folder / record.run)
    if record is None or run is None or record.fingerprint != run.fingerprint:
        return None
    tables = [run.metrics, *([run.path / TABLE] if cell.attack is not None and not record.diverged else [])]
    if not all(table.is_file() for table in tables):
        return None
    return run if hash_of(cell) in (record.words, record.trained) else None


def measured_run(root: Path, cell: Cell) -> MeasuredRun | None:
    """Returns a run that is done with its columns, None if it is not done. Columns of a diverged run end with NaN.

    Figures of an attack on its model are in its last round.
    """
    run, record = done_run(root, cell), _record(root, cell)
    if run is None or record is None:
        return None
    most = math.inf if record.rounds is None else record.rounds
    damage = list[str]()
    found = read_metrics(run.metrics, damage).items()
    if damage and is_news(damage[0], damage):
        print(one_line(damage[0]))
    columns = {name: {at: value for at, value in column.items() if at <= most} for name, column in found}
    end = max((at for column in columns.values() for at in column), default=0)
    if record.diverged:
        names = [*columns, *(COLUMNS if cell.attack is not None else ())]
        columns = {name: {**columns.get(name, {}), end + 1: math.nan} for name in names}
    elif cell.attack is not None:
        columns |= {name: {end: value} for name, value in attack_columns(run.path / TABLE).items()}
    return MeasuredRun(**vars(run), columns=columns)


def write_record(root: Path, cell: Cell, run: RunFolder, diverged: bool = False, rounds: int | None = None) -> None:
    """Records that a run was trained to its end, or diverged."""
    trained = hash_of(replace(cell, attack=None))
    record = _Record(hash_of(cell), run.path.name, run.fingerprint, diverged, rounds, trained)
    write_atomically(root / cell.folder / RECORD, sealed(asdict(record)), "--output")


def rounds_trained(folder: Path) -> int:
    """Returns how many rounds the newest run in a folder has trained."""
    tables = sorted(folder.glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    return max((int(row["round"]) for row in read_rows(tables[-1])), default=0) if tables else 0


def _record(root: Path, cell: Cell) -> _Record | None:
    try:
        return _Record(**unsealed(root / cell.folder / RECORD))
    except (OSError, ValueError, TypeError):
        return None


def hash_of(cell: Cell) -> str:
    """Hashes everything that sets a run's configuration: arguments, the files they name, environment variables."""
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("PL_FIT__"))
    named = [word for before, word in pairwise(cell.words) if before == "--config"]
    named += [value for word in cell.words if (value := word.partition("=")[2]).endswith(_CONFIGS + _WEIGHTS)]
    attack = () if cell.attack is None else ("attack", *cell.attack.words)
    parts = [*cell.words, *attack, *variables, *(values for name in named for values in _values_of(name))]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


@cache
def _values_of(name: str) -> tuple[Any, ...]:
    """Returns the content of a file and, recursively, of all files that its values name; () if there is no file."""
    found: dict[str, Any] = {}
    ahead = [find_config(name)]
    while ahead:
        path = ahead.pop(0)
        if path in found or not os.path.isfile(path):
            continue
        content = Path(path).read_bytes()
        if path.endswith(_WEIGHTS):
            found[path] = hashlib.sha256(content).hexdigest()
            continue
        try:
            found[path] = yaml.load(content, Loader=PlainLoader)
        except yaml.YAMLError:  # the parser of the run will report it
            found[path] = content
        ahead = [text for text in _texts(found[path]) if text.endswith(_CONFIGS + _WEIGHTS)] + ahead
    return tuple(found.values())


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, (dict, list)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)
