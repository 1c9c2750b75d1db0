"""What a checkpoint must hold for a run to go on from it: checked once, before anything is taken from it."""

import zlib
from typing import Any

from torch import Tensor

from lightning_fed.errors import FederatedError

__all__ = ["FORMAT", "expect_layout", "seal_of"]

FORMAT = 1

_NUMBERS = {str: (int, float)}
# A type or several; [x] for any number of x; {type: x} for a dict of x; {name: x} for these names, with ? for those
# that not every run has.
_FEDERATED = {
    "round": int,
    "weights": (Tensor, type(None)),
    "buffers": {"values": {str: Tensor}, "of_client": {int: {str: Tensor}}},
    "optimizer": {
        "built": [{str: str}],
        "groups": [{str: object}],
        "step_schedulers": [{str: object}],
        "round_schedulers": [{str: object}],
        "added?": [[[str]]],
    },
    "totals": _NUMBERS,
    "client_states": [str],
    "layout": [[int]],
    "engine": {"engine": str, "chunk_size?": int, "reason?": str, "full_gradients?": str},
    "memory_format": str,
    "metrics": {"logged": _NUMBERS, "callback": _NUMBERS, "progress_bar": _NUMBERS},
    "split_hash": (str, type(None)),
    "methods": [str],
    "should_stop": bool,
    "rows": (int, type(None)),
    "seal": int,
}
_CHECKPOINT = {
    "epoch": int,
    "global_step": int,
    "state_dict": {str: object},
    "callbacks": {str: object},
    "federated": _FEDERATED,
}


def expect_layout(checkpoint: dict[str, Any], source: str) -> None:
    """Refuses a checkpoint that a run cannot go on from, whatever its numbers are.

    Raises:
        FederatedError: If it is none of federated training, or something in it is missing or of another type.
    """
    state = checkpoint.get("federated")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FederatedError(
            f"Expected {source} to be a checkpoint of federated training to resume from: to start a new run from its "
            "weights give it as `--weights` instead of `--ckpt_path`."
        )
    wrong = _wrong(checkpoint, _CHECKPOINT, "")
    if wrong is None and not 0 <= checkpoint["epoch"] == state["round"]:
        wrong = f"`epoch` is {checkpoint['epoch']} and `federated.round` {state['round']}"
    if wrong is None and state["seal"] != seal_of(checkpoint):
        wrong = "something in it is not as it was written"
    if wrong is not None:
        raise FederatedError(
            f"Expected {source} to hold all that a run goes on from, but {wrong}: it was changed or made by another "
            "program, give another `--ckpt_path`."
        )


def seal_of(checkpoint: dict[str, Any]) -> int:
    """Returns a checksum of all that a run goes on from, but for the numbers in tensors, which the file itself checks.

    What callbacks keep has no layout that is known here, and what is left out of it would mean a fresh start of theirs.
    """
    read = {name.rstrip("?") for name in _FEDERATED} - {"seal"}
    state = {name: value for name, value in checkpoint["federated"].items() if name in read}
    held = [checkpoint["epoch"], checkpoint["global_step"], checkpoint["callbacks"], state]
    return zlib.crc32(repr(_outline(held)).encode())


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return [(repr(key), _outline(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [_outline(inner) for inner in value]
    return repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value)


def _wrong(value: Any, like: Any, place: str) -> str | None:
    """Says what is not as it must be, None if nothing is."""
    if isinstance(like, (type, tuple)):
        return None if isinstance(value, like) else f"`{place}` is of type {type(value).__name__}"
    if not isinstance(value, type(like)):
        return f"`{place}` is of type {type(value).__name__}"
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(like, list):
        parts = [(str(at), item, like[0]) for at, item in enumerate(value)]
    elif isinstance(kind := next(iter(like)), type):
        if any(not isinstance(key, kind) for key in value):
            return f"`{place}` has keys of another type than {kind.__name__}"
        parts = [(str(key), item, like[kind]) for key, item in value.items()]
    else:
        for name, inner in like.items():
            key = name.rstrip("?")
            if key in value:
                parts.append((key, value[key], inner))
            elif key == name:
                return f"`{f'{place}.{key}'.lstrip('.')}` is missing"
    found = (_wrong(item, inner, f"{place}.{key}".lstrip(".")) for key, item, inner in parts)
    return next((wrong for wrong in found if wrong is not None), None)
