"""Reads what nodes send of their clients, and believes nothing of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.callbacks.payload import Payload, payloads_of
from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.updates import Client, Need, Update
from lightning_fed.engines.base import FinishedClient, TrainingParts
from lightning_fed.engines.client_batches import local_steps
from lightning_fed.engines.fleet.logs import kinds_of, logged_of
from lightning_fed.engines.fleet.packets import Facts, Tensors, unpack, widened
from lightning_fed.errors import FederatedError, expect

__all__ = ["Replied", "Reply", "ReplyReader", "opened", "taken"]

# Steps of optimizers in one local step, where the module steps them by itself.
_MOST_OPTIMIZERS = 1000
# What a node has replied, or why that is nothing.
Reply: TypeAlias = tuple[Facts, Tensors] | Exception


@dataclass
class Replied:
    """A client's update, steps of optimizers that the module steps by itself, and whether the client keeps anything."""

    finished: FinishedClient
    optimizer_steps: int
    keeps: bool


def opened(data: bytes, ticket: str, most: int) -> tuple[Facts, Tensors]:
    """Opens the reply to a question that had this ticket.

    Raises:
        FederatedError: If it is none, has more than ``most`` bytes, answers another question or says what went wrong.
    """
    expect(len(data) <= most, f"Expected a reply of at most {most:,} bytes, got {len(data):,}.")
    try:
        facts, tensors = unpack(data)
    except Exception as error:  # whatever a foreign packet raises
        raise FederatedError(f"Expected a packet as a reply, got none ({type(error).__name__}: {error}).") from error
    expect(facts.get("ticket") == ticket, "Expected a reply to the question, got one to another.")
    expect("error" not in facts, str(facts.get("error"))[:500])
    return facts, tensors


def taken(reply: Reply) -> tuple[Facts, Tensors]:
    """Returns what a node has replied, or raises why that is nothing."""
    if isinstance(reply, Exception):
        raise reply
    return reply


