"""The server's side of a fleet that shows it sums over all nodes, and no single update."""

from collections.abc import Iterator
from typing import Any

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client
from lightning_fed.engines.base import FinishedClient, TrainingParts
from lightning_fed.engines.fleet.census import Fleet
from lightning_fed.engines.fleet.logs import kinds_of, logged_of
from lightning_fed.engines.fleet.packets import Facts, Tensors, unpack
from lightning_fed.engines.fleet.remote import RemoteTrainer
from lightning_fed.engines.fleet.replies import Reply
from lightning_fed.errors import expect

__all__ = ["SumsTrainer"]


class SumsTrainer(RemoteTrainer):
    """Gets the sum over all nodes, by the name "", and of each node counts and what its clients logged together.

    What is wrong with one reply cannot be taken out of the sum: then all clients of the round are left out.
    """

    def __init__(self, parts: TrainingParts, fleet: Fleet, reducer: RoundReducer) -> None:
        self.needs = reducer.needs.value
        averages = parts.aggregator.buffers == "average" and parts.state.buffers.num_bytes
        expect(
            not averages,
            "Expected `--aggregator.buffers local` or keep over a fleet that shows sums alone, as counters in buffers "
            "are no sums, got average.",
        )
        super().__init__(parts, fleet, reducer)

    def _entered(self, shares: dict[str, list[Client]], replies: dict[str, Reply]) -> Iterator[FinishedClient]:
        here = {node: reply[0] for node, reply in replies.items() if not isinstance(reply, Exception)}
        for node in shares.keys() - here.keys():
            self._leave_out(node, shares[node], replies[node])
        try:
            totals = self._totals() if here else {}
            entered = [one for node, facts in here.items() for one in self._counted(shares[node], facts)]
            logged = [logged_of(kinds_of(facts), facts["rest"]) for facts in here.values()]
            left_out = {node: dict(facts["left_out"]) for node, facts in here.items()}
            for facts in here.values():
                self._count(facts)
        except Exception as error:  # of a node that is broken or hostile, or in the sum
            for node in here:
                self._leave_out(node, shares[node], error)
            return
        for series in logged:
            self.recorder.merge(series)
        for node, ids in left_out.items():
            self._note_left_out(node, shares[node], ids)
        entered.sort(key=lambda one: one[0].id)
        for client, _, said in entered:
            self._note(client, bool(said["keeps"]))
            self.parts.counts.max_steps = max(self.parts.counts.max_steps, said["num_steps"], said["optimizer_steps"])
            self.parts.counts.bytes_up += said["bytes_up"]
        if entered:
            weigh = self.parts.aggregator.client_weight
            self.reducer.take([(client, weigh(client), distance) for client, distance, _ in entered], totals)
        yield from ()

    def _totals(self) -> Tensors:
        data: Any = self.replies.get("", b"")
        totals, like = unpack(data)[1], self.state.weights
        missing = self.reducer.totals().keys() - totals.keys()
        fits = [name.startswith("sum.") or value.shape == like.shape for name, value in totals.items()]
        finite = all(value.isfinite().all() for value in totals.values())
        expect(not missing and all(fits) and finite, "Expected finite sums of the model's shape, got others.")
        return {name: value.to(like.device) for name, value in totals.items()}

    def _counted(self, own: list[Client], facts: Facts) -> list[tuple[Client, float, Facts]]:
        """Returns a node's clients that are in the sum, with their distance."""
        asked, found = {client.id: client for client in own}, []
        for said in facts["clients"]:
            client, distance = asked.pop(said["id"]), float(said["optimizer_distance"])
            counts = [said[name] for name in ("num_steps", "optimizer_steps", "bytes_up")]
            sound = all(type(count) is int and 0 <= count < 1 << 24 for count in counts) and 0 < distance < float("inf")
            expect(sound, f"Expected counts of client {client.id}, got {str(said)[:200]}.")
            found.append((client, distance, said))
        return found
