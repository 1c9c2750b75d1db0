"""Why many clients cannot train at once: what is said of it, and what stands for what is of one client alone."""

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
    "FEWEST_LANES", "MANY_CLIENTS", "CannotStack", "NotQuicker", "attempt", "cause_of", "explained_refusals",
    "first_sentence", "of_one_client", "refusal", "tell",
]  # fmt: skip

_T = TypeVar("_T")
tell = logging.getLogger("lightning.pytorch").info  # of every process: each falls back for itself
FEWEST_LANES = 8  # of fewer clients that share a call of the step, nothing is won (docs/engines.md)


class CannotStack(Exception):
    """Says, in a part of a sentence, why a model or a run cannot train many clients at once."""


class NotQuicker(CannotStack):
    """Says so of a run that would gain nothing by it, which nobody can change."""


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


def cause_of(error: Exception, count: int) -> str:
    """Says, in a part of a sentence, what ended a step of a number of clients at once."""
    if isinstance(error, CannotStack):
        return str(error)
    if out_of_memory(error):
        return f"memory does not hold {count} clients at once"
    return f"the step does not go through torch.func.vmap each time ({first_sentence(error)})"


@contextmanager
def explained_refusals(count: int) -> Iterator[None]:
    """Makes a sentence of what ends the training of a number of clients at once, in the middle of a run."""
    try:
        yield
    except Exception as error:
        by_vmap = isinstance(error, RuntimeError) and ("vmap" in str(error) or "atching rule" in str(error))
        if by_vmap or isinstance(error, CannotStack) or out_of_memory(error):
            raise refusal(error, count) from error
        raise


def attempt(compute: Callable[[], _T], count: Callable[[], int]) -> tuple[_T | None, str, int]:
    """Lets many clients do something at once, as many as ``count`` says where it fails.

    Returns:
        What is computed, or else None, why, and for how many to try it next: half as many where memory ran out, and 0
        for one after another. The exception, which would keep what steps had made, is gone by then.
    """
    try:
        return compute(), "", 0
    except Exception as error:  # whatever it is: one client after another may do well
        if is_device_fault(error):  # nothing runs there any more
            raise
        tried = count()
        halves = out_of_memory(error) and tried > FEWEST_LANES
        return None, cause_of(error, tried), max(FEWEST_LANES, tried // 2) if halves else 0


class _OfOne:
    """Stands for what is of one client: a step finds the round there, and whatever else it reads or sets is refused."""

    def __init__(self, name: str, held: Any, reasons: list[CannotStack]) -> None:
        vars(self).update(_name=name, _held=held, _reasons=reasons)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name) if name in _OF_ALL else _refuse(f"{self._name}.{name}", self._reasons)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(f"{self._name}.{name}", self._reasons)


# What of the trainer is the same for all clients of a round; and what stands for `trainer.client`.
_OF_ALL = frozenset({"current_epoch", "round", "max_epochs", "max_rounds"})
MANY_CLIENTS: Any = _OfOne("trainer.client", None, [])


class _Output:
    """Stands for the standard output of one thread; others, such as that of a progress bar, write as always."""

    def __init__(self, stream: Any, reasons: list[CannotStack]) -> None:
        self._stream, self._reasons, self._thread = stream, reasons, get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        """Refuses what the step prints."""
        return self._stream.write(text) if get_ident() != self._thread else _refuse("print", self._reasons)


def _refuse(name: str, reasons: list[CannotStack]) -> NoReturn:
    reasons[:] = [CannotStack(f"its training uses `{name}`, and there are many clients at once")]
    raise reasons[0]


@contextmanager
def of_one_client(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Refuses a step that uses, within the block, what is there for one client at a time: the trainer and `print`.

    Args:
        parts: Those that know the trainer; loggers, optimizers and schedules are asked for there.

    Raises:
        CannotStack: If the step does, even if it catches what is raised at that place.
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
