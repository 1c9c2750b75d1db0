"""The outputs of a trained classifier, and the mean confidence of shadow models that were not trained on a sample."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.cli.exits import exit_with
from lightning_fed.data import FederatedDataModule, Split
from lightning_fed.data.evaluation import num_samples
from lightning_fed.data.sources import BatchSource
from lightning_fed.engines.client_batches import read_batches
from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.figures import confidences
from lightning_fed.models.scores import class_scores
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.evaluation import named_loaders

__all__ = ["Build", "Draw", "Outputs", "read_outputs", "shadow_confidences"]


class Draw(NamedTuple):
    """Which samples to use: the name of a test set (None for the only one), the most of each kind, and a seed."""

    test_set: str | None
    samples: int | None
    seed: int


class Outputs(NamedTuple):
    """Logits, shape (n, C), float64; labels, and the index of each sample in its set, shape (n,), int64."""

    logits: Tensor
    labels: Tensor
    rows: Tensor

    @property
    def confidences(self) -> Tensor:
        """The log-odds of each sample's own label, shape (n,)."""
        return confidences(self.logits, self.labels)


def read_outputs(
    trainer: FederatedTrainer, module: LightningModule, data: Any, checkpoint: Path | None, draw: Draw
) -> tuple[Outputs, Outputs]:
    """Runs a trained classifier on equally many training samples of all clients and test samples, drawn at random.

    Training samples are read without augmentation; ``forward`` must return scores of shape (B, C). Without a
    checkpoint the classifier keeps its current weights.

    Returns:
        Members and non-members in random order; the same draw gives the same order.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    rows: Tensor

    def loaders() -> dict[str, Any]:
        nonlocal rows
        others = _test_set(named_loaders(data.test_dataloader()), draw.test_set)
        source: BatchSource = data.train_source()
        source = getattr(source, "unaugmented", source)
        most = num_samples(others) if draw.samples is None else min(draw.samples, num_samples(others))
        rows = torch.randperm(int(np.sum(source.sizes)), generator=generator)[:most].sort().values
        return {"members": _batches(source, rows, getattr(data, "eval_batch_size", None)), "others": others}

    def step(batch: Any) -> tuple[Tensor, Tensor]:
        scores, labels = class_scores(module, batch, ", give another `--ckpt_path`")
        return scores.cpu().double(), labels.cpu().long()

    vars(data)["predict_dataloader"], vars(module)["predict_step"] = loaders, step
    try:
        found = trainer.predict(module, datamodule=data, ckpt_path=None if checkpoint is None else str(checkpoint))
    finally:
        del vars(data)["predict_dataloader"], vars(module)["predict_step"]
    sides = [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in found or ()]
    count = min(*(len(labels) for _, labels in sides), draw.samples or 2**63)
    if count < 2:
        raise FederatedError(f"Expected at least two training samples and two test samples to compare, got {count}.")
    numbers = (rows[: len(sides[0][1])], torch.arange(len(sides[1][1])))
    drawn = []
    for (logits, labels), number in zip(sides, numbers, strict=True):
        places = torch.randperm(len(number), generator=generator)[:count]
        drawn.append(Outputs(logits[places], labels[places], number[places]))
    return drawn[0], drawn[1]


def _test_set(loaders: dict[str, Any], name: str | None) -> Any:
    if not loaders:
        raise FederatedError("Expected data with a test set, whose samples the model has never seen, got none.")
    if name is None and len(loaders) == 1:
        return next(iter(loaders.values()))
    if name not in loaders:
        known = ", ".join(loaders) or "none with a name: leave it out"
        raise FederatedError(f"Expected `--test_set` to name one of the test sets ({known}), got {name or 'none'}.")
    return loaders[name]


def _batches(source: BatchSource, rows: Tensor, batch_size: int | None) -> Iterator[Any]:
    """Yields batches of training samples of all clients, client after client, with indices in ascending order."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(source.sizes))])
    for client, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        own = rows[(rows >= start) & (rows < end)] - start
        if len(own):
            yield from read_batches(source, client, own, seed=client, batch_size=batch_size)


Build: TypeAlias = Callable[[int], tuple[FederatedTrainer, LightningModule]]


def shadow_confidences(build: Build, data: Any, shadows: int, draw: Draw, weights: str | None) -> tuple[Tensor, Tensor]:
    """Trains pairs of models, one on a random half of each client's samples and one on the other half.

    Neither model of a pair saw a non-member, so one of the two is picked at random for it. Members and non-members are
    then averages over equally many models.

    Training starts from the weights in a file, or from the modules' own weights if ``weights`` is None.

    Returns:
        For each sample, the mean confidence of the models not trained on it: members and others, shape (n,) each.
    """
    if not isinstance(data, FederatedDataModule):
        raise FederatedError(
            f"Expected a FederatedDataModule for `--shadows`, whose clients can train on halves of their data, got "
            f"{type(data).__name__}: wrap it as its `source`, or leave `--shadows` out."
        )
    data.split_seed, split = data.division.seed, data.split  # the seeds of the shadow models would give another split
    # Members are indexed over the clients that train, and `drop_last` leaves some clients out.
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
    """Draws a random half of each client's samples, shape (samples,), bool."""
    drawn = torch.rand(len(split.index), generator=generator)
    order = np.lexsort([drawn.numpy(), split.owners])  # client after client, each in random order
    half = torch.empty(len(order), dtype=torch.bool)
    half[torch.from_numpy(order)] = torch.arange(len(order)) % 2 == 0
    return half
