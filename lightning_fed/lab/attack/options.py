"""The options of a membership inference attack, and the columns under which a run has its figures."""

import csv
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_fed.core.files import read_regular
from lightning_fed.errors import FederatedError, expect_count

__all__ = ["AttackOptions", "COLUMNS", "FIGURES", "TABLE", "attack_columns", "expect_sound_attack"]

TABLE = "attack.csv"
"""The file in a run's folder, with a row for each attack on its model."""

FIGURES = ("accuracy", "auc", "tpr_at_0.01", "tpr_at_0.001")
"""Columns of that file; each has two more for its interval, ``_low`` and ``_high``."""

COLUMNS = tuple(
    f"attack/{attack}/{figure}"
    for attack in ("logistic_regression", "loss", "client", "calibrated")
    for figure in FIGURES
)
"""The columns that a study may report."""


@dataclass(frozen=True)
class AttackOptions:
    """The options of `lightning-fed attack`.

    Args:
        test_set: Name of the test set, if the data have several; with `unseen` whole clients are attacked too.
        samples: Largest number of training samples, and of test samples (default: all).
        draw_seed: Seed of all random draws: samples, halves, bootstrap.
        shadows: Number of shadow models to train for the calibrated attack, an even number.
        bootstrap: Number of bootstrap resamples for the intervals.
    """

    test_set: str | None = None
    samples: int | None = None
    draw_seed: int = 0
    shadows: int = 0
    bootstrap: int = 1000

    @property
    def words(self) -> tuple[str, ...]:
        """The options as command-line arguments."""
        return tuple(f"--{name}={value}" for name, value in vars(self).items() if value is not None)


def expect_sound_attack(options: Any, place: str) -> None:
    """Refuses invalid numbers; messages have ``place`` before an option's name, as in ``--samples``."""
    for name, least in (("bootstrap", 1), ("samples", 2), ("draw_seed", 0), ("shadows", 0)):
        if (value := getattr(options, name)) is not None:
            expect_count(f"{place}{name}", value, least)
    if options.shadows % 2:
        raise FederatedError(f"Expected `{place}shadows` to be even, as they train in pairs, got {options.shadows}.")


def attack_columns(table: Path) -> dict[str, float]:
    """Reads the figures of a run's ``attack.csv``, by their column names in a study, such as ``attack/loss/auc``."""
    try:
        lines = csv.DictReader(StringIO(read_regular(table).decode(), newline=""), strict=True)
        rows = {row["attack"].replace(" ", "_"): row for row in lines}
        if not rows:
            raise ValueError("it has no rows")
        return {f"attack/{name}/{figure}": float(row[figure]) for name, row in rows.items() for figure in FIGURES}
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise FederatedError(
            f"Expected {table} as `lightning-fed attack` writes it, but it cannot be read ({type(error).__name__}: "
            f"{error}): remove it, and start the study again."
        ) from error
