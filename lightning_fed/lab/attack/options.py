"""What is asked of a membership inference attack, and the columns that its figures are among those of a run."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederatedError, expect_count

__all__ = ["COLUMNS", "FIGURES", "TABLE", "AttackOptions", "attack_columns", "expect_sound_attack"]

TABLE = "attack.csv"
"""The file in a run's folder with a row for each attack on its model."""

FIGURES = ("accuracy", "auc", "tpr_at_0.01", "tpr_at_0.001")
"""Columns of that file, each with ``_low`` and ``_high`` behind it."""

COLUMNS = tuple(
    f"attack/{attack}/{figure}" for attack in ("logistic_regression", "loss", "calibrated") for figure in FIGURES
)
"""What a study may report of its runs."""


@dataclass(frozen=True)
class AttackOptions:
    """Which samples are asked about, and what else `lightning-fed attack` may be told.

    Args:
        test_set: Name of the test set, where the data have several.
        samples: Most training, and test, samples (default: all).
        draw_seed: Seed of the draws: samples, halves, bootstrap.
        shadows: Shadow models to train for the calibrated attack, an even number.
        bootstrap: Draws that the intervals are made of.
    """

    test_set: str | None = None
    samples: int | None = None
    draw_seed: int = 0
    shadows: int = 0
    bootstrap: int = 1000

    @property
    def words(self) -> tuple[str, ...]:
        """The options on a command line."""
        return tuple(f"--{name}={value}" for name, value in vars(self).items() if value is not None)


def expect_sound_attack(options: Any, place: str) -> None:
    """Refuses numbers that are none of an attack; ``place`` stands before an option's name, as in ``--samples``."""
    for name, least in (("bootstrap", 1), ("samples", 2), ("draw_seed", 0), ("shadows", 0)):
        if (value := getattr(options, name)) is not None:
            expect_count(f"{place}{name}", value, least)
    if options.shadows % 2:
        raise FederatedError(f"Expected `{place}shadows` to be even, for they come in pairs, got {options.shadows}.")


def attack_columns(table: Path) -> dict[str, float]:
    """Reads the figures of a run's ``attack.csv``, by the columns that they are in a study, as ``attack/loss/auc``."""
    try:
        with table.open(encoding="utf-8", newline="") as file:
            rows = {row["attack"].replace(" ", "_"): row for row in csv.DictReader(file, strict=True)}
        if not rows:
            raise ValueError("it has no rows")
        return {f"attack/{name}/{figure}": float(row[figure]) for name, row in rows.items() for figure in FIGURES}
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise FederatedError(
            f"Expected {table} as `lightning-fed attack` writes it, but it cannot be read ({type(error).__name__}: "
            f"{error}): remove it, and start the study again."
        ) from error
