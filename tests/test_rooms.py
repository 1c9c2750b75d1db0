"""The package can be seen at a glance: few doors at its top (`py.typed`, a marker for type checkers, is none)."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_fed"
DOORS, FILES = 18, 13


def test_the_package_has_few_doors() -> None:
    doors = [*PACKAGE.glob("*.py"), *(init.parent for init in PACKAGE.glob("*/__init__.py"))]
    assert len(doors) <= DOORS, sorted(door.name for door in doors)


def test_a_folder_has_few_files() -> None:
    for folder in {file.parent for file in PACKAGE.rglob("*.py")}:
        files = sorted(file.name for file in folder.glob("*.py") if file.name != "__init__.py")
        assert len(files) <= FILES or folder == PACKAGE, (folder.name, files)
