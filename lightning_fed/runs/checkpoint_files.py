"""Writes checkpoint files atomically, reads them without running code from them, checks them, and finds them again."""

import io
import shutil
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.core import is_news
from lightning_fed.core.client_states import FOLDER
from lightning_fed.core.files import write_atomically
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import RunFolder, find_runs, open_run
from lightning_fed.runs.lock import RunLock

__all__ = [
    "FORMAT", "expect_layout", "expect_parts", "find_checkpoint", "find_to_train", "primitives_of",
    "read_checkpoint", "records_of_checkpoints", "save_checkpoint", "seal_of",
]  # fmt: skip

FORMAT = 2
# What a run goes on from; later versions may add to it.
_PARTS = {"epoch": int, "global_step": int, "callbacks": dict, "federated": dict}
_FEDERATED = (
    "round", "weights", "buffers", "optimizer", "totals", "client_states", "layout", "engine", "metrics", "split_hash",
    "methods", "should_stop", "rows",
)  # fmt: skip

_PRIMITIVE = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def save_checkpoint(checkpoint: Any, path: Path, option: str = "--trainer.default_root_dir") -> None:
    """Writes a checkpoint, or predictions, so that the file is whole at every moment; a refusal names ``option``."""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write_atomically(path, content.getvalue(), option)


def read_checkpoint(path: Path, option: str) -> dict[str, Any]:
    """Reads a checkpoint, or a plain ``state_dict``, on the CPU.

    Args:
        path: The file.
        option: The option that named it, for messages.
    """
    if not path.is_file():
        raise FederatedError(f"Expected a checkpoint at {path}, but there is no such file: change `{option}`.")
    try:
        if zipfile.is_zipfile(path):  # torch's format before version 1.6 was no zip file
            with zipfile.ZipFile(path) as file:  # torch writes checksums, and never reads them
                # After `torch.serialization.set_crc32_options(False)` there are none: all are 0.
                if any(part.CRC for part in file.infolist()) and (damaged := file.testzip()) is not None:
                    raise zipfile.BadZipFile(damaged)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise FederatedError(
            f"Expected {path} to be a checkpoint of tensors and primitives, but it cannot be read "
            f"({type(error).__name__}): it is damaged or of another kind, give another `{option}`."
        ) from error
    if not isinstance(checkpoint, dict):
        raise FederatedError(f"Expected {path} to hold a dict, got {type(checkpoint).__name__}: change `{option}`.")
    return checkpoint


def records_of_checkpoints(run: RunFolder) -> dict[str, list[str] | None]:
    """Returns the client state files that each checkpoint of a run refers to, by its name; None if unreadable."""
    records: dict[str, list[str] | None] = {}
    if not (run.path / FOLDER).is_dir():
        return records
    for path in run.kept():
        try:
            state = read_checkpoint(path, "--ckpt_path").get("federated", {})  # absent in a file with only weights
            records[path.stem] = [str(file) for file in state.get("client_states", [])]
        except (FederatedError, AttributeError, TypeError):
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


def find_to_train(
    root: Path, name: str, fingerprint: str, which: str, lock: RunLock
) -> tuple[Path | None, RunFolder | None]:
    """Finds the checkpoint from which training goes on: ``best``, or for ``last`` the newest undamaged one.

    Args:
        root: The folder in which run folders are made.
        name: The run's name.
        fingerprint: The fingerprint of its config.
        which: ``last`` or ``best``.
        lock: For ``last`` it takes the folder, so that no other process trains in it.

    Returns:
        The checkpoint and the run; None for both if no run has trained yet, so that a new run loses nothing.
    """
    runs = find_runs(root, name, fingerprint)
    begun = [run for run in runs if run.kept() or _rows(run) > 1]
    unknown = [path for path in sorted((root / name).glob("version_*")) if open_run(path) is None]
    unknown = [path for path in unknown if (path / "metrics.csv").exists() or any(path.glob("checkpoints/*.ckpt"))]
    if not begun:
        for path in unknown:
            raise FederatedError(
                f"Expected {path / 'run.json'} to describe its run, but it cannot be read: restore it, give "
                "the checkpoint in its folder as `--ckpt_path`, or move the folder away to start anew."
            )
        for run in runs:
            with RunLock() as other:
                other.take(run.path)  # another process may be about to train it
                shutil.rmtree(run.path)  # killed in its first round: the next start writes all again
        return None, None
    if which == "best":
        best = next((run for run in begun if (run.checkpoints / "best.ckpt").is_file()), None)
        if best is None:
            raise FederatedError(
                f"Expected a `best` checkpoint in {begun[0].path}: there is none, give `last` instead."
            )
        return best.checkpoints / "best.ckpt", best
    run = begun[0]
    lock.take(run.path)
    for path in unknown + [other.path for other in begun if not other.kept() and other.created > run.created]:
        rank_zero_warn(f"Skipped {path}: it has no checkpoint to go on from, or no readable run.json.")
    return _newest_whole(run), run


def _rows(run: RunFolder) -> int:
    """Counts the rows of a run, damaged ones too; the first row is written before any training."""
    return run.metrics.read_bytes().count(b"\n") - 1 if run.metrics.is_file() else 0


