"""Changes to an update on its way to the server: a client's half and a server's half each."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import ReducedUpdate, Update
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.functional.geometry import wide_dtype

__all__ = ["ClipUpdates", "Payload", "payloads_of"]


class Payload(FederatedCallback):
    """A change to an update on its way to the server. You give payloads as callbacks; they run in the order listed.

    The client halves run in ``on_client_end``; the server halves run in reverse order before the hooks
    ``on_before_server_step``.

    Attributes:
        bounds_length: Whether it bounds ‖δ_i‖; noise is scaled by this bound.
        adds_noise: Whether it adds noise. Payloads that bound lengths must come before it. The rule may read only the
            mean update, because noise would spoil votes and single updates or not reach them.
    """

    bounds_length = adds_noise = False

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """The client's half: edits ``update.delta`` in place, and sets ``update.bytes_up`` if its size changes."""

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        self.encode(trainer, pl_module, update)

    def decode(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """The server's half: edits the reduced update in place, in the same way on every process."""


def payloads_of(callbacks: Sequence[Callback]) -> list[Payload]:
    """Returns the payloads among callbacks, in their order; refuses one after noise by mistake."""
    found = [callback for callback in callbacks if isinstance(callback, Payload)]
    noisy = False
    for payload in found:
        if noisy and payload.bounds_length:
            raise FederatedError(
                f"Expected {type(payload).__name__} before the payload that adds noise, because its bound sets the "
                "noise, got it after: change the order of `--trainer.callbacks`."
            )
        noisy = noisy or payload.adds_noise
    return found


class ClipUpdates(Payload):
    """Scales down every client's update that is longer than a bound: δ_i <- δ_i min(1, C / ‖δ_i‖).

    Works with any aggregator and mask; they get the clipped updates. Shorter updates stay the same, bit for bit. Logs
    ``clip/share``, the share of clients that were clipped, and ``clip/norm``, the mean length of updates before.

    Args:
        max_norm: C, above 0, in the units of the model's parameters.
    """

    bounds_length = True

    def __init__(self, max_norm: float) -> None:
        self.max_norm = expect_number("max_norm", max_norm, above=0, of="ClipUpdates")

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Clips one update in place; nothing is read from the device."""
        norm = torch.linalg.vector_norm(update.delta, dtype=wide_dtype(update.delta))
        update.delta.mul_((self.max_norm / norm).clamp(max=1.0))
        pl_module.log_dict({"clip/share": (norm > self.max_norm).to(norm.dtype), "clip/norm": norm}, batch_size=1)
