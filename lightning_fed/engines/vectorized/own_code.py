"""What the user's own code does, found by reading it: nothing of it runs."""

import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["OwnCode", "is_of_python", "is_own"]

# Packages whose code is known: it is not read, and does what its name says.
_KNOWN = frozenset({
    "torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities",
    "lightning_fed", "numpy", "builtins", "math", "cmath", "functools", "itertools", "operator", "_operator", "abc",
    "collections", "typing", "typing_extensions", "types", "enum", "contextlib", "dataclasses", "numbers",
})  # fmt: skip
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor)
_SHARED = (
    list, dict, set, deque, bytearray, Iterator, np.ndarray, Tensor, np.random.Generator, torch.Generator
)  # fmt: skip
# What stands for a function or object, and where it has it.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    property: ("fget",), functools.cached_property: ("func",), staticmethod: ("__func__",), classmethod: ("__func__",),
    MethodType: ("__func__", "__self__"), functools.partial: ("func", "args", "keywords"),
}  # fmt: skip
_MADE = ("__init__", "__new__", "__post_init__", "__call__", "forward")
_MOST = 1000


def is_own(kind: Any) -> bool:
    """Says whether a class, function or file is of the user's own, or of a package that is not known here."""
    return _package(kind) not in _KNOWN


def is_of_python(kind: Any) -> bool:
    """Says whether it comes with Python."""
    return _package(kind) in sys.stdlib_module_names


def _package(kind: Any) -> str:
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return str(name or "builtins").partition(".")[0]


class OwnCode:
    """The functions of the user's own that belong to some objects, and all that they name.

    What is read is found by names: a function of the objects' classes whose name is used by another one that is read,
    and whatever such a name stands for among global variables, attributes and closures.

    Args:
        objects: Modules, of which all parts count, callbacks, and the like.
        first: Names of the methods to begin with; None for all of the objects' own methods, and whatever they hold.

    Attributes:
        names: Names of attributes and global variables that are used, and where.
        changes: Those, outside of a function, that are assigned to, and where.
        shared: Those that stand for lists, dicts, tensors and the like, which can be changed in place, and where.
        unknown: What is used that cannot be read, and where.
    """

    def __init__(self, objects: Iterable[Any], first: Iterable[str] | None = None) -> None:
        self.names: dict[str, str] = dict.fromkeys(first or (), "")
        self.changes: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self._all = first is None
        self._seen: dict[int, Any] = {}  # with the objects, so that no id is given away meanwhile
        self._holders: list[Mapping[str, Any]] = []
        self._todo: list[FunctionType] = []
        for item in objects:
            for part in item.modules() if isinstance(item, nn.Module) else (item,):
                self._follow(part, "", "")
                if self._all:
                    self._follow(list(vars(part).values()), "", "")
        while self._todo:
            self._read(self._todo.pop())

    def uses(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Returns one of these names that is used, and where; None if none is."""
        return next(((name, self.names[name]) for name in sorted(names) if self.names.get(name)), None)

    def _use(self, name: str, where: str) -> None:
        """Follows what a name stands for, wherever it is the name of something."""
        if name not in self.names:
            self.names[name] = where
            for holder in list(self._holders):
                if name in holder:
                    self._share(holder[name], name, where)

    def _hold(self, names: Mapping[str, Any]) -> None:
        self._holders.append(names)
        for name in [name for name in names if name in self.names]:
            self._share(names[name], name, self.names[name])

    def _follow(self, value: Any, name: str, where: str) -> None:
        """Takes in a value that is used under a name."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            for item in [*value, *(value.values() if isinstance(value, dict) else ())][:_MOST]:
                self._follow(item, name, where)
        elif isinstance(value, tuple(_WRAPPERS)):
            for attribute in next(found for kind, found in _WRAPPERS.items() if isinstance(value, kind)):
                self._follow(getattr(value, attribute), name, where)
        elif isinstance(value, FunctionType):
            if is_own(value):
                self._todo.append(value)
        elif isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            self._take_kind(value, name, where)
        else:
            self._take_object(value, name, where)

    def _take_kind(self, kind: Any, name: str, where: str) -> None:
        """Takes in a class, a file, or a function that was not written in Python."""
        if isinstance(kind, BuiltinFunctionType):
            self._use(kind.__name__, where)
        if not is_own(kind):
            return
        if isinstance(kind, BuiltinFunctionType) or is_of_python(kind):
            self.unknown.setdefault(name, where)
        elif isinstance(kind, ModuleType):
            self._hold(vars(kind))
        else:
            self._take_class(kind)
            for own in _MADE:
                self._use(own, where)

    def _take_object(self, value: Any, name: str, where: str) -> None:
        own = is_own(type(value))
        if own and is_of_python(type(value)):
            self.unknown.setdefault(name, where)
            return
        self._take_class(type(value))
        if own or isinstance(value, nn.Module):
            self._hold(getattr(value, "__dict__", {}))
        self._follow(getattr(value, "__wrapped__", None), name, where)

    def _take_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_own(base) and id(base) not in self._seen:
                self._seen[id(base)] = base
                self._hold(vars(base))
                for name in vars(base) if self._all else ():
                    self._use(name, base.__qualname__)

    def _read(self, function: FunctionType) -> None:
        where = function.__qualname__
        if len(self._seen) > _MOST:
            self.unknown.setdefault(where, where)
            return
        for cell in function.__closure__ or ():
            with_value = cell != type(cell)()  # one of a variable that is not assigned yet equals an empty one
            self._share(cell.cell_contents if with_value else None, where, where)
        self._follow((function.__defaults__, function.__kwdefaults__), where, where)
        for step in _instructions(function.__code__):
            self._take_instruction(step, function, where)

    def _share(self, value: Any, name: str, where: str) -> None:
        """Takes in what lives longer than a call."""
        if isinstance(value, _SHARED):
            self.shared.setdefault(name, where)
        self._follow(value, name, where)

    def _take_instruction(self, step: dis.Instruction, function: FunctionType, where: str) -> None:
        kind, _, target = step.opname.partition("_")
        name = str(step.argval)
        if kind in ("STORE", "DELETE"):
            if target in ("GLOBAL", "ATTR") or (target == "DEREF" and name in function.__code__.co_freevars):
                self.changes.setdefault(name, where)
        elif step.opname == "IMPORT_NAME" and name.partition(".")[0] not in _KNOWN:
            self.unknown.setdefault(name, where)
        elif step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
            self._use(name, where)
            if target in ("GLOBAL", "NAME"):
                self._share(function.__globals__.get(name), name, where)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yields what a function does, and the functions and comprehensions within it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
