"""Published figures of papers, which come with the package and are shown next to the cells of a study."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from lightning_fed.core.files import read_regular
from lightning_fed.errors import FederatedError, expect, expect_choice
from lightning_fed.lab.common import expect_known

__all__ = ["Figure", "PublishedFigures", "published_files", "read_published"]

_FOLDER = Path(__file__).parent / "figures"
_FIXED = ("table", "value", "std")

Row = dict[str, str]


@dataclass(frozen=True)
class Figure:
    """A published value in its printed unit, accuracies in percent, and the number after its ±."""

    value: float
    std: float | None


@dataclass(frozen=True)
class PublishedFigures:
    """The published figures that belong to a study."""

    table: str  # where they are published
    rows: Sequence[Row]
    axes: Mapping[str, Mapping[str, Row]]  # by axis and value, columns of the file; without figures, left out

    def figure(self, cell: Mapping[str, str]) -> Figure | None:
        """Finds the figure of a cell by the names of its values; None if the file has none."""
        if any(cell[axis] not in values for axis, values in self.axes.items()):
            return None
        wanted = {column: name for axis, values in self.axes.items() for column, name in values[cell[axis]].items()}
        found = [row for row in self.rows if _fits(row, wanted)]
        if len(found) > 1:
            differing = [name for name in found[0] if len({row[name] for row in found}) > 1 and name not in _FIXED]
            raise FederatedError(
                f"Expected `report.published` to select one figure of {self.table} a cell, got {len(found)} that "
                f"differ in {', '.join(differing)}: name its value in `where`, or its axis in `axes`."
            )
        return next((Figure(float(row["value"]), float(row["std"]) if row["std"] else None) for row in found), None)


def published_files() -> dict[str, Path]:
    """Returns the files in the package by name, such as ``gma_table10``."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.csv"))}


def read_published(published: Mapping[str, Any], axes: Mapping[str, Iterable[str]]) -> PublishedFigures:
    """Reads a study's ``report.published``.

    Args:
        published: ``file``, a name or a path; ``where``, the values of columns that are the same for all cells; and
            ``axes``, for each axis its column, or for each of its values the values of several columns. If they do not
            give a metric, the figures belong to the first metric.
        axes: The names of the values of each axis.
    """
    expect_known("report.published", published, ("file", "where", "axes"), "its keys")
    expect("file" in published, "Expected `report.published` to name a `file` of figures, got none.")
    rows = _read(str(published["file"]))
    where = _texts("report.published.where", published.get("where"))
    _expect_values("report.published.where", where, rows)
    rows = [row for row in rows if _fits(row, where)]
    named = _mapping("report.published.axes", published.get("axes"))
    expect_known("report.published.axes", named, axes, "axes of the study")
    meant = {axis: _meant(axis, what, list(axes[axis]), rows) for axis, what in named.items()}
    if "metric" in axes and "metric" not in named:  # a figure belongs to one metric only
        meant["metric"] = {next(iter(axes["metric"])): {}}
    found = PublishedFigures(rows[0]["table"] if rows else "", rows, meant)
    some = any(found.figure(dict(zip(meant, cell, strict=True))) for cell in product(*(axes[axis] for axis in meant)))
    expect(some, f"Expected `report.published` to select figures of {published['file']}, got none.")
    return found


def _read(name: str) -> list[Row]:
    if not name.endswith(".csv"):
        expect_choice("report.published.file", name, [*published_files(), "the path of a .csv"])
    path = Path(name) if name.endswith(".csv") else published_files()[name]
    try:
        rows = list(csv.DictReader(StringIO(read_regular(path).decode(), newline=""), strict=True))
        for row in rows:
            float(row["value"])
            float(row["std"] or 0)
            row["table"]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise FederatedError(
            f"Expected {path} to be a table with the columns {', '.join(_FIXED)} and others, but it cannot be read "
            f"({type(error).__name__}: {error}): change `report.published.file`."
        ) from error
    return rows


def _meant(axis: str, what: Any, values: Sequence[str], rows: Sequence[Row]) -> dict[str, Row]:
    """Returns the columns of each value of an axis, from one column for the axis or several for each value."""
    place = f"report.published.axes.{axis}"
    if not isinstance(what, Mapping):
        column = str(what)
        _expect_columns(place, [column], rows)
        return {value: {column: value} for value in values if any(_same(row[column], value) for row in rows)}
    meant = {str(value): _texts(place, row) for value, row in what.items()}
    expect_known(place, meant, values, f"values of {axis!r}")
    for value, row in meant.items():
        _expect_values(f"{place}.{value}", row, rows)
    return meant


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise FederatedError(f"Expected `{place}` to be a mapping from columns to values, got {value!r}.")
    return value or {}


def _texts(place: str, value: Any) -> Row:
    return {name: str(cell) for name, cell in _mapping(place, value).items()}


def _expect_columns(place: str, names: Iterable[str], rows: Sequence[Row]) -> None:
    expect_known(place, names, [name for row in rows[:1] for name in row if name not in _FIXED], "columns of the file")


def _expect_values(place: str, wanted: Row, rows: Sequence[Row]) -> None:
    _expect_columns(place, wanted, rows)
    for name, value in wanted.items():
        if not any(_same(row[name], value) for row in rows):
            expect_choice(f"{place}.{name}", value, list(dict.fromkeys(row[name] for row in rows)))


def _fits(row: Row, wanted: Row) -> bool:
    return all(_same(row[name], value) for name, value in wanted.items())


def _same(one: str, other: str) -> bool:
    """Whether two names are equal up to notation: ``0.10`` and 0.1, ``AVG`` and ``avg``."""
    with suppress(ValueError):
        return float(one) == float(other)
    return one.casefold() == other.casefold()
