"""The folder of a run, its rows, and the fingerprint by which a later start finds the run again."""

import csv
import hashlib
import io
import json
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_fed.core import ShownInNotebooks
from lightning_fed.core.files import WriteError, read_regular, write_atomically, writing
from lightning_fed.errors import FederatedError
from lightning_fed.runs.lock import RunLock
from lightning_fed.runs.statistics import Goal, goals_in

__all__ = [
    "FLAT_NAMES", "GOALS", "LAST_GOOD", "RunFolder", "create_run", "find_runs", "fingerprint", "is_below",
    "open_run", "read_rows", "read_run", "sealed", "unsealed",
]  # fmt: skip

# Options of a group by their names without the group.
FLAT_NAMES = {
    **{name: f"participation.{name}" for name in ("sampler", "availability", "stragglers", "work")},
    **{f"full_gradient_{name}": f"full_gradients.{name}" for name in ("mode", "batch_size", "weight_decay")},
    **{name: f"tolerance.{name}" for name in ("max_diverged", "on_client_error", "on_write_error", "process_timeout")},
}

# The checkpoint that a failed run leaves: only weights, without the state that is needed to go on.
LAST_GOOD = "last_good"

# The file with the goals of metrics, as their objects say them, where the names do not.
GOALS = "goals.json"

