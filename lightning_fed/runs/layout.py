"""Checks that a checkpoint is complete and unchanged before a run goes on from it."""

import zlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["FORMAT", "expect_layout", "expect_parts", "seal_of"]

FORMAT = 2
# What a run goes on from; later versions may add to it.
_PARTS = {"epoch": int, "global_step": int, "callbacks": dict, "federated": dict}
_FEDERATED = (
    "round", "weights", "buffers", "optimizer", "totals", "client_states", "layout", "engine", "metrics", "split_hash",
    "methods", "should_stop", "rows",
)  # fmt: skip


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
