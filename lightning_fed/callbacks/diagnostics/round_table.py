"""A table in the run's folder with rows for each round."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.core.files import WriteError, append_whole, csv_text, write_atomically

__all__ = ["RoundTable"]


class RoundTable:
    """A CSV file whose first column is the round. If it cannot be written, you are warned once and the run goes on.

    Args:
        path: The file.
        head: Names of the columns after ``round``.
        finished: Index of the last finished round. Rows of later rounds, left by a run that died after its checkpoint,
            are removed.
    """

    def __init__(self, path: Path, head: Sequence[str], finished: int) -> None:
        self.path, self._refused = path, False
        kept: list[list[str]] = []
        if finished and path.is_file():
            with path.open(newline="", errors="replace") as file:
                rows = list(csv.reader(file))[1:]
            kept = [row for row in rows if row and row[0].isdigit() and int(row[0]) <= finished]
        self._write(lambda: write_atomically(path, csv_text([["round", *head], *kept]).encode()))

    def append(self, round: int, rows: Iterable[Sequence[Any]]) -> None:
        """Appends the rows of a round."""
        self._write(lambda: append_whole(self.path, csv_text([round, *row] for row in rows).encode()))

    def _write(self, write: Any) -> None:
        if self._refused:
            return
        try:
            write()
        except WriteError as error:
            self._refused = True
            rank_zero_warn(f"The run goes on without {self.path.name}: {error}")
