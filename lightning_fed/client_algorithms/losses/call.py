"""The call of a module in a training step: what a term of the loss may read, and the same call at other weights."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederatedError

__all__ = ["Features", "LossCall", "ModelPass", "feature_layer", "last_linear"]


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
