"""Prints the lines of each room beside its budget in pyproject.toml: `python -m tests.budget`."""

from collections import Counter
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_fed"


def lines_of(file: Path) -> int:
    """Counts all lines, blank ones and documentation too."""
    return len(file.read_text(encoding="utf-8").splitlines())


def rooms() -> Counter[str]:
    """Returns the lines of each room; files at the top of the package are one."""
    lines: Counter[str] = Counter()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        lines[path.parts[0] if len(path.parts) > 1 else "top"] += lines_of(file)
    return lines


def budget() -> dict[str, int]:
    """Returns the most lines of each room, and of one file."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["tool"]["lightning_fed"]["lines"]


def main() -> None:
    """Prints a row for each room, the largest first, and the sums of library and lab."""
    found, most = rooms(), budget()
    rows = [(room, lines, most[room]) for room, lines in found.most_common()]
    library = [row for row in rows if row[0] != "lab"]
    rows.append(("library", sum(row[1] for row in library), sum(row[2] for row in library)))
    print(f"{'room':<20}{'lines':>8}{'budget':>8}")
    for room, lines, limit in rows:
        print(f"{room:<20}{lines:>8,}{limit:>8,}")


if __name__ == "__main__":
    main()
