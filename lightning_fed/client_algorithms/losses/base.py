"""The base of client algorithms that change the loss of a local step, and the call of the module that they may read."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import Client
from lightning_fed.errors import FederatedError

__all__ = ["Features", "LossAlgorithm", "LossCall", "ModelPass", "feature_layer", "last_linear"]


class Features(dict[str | None, Tensor]):
    """The inputs of layers by their names; a layer that a call does not reach is refused when it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __missing__(self, name: str | None) -> Tensor:
        feature_layer(self.module, name)
        raise FederatedError(
            f"Expected `self(x)` of {type(self.module).__name__} to call the layer whose input counts as the features, "
            "but it does not: name another one as `--client.layer`."
        )


@dataclass
class ModelPass:
    """What a call of ``self(x)`` computed.

    Attributes:
        output: What it returned, before ``LossAlgorithm.logits``.
        features: By name of the layer, as in ``LossAlgorithm.layer``, the input of that layer, shape (B, ...).
    """

    output: Any = None
    features: dict[str | None, Tensor] = field(default_factory=dict)


@dataclass
class LossCall(ModelPass):
    """The call of ``self(x)`` in a training step: what a term may read, and the same call at other weights.

    Attributes:
        args: What the module was called with.
        kwargs: The same for arguments by name.
        loss: What ``training_step`` returned, shape ().
        batch: What it was given.
        weights: The global model that the client got in this round, shape (d,): w, unless the aggregator sends another.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    batch: Any = None
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    losses: Any = None

    @property
    def labels(self) -> Tensor:
        """The second part of the batch, class labels; another batch is refused."""
        parts = self.batch if isinstance(self.batch, (list, tuple)) else ()
        labels = parts[1] if len(parts) > 1 else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            got = type(self.batch).__name__ if len(parts) < 2 else "a second part that holds no integers"
            raise FederatedError(
                "Expected a batch (inputs, labels, ...) with integer labels for a loss that reads them, got "
                f"{got}: arrange `--data` so, or leave the algorithm out of `--client`."
            )
        return labels

    def at(self, vector: Tensor) -> ModelPass:
        """Calls the module as this step did, at other weights, without gradients: one forward pass.

        Every part is in eval mode, so that dropout draws nothing; but BatchNorm, where it is in train mode, normalises
        by the batch as in the step, since running statistics belong to the live weights. No buffer changes.

        Args:
            vector: The weights, shape (d,), in any precision; personal parameters are the live ones.
        """
        found: ModelPass = self.losses.call_at(self, vector)
        return found

    def layer(self, name: str | None = None) -> nn.Module:
        """Returns the layer of a name, by default the last linear one, whose parameters are the client's now."""
        found: nn.Module = self.losses.layers[name]
        return found


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


def feature_layer(module: nn.Module, name: str | None) -> nn.Module:
    """Returns the layer whose input counts as features: the one of a name, or the last linear one.

    Raises:
        FederatedError: If there is none.
    """
    if name is None:
        if (last := last_linear(module)) is not None:
            return last
        raise FederatedError(
            f"Expected {type(module).__name__} to have a linear layer, whose input counts as the features, got none: "
            "name another layer as `--client.layer`."
        )
    layers = dict(module.named_modules())
    if name not in layers:
        known = ", ".join(part for part in layers if part)
        raise FederatedError(
            f"Expected `--client.layer` to name a layer of {type(module).__name__}, got {name!r}: it has {known}."
        )
    layer: nn.Module = layers[name]
    return layer


def last_linear(module: nn.Module) -> nn.Module | None:
    """Returns the last linear layer of a module, in the order in which layers were assigned; None without any."""
    return next((part for part in reversed(list(module.modules())) if isinstance(part, nn.Linear)), None)
