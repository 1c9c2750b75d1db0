"""Predictions on a whole set: a confusion matrix, and a sample of right and wrong ones to look at."""

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightning_fed.data.summary import images_of

__all__ = ["Predictions", "Shown"]


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
