"""Short names of the classes that other packages share, as entry points: each is loaded when its name is used."""

from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from jsonargparse._common import ImportDenied, check_import_path
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.cli.exits import debugging, exit_with
from lightning_fed.cli.suggestions import listing

__all__ = ["load_shared", "shared_path"]

_GROUPS = tuple(
    f"lightning_fed.{kind}" for kind in ("aggregators", "masks", "client_algorithms", "callbacks", "models", "data")
)


def _shared(name: str | None = None) -> dict[str, EntryPoint]:
    """Returns the entry points, those of a name or all, by import path; none that ``--safe_imports`` does not allow."""
    found = {one.value.replace(":", "."): one for one in _installed() if name in (None, one.name)}
    return {path: one for path, one in found.items() if _is_allowed(path)}


@cache
def _installed() -> list[EntryPoint]:
    return [one for group in _GROUPS for one in entry_points(group=group)]


def _is_allowed(path: str) -> bool:
    with suppress(ImportDenied):
        check_import_path(path)
        return True
    return False


def _failure(one: EntryPoint) -> str | None:
    """Loads an entry point; returns what is wrong with it in one sentence, None if nothing is."""
    try:
        one.load()
    except Exception as error:  # a package of somebody else's may raise anything
        if debugging():
            raise
        package = one.dist.name if one.dist else "a package"
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return f"Expected `{one.name}`, which {package} shares, to be loaded from {one.value}, but: {reason}."
    return None


def shared_path(name: str) -> str | None:
    """Returns the import path of the class that a package shares under a short name; None if none does.

    It ends the program with one sentence if that class cannot be loaded, or if several have the name.
    """
    found = _shared(name)
    if len(found) > 1:
        exit_with(
            f"Expected one class named {name}, but packages share {listing(sorted(found))}: give its import path.", 2
        )
    for path, one in found.items():
        if said := _failure(one):
            exit_with(said, 2)
        return path
    return None


def load_shared() -> None:
    """Loads all shared classes, to list them; says of each that fails why, and goes on."""
    for one in _shared().values():
        if said := _failure(one):
            rank_zero_warn(said)
