"""The base of client algorithms that change the loss of each local step before its backward pass."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses.call import LossCall
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client
from lightning_fed.errors import FederatedError

__all__ = ["LossAlgorithm"]


class LossAlgorithm(ClientAlgorithm):
    """Changes what ``self(x)`` returns within ``training_step``, or adds a term to the loss that this returns.

    A subclass overrides ``logits``, ``term`` or both. They also run under ``torch.func.vmap``, for one client of many,
    if the class says ``stacks = True``. Gradients over a client's full data, as FedGA exchanges them, are those of the
    module's own loss. ``train/loss`` is what ``training_step`` returned, and ``train/term`` the mean of the terms.

    Attributes:
        layer: Name of the layer whose input counts as the features; None for the last linear layer.
    """

    layer: str | None = None
    _names: tuple[str, ...] = ()
    _labels: Any = None
    _classes: Any = None

    @property
    def active(self) -> bool:
        """Whether it changes anything: at its limit it takes no part in a step, which is then plain to the bit."""
        return True

    def prepare(self, trainer: TrainerLike, client: Client) -> dict[str, Tensor]:
        """Returns what the loss of the client about to train depends on: vectors by name, of one length for all."""
        return {}

    def logits(self, output: Tensor, own: dict[str, Tensor]) -> Tensor:
        """Returns what ``self(x)`` is to return in a training step, from what the module computed and ``prepare``'s."""
        return output

    def term(self, call: LossCall, own: dict[str, Tensor]) -> Tensor:
        """Returns what is added to the loss of a batch, a scalar, from the call of ``self(x)`` and ``prepare``'s."""
        raise NotImplementedError

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        found = self.prepare(trainer, client) if self.active else {}
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.ndim != 1:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise FederatedError(
                    f"Expected `prepare` of {type(self).__name__} to return vectors by name, got {name!r} of {got}: "
                    "flatten what has more dimensions, and make a number a vector of length 1."
                )
            self.scratch(name, value).copy_(value)
        self._names = tuple(found)

    def own(self) -> dict[str, Tensor]:
        """Returns what ``prepare`` returned for the client that trains, or for each of several, shape (m, ...)."""
        vectors = self.__dict__.get("_vectors", {})
        return {name: vectors[name] if self.lanes is None else vectors[name][self.lanes[1]] for name in self._names}

    def expect_labels(self, trainer: TrainerLike) -> None:
        """Refuses data whose clients' labels are not known, as ``class_counts`` does: in ``check`` it is earlier."""
        data = trainer.datamodule
        self._labels, self._classes = getattr(data, "labels", None), getattr(data, "num_classes", None)
        if self._labels is None or self._classes is None:
            raise FederatedError(
                f"Expected class labels for {type(self).__name__}, which counts those of each client, but "
                f"{type(data).__name__} knows none: give its data set an attribute `targets`, one class per sample, or "
                "leave it out of `--client`."
            )

    def class_counts(self, trainer: TrainerLike, client: Client) -> Tensor:
        """Counts the client's own training labels, after the split: shape (C,), in the global vector's dtype."""
        if self._labels is None:
            self.expect_labels(trainer)
        split = trainer.datamodule.split
        rows = split.index[split.offsets[client.id] : split.offsets[client.id + 1]]
        return torch.from_numpy(np.bincount(self._labels[rows], minlength=self._classes)).to(trainer.weights)

    def teardown(self, trainer: object, pl_module: object, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._labels = None
