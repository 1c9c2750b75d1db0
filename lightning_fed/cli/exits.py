"""How a mistake ends: one sentence as the last line on stderr, an exit code, no traceback unless asked for."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning_fed.errors import FederatedError

__all__ = ["debugging", "exit_with", "mistakes_in_one_sentence", "open_streams", "output_is_written"]


def debugging() -> bool:
    """Whether tracebacks of mistakes are wanted: LIGHTNING_FED_DEBUG=1, which ``--debug`` sets."""
    return os.environ.get("LIGHTNING_FED_DEBUG", "0") not in ("", "0")


def exit_with(sentence: str, code: int) -> NoReturn:
    """Prints the sentence, unless it is empty, as one line on stderr after all output so far, and exits.

    What somebody gave may be of any length: of a word with hundreds of letters the first and the last are shown.
    """
    sys.stdout.flush()
    if sentence:
        line = re.sub(r"(\S{100})\S{200,}(\S{50})", r"\1…\2", " ".join(sentence.split()))
        print(line, file=sys.stderr, flush=True)
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
        if error.filename is not None:
            raise
        try:
            print(flush=True)
        except OSError:
            pass
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        exit_with(f"Expected to write to the standard output, but that failed ({error.strerror}).", 1)


@contextmanager
def mistakes_in_one_sentence() -> Iterator[None]:
    """Turns the user's mistakes raised inside into one sentence and exit code 1.

    Any other exception is a defect, often in the user's own module, and keeps its traceback.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        sentence = _explain(error)
        if debugging() or sentence is None:
            raise
        exit_with(sentence, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _explain(error: BaseException) -> str | None:
    """Says a mistake of the user's in one sentence, none at all if another process says it; None for a defect."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if isinstance(error, FederatedError):
        return "" if error.is_told else str(error)
    if isinstance(error, UnicodeEncodeError):
        return f"Expected text in UTF-8, got {ascii(error.object)[:80]}."
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"Expected names of files and folders that can be, got {error.filename!r} ({error.strerror})."
    # By its name, so that no command waits for Lightning because of it.
    return str(error) if type(error).__name__ == "MisconfigurationException" else None
