"""A client's batches, as many as its source promises."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client
from lightning_fed.data.sources import BatchSource
from lightning_fed.errors import FederatedError

__all__ = ["explained_batches", "local_steps", "read_batches", "samples_in_epoch", "to_device"]

_CHANGE = "set `--data.drop_last true`, or change `--data.batch_size`"


@contextmanager
def explained_batches(clients: Sequence[Client], batch_size: int, change: str = _CHANGE) -> Iterator[None]:
    """Says what to change where batch normalisation refuses the last batch, of one sample, of one of the clients."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        client = next((client for client in clients if client.num_samples % batch_size == 1), clients[0])
        raise FederatedError(
            f"Expected at least two samples in each batch for batch normalisation, got one in the last batch of client "
            f"{client.id} in round {client.round} ({client.num_samples} samples in batches of {batch_size}): {change}."
        ) from error


def to_device(rows: Tensor, device: torch.device) -> Tensor:
    """Sends row numbers to a device without waiting for it: to a GPU from pinned memory."""
    if device.type == "cpu":
        return rows
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def samples_in_epoch(source: BatchSource, samples: Any) -> Any:
    """Returns how many samples a local epoch goes through, less than there are only where short batches are left out.

    Args:
        source: The clients' batches.
        samples: Samples of one client, or of several, an array.
    """
    return samples - samples % source.batch_size if getattr(source, "drop_last", False) else samples


def local_steps(source: BatchSource, options: LocalOptions, samples: Any) -> Any:
    """Returns how many local steps the trainer's options make of these samples.

    Args:
        source: The clients' batches.
        options: Local epochs or steps, and batches of a step.
        samples: Samples of each client, shape (n,); without any it takes none.
    """
    batches = -(-samples_in_epoch(source, samples) // source.batch_size)
    if options.local_steps is not None:
        return np.where(batches > 0, options.local_steps, 0)
    return -(-batches // options.accumulate_grad_batches) * (options.epochs or 0)


def read_batches(
    source: BatchSource, client: int, order: Tensor, seed: int, batch_size: int | None = None
) -> Iterator[Any]:
    """Yields a client's batches, and makes sure that there are as many as the source's sizes promise.

    Steps, epochs and weights are counted by what it promises: of other batches they would be wrong without a word.

    Args:
        source: The clients' batches.
        client: Client id.
        order: See ``BatchSource.batches``.
        seed: The same.
        batch_size: Another number of samples per batch.

    Raises:
        FederatedError: If there are fewer or more.
    """
    size = batch_size or source.batch_size
    promised, count = -(-len(order) // size), 0
    # A source of the user's own need not know of other sizes than its own.
    other = {} if size == source.batch_size else {"batch_size": size}
    for batch in source.batches(client, order, seed, **other):
        count += 1
        if count > promised:
            break
        yield batch
    if count != promised:
        raise FederatedError(
            f"Expected {promised} batches of client {client} from the {type(source).__name__} of `--data`, for its "
            f"{len(order)} samples in batches of {size}, got {'more' if count > promised else count}: let `batches` "
            "yield what `sizes` and `batch_size` say."
        )