class ReplyReader:
    """Makes updates of replies; anything that was not asked for, or is of another shape, is refused."""

    def __init__(self, parts: TrainingParts) -> None:
        self.parts, self.state, self.start_gradients = parts, parts.state, parts.start_gradients
        self._wide = self.start_gradients.full_gradient.wide
        self.codes: Payload | None = next((p for p in payloads_of(parts.hooks.callbacks) if p.packs), None)

    def read(self, own: Sequence[Client], facts: Facts, tensors: Tensors) -> tuple[list[Replied], dict[int, Any]]:
        """Returns what those of a node's clients send that entered, and those that it left out, with why.

        Raises:
            Exception: Of any kind, if a node is broken, of another version or hostile.
        """
        asked = {client.id: client for client in own}
        left_out = dict(facts["left_out"])
        ids = [*left_out, *(said["id"] for said in facts["clients"])]
        expect({*ids} <= asked.keys() and len({*ids}) == len(ids), "Expected clients that were asked for, each once.")
        kinds = kinds_of(facts)
        found = []
        for said in facts["clients"]:
            at = f"{said['id']}."
            mine = {name[len(at) :]: tensors.pop(name) for name in [*tensors] if name.startswith(at)}
            logged = logged_of(kinds, mine.pop("log", torch.empty(0)).tolist())
            found.append(self._replied(asked[said["id"]], said, mine, logged))
            expect(not mine, f"Expected nothing else of client {said['id']}, got {next(iter(mine), '')[:100]!r}.")
        expect(not tensors, f"Expected nothing else of a node, got {next(iter(tensors), '')[:100]!r}.")
        return found, left_out

    def _replied(self, client: Client, said: Facts, mine: Tensors, logged: dict[str, LoggedValue]) -> Replied:
        """Takes a client's tensors out of ``mine``."""
        like = self.state.weights
        delta = self._delta(client, said, mine)
        gradient = None if self.parts.gradients.at is None else _finite("gradient", mine.pop("gradient"), like)
        needed = Need.LOSSES in self.parts.aggregator.all_needs
        loss = _finite("loss", mine.pop("loss").reshape(())) if needed or "loss" in mine else None
        loss = None if loss is None else loss.to(like.device, self._wide)
        same = {"delta": delta, "gradient": gradient, "row": self.start_gradients.row_of(client)}
        sums, factors = dict[str, Tensor](), dict[str, float]()
        for name, (factor, _, alias) in said["sums"].items():
            value = same[alias] if alias else _finite(name, mine.pop(f"sum.{name}")).to(like.device)
            expect(value is not None, f"Expected the sum {name!r} to be sent, got none.")
            assert value is not None
            sums[name], factors[name] = value, float(factor)
        buffers = {name[7:]: mine.pop(name).to(like.device) for name in [*mine] if name.startswith("buffer.")}
        self._expect_buffers(buffers)
        distance = float(said["optimizer_distance"])
        counts = [said[name] for name in ("num_steps", "optimizer_steps", "bytes_up")]
        steps = client.steps or int(local_steps(self.state.source, self.parts.options, client.num_samples))
        sound = all(abs(number) < float("inf") for number in (distance, *factors.values())) and distance != 0
        sound &= 0 < counts[0] <= steps and 0 <= counts[1] <= _MOST_OPTIMIZERS * steps and 0 <= counts[2] < 1 << 48
        sound &= all(type(count) is int for count in counts)
        expect(sound, f"Expected finite numbers and counts of client {client.id}, got {str(said)[:200]}.")
        update = Update(
            client, delta, counts[0], buffers, weight=self.parts.aggregator.client_weight(client), gradient=gradient,
            optimizer_distance=distance, loss=loss, bytes_up=counts[2], sums=sums, factors=factors,
            implied={name for name, (_, implied, _) in said["sums"].items() if implied},
        )  # fmt: skip
        finished = FinishedClient(update, self.parts.start, logged=[logged], sent=True)
        return Replied(finished, counts[1], bool(said["keeps"]))

    def _delta(self, client: Client, said: Facts, mine: Tensors) -> Tensor:
        """Returns δ_i as it was sent, from what a payload has packed, or zeros of a client that sends nothing."""
        like, trainer = self.state.weights, self.parts.hooks.trainer
        if said["nothing"]:
            return torch.zeros_like(like)
        if not said["packed"]:
            return _finite("delta", mine.pop("delta"), like)
        expect(self.codes, "Expected an update as it is, got one that was packed.")
        assert self.codes is not None
        parts = {
            name: widened(mine.pop(f"packed.{name}"), *kind).to(like.device) for name, kind in said["packed"].items()
        }
        return _finite("delta", self.codes.unpack(trainer, self.parts.module, client, parts).clone(), like)

    def _expect_buffers(self, buffers: Tensors) -> None:
        """Refuses other buffers than the server's, and numbers that are not finite where those of w are."""
        known = self.state.buffers.of_client() if self.state.buffers.policy == "average" else {}
        kinds, own = ({name: (b.shape, b.dtype) for name, b in each.items()} for each in (buffers, known))
        other = next((name for name in {**kinds, **own} if kinds.get(name) != own.get(name)), "")
        expect(
            not other and all((known[name].isfinite() <= value.isfinite()).all() for name, value in buffers.items()),
            f"Expected the finite buffers that the server has, got others, such as {other[:100]!r}: register what "
            "training moves as a buffer.",
        )


def _finite(name: str, value: Tensor, like: Tensor | None = None) -> Tensor:
    """Refuses a tensor of another shape or dtype, or one that is not finite; returns it on the device of ``like``."""
    fits = like is None or (value.shape == like.shape and value.dtype == like.dtype)
    expect(
        fits and value.is_floating_point() and value.isfinite().all(),
        f"Expected {name!r} to be finite and of the shape asked for, got {tuple(value.shape)} in {value.dtype}.",
    )
    return value if like is None else value.to(like.device)
