"""Changes to an update on its way to the server: a client's half and a server's half each."""

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.seeding import Purpose, global_streams, seed_for
from lightning_fed.core.updates import Client, Packed, ReducedUpdate, Update
from lightning_fed.core.user_code import is_own
from lightning_fed.errors import FederatedError, expect, expect_number
from lightning_fed.functional.geometry import wide_dtype

__all__ = ["ClipUpdates", "Packed", "Payload", "clip_to", "expect_noise_holds", "payloads_of"]


class Payload(FederatedCallback):
    """A change to an update on its way to the server. You give payloads as callbacks; they run in the order listed.

    The client halves run in ``on_client_end``; the server halves run in reverse order before the hooks
    ``on_before_server_step``. What a client keeps from round to round is in ``trainer.client_states``, written in
    ``on_client_entered``; until then it is in ``scratch``. Random numbers come from ``stream``: draws from the global
    streams, which differ between engines, are refused in the first round of a ``fit``.

    Attributes:
        bounds_length: Whether it bounds ‖δ_i‖; noise is scaled by this bound.
        adds_noise: Whether it adds noise. Payloads that bound lengths must come before it. The rule may read only the
            mean update, because noise would spoil votes and single updates or not reach them; all else that leaves a
            client is refused or left out of the row. A round without clients steps too.
        covers: Names of the ``Update.sums`` to which it adds noise too, by bounds of their own; others are refused.
        assumes_sampler: The class of sampler that its accountant assumes; None for any.
        about: What to record of the run beside its options; known after ``setup``.
    """

    bounds_length = adds_noise = False
    covers: tuple[str, ...] = ()
    assumes_sampler: type | None = None
    about: str = ""

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed | None:
        """The client's half: edits ``update.delta`` in place, and sets ``update.bytes_up`` if its size changes.

        Or it returns what is sent instead, by name, from which ``unpack`` makes the update; its bytes are then counted.
        """

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        """The server's half for one client: returns δ_i, shape (d,), from the tensors of ``encode`` by name."""
        raise FederatedError(f"Expected {type(self).__name__}, whose `encode` returns tensors, to have an `unpack`.")

    def decode(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """The server's half: edits the reduced update in place, in the same way on every process."""

    def stream(self, trainer: TrainerLike, client: Client | None = None) -> torch.Generator:
        """Returns the round's generator of a client, or for noise of the server, on the updates' device.

        It begins anew with each call, and depends on the seed, the class, the round and the client alone.
        """
        purpose, id = (Purpose.NOISE, 0) if client is None else (Purpose.PAYLOAD, client.id)
        seed = seed_for(trainer.seed, purpose, trainer.round, id, index=crc32(self.state_key.encode()))
        return torch.Generator(trainer.weights.device).manual_seed(seed)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        before, name = update.bytes_up, type(self).__name__
        if self.watched(self._send, trainer, pl_module, update) or update.bytes_up != before:
            first, update.coded_by = update.coded_by, name
            expect(
                not first,
                f"Expected one payload that codes updates, got {name} after {first}, which would code the update that "
                f"{first} restores and not what it sends: leave one out of `--trainer.callbacks`.",
            )
        if self.bounds_length:
            update.bounded = update.delta, update.delta._version

    def _send(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> bool:
        """Encodes, and unpacks what is returned; returns whether anything was."""
        packed = self.encode(trainer, pl_module, update)
        if packed is None:
            return False
        update.bytes_up, sent = 0, dict[str, Tensor]()
        for name, part in packed.items():
            values, bits = part if isinstance(part, tuple) else (part, 8 * part.element_size())
            fits = bits == 8 * values.element_size()
            fits = fits or not (values.is_floating_point() or (values.long() >> bits).any())
            expect(fits, f"Expected {name!r} of {type(self).__name__} to be integers of {bits} bits, as it says.")
            update.bytes_up += -(-values.numel() * bits // 8)
            sent[name] = values
        update.delta.copy_(self.unpack(trainer, pl_module, update.client, sent))
        update.packed = packed
        return True

    @property
    def packs(self) -> bool:
        """Whether it sends tensors of its own in place of δ_i."""
        return type(self).unpack is not Payload.unpack

    def watched(self, half: Callable[..., Any], trainer: TrainerLike, *args: Any) -> Any:
        """Calls a half, and refuses draws of the user's own code from the global streams in the first round."""
        is_watched = is_own(type(self)) and trainer.round == self.__dict__.setdefault("_first", trainer.round)
        before = global_streams() if is_watched else ()
        result = half(trainer, *args)
        expect(
            not is_watched or global_streams() == before,
            f"Expected {type(self).__name__} to draw from `self.stream(trainer, client)`, or in `decode` from "
            "`self.stream(trainer)`, got draws from a global stream, which differ between engines: give it as "
            "`generator`, or its `initial_seed()` to NumPy.",
        )
        return result

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self.__dict__.pop("_first", None)


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


def expect_noise_holds(update: Update, noisy: Sequence[Payload]) -> None:
    """Refuses, beside payloads that add noise, an edit of an update after its bound, and sums without noise."""
    name, bound = type(noisy[0]).__name__, update.bounded
    expect(
        bound is None or (update.delta is bound[0] and update.delta._version == bound[1]),
        f"Expected an update to stay as it is after the bound for which {name} adds noise, got an edit by a payload or "
        "an `on_client_end` that comes later: put it before the bound in `--trainer.callbacks`.",
    )
    weighs = (
        f"Expected clients to weigh 1 each beside {name}, got {update.weight:g}: change `client_weight` of the rule."
    )
    expect(update.weight == 1, weighs)
    bare = sorted(set(update.sums).difference(*(payload.covers for payload in noisy)))
    expect(
        not bare,
        f"Expected clients to send nothing without noise beside {name}, got the sum {bare[:1]}: change `--client` or "
        "`--aggregator`, or add noise to it and name it in `covers`.",
    )


def clip_to(delta: Tensor, bound: float) -> Tensor:
    """Scales δ, shape (d,), in place to at most a length; returns its length before, shape (), in wide precision."""
    norm: Tensor = torch.linalg.vector_norm(delta, dtype=wide_dtype(delta))
    delta.mul_((bound / norm).clamp(max=1.0))
    return norm


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
        norm = clip_to(update.delta, self.max_norm)
        pl_module.log_dict({"clip/share": (norm > self.max_norm).to(norm.dtype), "clip/norm": norm}, batch_size=1)
