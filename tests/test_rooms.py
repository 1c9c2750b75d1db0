"""The package can be seen at a glance: few doors at its top (`py.typed`, a marker for type checkers, is none)."""

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
from PIL import Image

import lightning_fed
from tests.budget import PACKAGE, ROOT, budget, lines_of, rooms

DOORS, FILES, BYTES_OF_DOCS = 18, 13, 6_000_000


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


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files of docs/ that git holds."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout")
    listed = subprocess.run(["git", "ls-files", "-z", "docs"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(listed.stderr.decode())
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_the_documentation_is_small_enough_to_clone(tracked: list[Path]) -> None:
    held = sum(path.stat().st_size for path in tracked)
    assert held <= BYTES_OF_DOCS, (
        f"docs/ may hold {BYTES_OF_DOCS:,} bytes in git, and holds {held:,}: `python docs/pictures.py` makes pictures "
        "small, `gzip -n` packs curves.csv of a study, and what `report --study --from` draws of these stays out"
    )


def test_curves_are_packed_and_what_is_drawn_of_them_stays_out(tracked: list[Path]) -> None:
    assert [path for path in tracked if path.name == "curves.csv"] == [], "run `gzip -n` on it"
    assert [path for path in tracked if path.name == "table.tex"] == [], "`report --study --from` draws it"


def test_a_picture_has_a_palette_and_a_page(tracked: list[Path]) -> None:
    pages = [ROOT / "README.md", *(path for path in tracked if path.suffix == ".md")]
    link = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
    shown = {(page.parent / target).resolve() for page in pages for target in link.findall(page.read_text("utf-8"))}
    pictures = [path for path in tracked if path.suffix == ".png"]
    assert pictures
    assert [path for path in pictures if path not in shown] == [], "no page shows it"
    assert [path for path in pictures if Image.open(path).mode != "P"] == [], "run `python docs/pictures.py`"
