"""How a mistake ends: one sentence as the last line on stderr, an exit code, no traceback unless asked for."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from lightning_fed.errors import FederatedError

__all__ = ["debug_mode", "debugging", "exit_with", "mistakes_in_one_sentence"]

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
        print(line, file=sys.stderr, flush=True)
    raise SystemExit(code)


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
