"""A progress bar for rounds, one for the clients of a round, lines for a log file, and the summary of the layers."""

import sys
import time
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelSummary
from tqdm import tqdm

from lightning_fed.core import is_news
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Cohort, ReducedUpdate, Update

__all__ = ["FederatedProgressBar", "model_summary", "newest_metrics"]

_TICK_S = 0.1
_LINE_S = 10.0  # a log file gets no line sooner than this after the last, but for the first round and the last
_PARTS = ("test", "val")
_EVALUATED = ("test/acc", "val/acc", "test/loss", "val/loss")


class FederatedProgressBar(FederatedCallback):
    """Shows rounds with the newest metrics and the time left, and the clients of the current round.

    It shows the training loss, metrics logged with ``prog_bar`` and those that callbacks monitor. If none of these is
    of an evaluation, it adds the first that exists of test accuracy, validation accuracy, test loss, validation loss
    and any other metric of theirs. It also shows how many drawn clients were left out so far, if any were.

    In a notebook the bars are widgets; without ipywidgets only the bar for rounds is shown, as text. Without a terminal
    or a notebook, as under ``nohup`` or SLURM, it prints a line with the same facts after the first round and the last,
    and between them after each round, but at most one in 10 seconds.
    """

    def __init__(self) -> None:
        self.in_notebook = type(sys.stderr).__module__.startswith("ipykernel")
        self.has_bars = self.in_notebook or sys.stderr.isatty()
        self._rounds: Any = None
        self._clients: Any = None
        self._left_out = self._missing = self._first = 0
        self._began = self._said = 0.0

    def on_fit_start(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # the trainer is ours
        self._left_out, self._first = 0, trainer.round
        self._began, self._said = time.monotonic(), float("-inf")

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Opens the bars, after all earlier messages, and resets the bar for the clients of this process."""
        if self._rounds is None and self.has_bars and trainer.is_global_zero:
            self._open(trainer)
        self._missing = len(cohort.clients) + len(cohort.skipped)
        if self._clients is not None:
            self._clients.reset(total=-(-len(cohort.clients) // trainer.world_size))

    def _open(self, trainer: TrainerLike) -> None:
        has_widgets = self.in_notebook and find_spec("ipywidgets") is not None
        bar: Any = tqdm
        if has_widgets:
            from tqdm.auto import tqdm as bar  # imported only here, as it warns in a notebook without widgets
        self._rounds = bar(
            total=trainer.max_rounds, initial=trainer.round - 1, desc="Rounds", unit="round", mininterval=_TICK_S
        )
        if has_widgets or not self.in_notebook:  # in a notebook text bars must share one line
            self._clients = bar(desc="Clients", unit="client", leave=False, mininterval=_TICK_S)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self._clients is not None:
            self._clients.update()

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        self._missing -= update.num_clients

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # the trainer is ours
        self._left_out += self._missing
        if self._rounds is not None:
            self._rounds.set_postfix(self._shown(trainer), refresh=False)
            self._rounds.update()
        elif not self.has_bars and trainer.is_global_zero:
            self._say(trainer)

    def _shown(self, trainer: TrainerLike) -> dict[str, str]:
        shown = {name: f"{value:.4g}" for name, value in newest_metrics(trainer).items()}
        return shown | ({"clients left out": str(self._left_out)} if self._left_out else {})

    def _say(self, trainer: TrainerLike) -> None:
        now, last = time.monotonic(), trainer.round >= trainer.max_rounds or trainer.should_stop
        if now < self._said + _LINE_S and not last:
            return
        self._said = now
        pace = (now - self._began) / (trainer.round - self._first)
        left = tqdm.format_interval(pace * (trainer.max_rounds - trainer.round))
        shown = "".join(f", {name} {value}" for name, value in self._shown(trainer).items())
        line = f"Round {trainer.round} of {trainer.max_rounds}{shown}; {pace:.3g} s a round, {left} left"
        print(line, file=sys.stderr, flush=True)

    def on_fit_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # the trainer is ours
        """Closes the bars before the trainer prints the run's folder."""
        self._close()

    def teardown(self, trainer: TrainerLike, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]  # the trainer is ours
        """Closes the bars of a run that failed."""
        self._close()

    def _close(self) -> None:
        for bar in (self._clients, self._rounds):
            if bar is not None:
                bar.close()
        self._rounds = self._clients = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Writes a line above the bars, for ``LightningModule.print``."""
        tqdm.write(kwargs.pop("sep", " ").join(map(str, args)), **kwargs)


def newest_metrics(trainer: Any) -> dict[str, float]:
    """Returns what tells how the training goes, as the bar says: losses, what is watched, and one evaluated metric."""
    known, shown = trainer.callback_metrics, dict(trainer.progress_bar_metrics)
    names = ["train/loss", *(getattr(callback, "monitor", None) for callback in trainer.callbacks)]
    shown = {name: float(known[name]) for name in names if name in known} | shown
    if not any(name.startswith(_PARTS) for name in shown):
        found = [name for name in (*_EVALUATED, *known) if name in known and name.startswith(_PARTS)][:1]
        shown |= {name: float(known[name]) for name in found}
    return shown


def model_summary() -> ModelSummary:
    """Makes Lightning's table of the module's layers; it is shown again only if it has changed."""
    shown = ModelSummary()
    shown.summarize = _summarize  # type: ignore[method-assign]  # the user's own could not replace a subclass
    return shown


def _summarize(*table: Any, **options: Any) -> None:
    if is_news("layers", repr((table, options))):
        ModelSummary.summarize(*table, **options)
