"""The loggers of a run: metrics.csv, which is the source of truth, and Weights & Biases in addition."""

import csv
import netrc
import os
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_fed.core import is_news
from lightning_fed.core.files import WriteError, append_whole, csv_text, write_atomically, writing
from lightning_fed.runs.folder import GOALS, RunFolder, read_rows, sealed
from lightning_fed.runs.statistics import LAST, Goal, known_goal, number_in, run_statistic

__all__ = ["RoundCSVLogger", "RoundWandbLogger", "logged_in", "show_picture"]

# Columns of evaluations: their best value and their last ones go into the summary of a run.
_EVALUATED = ("val/", "test/", "per_client/")


class RoundCSVLogger(Logger):
    """Appends one row for each round to a CSV file immediately; a new column rewrites the file atomically.

    Where the system refuses to write, a method raises ``WriteError``, and the next ``save`` tries again.

    Args:
        path: The file; rows that are already in it are kept.

    Attributes:
        checksum: A checksum of all rows so far, by which a resumed run checks that they have not changed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.checksum = 0
        self._columns = list(next(read_rows(path), {}))
        self._waiting: list[Mapping[str, Any]] = []
        self._told: dict[str, Goal] = {}

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @property
    def log_dir(self) -> str:
        return str(self.path.parent)

    root_dir = save_dir = log_dir

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing, as the config is saved next to the file."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Does nothing, as only whole rounds are rows here."""

    def log_round(self, row: Mapping[str, float], goals: Mapping[str, Goal] = MappingProxyType({})) -> None:
        """Appends the row of a round; ``round`` is the first column. ``goals`` that names do not say go beside it."""
        self._waiting.append(row)
        self.checksum = _checksum(self.checksum, row)
        self.save()
        told = {name: goal for name, goal in goals.items() if known_goal(name) != goal}
        if told != self._told:
            write_atomically(self.path.with_name(GOALS), sealed(told))
            self._told = told

    def save(self) -> None:
        """Writes the rows that could not be written before."""
        if new := {key for row in self._waiting for key in row}.difference(self._columns):
            columns = sorted({*self._columns, *new}, key=lambda key: (key != "round", key))
            self._rewrite(columns, [*read_rows(self.path), *self._waiting])
        elif self._waiting:
            try:
                append_whole(self.path, _csv(self._columns, self._waiting))
            except WriteError:
                self._columns = []  # rewrite the whole file next time, as its end may be damaged
                raise
        self._waiting = []

    def make_durable(self) -> None:
        """Writes all rows and flushes them to the disk, as a checkpoint needs them even after a power cut."""
        self.save()
        with writing(self.path), open(self.path, "rb+") as file:
            os.fsync(file.fileno())

    def go_on_from(self, table: Path, round: int, checksum: int | None) -> bool:
        """Keeps the rows of a table, its own or another run's, up to the round of a checkpoint; cuts off later ones.

        ``checksum`` is that in the checkpoint, None if its run had no table. Returns whether all rows are there and
        unchanged; otherwise none is kept.
        """
        rows = [row for row in read_rows(table) if int(row["round"]) <= round]
        found = reduce(_checksum, rows, 0)
        whole = bool(rows) and found == checksum
        if whole:
            self.checksum = found
            self._rewrite([c for c in rows[0] if c == "round" or any(row[c] for row in rows)], rows)
        return whole

    def _rewrite(self, columns: list[str], rows: Sequence[Mapping[str, Any]]) -> None:
        with writing(self.path):
            self.path.parent.stat()  # do not make a removed run folder again: without run.json no start could use it
        write_atomically(self.path, _csv(columns, [{name: name for name in columns}, *rows]))
        self._columns = columns


