"""Pictures and tables of a finished run: the classifier's predictions, and how clients and coordinates differ."""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightning_fed.callbacks.diagnostics.updates import UpdateAgreement
from lightning_fed.core.files import csv_text, write_atomically
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, numpy_generator_for
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.summary import image_table, images_of, new_figure
from lightning_fed.errors import FederatedError, expect_count
from lightning_fed.runs.log import keep_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FinalPictures", "Predictions", "Shown", "agreement_figure", "confusion_figure", "distribution_figure",
    "predictions_figure",
]  # fmt: skip

_MAX_NAMES = 20
_COLUMNS = 10
_RIGHT, _WRONG = "tab:green", "tab:red"


class Shown(NamedTuple):
    """An image, shape (C, H, W), float32 on the CPU, with its label and prediction."""

    image: Tensor
    label: int
    predicted: int


class Predictions:
    """Counts a classifier's predictions over batches, and draws ``count`` images predicted right and ``count`` wrong.

    They are drawn without replacement; the batch size does not change which.
    """

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self._count, self._rng = count, rng
        self._confusion: Tensor | int = 0
        self._drawn: dict[bool, list[tuple[float, Shown]]] = {True: [], False: []}

    def add(self, batch: Any, scores: Tensor, labels: Tensor) -> None:
        """Adds a batch (its first part may be images, (B, C, H, W)) with its scores (B, C) and labels (B,)."""
        predicted = scores.argmax(dim=1)
        self._confusion += multiclass_confusion_matrix(predicted, labels, scores.shape[1], validate_args=False).cpu()
        keys, pairs = self._rng.random(len(labels)), torch.stack([labels, predicted], dim=1).cpu().numpy()
        for right, drawn in self._drawn.items():
            rows = np.flatnonzero((pairs[:, 0] == pairs[:, 1]) == right)
            rows = rows[np.argsort(keys[rows])[: self._count]]
            found = batch[0]
            if isinstance(found, Tensor):
                found = found[torch.from_numpy(rows).to(found.device)]
            images = images_of([found])
            if images is not None:
                shown = [Shown(image, *pair) for image, pair in zip(images, pairs[rows].tolist(), strict=True)]
                drawn += zip(keys[rows].tolist(), shown, strict=True)
                drawn.sort(key=itemgetter(0))
                del drawn[self._count :]

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """Numbers of samples by label and prediction, shape (C, C)."""
        return np.asarray(self._confusion)

    def drawn(self, right: bool) -> list[Shown]:
        """Returns the images predicted right, or those predicted wrong, in random order."""
        return [shown for _, shown in self._drawn[right]]


def confusion_figure(confusion: npt.NDArray[np.int64], class_names: Sequence[str]) -> "Figure":
    """Draws the share of each label's samples that is predicted as each class.

    ``confusion`` is of shape (C, C), by label and prediction. Names and shares are shown for at most 20 classes.
    """
    total, classes = confusion.sum(), len(confusion)
    shares = confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)
    size = min(3.5 + 0.35 * classes, 10)
    figure, axes = new_figure(size + 1, size)
    image = axes.imshow(shares, interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
    accuracy = np.trace(confusion) / max(total, 1)
    axes.set(xlabel="prediction", ylabel="label", title=f"accuracy {accuracy:.3f} over {total} samples")
    if classes <= _MAX_NAMES:
        longest = max(map(len, class_names))
        axes.set_xticks(range(classes), class_names, rotation=0 if longest < 4 else 90)
        axes.set_yticks(range(classes), class_names)
        for (row, column), share in np.ndenumerate(shares):
            colour = "black" if share > 0.6 else "white"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=axes, label="share of the label's samples" + " (cells: %)" * (classes <= _MAX_NAMES))
    return figure


def predictions_figure(
    predictions: Predictions, names: Sequence[str], mean: Sequence[float] | None, std: Sequence[float] | None
) -> "Figure":
    """Draws images with right and with wrong predictions, ten in a row, each above its label and its prediction.

    The normalisation by ``mean`` and ``std`` of the channels is undone; without them images are scaled to [0, 1].
    """
    rows: list[tuple[str, list[Shown]]] = []
    for word, right in (("right", True), ("wrong", False)):
        drawn = predictions.drawn(right)
        rows += [(word, drawn[at : at + _COLUMNS]) for at in range(0, len(drawn), _COLUMNS)]
    images = image_table([torch.stack([one.image for one in row]) for _, row in rows], _COLUMNS, mean, std)
    height, width = images.shape[2:4]
    gap = max(1, height // 12)
    step = height + max(gap, height // 3)  # with room for a line of text
    padded = np.pad(images, ((0, 0), (0, 0), (0, step - height), (0, gap), (0, 0)), constant_values=1)
    mosaic = padded.transpose(0, 2, 1, 3, 4).reshape(len(rows) * step, _COLUMNS * (width + gap), 3)
    figure, axes = new_figure(1 + 0.9 * _COLUMNS, 0.4 + 0.9 * len(rows) * step / width)
    axes.imshow(mosaic, interpolation="nearest")
    for at, (word, row) in enumerate(rows):
        for column, (_, label, predicted) in enumerate(row):
            text = names[label] if label == predicted else f"{names[label]} → {names[predicted]}"
            place = column * (width + gap) + (width - 1) / 2, at * step + height
            axes.text(*place, text, ha="center", va="top", fontsize=7, color=_RIGHT if word == "right" else _WRONG)
    axes.set_yticks([at * step + (height - 1) / 2 for at in range(len(rows))], [word for word, _ in rows])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("label, or label → prediction")
    return figure


def distribution_figure(values: Mapping[str, Sequence[float]]) -> "Figure":
    """Draws how the finite values of metrics are distributed over clients: violins, extremes and medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 2.5 * len(values), 4), layout="constrained")
    for axes, (name, each) in zip(figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True):
        axes.violinplot(each, showmedians=True)
        axes.set(title=name, xlabel=f"{len(each)} clients", xticks=[])
    return figure


def agreement_figure(counts: npt.NDArray[np.int64], coin_flips: npt.NDArray[np.float64], threshold: float) -> "Figure":
    """Draws the distribution of the agreement A, the one that coin flips would give, and τ.

    ``counts`` of coordinates and shares of ``coin_flips`` are both for bins of equal width over [0, 1].
    """
    edges = np.linspace(0, 1, len(counts) + 1)
    figure, axes = new_figure(5, 3.5)
    axes.stairs(counts / counts.sum(), edges, fill=True)
    axes.stairs(coin_flips, edges, color="tab:orange", linewidth=1.5, label="coin flips")
    axes.axvline(threshold, color="black", linewidth=1, linestyle="--", label=f"τ = {threshold:g}")
    axes.set(xlabel="agreement A", ylabel="share of coordinates", title=f"{counts.sum()} coordinates")
    axes.legend(frameon=False)
    return figure


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
                _draw(trainer, "clients", partial(distribution_figure, values))
        for callback in trainer.callbacks:
            if not isinstance(callback, UpdateAgreement) or callback.histogram is None or callback.coin_flips is None:
                continue
            shown = callback.histogram.cpu().numpy(), callback.coin_flips.numpy(), callback.threshold
            _draw(trainer, "agreement", partial(agreement_figure, *shown))

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
        _draw(trainer, f"confusion{end}", partial(confusion_figure, confusion, names))
        if predictions.drawn(True) or predictions.drawn(False):
            spread = (None, None) if known is None else (known.mean, known.std)
            _draw(trainer, f"predictions{end}", partial(predictions_figure, predictions, names, *spread))


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
