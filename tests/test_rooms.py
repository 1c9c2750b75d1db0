"""The package can be seen at a glance: few doors at its top (`py.typed`, a marker for type checkers, is none)."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import lightning_fed
from tests.budget import PACKAGE, budget, lines_of, rooms

DOORS, FILES = 18, 13


def test_the_package_has_few_doors() -> None:
    doors = [*PACKAGE.glob("*.py"), *(init.parent for init in PACKAGE.glob("*/__init__.py"))]
    assert len(doors) <= DOORS, sorted(door.name for door in doors)


def test_a_folder_has_few_files() -> None:
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        files = sorted(file.name for file in folder.glob("*.py") if file.name != "__init__.py")
        assert len(files) <= FILES or folder == PACKAGE, (folder.name, files)


def test_a_room_keeps_its_budget_and_a_file_its_length() -> None:
    most, found = budget(), rooms()
    assert found.keys() == most.keys() - {"file"}
    assert {room: lines for room, lines in found.items() if lines > most[room]} == {}, "see `tool.lightning_fed.lines`"
    assert [file for file in PACKAGE.rglob("*.py") if lines_of(file) > most["file"]] == []


def test_only_the_root_imports_by_name() -> None:
    """What import-linter cannot see: a room gets what is above it from the root, which registers it."""
    found = [
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in PACKAGE.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "lightning_fed" in line.partition("import_module(")[2]
    ]
    assert found == []


def test_every_public_method_has_a_docstring_or_overrides_another() -> None:
    """Ruff's D102, which this stands in for, does not know what a method overrides."""
    for module in walk_packages(lightning_fed.__path__, "lightning_fed."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    missing = [
        f"{kind.__module__}.{method.__qualname__}"
        for kind in _public_classes()
        for name, value in vars(kind).items()
        for method in [inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))]
        if not name.startswith("_") and getattr(method, "__qualname__", "") == f"{kind.__qualname__}.{name}"
        if not method.__doc__ and not any(name in vars(base) for base in kind.__mro__[1:])
    ]
    assert missing == []


def _public_classes() -> Iterator[type]:
    for module in [module for name, module in sys.modules.items() if name.startswith("lightning_fed.")]:
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_"):
                yield kind
