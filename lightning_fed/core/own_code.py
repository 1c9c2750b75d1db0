"""The user's own code behind some objects, and the names that it uses: it is read, nothing of it runs."""

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["OwnCode", "is_own"]

# Packages that do what their names say, as Python's own do.
_KNOWN = {"torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fed", "numpy"}


def is_own(kind: type | FunctionType) -> bool:
    """Says whether a class or function is of the user's own, or of a package that is not known here."""
    package = str(kind.__module__ or "builtins").partition(".")[0]
    return package not in _KNOWN and package not in sys.stdlib_module_names - {"__main__"}


class OwnCode:
    """The functions of the user's own that belong to some objects, and those that they name.

    Args:
        objects: Modules, of which all parts count, and callbacks.
        first: Names of the methods to begin with; None for all of them.

    Attributes:
        names: Attributes and global variables that are used, each with a function that uses it.
        variables: The global variables among them, each name with the dict that holds it.
    """

    def __init__(self, objects: Iterable[Any], first: Iterable[str] | None = None) -> None:
        self.names: dict[str, str] = {}
        self.variables: dict[str, dict[str, Any]] = {}
        methods = _methods(objects)
        todo = [function for name in (methods if first is None else first) for function in methods.get(name, ())]
        seen: set[FunctionType] = set()
        while todo:
            function = todo.pop()
            if function in seen or not is_own(function):
                continue
            seen.add(function)
            for name in _names(function.__code__):
                self.names.setdefault(name, function.__qualname__)
                todo += methods.get(name, ())
                if name in function.__globals__:
                    self.variables[name] = function.__globals__
                    todo += _functions(function.__globals__[name])

    def uses(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Returns the first of these names that is used, and where; None if none is."""
        return next(((name, self.names[name]) for name in sorted(names) if name in self.names), None)


def _methods(objects: Iterable[Any]) -> dict[str, list[FunctionType]]:
    """Finds functions by the names under which the objects' own classes, and they themselves, have them."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for item in objects:
        for part in item.modules() if isinstance(item, nn.Module) else (item,):
            for held in (vars(part), *(vars(base) for base in type(part).__mro__ if is_own(base))):
                for name, value in held.items():
                    found[name] += _functions(value)
    return found


def _functions(value: Any) -> list[FunctionType]:
    """Returns the functions that a value stands for."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset) if isinstance(function, FunctionType)]
    if isinstance(value, type):
        return [function for function in vars(value).values() if isinstance(function, FunctionType)]
    if isinstance(value, (functools.partial, functools.cached_property)):
        value = value.func
    value = inspect.unwrap(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
    return [value] if isinstance(value, FunctionType) else []


def _names(code: CodeType) -> Iterator[str]:
    """Yields what a function names that is not its own, and the functions and comprehensions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
