"""The server's side of a fleet: clients that train at nodes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client
from lightning_fed.distributed.consistency import checksum
from lightning_fed.engines.base import ClientTrainer, Engine, FinishedClient, TrainingParts
from lightning_fed.engines.fleet.census import Fleet
from lightning_fed.engines.fleet.evaluation import AtNodes, sets_of
from lightning_fed.engines.fleet.logs import kinds_of, logged_of, unlike_most
from lightning_fed.engines.fleet.packets import Facts, Tensors, body_of, pack, planted
from lightning_fed.engines.fleet.replies import Replied, Reply, ReplyReader, opened, taken
from lightning_fed.engines.fleet.terms import methods_sent, runs_at_nodes, terms_of
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.errors import FederatedError, expect

__all__ = ["RemoteTrainer"]

# A reply may be so many times as large as the models of its clients, and has room for this besides.
_MOST_VECTORS, _ROOM = 16, 1 << 20


class RemoteTrainer(ClientTrainer):
    """Has clients trained at the nodes of a fleet, and hands over what these send.

    A reply that is to another question, about other clients, of other names, shapes or more bytes than asked for, or
    not finite is refused: its clients are left out of the round, named and counted.

    Attributes:
        needs: What nodes add up over their clients, as a number, where nobody sees a single update; else None.
        told: The nodes that know of the run.
        sets: The samples that each node holds out, by val or test and the set's name.
    """

    needs: int | None = None

    def __init__(self, parts: TrainingParts, fleet: Fleet, reducer: RoundReducer) -> None:
        super().__init__(parts)
        self.reducer, self._reads, self.run = reducer, False, token_hex(8)
        self.fleet, self.trainer, self.reader = fleet, parts.hooks.trainer, ReplyReader(parts)
        self.census = self.trainer.datamodule.census
        start = self.start_gradients
        start.full_gradient = _AtNodes(self, start.full_gradient)
        if start.own_losses is not None:
            start.own_losses = _AtNodes(self, start.own_losses)
        if self.state.first_weights is None:
            self.state.first_weights = checksum(self.state.weights)
        self.methods, self.told = methods_sent(parts.hooks.callbacks), set[str]()
        self.sets = dict[str, dict[str, dict[str, int]]]()
        places: Any = (*self.trainer.val_loaders.values(), *self.trainer.test_loaders.values())
        self.evaluated: list[AtNodes] = [place for place in places if isinstance(place, AtNodes)]
        self.begin_round()
        for node, why in self._begin(set(self.census.homes.values())).items():
            raise FederatedError(f"Node {node} cannot take part in the run: {why}")
        for place in self.evaluated:
            place.begin(self)

    def begin_round(self) -> None:
        """Takes what clients are sent of methods as it is between two rounds, as a checkpoint has it."""
        self.states = Tensors()
        self.said = planted({cb.state_key: cb.state_dict() for cb in self.methods}, self.states, "state")
        self.facts: dict[str, float] = {"fleet/bytes_down": 0.0, "fleet/bytes_up": 0.0}

    def joined(self, engine: Engine) -> Engine:
        """Returns the engine that adds up what nodes send: hooks of clients ran there, and what they keep is there."""
        hooks: list[Any] = self.hooks.bound("on_client_entered")
        engine.client_entered_hooks = [hook for hook in hooks if not runs_at_nodes(hook.func.__self__)]
        self.state.client_states.elsewhere = lambda client: not self._reads
        return engine

    def ask(self, kind: str, orders: Mapping[str, Facts], tensors: Tensors, room: int = _ROOM) -> dict[str, Reply]:
        """Sends each node a packet, which differ in their facts alone, and opens the replies."""
        body, found = body_of(tensors), dict[str, Reply]()
        common = {"kind": kind, "round": self.state.round, "run": self.run}
        tickets = {node: token_hex(8) for node in orders}
        packets = {node: pack({**facts, **common, "ticket": tickets[node]}, body) for node, facts in orders.items()}
        replies = self.replies = self.fleet.ask(packets) if packets else {}
        one = _MOST_VECTORS * (8 * self.state.vector.all_numel + self.state.buffers.num_bytes)
        for node, facts in orders.items():
            data = replies.get(node, "it has not replied in time")
            self.facts["fleet/bytes_down"] += len(packets[node])
            self.facts["fleet/bytes_up"] += len(data) if isinstance(data, bytes) else 0
            try:
                if isinstance(data, str):
                    raise FederatedError(data)
                found[node] = opened(data, tickets[node], room + one * len(facts.get("clients", ())))
            except FederatedError as error:
                found[node] = error
                self.told.discard(node)
        return found

    def _begin(self, nodes: set[str]) -> dict[str, Exception]:
        """Tells nodes of the run, for which they then get ready; returns those that cannot take part, with why."""
        census = self.census
        facts: Facts = {"sizes": census.sizes.tolist(), "held_out": census.held_out.tolist()}
        facts |= {"num_classes": self.trainer.datamodule.num_classes, "needs": self.needs}
        facts |= {"terms": terms_of(self.trainer), "evaluated": [place.kind for place in self.evaluated]}
        facts["first_weights"] = self.state.first_weights
        replies, refused = self.ask("begin", dict.fromkeys(sorted(nodes), facts), {"initial": self.state.initial}), {}
        for node, reply in replies.items():
            try:
                self.sets[node] = sets_of(taken(reply)[0])
                self.told.add(node)
            except Exception as error:  # as in `_take`
                refused[node] = error
        return refused

    def find(self, clients: Iterable[int]) -> dict[str, Exception]:
        """Tells the nodes of clients of the run; returns those that do not take part now, with why."""
        homes, refused = self.census.homes, dict[str, Exception]()
        if not {homes[client] for client in clients} <= self.told:  # somebody is away: who is there now?
            there = self.fleet.hello()
            self.census.look_again(there)
            refused = self._begin({home for client in clients if (home := homes[client]) in there} - self.told)
        away = {homes[client] for client in clients} - self.told
        return {node: refused.get(node, FederatedError("it is not there")) for node in away}

    def _shares(self, clients: Sequence[Client]) -> dict[str, list[Client]]:
        """Divides clients over their nodes; one whose node is not there is left out."""
        away, shares = self.find([client.id for client in clients]), dict[str, list[Client]]()
        for client in clients:
            home = self.census.homes[client.id]
            if home in away:
                self._leave_out(home, [client], away[home])
            else:
                shares.setdefault(home, []).append(client)
        return shares

    def _leave_out(self, node: str, clients: Sequence[Client], why: object) -> None:
        why = repr(why) if isinstance(why, Exception) and not isinstance(why, FederatedError) else why
        for client in clients:
            if client.id not in self.divergence.clients:
                self.divergence.leave_out(client, FederatedError(f"node {node}: {why}"))

    def model(self) -> Tensors:
        """Returns the global model."""
        return {"weights": self.state.weights} | {f"buffer.{n}": b for n, b in self.state.buffers.values.items()}

    def _common(self) -> tuple[Facts, Tensors]:
        """Returns what every client starts from."""
        state, tensors = self.state, self.model()
        facts: Facts = {"optimizer": planted(state.optimizer.state_dict(), tensors, "optimizer"), "states": self.said}
        return facts | {"epochs": state.epochs, "steps": state.steps_before_round}, tensors | self.states

    def _orders(self, own: list[Client]) -> Facts:
        """Says which clients a node trains, and from which of its records of each the run goes on."""
        saves = self.trainer.checkpoint_callback  # may be Lightning's own
        every = max(1, getattr(saves, "every_n_rounds", getattr(saves, "_every_n_epochs", 1)))
        rounds, since = list[int](), torch.zeros(1, dtype=torch.float64)
        self._reads = True
        for client in own:
            self.state.client_states.recall("fleet", client.id, since)
            rounds.append(int(since))
        self._reads = False
        saved = max(0, (self.state.round - 1) // every * every)  # a server that is resumed goes back no further
        return {"clients": [client.id for client in own], "since": rounds, "saved": saved}

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        facts, tensors = self._common()
        cohort, start = self.parts.cohort, self.start_gradients
        facts |= {"cohort": [[c.id, c.num_samples, c.steps, c.lr_factor] for c in cohort.clients]}
        facts |= {"skipped": list(cohort.skipped), "exchange": None}
        if start.exchanged:
            facts["exchange"], tensors["mean"] = [client.id for client in start.clients], start.mean
        shares = self._shares(clients)
        replies = self.ask("train", {node: facts | self._orders(own) for node, own in shares.items()}, tensors)
        yield from self._entered(shares, replies)

    def _entered(self, shares: dict[str, list[Client]], replies: dict[str, Reply]) -> Iterator[FinishedClient]:
        """Hands over, in ascending order of id, the clients that enter the round."""
        sent = [one for node, own in shares.items() for one in self._take(node, own, replies[node])]
        updates = [one.finished.update for one in sent]
        unlike = unlike_most({u.client.id: {n: (v.shape, v.dtype) for n, v in u.sums.items()} for u in updates})
        for one in sorted(sent, key=lambda one: one.finished.update.client.id):
            client = one.finished.update.client
            if client.id in unlike:
                why = f"client {client.id} sends {unlike[client.id]!r} of another shape than most"
                self._leave_out(self.census.homes[client.id], [client], why)
                continue
            for series in one.finished.logged:
                self.recorder.merge(series)
            self.state.optimizer_steps = one.optimizer_steps
            self._note(client, one.keeps)
            yield one.finished
        self.state.optimizer_steps = 0

    def _note(self, client: Client, keeps: bool) -> None:
        """Remembers, in checkpoints too, after which round a client has kept what the run goes on from."""
        if keeps:
            self.state.client_states.store("fleet", client.id, torch.tensor([float(client.round)]).double())

    def _take(self, node: str, own: list[Client], reply: Reply) -> list[Replied]:
        """Returns what a node's clients send; leaves out all of them if anything is wrong with it."""
        try:
            facts, tensors = taken(reply)
            found, left_out = self.reader.read(own, facts, tensors)
            rest = logged_of(kinds_of(facts), facts["rest"])
            self._count(facts)
        except Exception as error:  # whatever is sent by a node that is broken, of another version or hostile
            self._leave_out(node, own, error)
            return []
        self.recorder.merge(rest)
        self._note_left_out(node, own, left_out)
        return found

    def _count(self, facts: Facts) -> None:
        """Adds what a node's training took."""
        for name in ("samples", "gradients"):
            expect(type(facts[name]) is int and 0 <= facts[name] < 1 << 48, f"Expected a count of {name}, got another.")
        self.parts.counts.samples += facts["samples"]
        self.parts.counts.gradients += facts["gradients"]

    def _note_left_out(self, node: str, own: Sequence[Client], left_out: dict[int, Any]) -> None:
        """Leaves out those that a node has left out: they have diverged, if it says nothing else."""
        for client in own:
            if client.id in left_out and left_out[client.id] is None:
                self.divergence.leave_out(client)
            elif client.id in left_out:
                self._leave_out(node, [client], str(left_out[client.id])[:300])

    def take_at_start(self, clients: Sequence[Client], out: Tensor | None, held_out: bool, losses: Tensor) -> Tensor:
        """Fills gradients at w of clients, shape (n, d), and their losses, shape (n,), with what nodes compute.

        Those of a client whose node does not send them stay NaN, and the client is left out.
        """
        facts, tensors = self._common()
        shares, place = self._shares(clients), {client.id: at for at, client in enumerate(clients)}
        facts |= {"rows": out is not None, "held_out": held_out}
        replies = self.ask("gradients", {node: facts | self._orders(own) for node, own in shares.items()}, tensors)
        for filled in [losses] if out is None else [losses, out]:
            filled.fill_(torch.nan)
        for node, own in shares.items():
            try:
                said, sent = taken(replies[node])
                left_out, asked = dict(said["left_out"]), {client.id for client in own}
                expect({*said["clients"]} == asked - left_out.keys(), "Expected clients that were asked for.")
                at = torch.tensor([place[client] for client in said["clients"]], device=losses.device)
                for name, filled in [("losses", losses)] if out is None else [("losses", losses), ("rows", out)]:
                    filled.index_copy_(0, at, sent[name].to(filled))
                self._note_left_out(node, own, left_out)
            except Exception as error:  # as in `_take`
                if out is None:
                    raise FederatedError(
                        f"Expected losses of all clients of the round, got none: {node}, {error}"
                    ) from error
                self._leave_out(node, own, error)
        return losses


class _AtNodes(FullGradient):
    """Gradients and losses at w over the data of clients at nodes, which count as what they cost ever."""

    def __init__(self, remote: RemoteTrainer, here: FullGradient) -> None:
        vars(self).update(vars(here))
        self.remote = remote

    def compute_at_start(self, clients: tuple[Client, ...], out: Tensor | None) -> Tensor:
        losses = torch.empty(len(clients), dtype=self.wide, device=self.state.weights.device)
        return self.remote.take_at_start(clients, out, self.held_out is not None, losses)
