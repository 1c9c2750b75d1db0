"""How hard each sample is for models that were not trained on it: shadow models of the same configuration."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.cli.exits import exit_with
from lightning_fed.data import FederatedDataModule, Split
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.outputs import Draw, read_outputs
from lightning_fed.trainer import FederatedTrainer

__all__ = ["Build", "shadow_confidences"]

Build: TypeAlias = Callable[[int], tuple[FederatedTrainer, LightningModule]]


def shadow_confidences(build: Build, data: Any, shadows: int, draw: Draw, weights: str | None) -> tuple[Tensor, Tensor]:
    """Trains pairs of models, one on a random half of each client's samples and one on the other.

    Neither model of a pair saw a non-member, so one is picked at random: members and non-members are then averaged over
    equally many models.

    Training starts from the weights of a file, or else from the modules' own.

    Returns:
        Mean confidence of the models that were not trained on a sample, of members and of others, shape (n,) each.
    """
    if not isinstance(data, FederatedDataModule):
        raise FederatedError(
            f"Expected a FederatedDataModule for `--shadows`, whose clients can train on halves of their data, got "
            f"{type(data).__name__}: wrap it as its `source`, or leave `--shadows` out."
        )
    data.split_seed, split = data.division.seed, data.split  # the shadows' own seeds would split otherwise
    # Members are counted over the clients that train; `drop_last` leaves some out.
    trained = torch.from_numpy(np.flatnonzero(np.asarray(data.train_source().sizes)[split.owners]))
    generator = torch.Generator().manual_seed(draw.seed)
    means: list[Any] = [0.0, 0.0]
    for pair in range(shadows // 2):
        half, asked = _half_of_each(split, generator), []
        for number, inside in enumerate((half, ~half), 2 * pair):
            rank_zero_info(f"Training shadow model {number + 1} of {shadows}.")
            trainer, module = build(number)
            with data.training_on(split.keep(inside.numpy())):
                trainer.fit(module, datamodule=data, weights=weights)
            if trainer.interrupted is not None:
                exit_with(
                    "Stopped in the training of a shadow model: start the attack again.", 128 + trainer.interrupted
                )
            asked.append(read_outputs(trainer, module, data, None, draw))
        first = [~half[trained[asked[0][0].rows]], torch.rand(len(asked[0][1].rows), generator=generator) < 0.5]
        for side in range(2):
            one, other = (outputs[side].confidences for outputs in asked)
            means[side] = means[side] + torch.where(first[side], one, other) / (shadows // 2)
    return means[0], means[1]


def _half_of_each(split: Split, generator: torch.Generator) -> Tensor:
    """Draws every other sample of each client, shape (samples,), bool."""
    drawn = torch.rand(len(split.index), generator=generator)
    order = np.lexsort([drawn.numpy(), split.owners])  # client after client, each in random order
    half = torch.empty(len(order), dtype=torch.bool)
    half[torch.from_numpy(order)] = torch.arange(len(order)) % 2 == 0
    return half
