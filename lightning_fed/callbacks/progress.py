"""A bar for the rounds and one for the clients of the round."""

import sys
from typing import Any

from lightning.pytorch import LightningModule
from tqdm import tqdm

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Cohort, ReducedUpdate, Update

__all__ = ["FederatedProgressBar"]

_TICK_S = 0.1
_EVALUATED = ("test/acc", "val/acc", "test/loss", "val/loss")


class FederatedProgressBar(FederatedCallback):
    """Shows rounds with the newest metrics and the time left, and the clients of the current round.

    Metrics are those logged with ``prog_bar``, and where none of them is of an evaluation, the first of test and
    validation accuracy, then of losses, that is there; behind them stands how many clients that were drawn have been
    left out so far, if any.

    Quiet without a terminal: progress then shows in metrics.csv, which is flushed after every round.
    """

    def __init__(self) -> None:
        self.is_enabled = sys.stderr.isatty()
        self._rounds: Any = None
        self._clients: Any = None
        self._left_out = self._missing = 0

    def on_fit_start(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Opens the bars at the round to start from."""
        if not (self.is_enabled and trainer.is_global_zero):
            return
        self._left_out = 0
        self._rounds = tqdm(
            total=trainer.max_rounds, initial=trainer.round, desc="Rounds", unit="round", mininterval=_TICK_S
        )
        self._clients = tqdm(desc="Clients", unit="client", leave=False, mininterval=_TICK_S)

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Starts the bar of the clients anew, about those of this process."""
        self._missing = len(cohort.clients) + len(cohort.skipped)
        if self._clients is not None:
            self._clients.reset(total=-(-len(cohort.clients) // trainer.world_size))

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Counts a client."""
        if self._clients is not None:
            self._clients.update()

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Notes how many of those drawn have entered."""
        self._missing -= update.num_clients

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Counts a round and shows the newest values."""
        self._left_out += self._missing
        if self._rounds is not None:
            shown = {name: f"{value:.4g}" for name, value in _metrics(trainer).items()}
            if self._left_out:
                shown["clients left out"] = str(self._left_out)
            self._rounds.set_postfix(shown, refresh=False)
            self._rounds.update()

    def on_fit_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Closes the bars before the trainer says where the run lies."""
        self._close()

    def teardown(self, trainer: TrainerLike, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]  # our trainer stands in
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


def _metrics(trainer: Any) -> dict[str, float]:
    shown = dict(trainer.progress_bar_metrics)
    if not any(name.startswith(("test", "val")) for name in shown):
        found = next((name for name in _EVALUATED if name in trainer.callback_metrics), None)
        shown |= {} if found is None else {found: float(trainer.callback_metrics[found])}
    return shown