# Before classes that were named with another package once.
_DIAGNOSTICS = "ClientEvaluation|DistributionGap|FinalPictures|GradientDissimilarity|UpdateAgreement|UpdateGeometry"
_EXPORTED = re.compile(rf'(?<="lightning_fed\.callbacks\.)(?=({_DIAGNOSTICS})")')
# Where classes were when runs from Python, whose configs name files, began: by where they are now.
_MOVED = {
    f"{now}.{name}": f"{then}.{name}"
    for now, then, names in (
        ("callbacks.payload", "callbacks.compression", "QSGD RandomK TopK"),
        ("callbacks.diagnostics.updates", "callbacks.diagnostics.agreement", "UpdateAgreement"),
        ("callbacks.diagnostics.updates", "callbacks.diagnostics.geometry", "UpdateGeometry"),
        ("callbacks.diagnostics.differences", "callbacks.diagnostics.dissimilarity", "GradientDissimilarity"),
        ("callbacks.diagnostics.differences", "callbacks.diagnostics.gap", "DistributionGap"),
        ("client_algorithms.server_direction", "client_algorithms.fedcm", "FedCM"),
        ("client_algorithms.server_direction", "client_algorithms.mime", "MimeLite"),
        ("client_algorithms.server_direction", "client_algorithms.last_step", "FedGaLA FedLESAM"),
        ("client_algorithms.losses.methods", "client_algorithms.losses.by_counts", "FedLC FedRS LogitAdjustment"),
        ("client_algorithms.losses.methods", "client_algorithms.losses.distillation", "FedNTD MOON"),
        ("client_algorithms.losses.methods", "client_algorithms.losses.fediir", "FedIIR"),
        ("client_algorithms.own_models", "client_algorithms.personal.own_models", "APFL Ditto LocalOnly PFedMe"),
        ("client_algorithms.own_models", "client_algorithms.personal.per_fedavg", "PerFedAvg"),
        (
            "client_algorithms.personal_parameters",
            "client_algorithms.personal.parameters",
            "FedBN FedPer FedRep LGFedAvg PersonalParameters",
        ),
        ("client_algorithms.fedga", "client_algorithms.single_step", "GradAlign LinearScaling"),
        ("data.containers", "data.adapters.containers", "ClientDatasets"),
        ("data.source_module", "data.adapters.modules", "GivenLoaders SourceModule"),
        ("data.datasets.own_files", "data.datasets.arrays", "Arrays"),
        ("data.datasets.own_files", "data.datasets.image_folders", "ImageFolders"),
        ("data.skews.images", "data.skews.colors", "BinaryColors ClassColors ClientColors"),
        ("data.skews.images", "data.skews.rotation", "ClientRotation"),
        ("models.backbones", "models.resnet", "ResNet18"),
        ("sampling.samplers", "sampling.arrivals", "Arrivals"),
        ("sampling.cohorts", "sampling.participation", "Participation"),
        ("sampling.work", "sampling.stragglers", "Stragglers"),
    )
    for name in names.split()
}
_NAMED = re.compile(r'(?<="lightning_fed\.)[\w.]+(?=")')
# Options that do not change the numbers of a round: length of the run, folders, display, and number of processes.
_LENGTH = (
    "max_rounds", "max_time", "enable_progress_bar", "default_root_dir", "client_states", "devices", "num_nodes",
    "strategy", "process_timeout", "enable_model_summary", "benchmark", "detect_anomaly", "on_write_error",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder(ShownInNotebooks):
    """A run folder and the content of its ``run.json``.

    Attributes:
        path: The folder, ``default_root_dir/NAME/version_K``.
        fingerprint: Hash of the resolved config without the run's length.
        group: The same hash without seed and name; runs of one method with several seeds share it.
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

    @property
    def goals(self) -> dict[str, Goal]:
        """What metric objects said of themselves, by column, where its name does not say it."""
        with suppress(OSError, ValueError, TypeError):
            return goals_in(unsealed(self.path / GOALS))
        return {}

    def kept(self) -> list[Path]:
        """Returns the checkpoints from which a run may go on."""
        return [path for path in self.checkpoints.glob("*.ckpt") if path.is_file() and path.stem != LAST_GOOD]


def is_below(name: object) -> bool:
    """Tells whether a name is a relative path without ``..``, on one line and without control characters."""
    parts = PurePosixPath(name).parts if isinstance(name, str) and name.isprintable() else ()
    return bool(parts) and parts[0] not in ("/", "//") and ".." not in parts


def fingerprint(config: dict[str, Any], *without: str) -> str:
    """Hashes a config to 64 hexadecimal digits, without the run's length and without further dotted keys.

    Grouped options are hashed under their names without the group, diagnostics as when only their own package exported
    them, and classes that have moved under their former files, so that older runs are found.
    """
    text = _EXPORTED.sub("diagnostics.", json.dumps(config, sort_keys=True, default=str))
    kept = json.loads(_NAMED.sub(lambda found: _MOVED.get(found[0], found[0]), text))
    options = kept.get("trainer") or {}
    for name, (group, part) in ((name, path.split(".")) for name, path in FLAT_NAMES.items()):
        if part in options.get(group, {}):
            options[name] = options[group].pop(part)
            if not options[group]:
                del options[group]
    for key in (*(f"trainer.{name}" for name in _LENGTH), *without):
        *parents, last = key.split(".")
        place: Any = kept
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def create_run(root: Path, name: str, config: dict[str, Any], label: str, seed: int, lock: RunLock) -> RunFolder:
    """Makes a new folder ``root/name/version_K`` with the next free K, locks it and writes its ``run.json``."""
    parent = root / name
    with writing(parent, what="a run folder in "):
        parent.mkdir(parents=True, exist_ok=True)
        path = _take_next(parent, lock)
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
    write_atomically(path / "run.json", sealed({key: value for key, value in asdict(run).items() if key != "path"}))
    return run


def _take_next(parent: Path, lock: RunLock) -> Path:
    """Makes and locks the folder with the next free number; whoever starts meanwhile may be faster."""
    taken = [int(p.name[8:]) for p in parent.glob("version_*") if p.name[8:].isdigit()]
    for version in count(max(taken, default=-1) + 1):
        path = parent / f"version_{version}"
        try:
            path.mkdir(mode=0o770)  # not readable by everybody, as it may hold pictures of samples
            lock.take(path)
        except (FileExistsError, FederatedError) as error:
            if isinstance(error, WriteError) and path.is_dir():
                raise
            continue
        if path.is_dir():  # else another start took it for the folder of a killed one, before it was locked
            break
        lock.__exit__(None, None, None)
    return path


def sealed(facts: dict[str, Any]) -> bytes:
    """Writes facts as JSON with a checksum."""
    return json.dumps({**facts, "crc32": _crc32(facts)}, indent=2).encode()


def unsealed(path: Path) -> dict[str, Any]:
    """Reads the facts of ``sealed``; a file that was written by hand has no checksum.

    Raises:
        OSError, ValueError, TypeError: If it is no such file, or is damaged.
    """
    try:
        facts = dict(json.loads(read_regular(path, 1 << 20)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if facts.pop("crc32", None) not in (None, _crc32(facts)):
        raise ValueError("it has been changed or damaged")
    return facts


def _crc32(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def read_run(path: Path) -> RunFolder:
    """Reads a run folder.

    Raises:
        OSError, ValueError, TypeError: If it is not one, or its ``run.json`` is damaged.
    """
    run = RunFolder(path=path, **unsealed(path / "run.json"))
    kinds: dict[str, Any] = {**RunFolder.__annotations__, "created": (int, float)}
    if wrong := [name for name, kind in kinds.items() if not isinstance(getattr(run, name), kind)]:
        raise TypeError(f"{', '.join(wrong)} of a wrong type")
    return run


def open_run(path: Path) -> RunFolder | None:
    """Reads a run folder; None if it is not one."""
    try:
        return read_run(path)
    except (OSError, ValueError, TypeError):
        return None


def find_runs(root: Path, name: str, fingerprint: str) -> list[RunFolder]:
    """Finds the runs with a name and a fingerprint, the run with the newest checkpoint first."""
    runs = [run for path in (root / name).glob("version_*") if (run := open_run(path)) is not None]
    same = [run for run in runs if run.fingerprint == fingerprint]

    def newest(run: RunFolder) -> tuple[float, float]:
        return (max((path.stat().st_mtime for path in run.kept()), default=0.0), run.created)

    return sorted(same, key=newest, reverse=True)


def read_rows(path: Path, notes: list[str] | None = None) -> Iterator[dict[str, str]]:
    """Yields the complete rows of a ``metrics.csv``, even while it is written or after a killed process.

    A row with more or fewer cells than the header is left out, and so is a last line without a line end. ``notes`` get
    a sentence if it is not as it was written, with a row for each round in order.
    """
    due = None
    for row in _rows(path):
        at = int(row["round"]) if row else None
        if notes == [] and (at is None or due not in (None, at)):
            where = "the first row" if due is None else f"the row after round {due - 1}"
            notes.append(f"{path} is damaged at {where}: later rounds count only as far as they can be read.")
        due = due if at is None else at + 1
        if row:
            yield row


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a table, an empty one for each that is damaged."""
    if not path.is_file() or path.stat().st_size > 1 << 30:  # no table of rounds has as many
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    # A killed process can leave a block of zeros, which the csv module refuses, and half a number at the end.
    lines = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    rows = csv.reader("\n" if "\0" in line else line for line in lines)
    with suppress(csv.Error):  # a damaged cell without an end
        header = next(rows, [])
        for cells in rows:
            row = dict(zip(header, cells, strict=False))
            at = row.get("round", "")
            yield row if len(cells) == len(header) and at.isascii() and at.isdigit() and len(at) < 10 else {}
