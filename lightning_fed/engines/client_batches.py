"""A client's batches, as many as its source promises."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_fed.data.sources import BatchSource
from lightning_fed.errors import FederatedError

__all__ = ["read_batches"]


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