def _newest_whole(run: RunFolder) -> Path:
    """Returns ``last``; if it is missing or damaged, warns and returns the checkpoint of the latest round."""
    last, usable = run.checkpoints / "last.ckpt", []
    for path in [last, *(path for path in run.kept() if path != last)]:
        with suppress(FederatedError):
            checkpoint = read_checkpoint(path, "--ckpt_path")
            if path == last:
                return last
            if "federated" in checkpoint and isinstance(checkpoint.get("epoch"), int):
                usable.append((checkpoint["epoch"], path))
    trouble = f"{last} {'cannot be read' if last.exists() else 'is missing'}"
    if not usable:
        raise FederatedError(
            f"Expected a checkpoint to resume from in {run.path}, which has {_rows(run)} rows, but {trouble}, and "
            "there is no other: restore it, or leave out `--ckpt_path` to start a new run."
        )
    at, path = max(usable)
    rank_zero_warn(f"{trouble}: going on from {path.name} of round {at}; later rounds are trained again.")
    return path


def primitives_of(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Keeps values that consist of tensors and primitives; of any other value it warns, and leaves it out as a whole.

    NumPy numbers become Python numbers, and mappings become dicts.

    Args:
        values: The content for a checkpoint, by name.
        place: Its place in the checkpoint, empty for all of it.
    """
    kept = {}
    for key, value in values.items():
        try:
            kept[key] = _primitive(value, f"{place}.{key}" if place else str(key))
        except (TypeError, RecursionError) as error:
            left_out = f"A checkpoint holds only tensors and primitives: `{key}` is left out for its {error}"
            again = f": give it again in `load_from_checkpoint(path, {key}=...)`"
            message = f"{left_out}{again if place.endswith('hyper_parameters') else ''}."
            if is_news(message, said=True):
                rank_zero_warn(message)
    return kept


def _primitive(value: Any, place: str) -> Any:
    """Converts a value to one that ``torch.load`` reads with ``weights_only``.

    Raises:
        TypeError: If that is not possible; the message gives the type and the place.
    """
    if type(value) in _PRIMITIVE:
        return value
    if isinstance(value, Tensor):
        value = value if type(value) is Tensor else value.detach().as_subclass(Tensor)
        is_part = value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_part else value  # else the file would hold the whole that it is a view of
    if isinstance(value, np.generic):
        return _primitive(value.item(), place)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        items = ((_primitive(key, f"{place} (a key)"), _primitive(v, f"{place}.{key}")) for key, v in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, (list, tuple, set)):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(_primitive(item, f"{place}[{index}]") for index, item in enumerate(value))
    named = f"class {value.__name__}" if isinstance(value, type) else type(value).__name__
    raise TypeError(f"{named} under `{place}`")


def expect_layout(checkpoint: dict[str, Any], source: str) -> None:
    """Refuses a checkpoint that is not from federated training, or that has a missing or changed part."""
    state = checkpoint.get("federated")
    if not isinstance(state, dict) or repr(state.get("format")) != repr(FORMAT):  # a tensor there has no truth value
        raise FederatedError(
            f"Expected {source} to be a checkpoint of federated training to resume from: to start a new run from its "
            "weights give it as `--weights` instead of `--ckpt_path`."
        )
    sealed, found = state.get("seal"), seal_of(checkpoint)
    wrong = ["federated.seal"]
    if isinstance(sealed, dict):
        wrong = [name for name in {**sealed, **found} if repr(sealed.get(name)) != repr(found.get(name))]
    if wrong:
        raise FederatedError(
            f"Expected {source} to be complete and unchanged, but `{wrong[0]}` is missing or not as it was "
            "written: it was changed or made by another program, give another `--ckpt_path`."
        )


def expect_parts(checkpoint: dict[str, Any], source: str) -> None:
    """Refuses a checkpoint in which the module's hooks have left out a part that a resumed run needs."""
    wrong = [name for name, kind in _PARTS.items() if not isinstance(checkpoint.get(name), kind)]
    wrong += [] if wrong else [f"federated.{name}" for name in _FEDERATED if name not in checkpoint["federated"]]
    if wrong:
        raise FederatedError(
            f"Expected {source} to hold `{wrong[0]}`, which a resumed run needs, but `on_save_checkpoint` or "
            "`on_load_checkpoint` has removed it: keep it there, or start a new run with `--weights`."
        )


def seal_of(checkpoint: dict[str, Any]) -> dict[str, int]:
    """Returns a checksum of each part that a resumed run needs, by name, such as ``federated.totals.steps``.

    Values of tensors are left out, as the file itself has checksums of them.
    """
    parts = {name: checkpoint.get(name) for name in ("epoch", "global_step", "callbacks")}
    state = {name: value for name, value in checkpoint["federated"].items() if name != "seal"}
    return dict(_checksums({**parts, "federated": state}))


def _checksums(parts: dict[Any, Any], place: str = "") -> Iterator[tuple[str, int]]:
    for key, value in parts.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _checksums(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", zlib.crc32(repr(_outline(value)).encode())


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return [(repr(key), _outline(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [_outline(inner) for inner in value]
    return repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value)
