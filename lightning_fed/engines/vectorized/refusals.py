"""Why many clients cannot train at once: the messages, and guards for what exists for one client only."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from threading import get_ident
from typing import Any, NoReturn, TypeVar

from torch import nn

from lightning_fed.core.devices import is_device_fault, out_of_memory
from lightning_fed.errors import FederatedError

__all__ = [
    "CannotStack", "FEWEST_LANES", "MANY_CLIENTS", "attempt", "cause_of", "first_sentence", "is_of_many",
    "of_one_client", "refusal", "tell",
]  # fmt: skip

_T = TypeVar("_T")
tell = logging.getLogger("lightning.pytorch").info  # in every process: each falls back by itself
FEWEST_LANES = 8  # if fewer clients share a call of the step, nothing is gained (docs/engines.md)

_NOT_EACH_TIME = "the step does not go through torch.func.vmap each time"


class CannotStack(Exception):
    """Says, in a part of a sentence, why a model or a run cannot train many clients at once."""


def refusal(error: Exception, count: int) -> FederatedError:
    """Says to the user what ended a step of a number of clients at once, and what to change."""
    change = "set `--trainer.engine sequential`"
    if out_of_memory(error):
        change = "set `--trainer.chunk_size` to fewer" if count > 2 else f"lower `--data.batch_size`, or {change}"
    return FederatedError(
        "Expected a run that can train many clients at once for `--trainer.engine vectorized`, but "
        f"{cause_of(error, count)}: {change}."
    )


def first_sentence(error: Exception) -> str:
    """Takes from what torch says what fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(".")


def cause_of(error: Exception, count: int, otherwise: str = _NOT_EACH_TIME) -> str:
    """Says, in a part of a sentence, what ended a step of a number of clients at once."""
    if isinstance(error, CannotStack):
        return str(error)
    if out_of_memory(error):
        return f"memory does not hold {count} clients at once"
    return f"{otherwise} ({first_sentence(error)})"


def is_of_many(error: Exception) -> bool:
    """Returns whether an error comes from training many clients at once, and is no defect in the user's code."""
    by_vmap = isinstance(error, RuntimeError) and ("vmap" in str(error) or "atching rule" in str(error))
    return by_vmap or isinstance(error, CannotStack) or out_of_memory(error)


def attempt(compute: Callable[[], _T], count: Callable[[], int]) -> tuple[_T | None, str, int]:
    """Tries to compute something for many clients at once; ``count`` says for how many it was, if it fails.

    Returns:
        The result, or None; why it failed; and how many clients to try next: half as many if memory ran out, else 0,
        for one after another. The exception is not kept, because it would keep the tensors of the failed steps.
    """
    try:
        return compute(), "", 0
    except Exception as error:  # any error: it may work for one client after another
        if is_device_fault(error):  # nothing runs there any more
            raise
        tried = count()
        halves = out_of_memory(error) and tried > FEWEST_LANES
        return None, cause_of(error, tried), max(FEWEST_LANES, tried // 2) if halves else 0


class _OfOne:
    """Replaces an object that exists for one client: a step may read the round from it; all else is refused."""

    def __init__(self, name: str, held: Any, reasons: list[CannotStack]) -> None:
        vars(self).update(_name=name, _held=held, _reasons=reasons)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name) if name in _OF_ALL else _refuse(f"{self._name}.{name}", self._reasons)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(f"{self._name}.{name}", self._reasons)


# Attributes of the trainer that are the same for all clients of a round; and what replaces `trainer.client`.
_OF_ALL = frozenset({"current_epoch", "round", "max_epochs", "max_rounds"})
MANY_CLIENTS: Any = _OfOne("trainer.client", None, [])


class _Output:
    """Replaces the standard output of one thread; others, such as that of a progress bar, write as before."""

    def __init__(self, stream: Any, reasons: list[CannotStack]) -> None:
        self._stream, self._reasons, self._thread = stream, reasons, get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        """Refuses what the step prints."""
        return self._stream.write(text) if get_ident() != self._thread else _refuse("print", self._reasons)


def _refuse(name: str, reasons: list[CannotStack]) -> NoReturn:
    reasons[:] = [CannotStack(f"its training uses `{name}`, which is for one client")]
    raise reasons[0]


@contextmanager
def of_one_client(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Refuses a step that uses, within the block, what exists for one client only: the trainer and `print`.

    Args:
        parts: The modules that hold the trainer; loggers, optimizers and schedules are reached through it.

    Raises:
        CannotStack: If the step does so, even if it catches the error raised there.
    """
    reasons: list[CannotStack] = []
    held = [vars(part)["_trainer"] for part in parts]
    for part, trainer in zip(parts, held, strict=True):
        vars(part)["_trainer"] = _OfOne("trainer", trainer, reasons)
    try:
        with redirect_stdout(_Output(sys.stdout, reasons)):
            yield
    finally:
        for part, trainer in zip(parts, held, strict=True):
            vars(part)["_trainer"] = trainer
    if reasons:
        raise reasons[0]
