"""Sends a run's rows, config and split to its loggers."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_fed.runs.folder import RunFolder, read_rows
from lightning_fed.runs.loggers import RoundCSVLogger, RoundWandbLogger, show_picture

__all__ = ["RunLog"]


class RunLog:
    """The loggers of one run.

    Args:
        choice: The trainer's ``logger``: None or True for W&B, False for none, or the user's own. Whatever loggers
            there are, metrics.csv is written too.
        run: The run, None to log nothing.
        resumed_at: Round of the checkpoint that the run resumes from; later rows of metrics.csv are cut off.
        writes: Whether this process writes; another one has loggers that take everything and keep nothing.
    """

    def __init__(self, choice: Any, run: RunFolder | None, resumed_at: int | None, writes: bool = True) -> None:
        self.loggers: list[Logger] = []
        if run is None or choice is False:
            return
        if not writes:
            self.loggers = [DummyLogger()]
            return
        csv_logger = RoundCSVLogger(run.metrics)
        if resumed_at is not None:
            csv_logger.cut_back(resumed_at)
        if choice is None or choice is True:
            choice = RoundWandbLogger(run)
        self.loggers = [*(choice if isinstance(choice, (list, tuple)) else [choice]), csv_logger]
        if resumed_at is not None:
            self._replay(run)

    def _replay(self, run: RunFolder) -> None:
        """Gives a resumed W&B run the rounds of metrics.csv again: offline, each start writes a file of its own."""
        for logger in self.loggers:
            if isinstance(logger, RoundWandbLogger):
                for row in read_rows(run.metrics):
                    logger.log_metrics({k: float(v) for k, v in row.items() if v != ""}, step=int(row["round"]))

    def log_config(self, config: dict[str, Any]) -> None:
        """Records the run's config, split summary and size."""
        for logger in self.loggers:
            logger.log_hyperparams(config)

    def log_picture(self, key: str, path: Path) -> None:
        """Adds a picture file where a logger takes pictures."""
        for logger in self.loggers:
            show_picture(logger, key, path)

    def log_round(self, row: dict[str, float]) -> None:
        """Records the row of a finished round."""
        for logger in self.loggers:
            logger.log_metrics(row, step=int(row["round"]))

    def close(self, status: str) -> None:
        """Flushes and closes every logger."""
        for logger in self.loggers:
            logger.save()
            logger.finalize(status)
