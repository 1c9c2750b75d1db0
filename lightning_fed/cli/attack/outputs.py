"""What a trained classifier says of samples that it was trained on, and of samples that it has never seen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.data.evaluation import num_samples
from lightning_fed.data.sources import BatchSource
from lightning_fed.engines.client_batches import read_batches
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.evaluation import named_loaders
from lightning_fed.trainer.options import expect_datamodule

__all__ = ["Outputs", "read_outputs"]


class Outputs(NamedTuple):
    """Logits, shape (n, C), float64, and labels, shape (n,), int64, in random order."""

    logits: Tensor
    labels: Tensor

    def part(self, rows: slice | Tensor) -> "Outputs":
        """Returns some of the samples."""
        return Outputs(self.logits[rows], self.labels[rows])


def read_outputs(
    trainer: FederatedTrainer,
    module: LightningModule,
    datamodule: Any,
    checkpoint: Path,
    test_set: str | None,
    samples: int | None,
    seed: int,
) -> tuple[Outputs, Outputs]:
    """Runs a trained classifier over as many training samples of all clients as test samples, both drawn at random.

    Args:
        trainer: The trainer, of which ``predict`` is called.
        module: The classifier: its ``forward`` returns scores of shape (B, C) for the inputs of a
            batch (inputs, labels).
        datamodule: The data that it was trained on; training samples are read without augmentation.
        checkpoint: The file of its weights.
        test_set: Name of the test set, None for the only one.
        samples: The most of either kind, None for no limit.
        seed: Of the draw.

    Returns:
        Members and non-members.

    Raises:
        FederatedError: If there are too few of either, or the module is no classifier.
    """
    data, generator = expect_datamodule(module, datamodule, train=None), torch.Generator().manual_seed(seed)

    def loaders() -> dict[str, Any]:
        others = _test_set(named_loaders(data.test_dataloader()), test_set)
        source: BatchSource = data.train_source()  # type: ignore[attr-defined]  # `expect_datamodule` has asked for it
        source = getattr(source, "unaugmented", source)
        most = num_samples(others) if samples is None else min(samples, num_samples(others))
        return {"members": _drawn(source, most, getattr(data, "eval_batch_size", None), generator), "others": others}

    def step(batch: Any) -> Outputs:
        return _outputs(module, batch)

    vars(data)["predict_dataloader"], vars(module)["predict_step"] = loaders, step
    try:
        found = trainer.predict(module, datamodule=data, ckpt_path=str(checkpoint))
    finally:
        del vars(data)["predict_dataloader"], vars(module)["predict_step"]
    sides = [Outputs(*(torch.cat(parts) for parts in zip(*batches, strict=True))) for batches in found]
    count = min(*(len(side.labels) for side in sides), samples or 2**63)
    if count < 2:
        raise FederatedError(f"Expected at least two training samples and two test samples to compare, got {count}.")
    members, others = (side.part(torch.randperm(len(side.labels), generator=generator)[:count]) for side in sides)
    return members, others


def _test_set(loaders: dict[str, Any], name: str | None) -> Any:
    if not loaders:
        raise FederatedError(
            "Expected data with a test set, whose samples the model has never seen, got none: give one by `--data`."
        )
    if name is None and len(loaders) == 1:
        return next(iter(loaders.values()))
    if name not in loaders:
        known = ", ".join(loaders) or "none with a name: leave it out"
        raise FederatedError(f"Expected `--test_set` to name one of the test sets ({known}), got {name or 'none'}.")
    return loaders[name]


def _drawn(source: BatchSource, most: int, batch_size: int | None, generator: torch.Generator) -> Iterator[Any]:
    """Yields batches of training samples of all clients, drawn without replacement."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(source.sizes))])
    rows = torch.randperm(int(offsets[-1]), generator=generator)[:most].sort().values
    for client, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        own = rows[(rows >= start) & (rows < end)] - start
        if len(own):
            yield from read_batches(source, client, own, seed=client, batch_size=batch_size)


def _outputs(module: LightningModule, batch: Any) -> Outputs:
    """Returns what the module says of a batch, on the CPU; refuses what no classifier says."""
    expected = (
        f"Expected {type(module).__name__} to be a classifier, whose `forward` returns finite scores of shape (B, C) "
        "for the inputs of a batch (inputs, labels), labels from 0 to C - 1"
    )
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise FederatedError(f"{expected}, got a batch that is {_shown(batch)}.")
    scores, labels = module(batch[0]), batch[1]
    integers = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 1
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not integers or scores.shape[0] != labels.shape[0]:
        raise FederatedError(f"{expected}, got {_shown(scores)} for labels that are {_shown(labels)}.")
    found = Outputs(scores.cpu().double(), labels.cpu().long())
    if not found.logits.isfinite().all():
        raise FederatedError(f"{expected}, got NaN or infinity: the model has diverged, give another `--ckpt_path`.")
    if not ((found.labels >= 0) & (found.labels < scores.shape[1])).all():
        raise FederatedError(f"{expected}, got labels up to {int(found.labels.max())} for {scores.shape[1]} scores.")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    parts = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    return f"a {type(value).__name__}{parts}"
