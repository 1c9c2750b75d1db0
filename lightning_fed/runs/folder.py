"""The folder of a run, the rows in it, and the fingerprint by which a later start finds it again."""

import csv
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lightning_fed.core.files import write_atomically

__all__ = ["RunFolder", "create_run", "find_runs", "fingerprint", "open_run", "read_rows", "read_run"]

# What does not change the numbers of a round: how long the run is, where it is kept, what is shown of it, how many
# processes share it, and how.
_LENGTH = (
    "max_rounds", "max_time", "enable_progress_bar", "default_root_dir", "client_states", "devices", "num_nodes",
    "strategy", "process_timeout", "enable_model_summary", "benchmark", "detect_anomaly",
)  # fmt: skip
# Options that are no more, with the value that the runs of today share with those that were made before.
_REMOVED = {"cuda_graphs": False}
# Options that are new, with the value at which a run is as it was without them.
_NEW = {"availability": None, "stragglers": None, "work": None}
# What the data's options are where they are None, and those that are new, both without a ``source``.
_DATA = {
    "batch_size": 32, "num_workers": 0,
    "partitioner": {"class_path": "lightning_fed.data.IID", "init_args": {"min_samples": 0, "too_small": "redraw"}},
}  # fmt: skip
_NEW_DATA = ("collate_fn", "drop_last", "source")


@dataclass(frozen=True)
class RunFolder:
    """A run folder and what its ``run.json`` says.

    Attributes:
        path: The folder, ``default_root_dir/NAME/version_K``.
        fingerprint: Hash of the resolved config without the run's length.
        group: The same without seed and name: runs of one method over several seeds share it.
        label: A short name of the method.
        name: NAME.
        seed: The run's seed.
        wandb_id: Id of the W&B run.
        created: Seconds since the epoch.
    """

    path: Path
    fingerprint: str
    group: str
    label: str
    name: str
    seed: int
    wandb_id: str
    created: float

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The table of rounds."""
        return self.path / "metrics.csv"


def fingerprint(config: dict[str, Any], *without: str) -> str:
    """Hashes a config to 64 hexadecimal digits, leaving out the run's length and further dotted keys."""
    kept = json.loads(json.dumps(config, sort_keys=True, default=str))
    if isinstance(kept.get("trainer"), dict):
        options = {**_REMOVED, **kept["trainer"]}
        kept["trainer"] = {k: v for k, v in options.items() if k not in _NEW or v != _NEW[k]}
    _write_as_before(kept.get("data"))
    for key in (*(f"trainer.{name}" for name in _LENGTH), *without):
        *parents, last = key.split(".")
        place: Any = kept
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _write_as_before(data: Any) -> None:
    """Writes the options of data as the runs of former versions have them, where they mean the same."""
    options = data.get("init_args") if isinstance(data, dict) else None
    if not isinstance(options, dict) or options.get("source") is not None:
        return
    for name in [name for name in options if options[name] is None]:
        if name in _NEW_DATA:
            del options[name]
        elif name in _DATA:
            options[name] = _DATA[name]


def create_run(root: Path, name: str, config: dict[str, Any], label: str, seed: int) -> RunFolder:
    """Makes a new folder ``root/name/version_K`` with the smallest free K and writes its ``run.json``."""
    parent = root / name
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(p.name[8:]) for p in parent.glob("version_*") if p.name[8:].isdigit()]
    for version in count(max(taken, default=-1) + 1):
        path = parent / f"version_{version}"
        with suppress(FileExistsError):  # another process may take the same number at the same time
            path.mkdir()
            break
    run = RunFolder(
        path=path,
        fingerprint=fingerprint(config),
        group=fingerprint(config, "seed_everything", "trainer.seed", "trainer.name"),
        label=label,
        name=name,
        seed=seed,
        wandb_id=secrets.token_hex(4),
        created=time.time(),
    )
    facts = {key: value for key, value in asdict(run).items() if key != "path"}
    write_atomically(path / "run.json", json.dumps(facts, indent=2).encode())
    return run


def read_run(path: Path) -> RunFolder:
    """Reads a run folder.

    Raises:
        OSError, ValueError, TypeError: If it is not one.
    """
    return RunFolder(path=path, **json.loads((path / "run.json").read_text()))


def open_run(path: Path) -> RunFolder | None:
    """Reads a run folder; None if it is not one."""
    try:
        return read_run(path)
    except (OSError, ValueError, TypeError):
        return None


def find_runs(root: Path, name: str, fingerprint: str) -> list[RunFolder]:
    """Finds the runs of a name with a fingerprint, those with the newest ``last`` checkpoint first."""
    runs = [run for path in (root / name).glob("version_*") if (run := open_run(path)) is not None]
    same = [run for run in runs if run.fingerprint == fingerprint]

    def newest(run: RunFolder) -> tuple[float, float]:
        last = run.checkpoints / "last.ckpt"
        return (last.stat().st_mtime if last.is_file() else 0.0, run.created)

    return sorted(same, key=newest, reverse=True)


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yields the whole rows of a ``metrics.csv``, also of one that is being written or that a killed process left.

    A row with another number of cells than the header is left out, as is a last line without its end.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    # A killed process can leave a block of zeros, which the csv module refuses, and half a number at the end.
    rows = csv.reader(line for line in text[: text.rfind("\n") + 1].splitlines() if "\0" not in line)
    header = next(rows, [])
    for cells in rows:
        row = dict(zip(header, cells, strict=False))
        if len(cells) == len(header) and row.get("round", "").isdigit():
            yield row
