"""Changes to an update on its way to the server, a client's half and a server's half each: clipping and compression."""

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
from lightning_fed.errors import FederatedError, expect, expect_count, expect_number
from lightning_fed.functional.geometry import wide_dtype

__all__ = ["ClipUpdates", "Payload", "QSGD", "RandomK", "TopK", "clip_to", "expect_noise_holds", "payloads_of"]


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


class _Sparse(Payload):
    """Sends k = max(1, round(``share`` d)) coordinates in the dtype of δ_i, float32 or wider; the others are 0."""

    def __init__(self, share: float) -> None:
        self.share = expect_number("share", share, above=0, most=1, of=type(self).__name__)

    def count(self, size: int) -> int:
        """Returns k for updates of ``size`` coordinates."""
        return max(1, round(self.share * size))

    def spread(self, trainer: TrainerLike, places: Tensor, values: Tensor) -> Tensor:
        """Returns a vector of zeros but for the values at their places, shape (d,); the next client reuses it."""
        sent = self.scratch("sent", trainer.weights).zero_()
        sent[places] = values
        return sent


class TopK(_Sparse):
    """Sends the k largest coordinates of e_i + δ_i; the rest is the client's e_i, which it adds in its next round.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1, on updates in place of gradients.
    What is sent and e_i make up what the client meant to send, in every round. A client that diverges or takes no step
    keeps its e_i. The places are sent as indices of ⌈log2 d⌉ bits, or as a map of d bits if that is shorter. With a
    share of 1 it is FedAvg, bit for bit.

    Args:
        share: Share of the coordinates that a client sends, above 0 and at most 1.
    """

    def __init__(self, share: float = 0.01) -> None:
        super().__init__(share)

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        meant = self.scratch("meant", update.delta)
        trainer.client_states.recall("TopK", update.client.id, meant)
        meant += update.delta
        size = len(meant)
        count, bits = self.count(size), max(1, (size - 1).bit_length())
        places = meant.abs().topk(count, sorted=False).indices
        if count * bits >= size:
            places, bits = torch.zeros_like(meant, dtype=torch.bool).index_fill_(0, places, True), 1
        return {"values": meant[places], "places": (places, bits)}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        return self.spread(trainer, packed["places"], packed["values"])

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        """Stores e_i <- e_i + δ_i less what was sent, whatever a later payload made of that."""
        rest = self.scratch("meant", update.delta).sub_(self.scratch("sent", update.delta))
        trainer.client_states.store("TopK", update.client.id, rest)


class RandomK(_Sparse):
    """Sends k coordinates at places that both sides draw from the seed, times d / k: no index is sent.

    The mean over draws is δ_i, and E‖sent‖² = (d / k) ‖δ_i‖²: the random sparsification of Stich, Cordonnier, Jaggi,
    NeurIPS 2018, scaled to have no bias, and the random mask of Konečný et al., 2016, arXiv:1610.05492. With a share of
    1 it is FedAvg, bit for bit.

    Args:
        share: Share of the coordinates that a client sends, above 0 and at most 1.
    """

    def __init__(self, share: float = 0.1) -> None:
        super().__init__(share)

    def _places(self, trainer: TrainerLike, client: Client) -> Tensor:
        stream, size = self.stream(trainer, client), len(trainer.weights)
        return torch.randperm(size, generator=stream, device=stream.device)[: self.count(size)]

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        return {"values": update.delta[self._places(trainer, update.client)]}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        values = packed["values"]
        return self.spread(trainer, self._places(trainer, client), values * (len(trainer.weights) / len(values)))


class QSGD(Payload):
    """Rounds each coordinate at random to one of s levels of ‖δ_i‖, up or down so that the mean over draws is δ_i.

    It sends l_j = sign(δ_ij) ⌊s |δ_ij| / ‖δ_i‖ + u_j⌋ with u_j uniform in [0, 1), in ⌈log2 (2s + 1)⌉ bits each, and
    ‖δ_i‖ in float32; the server gets l_j ‖δ_i‖ / s. Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD:
    Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017, section 3.1, without its
    variable-length code.

    Args:
        levels: s, at least 1: coordinates are rounded to multiples of ‖δ_i‖ / s.
    """

    def __init__(self, levels: int = 4) -> None:
        self.levels = expect_count("levels", levels, of="QSGD")

    def encode(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> Packed:
        delta, wide, stream = update.delta, wide_dtype(update.delta), self.stream(trainer, update.client)
        norm = torch.linalg.vector_norm(delta, dtype=wide).to(torch.float32)
        draws = torch.rand(delta.shape, generator=stream, dtype=wide, device=stream.device)  # fine enough for few large
        sizes = (delta.abs() / norm.to(wide)).nan_to_num_(0.0, 0.0).mul_(self.levels)  # 0 / 0, or one that diverged
        levels = sizes.add_(draws).floor_().clamp_(max=self.levels).mul_(delta.sign()).add_(self.levels)
        return {"norm": norm.reshape(1), "levels": (levels.long(), (2 * self.levels).bit_length())}

    def unpack(self, trainer: TrainerLike, pl_module: LightningModule, client: Client, packed: Any) -> Tensor:
        sent = self.scratch("sent", trainer.weights).copy_(packed["levels"]).sub_(self.levels)
        return sent.mul_(packed["norm"].to(sent) / self.levels)
