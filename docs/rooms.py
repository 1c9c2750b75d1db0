"""Draws the rooms of the package, and which of them import which, from the imports themselves.

    python docs/rooms.py

Above the floors, which are the layers in pyproject.toml; below how often the room of a line imports that
of a column, for annotations too. What runs downwards is above the diagonal; what is below it would be black, and
`make lint` allows nothing there.
"""

from collections import Counter
from pathlib import Path

import grimp
import matplotlib

matplotlib.use("Agg")
from importlinter.api import read_configuration
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from matplotlib.pyplot import subplots
from pictures import save

__all__ = ["draw_floors", "draw_imports", "main"]

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "rooms.png"
WIDTH, HEIGHT, FLOOR = 0.94, 0.62, 1.0


def layers() -> list[list[str]]:
    """Returns the rooms of each floor, from the top down, as the first contract of import-linter names them."""
    contract = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"][0]
    return [floor.replace(" ", "").split("|") for floor in contract["layers"] if floor != "__main__"]


def count_imports() -> Counter[tuple[str, str]]:
    """Counts the imports of one room's files from another's, those for annotations too."""
    graph = grimp.build_graph("lightning_fed", cache_dir=None)
    counts: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            importer, importee = (f"{name}.".split(".")[1] for name in (module, imported))
            counts[importer, importee] += 1
    return counts


def size(room: str) -> tuple[int, int]:
    """Returns how many files and lines a room has."""
    place = ROOT / "lightning_fed" / room
    files = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def draw_floors(axes: Axes, floors: list[list[str]]) -> None:
    """Draws a box for each room, floor below floor."""
    for level, floor in enumerate(floors):
        for at, room in enumerate(floor):
            x, y = at - (len(floor) - 1) / 2, -level * FLOOR
            corner = (x - WIDTH / 2, y - HEIGHT / 2)
            style = {"facecolor": "white", "edgecolor": f"C{level}", "linewidth": 2}
            axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, "round,pad=0.02", **style))
            axes.text(x, y + 0.12, room, ha="center", va="center", fontsize=8.5, fontweight="bold")
            files, lines = size(room)
            what = f"{files} files, {lines:,} lines" if files > 1 else f"{lines:,} lines"
            axes.text(x, y - 0.15, what, ha="center", va="center", fontsize=6.5, color="0.3")
    widest = max(map(len, floors)) / 2
    axes.set(xlim=(-widest, widest), ylim=(-(len(floors) - 1) * FLOOR - HEIGHT, HEIGHT))
    axes.axis("off")


def draw_imports(axes: Axes, floors: list[list[str]]) -> None:
    """Draws how often the room of a line imports the room of a column."""
    rooms, counts = [room for floor in floors for room in floor], count_imports()
    floor_of = {room: level for level, floor in enumerate(floors) for room in floor}
    for line, importer in enumerate(rooms):
        for column, imported in enumerate(rooms):
            count, level = counts[importer, imported], floor_of[importer]
            if line == column:
                colour = "0.85"
            elif floor_of[imported] <= level:
                colour = "black" if count else "0.96"
            else:
                colour = f"C{level}" if count else "white"
            axes.add_patch(
                FancyBboxPatch((column - 0.42, line - 0.42), 0.84, 0.84, "square,pad=0", fc=colour, ec="0.9")
            )
            if count and line != column:
                axes.text(column, line, str(count), ha="center", va="center", fontsize=8, color="white")
    axes.set(xlim=(-0.5, len(rooms) - 0.5), ylim=(len(rooms) - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(len(rooms)), rooms, rotation=45, ha="left", fontsize=8)
    axes.set_yticks(range(len(rooms)), rooms, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def main() -> None:
    """Writes the picture."""
    floors = layers()
    figure, (above, below) = subplots(2, 1, figsize=(8.5, 13), layout="constrained", height_ratios=[1, 1.25])
    draw_floors(above, floors)
    draw_imports(below, floors)
    above.set_title("rooms, each floor above those that it imports")
    below.set_title("imports of the room on the left from the room above")
    save(figure, PICTURE, dpi=90)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
