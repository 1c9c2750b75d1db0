"""The server's side of a fleet that shows it sums over all nodes, and no single update."""

from collections.abc import Iterator

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client
from lightning_fed.engines.base import FinishedClient, TrainingParts
from lightning_fed.engines.fleet.census import Fleet
from lightning_fed.engines.fleet.packets import Facts, Tensors, unpack
from lightning_fed.engines.fleet.remote import RemoteTrainer, Reply
from lightning_fed.engines.fleet.replies import ids_of, kinds_of, logged_of
from lightning_fed.errors import FederatedError, expect

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
        entered = list[tuple[Client, float, float]]()
        here = {
            node: (own, reply) for node, own in shares.items() if not isinstance(reply := replies[node], FederatedError)
        }
        for node in shares.keys() - here.keys():
            self._leave_out(node, shares[node], replies[node])
        try:
            totals = self._totals() if here else {}
            for node, (own, (facts, _)) in here.items():
                entered += self._counted(node, own, facts)
        except Exception as error:  # of a node that is broken or hostile, or in the sum
            for node, (own, _) in here.items():
                self._leave_out(node, own, error)
            return
        if entered:
            self.reducer.take(sorted(entered, key=lambda one: one[0].id), totals)
        yield from ()

    def _totals(self) -> Tensors:
        data = self.replies.get("", b"")
        totals = unpack(data.encode() if isinstance(data, str) else data)[1]
        for name, value in totals.items():
            fits = value.shape == self.state.weights.shape or name.startswith("sum.")
            expect(
                fits and value.isfinite().all(), f"Expected a finite sum {name!r} of the model's shape, got another."
            )
        return {name: value.to(self.state.weights.device) for name, value in totals.items()}

    def _counted(self, node: str, own: list[Client], facts: Facts) -> list[tuple[Client, float, float]]:
        """Returns a node's clients that are in the sum, with weight and distance."""
        asked, found = {client.id: client for client in own}, []
        logged = logged_of(kinds_of(facts), facts["rest"])
        for said in facts["clients"]:
            client = asked.pop(said["id"])
            found.append((client, self.parts.aggregator.client_weight(client), float(said["optimizer_distance"])))
            self.parts.counts.max_steps = max(self.parts.counts.max_steps, said["num_steps"], said["optimizer_steps"])
            self.parts.counts.bytes_up += said["bytes_up"]
            self._note(client, bool(said["keeps"]))
        self._count(facts)
        self._note_left_out(node, list(asked.values()), ids_of(facts["left_out"]))
        self.recorder.merge(logged)
        return found
