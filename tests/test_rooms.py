"""The package can be seen at a glance: few doors at its top (`py.typed`, a marker for type checkers, is none)."""

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
