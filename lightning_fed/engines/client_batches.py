"""A client's batches, as many as its source promises, and which part of its model the steps on them train."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.client_algorithms.personal_parameters import PersonalParameters
from lightning_fed.core.devices import to_device
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.errors import FederatedError

__all__ = [
    "Phases", "explained_batches", "local_steps", "read_batches", "samples_in_epoch", "send_order",
    "steps_in_epochs",
]  # fmt: skip

_CHANGE = "set `--data.drop_last true`, or change `--data.batch_size`"


@contextmanager
def explained_batches(clients: Sequence[Client], batch_size: int, change: str = _CHANGE) -> Iterator[None]:
    """Says what to change where batch normalisation refuses a client's last batch because it has one sample."""
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


def send_order(source: BatchSource, order: Tensor) -> Tensor:
    """Sends an order of samples to the device where a source needs it."""
    return to_device(order, getattr(source, "order_device", torch.device("cpu")))


def samples_in_epoch(source: BatchSource, samples: Any) -> Any:
    """Returns how many samples, of one client or in an array, an epoch uses: fewer if short batches are left out."""
    return samples - samples % source.batch_size if getattr(source, "drop_last", False) else samples


def local_steps(source: BatchSource, options: LocalOptions, samples: Any) -> Any:
    """Returns how many steps the options make of each client's samples, shape (n,): none of a client without any."""
    batches = -(-samples_in_epoch(source, samples) // source.batch_size)
    if options.local_steps is not None:
        return np.where(batches > 0, options.local_steps, 0)
    return steps_in_epochs(options.epochs or 0, -(-batches // options.accumulate_grad_batches))


def steps_in_epochs(epochs: float, per_epoch: Any) -> Any:
    """Returns the steps of so many epochs, for one client or an array: rounded half up, at least one of who has any.

    What is no whole epoch is the first part of one.
    """
    if epochs == int(epochs):
        return int(epochs) * per_epoch
    rounded = np.maximum(np.floor(np.asarray(per_epoch) * epochs + 0.5).astype(np.int64), 1)
    return np.where(np.asarray(per_epoch) > 0, rounded, 0)[()]


class Phases:
    """Knows the local steps that train a client's personal parameters alone, before the others train the shared ones.

    Attributes:
        alternate: Whether a callback asks for such phases.
        by_epochs: Whether clients change over after epochs of their own.
    """

    def __init__(self, state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
        asked = [cb.head for cb in hooks.callbacks if isinstance(cb, PersonalParameters) and cb.head is not None]
        self._state = state
        self.alternate, self.by_epochs = bool(asked), bool(asked) and asked[0][0] == "epochs"
        if asked:
            unit, count = asked[0]
            none: dict[str, Any] = {"local_epochs": None, "local_steps": None}
            self._options = replace(options, **{**none, f"local_{unit}": count})

    def head_steps(self, samples: Any) -> Any:
        """Returns how many first steps of clients with so many samples, shape (n,), train the personal part alone."""
        return local_steps(self._state.source, self._options, samples) if self.alternate else np.zeros_like(samples)

    @property
    def in_head(self) -> bool:
        """Whether the step that the client is about to take is one of them."""
        state = self._state
        if not self.alternate or state.client is None:
            return False
        return bool(state.local_step < self.head_steps(np.array([state.client.num_samples]))[0])

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The parameters that this step leaves as they are."""
        vector, shared = self._state.vector, len(self._state.vector.parameters)
        if not self.alternate:
            return ()
        return vector.parameters if self.in_head else vector.all_parameters[shared:]


def read_batches(
    source: BatchSource, client: int, order: Tensor, seed: int, batch_size: int | None = None
) -> Iterator[Any]:
    """Yields a client's batches, and makes sure that there are as many as the source's sizes promise.

    Steps, epochs and weights are computed from these sizes and would be wrong, without an error, for other batches.
    The arguments are those of ``BatchSource.batches``.
    """
    size = batch_size or source.batch_size
    promised, count = -(-len(order) // size), 0
    # A source of the user's own may support only its own batch size.
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
