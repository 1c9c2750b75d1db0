"""Sends the rows, config and split of a run to its loggers."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.core.files import WriteError, png, write_atomically, writing
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import RunFolder, read_rows
from lightning_fed.runs.loggers import RoundCSVLogger, RoundWandbLogger, show_picture
from lightning_fed.runs.statistics import Goal

__all__ = ["RunLog", "keep_picture"]


class RunLog:
    """The loggers of one run.

    Args:
        choice: The trainer's ``logger``: None or True for W&B, False for none, or your own loggers. metrics.csv is
            always written too.
        run: The run, None to log nothing.
        checkpoint: The checkpoint that the run resumes, None for a new run. Later rows of metrics.csv are cut off.
        former: The run that wrote the checkpoint, None if unknown.
        writes: Whether this process writes; in other processes the loggers keep nothing.

    Attributes:
        draw: Draws the pictures of the split; called at the first ``catch_up``.

    Raises:
        FederatedError: If the run goes on in its folder, but rows are missing there or have changed.
    """

    draw: Callable[[], None] | None = None

    def __init__(
        self,
        choice: Any,
        run: RunFolder | None,
        checkpoint: dict[str, Any] | None = None,
        former: RunFolder | None = None,
        writes: bool = True,
    ) -> None:
        self.loggers: list[Logger] = []
        if run is None or choice is False:
            return
        if not writes:
            self.loggers = [DummyLogger()]
            return
        csv_logger = RoundCSVLogger(run.metrics)
        if checkpoint is not None and former is not None:
            _take_over_rows(csv_logger, run, checkpoint, former)
        if choice is None or choice is True:
            choice = RoundWandbLogger(run)
        self.loggers = [*(choice if isinstance(choice, (list, tuple)) else [choice]), csv_logger]
        for logger in self.loggers if checkpoint is not None else ():
            if isinstance(logger, RoundWandbLogger):  # sent again, as offline each start writes a new file
                for row in read_rows(run.metrics):
                    logger.log_metrics({k: float(v) for k, v in row.items() if v != ""}, step=int(row["round"]))

    def log_config(self, config: dict[str, Any], module: LightningModule) -> None:
        """Records the run's config, split summary, size and, where a logger draws it, the module's graph."""
        for logger in self.loggers:
            with _writing(logger):
                logger.log_hyperparams(config)
                logger.log_graph(module)

    def catch_up(self) -> None:
        """Draws the pictures and opens the W&B run, once. Both take seconds, and no round needs them."""
        draw, self.draw = self.draw, None
        if draw is None:
            return
        with isolated_streams():
            draw()
            for logger in self.loggers:
                if isinstance(logger, RoundWandbLogger):
                    with _writing(logger):
                        logger.open()

    def log_round(self, row: dict[str, float], goals: Mapping[str, Goal]) -> None:
        """Records the row of a finished round, and the goals that metric objects said.

        Raises:
            WriteError: If a logger cannot write it; the others have written it.
        """
        refused: WriteError | None = None
        for logger in self.loggers:
            try:
                with _writing(logger):
                    if isinstance(logger, RoundCSVLogger):
                        logger.log_round(row, goals)
                    else:
                        logger.log_metrics(row, step=int(row["round"]))
            except WriteError as error:
                refused = error
        if refused is not None:
            raise refused

    def close(self, status: str) -> None:
        """Flushes and closes every logger."""
        if status == "success":
            self.catch_up()
        for logger in self.loggers:
            ended = nullcontext() if status == "success" else suppress(WriteError)  # show the first error
            with ended, _writing(logger):
                logger.save()
                logger.finalize(status)


def keep_picture(figure: Any, path: Path, loggers: Iterable[Logger]) -> None:
    """Writes a matplotlib figure into a run's folder, and sends it to the loggers that accept pictures."""
    write_atomically(path, png(figure))
    for logger in loggers:
        with _writing(logger):
            show_picture(logger, path.stem, path)


def _writing(logger: Logger) -> AbstractContextManager[None]:
    """Turns an error of the system while a logger writes into one sentence."""
    return writing(Path(str(logger.save_dir or type(logger).__name__)), "--trainer.logger")


def _take_over_rows(logger: RoundCSVLogger, run: RunFolder, checkpoint: dict[str, Any], former: RunFolder) -> None:
    at, checksum = checkpoint["epoch"], checkpoint["federated"]["rows"]
    if logger.go_on_from(former.metrics, at, checksum):
        return
    trouble = f"{former.metrics} does not hold the rows of all rounds up to {at} as they were written"
    if former.path == run.path:
        raise FederatedError(
            f"Expected all earlier rows of the run, but {trouble}: restore the file, or give the path of the "
            "checkpoint as `--ckpt_path`, which goes on in a new folder without them."
        )
    if former.metrics.exists():
        rank_zero_warn(f"{trouble}: {run.metrics} begins with round {at + 1}.")
