"""Where a run's numbers go: metrics.csv, which is the source of truth, and Weights & Biases beside it."""

import csv
import io
import netrc
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.core.files import write_atomically
from lightning_fed.runs.folder import RunFolder, read_rows

__all__ = ["RoundCSVLogger", "RoundWandbLogger", "show_picture"]


class RoundCSVLogger(Logger):
    """Appends one row for each round to a CSV file and flushes it; a new column rewrites the file atomically.

    Args:
        path: The file; rows that it already holds are kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = []
        if path.exists():
            with path.open(newline="") as file:
                self._columns = next(csv.reader(file), [])

    @property
    def name(self) -> str:
        """``csv``."""
        return "csv"

    @property
    def version(self) -> str:
        """The name of the run's folder."""
        return self.path.parent.name

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    root_dir = save_dir = log_dir

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the config is saved beside the file."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends a round's row, ``round`` first; what a module logs by itself has no row here."""
        if "round" not in metrics:
            return
        new = [key for key in metrics if key not in self._columns]
        if new:
            self._columns = sorted({*self._columns, *new}, key=lambda key: (key != "round", key))
            self._rewrite(list(read_rows(self.path)))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(metrics)

    def cut_back(self, round: int) -> None:
        """Drops the rows of later rounds, and a line that a killed process left half written."""
        rows = [row for row in read_rows(self.path) if int(row["round"]) <= round]
        self._columns = [c for c in self._columns if c == "round" or any(row.get(c) for row in rows)]
        self._rewrite(rows)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, text.getvalue().encode())


def _logged_in() -> bool:
    """Says whether credentials for W&B are at hand, without asking for them and without a network."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _wandb_mode() -> str:
    chosen = os.environ.get("WANDB_MODE", "")
    if chosen:
        return "offline" if chosen == "dryrun" else chosen
    if _logged_in():
        return "online"
    rank_zero_info("W&B: not logged in, so this run is kept offline (`wandb login`, then `wandb sync`, uploads it).")
    return "offline"


def show_picture(logger: Logger, key: str, path: Path) -> None:
    """Gives a picture file to a logger, in the way of W&B, TensorBoard, Comet or MLflow; others get none."""
    if isinstance(logger, RoundWandbLogger):
        logger.log_picture(key, path)
    elif hasattr(logger, "log_image"):
        logger.log_image(key=key, images=[str(path)])
    else:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_image"):
            from matplotlib.image import imread

            experiment.add_image(key, imread(path)[..., :3], dataformats="HWC")
        elif hasattr(experiment, "log_image") and not hasattr(experiment, "log_artifact"):
            experiment.log_image(str(path), name=key)
        elif hasattr(experiment, "log_artifact"):
            experiment.log_artifact(getattr(logger, "run_id", None), str(path))


class RoundWandbLogger(WandbLogger):
    """Lightning's WandbLogger with ``round`` as the axis of every chart.

    Online when the user is logged in, else offline. A run that is resumed keeps its id; its earlier rounds are
    replayed from metrics.csv, unless the server holds them already.

    Args:
        run: The run's folder and id.
        project: W&B project.
    """

    def __init__(self, run: RunFolder, project: str = "lightning_fed") -> None:
        import wandb

        super().__init__(
            name=f"{run.name}/{run.path.name}",
            save_dir=str(run.path),
            version=run.wandb_id,
            project=os.environ.get("WANDB_PROJECT", project),
            group=run.label,
            mode=_wandb_mode(),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Lightning passes this setting, unset, to every wandb; newer ones warn that they no longer know it.
        self._wandb_init.pop("anonymous", None)
        self.experiment.define_metric("round")
        self.experiment.define_metric("*", step_metric="round", step_sync=False, overwrite=True)
        # An online run that is resumed already holds rounds: they are the same numbers, and are not sent again.
        resumed = getattr(self.experiment, "resumed", False)
        self._already_there = int(self.experiment.summary.get("round", -1)) if resumed else -1

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs a round's row, or whatever else a module logs by itself."""
        if metrics.get("round", float("inf")) > self._already_there:
            super().log_metrics(metrics, step=step)

    def log_picture(self, key: str, path: Path) -> None:
        """Adds a picture file to the row that is logged next."""
        import wandb

        self.experiment.log({key: wandb.Image(str(path))}, commit=False)

    def finalize(self, status: str) -> None:
        """Closes the run, so that the next one in this process is a run of its own."""
        self.experiment.finish(exit_code=0 if status == "success" else 1)