def _csv(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    return csv_text(([row.get(name, "") for name in columns] for row in rows), end="\r\n").encode()


def _checksum(before: int, row: Mapping[str, Any]) -> int:
    """Adds a row to the checksum of earlier rows, without times, which differ if a round is trained again."""
    cells = sorted((k, str(value)) for k, value in row.items() if value not in ("", None) and not k.startswith("time/"))
    return zlib.crc32(repr(cells).encode(), before)


def logged_in() -> bool:
    """Says whether you are logged in at W&B, without asking you and without a network."""
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
    if logged_in():
        return "online"
    if is_news("W&B", "offline"):
        rank_zero_info("W&B: not logged in, so runs are kept offline (`wandb login`, then `wandb sync` uploads them).")
    return "offline"


def show_picture(logger: Logger, key: str, path: Path) -> None:
    """Sends a picture file to a logger of W&B, TensorBoard, Comet or MLflow; other loggers get none."""
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

    Online if you are logged in, else offline. A resumed run keeps its id, and its earlier rounds are sent again from
    metrics.csv, unless the server has them already. The W&B run opens at the first use of ``experiment``, which takes
    seconds; earlier logs wait for it. Runs of one config with several seeds form one group. If W&B fails, you get one
    warning and the run goes on without it: metrics.csv has the numbers.

    Args:
        run: The run's folder and id.
    """

    def __init__(self, run: RunFolder) -> None:
        super().__init__(
            name=f"{run.name}/{run.path.name}",
            save_dir=str(run.path),
            version=run.wandb_id,
            project=os.environ.get("WANDB_PROJECT", "lightning_fed"),
            group=f"{run.label} {run.group[:8]}",
            job_type="fit",
            tags=run.label.split("+"),
            mode=_wandb_mode(),
            settings={"silent": True, "console": "off"},
        )
        # Lightning always passes this setting, even unset, and newer versions of wandb warn that it is unknown.
        self._wandb_init.pop("anonymous", None)
        self._run, self._lost = run, False
        self._waiting: list[Callable[[], None]] = []

    @property
    def experiment(self) -> Any:
        """The W&B run; if W&B has failed, a dummy that ignores all calls."""
        self.open()
        return self._experiment

    def open(self) -> None:
        """Opens the W&B run unless it is open, and logs everything that has waited for it."""
        if self._experiment is not None:
            return
        with self._going_on():
            run: Any = super().experiment
            self._experiment = run
            run.define_metric("round")
            run.define_metric("*", step_metric="round", step_sync=False, overwrite=True)
            # A resumed online run already has rounds. Their numbers are the same, so they are not sent again.
            self._already_there = int(run.summary.get("round", -1)) if getattr(run, "resumed", False) else -1
        if self._experiment is None:
            import wandb

            self._experiment = wandb.init(mode="disabled")
        waiting, self._waiting = self._waiting, []
        for log in waiting:
            log()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Turns any failure of W&B into one warning, and sends nothing more."""
        try:
            yield
        except Exception as error:
            if not self._lost:
                self._lost = True
                why = " ".join(str(error).split()) or type(error).__name__
                rank_zero_warn(f"W&B: the run goes on without it, as {why}; metrics.csv has the numbers.")

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        if self._experiment is None:
            self._waiting.append(partial(self.log_hyperparams, params))
        elif not self._lost:
            with self._going_on():
                super().log_hyperparams(params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs the row of a round, or other values that a module logs by itself."""
        if self._experiment is None:
            self._waiting.append(partial(self.log_metrics, dict(metrics), step))
        elif not self._lost and metrics.get("round", float("inf")) > self._already_there:
            with self._going_on():
                super().log_metrics(metrics, step=step)

    def log_picture(self, key: str, path: Path) -> None:
        """Adds a picture file to the next row that is logged."""
        if self._experiment is None:
            self._waiting.insert(0, partial(self.log_picture, key, path))
        elif not self._lost:
            import wandb

            with self._going_on():
                self._experiment.log({key: wandb.Image(str(path))}, commit=False)

    def finalize(self, status: str) -> None:
        """Writes the summary and closes the run, so that the next one in this process is a new run."""
        if self._experiment is not None:
            with self._going_on():
                if not self._lost:
                    self._sum_up()
                self._experiment.finish(exit_code=0 if status == "success" else 1)

    def _sum_up(self) -> None:
        """Adds the best value and the mean of the last rounds to the summary, and logs the table of clients."""
        import wandb

        run: Any = self._experiment
        columns: dict[str, dict[int, float]] = defaultdict(dict)
        for row in read_rows(self._run.metrics):
            for name, cell in row.items():
                if cell and name.startswith(_EVALUATED):
                    columns[name][int(row["round"])] = number_in(cell)
        for name, curve in columns.items():
            if goal := known_goal(name, self._run.goals.get(name)):
                run.summary[f"{name}.best"] = run_statistic(curve, "best", name, goal)
            run.summary[f"{name}.last{LAST}"] = run_statistic(curve, f"last {LAST}", name)
        for path in filter(Path.is_file, (self._run.path / f"{name}.csv" for name in ("clients", "unseen"))):
            with path.open(newline="") as file:
                head, *rows = csv.reader(file)
            named = head.index("name") if "name" in head else None
            cells = [[c if n == named else float(c) if c else None for n, c in enumerate(row)] for row in rows]
            run.log({path.stem: wandb.Table(list(head), cells)})
