"""``--safe_imports NAMES``: options name only these classes and functions and those of this package."""

import sys
from contextlib import suppress
from pydoc import ErrorDuringImport, locate
from typing import Any

from jsonargparse import set_parsing_settings
from torch import optim

from lightning_fed import aggregators, callbacks, client_algorithms, data, masks, models, sampling
from lightning_fed.cli.exits import exit_with

__all__ = ["allow_only"]

# Packages whose public classes every configuration may name.
_OURS: tuple[Any, ...] = (aggregators, callbacks, client_algorithms, data, masks, models, sampling)


def allow_only(names: str) -> None:
    """Lets options name only these classes and functions and those of this package; others are never imported.

    An option of type ``Any`` builds no class at all, as none is expected there.
    """
    allowed = {**_own_classes(), **{name: _named(name) for name in names.split(",")}}
    allowed.update({f"{found.__module__}.{found.__qualname__}": found for found in list(allowed.values())})
    # Names below an allowed class are its methods. They are denied, as one may for example load a file.
    classes = [(path, found) for path, found in allowed.items() if isinstance(found, type)]
    methods = [f"{path}.{name}" for path, found in classes for name in {*dir(found), *dir(type)}]
    try:
        set_parsing_settings(
            import_path_denylist=["*", *methods],
            import_path_allowlist=list(allowed),
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:  # of a function that could take the restriction back
        exit_with(f"Expected after `--safe_imports` names that can be allowed, but: {error}", 2)


def _own_classes() -> dict[str, Any]:
    """Returns the classes that are always allowed, by import path: our public ones and torch's optimizers."""
    found = {f"{room.__name__}.{name}": getattr(room, name) for room in _OURS for name in room.__all__}
    classes = {path: part for path, part in found.items() if isinstance(part, type)}
    optimizers = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    return {**classes, **{f"torch.optim.{kind.__name__}": kind for kind in optimizers}}


def _named(path: str) -> Any:
    """Imports a class or function that you trust."""
    found = None
    if not _is_module(path):
        with suppress(ErrorDuringImport):
            found = locate(path)
    is_below = isinstance(locate(path.rpartition(".")[0]) if found is not None and "." in path else None, type)
    if is_below or not (callable(found) and hasattr(found, "__qualname__")):
        expected = "full names of classes and functions, as in `torch.optim.SGD,my_file.MyModel`"
        exit_with(f"Expected after `--safe_imports` {expected}, got {path!r}, which is none that can be imported.", 2)
    return found


def _is_module(path: str) -> bool:
    """Says whether a name is one of a package or module, or has no dot, without importing anything."""
    names, places = path.split("."), None
    for end in range(1, len(names) + 1 if all(names) else 0):
        specs = (finder.find_spec(".".join(names[:end]), places) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        places = None if spec is None else spec.submodule_search_locations
        if places is None:
            return end == len(names) and (spec is not None or end == 1)
    return True
