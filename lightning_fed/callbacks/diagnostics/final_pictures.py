"""Pictures and tables of a finished run: the classifier's predictions, and how clients differ."""

import csv
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.callbacks.diagnostics import figures
from lightning_fed.callbacks.diagnostics.agreement import UpdateAgreement
from lightning_fed.callbacks.diagnostics.predictions import Predictions
from lightning_fed.core.files import csv_text, write_atomically
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.errors import FederatedError, expect_count
from lightning_fed.runs.log import keep_picture

__all__ = ["FinalPictures"]


class FinalPictures(FederatedCallback):
    """Draws, at the end of ``fit``, the final model's predictions, and how clients and coordinates differ.

    For the test set, or the validation set if there is none, it writes into the run's folder ``confusion.csv`` (samples
    by label and prediction), ``classes.csv`` (samples and accuracy of each class), ``confusion.png`` (shares of each
    label's samples) and, for images, ``predictions.png`` (some right and some wrong predictions). Of several sets each
    has its own files, such as ``confusion_NAME.png``. With ``ClientEvaluation`` it also draws ``clients.png``, the
    values of ``clients.csv``; with ``UpdateAgreement`` it also draws ``agreement.png``, A at the last measurement.
    Loggers get the pictures too.

    It works with any module whose ``forward`` gives scores (B, C) for the inputs of a batch (inputs, labels). Training
    is the same with and without it, bit for bit. You get a warning if something cannot be drawn or written. A run that
    a signal stopped gets its pictures when it is resumed and ends.

    Args:
        num_samples: Right predictions to show, and as many wrong ones, drawn by the run's seed.
    """

    def __init__(self, num_samples: int = 20) -> None:
        self.num_samples = expect_count("num_samples", num_samples, of=type(self).__name__)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Tries one batch, so that a module that is no classifier is refused before training."""
        name = type(self).__name__
        try:
            with closing(trainer.scored_batches()) as batches:
                found = next(batches, None)
        except Exception as error:
            expected = f"Expected a module whose `forward` scores the inputs of a batch (inputs, labels), got {error!r}"
            why = str(error).removesuffix(".") if isinstance(error, FederatedError) else expected
            raise FederatedError(f"{why}: change it, or leave {name} out of `--trainer.callbacks`.") from error
        if found is None:
            raise FederatedError(
                f"Expected test or validation data for {name}, got none: give some by `--data`, or leave it out of "
                "`--trainer.callbacks`."
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes and draws everything, in the first process only."""
        ended = trainer.should_stop or trainer.round >= trainer.max_rounds
        if trainer.run is None or not trainer.is_global_zero or not ended:
            return
        with _going_on("the predictions of the final model"):
            for name, predictions in self._predict(trainer).items():
                self._show(trainer, "_" + re.sub(r"[^-.\w]", "_", name) if name else "", predictions)
        with _going_on("clients.png"):
            if values := _client_values(trainer):
                _draw(trainer, "clients", partial(figures.distribution_figure, values))
        for callback in trainer.callbacks:
            if not isinstance(callback, UpdateAgreement) or callback.histogram is None or callback.coin_flips is None:
                continue
            shown = callback.histogram.cpu().numpy(), callback.coin_flips.numpy(), callback.threshold
            _draw(trainer, "agreement", partial(figures.agreement_figure, *shown))

    def _predict(self, trainer: Any) -> dict[str, Predictions]:
        """Returns the final model's predictions on each set."""
        found: dict[str, Predictions] = {}
        with closing(trainer.scored_batches()) as batches:
            for name, *batch in batches:
                if name not in found:
                    rng = numpy_generator_for(trainer.seed, Purpose.EVALUATE, client=len(found))
                    found[name] = Predictions(self.num_samples, rng)
                found[name].add(*batch)
        return found

    def _show(self, trainer: Any, end: str, predictions: Predictions) -> None:
        """Writes the tables of a set, then its pictures."""
        confusion, data = predictions.confusion, trainer.datamodule
        known = data if isinstance(data, FederatedDataModule) else None
        names = list((None if known is None else known.class_names) or ())
        if len(names) != len(confusion):
            names = [str(label) for label in range(len(confusion))]
        sizes, right = confusion.sum(axis=1), np.diag(confusion)
        shares = [hits / size if size else "" for hits, size in zip(right.tolist(), sizes.tolist(), strict=True)]
        tables: dict[str, list[list[Any]]] = {
            "confusion": [["label", *names], *([n, *row] for n, row in zip(names, confusion.tolist(), strict=True))],
            "classes": [["class", "samples", "accuracy"], *map(list, zip(names, sizes, shares, strict=True))],
        }
        for table, rows in tables.items():
            with _going_on(f"{table}{end}.csv"):
                write_atomically(trainer.run.path / f"{table}{end}.csv", csv_text(rows).encode())
        _draw(trainer, f"confusion{end}", partial(figures.confusion_figure, confusion, names))
        if predictions.drawn(True) or predictions.drawn(False):
            spread = (None, None) if known is None else (known.mean, known.std)
            _draw(trainer, f"predictions{end}", partial(figures.predictions_figure, predictions, names, *spread))


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    """Turns any failure in the block into one warning: a picture must not end a run."""
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"The run goes on without {what} ({type(error).__name__}: {error}).")


def _draw(trainer: Any, name: str, draw: Callable[[], Any]) -> None:
    with _going_on(f"{name}.png"):
        keep_picture(draw(), trainer.run.path / f"{name}.png", trainer.loggers)


def _client_values(trainer: Any) -> dict[str, list[float]]:
    """Returns the finite values of each metric in ``clients.csv``, nothing if the file does not exist."""
    path = trainer.run.path / "clients.csv"
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = (
        [name for name in rows[0] if name not in ("round", "client", "name", "samples", "classes")] if rows else []
    )
    values = {name: [float(row[name]) for row in rows if row[name]] for name in metrics}
    return {name: finite for name, each in values.items() if (finite := [v for v in each if isfinite(v)])}
