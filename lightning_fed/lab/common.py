"""What the commands of the laboratory share: their parser, packages of extras, and names that must be known."""

import argparse
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

from lightning_fed.errors import FederatedError

__all__ = ["CommandParser", "expect_known", "import_extra"]


class CommandParser(argparse.ArgumentParser):
    """Tells a mistake in one sentence, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """Raises the sentence."""
        raise FederatedError(f"Expected `{self.prog}` with options that `{self.prog} --help` lists: {message}.")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of a package that one of the extras installs."""
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ImportError as error:
        raise FederatedError(
            f"Expected {package} for {purpose}, which cannot be imported ({error}): run "
            f"`pip install 'lightning_fed[{extra}]'`."
        ) from error


def expect_known(place: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses the first of some names, given by an option or a key, that is not known; ``what`` says what they are."""
    known = list(known)
    for name in names:
        if name not in known:
            there = ", ".join(known) or "none"
            raise FederatedError(f"Expected `{place}` to name {what} ({there}), got {name!r}.")
