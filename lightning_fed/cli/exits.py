"""Ends the program after a mistake: one sentence on stderr and an exit code, a traceback only with ``--debug``."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import NoReturn

from lightning_fed.core import one_line
from lightning_fed.errors import FederatedError

__all__ = ["debugging", "exit_with", "mistakes_in_one_sentence", "open_streams", "output_is_written"]


def debugging() -> bool:
    """Whether to show tracebacks of mistakes: LIGHTNING_FED_DEBUG is 1, which ``--debug`` sets."""
    return os.environ.get("LIGHTNING_FED_DEBUG", "0") not in ("", "0")


def exit_with(sentence: str, code: int) -> NoReturn:
    """Prints the sentence, unless it is empty, as one line on stderr after all earlier output, and exits.

    A very long word in it, which you may have typed, is shortened to its first and last letters.
    """
    print(end="", flush=True)  # user code may have set `sys.stdout` to None
    if sentence:
        line = re.sub(r"(\S{100})\S{200,}(\S{50})", r"\1…\2", one_line(" ".join(sentence.split())))
        print(line, file=sys.stderr, flush=True)
    raise SystemExit(code)


def open_streams() -> None:
    """Opens the null device for each standard stream that is missing at the start.

    Otherwise the next opened file would get the stream's number, and output of libraries would land in that file. What
    the terminal has no letter for is printed as "?".
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the program ends
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def output_is_written() -> Iterator[None]:
    """Ends the program with a sentence if its output cannot be written, for example on a full disk.

    If the reader has gone, as after ``| head``, it ends with 128 + SIGPIPE, as other programs do.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # user code may have set `sys.stdout` to None
    except OSError as error:
        if error.filename is not None:
            raise
        try:
            print(flush=True)
        except OSError:
            pass
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of its buffer
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        exit_with(f"Expected to write to the standard output, but that failed ({error.strerror}).", 1)


@contextmanager
def mistakes_in_one_sentence() -> Iterator[None]:
    """Turns your mistakes, raised inside the block, into one sentence and exit code 1.

    Any other exception is a defect, often in your own module, and keeps its traceback.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        sentence = _explain(error)
        if debugging() or sentence is None:
            raise
        exit_with(sentence, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _explain(error: BaseException) -> str | None:
    """Returns the sentence for a user's mistake, empty if another process prints it; None for a defect."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if isinstance(error, FederatedError):
        return "" if error.is_told else str(error)
    if isinstance(error, UnicodeEncodeError):
        return f"Expected text in UTF-8, got {ascii(error.object)[:80]}."
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"Expected a valid name of a file or folder, got {error.filename!r} ({error.strerror})."
    # Compared by name, so that no command has to import Lightning for it.
    return str(error) if type(error).__name__ == "MisconfigurationException" else None
