"""What happens to an update on its way to the server: an ordered list of objects with two halves."""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import ReducedUpdate, Update
from lightning_fed.errors import FederatedError

__all__ = ["Payload", "payloads_of"]


class Payload(FederatedCallback):
    """A step on an update's way. Payloads are given as callbacks and work in the order of their list.

    The client halves run as ``on_client_end`` of callbacks do, the server halves in reverse before the hooks
    ``on_before_server_step``.

    Attributes:
        bounds_length: Whether it bounds ‖δ_i‖, which noise is measured by.
        adds_noise: Whether it adds noise: what shortens updates comes before it, and the server's rule may read their
            mean alone, as votes and single updates would pass the noise by or drown in it.
    """

    bounds_length = adds_noise = False

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """The client's half: edits ``update.delta`` in place, and sets ``update.bytes_up`` where that changes."""

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Runs the client's half."""
        self.encode(trainer, pl_module, update)

    def decode(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """The server's half: edits the reduced update in place, alike on every process."""


def payloads_of(callbacks: Sequence[Callback]) -> list[Payload]:
    """Returns the payloads among callbacks, in their order; refuses one that is there twice, or too late."""
    found = [callback for callback in callbacks if isinstance(callback, Payload)]
    names = [type(payload).__name__ for payload in found]
    if len(set(names)) < len(names):
        name = max(names, key=names.count)
        raise FederatedError(f"Expected each payload once, got {name} twice: leave one out of `--trainer.callbacks`.")
    noisy = False
    for payload, name in zip(found, names, strict=True):
        if noisy and payload.bounds_length:
            raise FederatedError(
                f"Expected {name} before the payload that adds noise, because its bound sets the noise, got it after: "
                "change the order of `--trainer.callbacks`."
            )
        noisy = noisy or payload.adds_noise
    return found
