"""The files of checkpoints: written whole, read as tensors and primitives alone, and found again."""

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from lightning_fed.core.client_states import FOLDER
from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import RunFolder, find_runs, open_run

__all__ = [
    "find_checkpoint",
    "read_checkpoint",
    "records_of_checkpoints",
    "save_checkpoint",
    "primitives_of",
]

_warnings = WarningCache()


def save_checkpoint(checkpoint: Any, path: Path) -> None:
    """Writes a checkpoint, or predictions, so that the file is whole at every moment."""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write_atomically(path, content.getvalue())


def read_checkpoint(path: Path, option: str) -> dict[str, Any]:
    """Reads a checkpoint, or a plain ``state_dict``, on the CPU.

    Args:
        path: The file.
        option: The option that named it, for messages.

    Raises:
        FederatedError: If there is no such file, or it is damaged or not a checkpoint.
    """
    if not path.is_file():
        raise FederatedError(f"Expected a checkpoint at {path}, but there is no such file: change `{option}`.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise FederatedError(
            f"Expected {path} to be a checkpoint of tensors and primitives, but it cannot be read "
            f"({type(error).__name__}): it is damaged or of another kind, give another `{option}`."
        ) from error
    if not isinstance(checkpoint, dict):
        raise FederatedError(f"Expected {path} to hold a dict, got {type(checkpoint).__name__}: change `{option}`.")
    return checkpoint


def records_of_checkpoints(run: RunFolder) -> dict[str, list[str] | None]:
    """Returns the files of client state that each checkpoint of a run refers to, by name, None if unreadable."""
    records: dict[str, list[str] | None] = {}
    if not (run.path / FOLDER).is_dir():
        return records
    for path in run.checkpoints.glob("*.ckpt"):
        try:
            records[path.stem] = read_checkpoint(path, "--ckpt_path")["federated"]["client_states"]
        except (FederatedError, KeyError, TypeError):
            records[path.stem] = None
    return records


def find_checkpoint(root: Path, name: str, fingerprint: str, ckpt_path: str) -> tuple[Path | None, RunFolder | None]:
    """Resolves ``last``, ``best`` or a path.

    Returns:
        The checkpoint and the run folder that it lies in; None for either that does not exist.
    """
    if ckpt_path in ("last", "best"):
        for run in find_runs(root, name, fingerprint):
            path = run.checkpoints / f"{ckpt_path}.ckpt"
            if path.is_file():
                return path, run
        return None, None
    path = Path(ckpt_path)
    return path, open_run(path.parent.parent)


def primitives_of(values: dict[str, Any], place: str, say: bool = True) -> dict[str, Any]:
    """Keeps what can be stored as tensors and primitives, NumPy's numbers as Python's; the rest is left out whole.

    Args:
        values: What a checkpoint would hold, by name.
        place: Where it lies in the checkpoint, empty for all of it.
        say: Whether to warn, once for each name, of what is left out.
    """
    kept = {}
    for key, value in values.items():
        try:
            kept[key] = _primitive(value, f"{place}.{key}" if place else str(key))
        except TypeError as error:
            if say:
                _warnings.warn(f"A checkpoint holds tensors and primitives alone: `{key}` is left out for its {error}.")
    return kept


def _primitive(value: Any, place: str) -> Any:
    """Turns a value into one that ``torch.load`` reads with ``weights_only``.

    Raises:
        TypeError: With what it is and where, if that cannot be.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Size):
        return value
    if isinstance(value, Tensor):
        return value if type(value) is Tensor else value.detach().as_subclass(Tensor)
    if isinstance(value, np.generic):
        return _primitive(value.item(), place)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, dict):
        items = ((_primitive(key, f"{place} (a key)"), _primitive(v, f"{place}.{key}")) for key, v in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, (list, tuple, set)):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(_primitive(item, f"{place}[{index}]") for index, item in enumerate(value))
    raise TypeError(f"{type(value).__name__} under `{place}`")
