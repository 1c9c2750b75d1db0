"""How a mistake ends: one sentence as the last line on stderr, an exit code, no traceback unless asked for."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from lightning_fed.errors import FederatedError

__all__ = ["debug_mode", "debugging", "exit_with", "mistakes_in_one_sentence", "open_streams", "output_is_written"]

_asked_for_debug: ContextVar[bool] = ContextVar("asked_for_debug", default=False)


@contextmanager
def debug_mode(enabled: bool) -> Iterator[None]:
    """Shows tracebacks of mistakes while open, if enabled."""
    token = _asked_for_debug.set(enabled)
    try:
        yield
    finally:
        _asked_for_debug.reset(token)


def debugging() -> bool:
    """Whether tracebacks of mistakes are wanted: ``--debug`` or LIGHTNING_FED_DEBUG=1."""
    return _asked_for_debug.get() or os.environ.get("LIGHTNING_FED_DEBUG", "0") not in ("", "0")


def exit_with(sentence: str, code: int) -> NoReturn:
    """Prints the sentence, unless it is empty, as one line on stderr after all output so far, and exits.

    What somebody gave may be of any length: of a word with hundreds of letters the first and the last are shown.
    """
    sys.stdout.flush()
    if sentence:
        line = re.sub(r"(\S{100})\S{200,}(\S{50})", r"\1…\2", " ".join(sentence.split()))
        print(line, file=sys.stderr if sys.__stderr__ else sys.__stdout__, flush=True)
    raise SystemExit(code)


def open_streams() -> None:
    """Gives a program that was started without standard streams such that lead nowhere.

    Else the next files that it opens would have their numbers, and what libraries write to them would be written there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # as long as the program


@contextmanager
def output_is_written() -> Iterator[None]:
    """Ends the program with a sentence if what it printed inside cannot be written, as on a full disk.

    Where nobody reads it any more, as after ``| head``, it ends as other programs do, with 128 + SIGPIPE.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or _can_print():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        exit_with(f"Expected to write to the standard output, but that failed ({error.strerror}).", 1)


def _can_print() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


@contextmanager
def mistakes_in_one_sentence() -> Iterator[None]:
    """Turns the user's mistakes raised inside into one sentence and exit code 1.

    Any other exception is a defect, often in the user's own module, and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        if debugging():
            raise
        exit_with("Interrupted.", 130)
    except FederatedError as error:
        if debugging():
            raise
        if error.is_told:
            raise SystemExit(1) from None
        exit_with(str(error), 1)
    except OSError as error:
        if debugging() or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        exit_with(f"Expected names of files and folders that can be, got {error.filename!r} ({error.strerror}).", 1)
    except Exception as error:
        if debugging() or not _is_misconfiguration(error):
            raise
        exit_with(str(error), 1)


def _is_misconfiguration(error: Exception) -> bool:
    """Whether it is Lightning's; looked up only now, so that no command waits for Lightning because of it."""
    if "lightning" not in sys.modules:
        return False
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)
