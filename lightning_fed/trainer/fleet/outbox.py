"""What a node sends of a round, in place of stepping a model: its clients' updates as they are, or their sums alone."""

from typing import Any

import torch

from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.updates import Need, ReducedUpdate, Update
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.fleet.logs import rows_of
from lightning_fed.engines.fleet.packets import NAMES, Facts, Tensors, squeezed
from lightning_fed.errors import FederatedError

__all__ = ["Outbox", "SumsBox"]


class SumsBox(RoundReducer):
    """Adds up over the node's clients what the server needs of all, which is all that it sends besides counts."""

    def __init__(self, state: TrainState, needs: Need) -> None:
        super().__init__(state.weights, needs)
        self.state = state

    def reset(self, cohort_size: int) -> None:
        super().reset(cohort_size)
        self.rows, self.kinds, self.tensors = list[Facts](), list[list[Any]](), Tensors()

    def add(self, update: Update, average_buffers: bool) -> None:
        super().add(update, average_buffers)
        self._note(update)

    def _note(self, update: Update, **facts: Any) -> None:
        counts = {"num_steps": update.num_steps, "optimizer_steps": self.state.optimizer_steps}
        counts["bytes_up"] = update.bytes_up + update.numbers_beside * self.state.vector.data.element_size()
        self.rows.append(
            {"id": update.client.id, "optimizer_distance": float(update.optimizer_distance), **counts, **facts}
        )

    def logged(self) -> list[list[float]]:
        """Takes what was logged since the last call: of each name its place in ``kinds``, and three numbers."""
        recorder = self.state.recorder
        if recorder.metrics:
            raise FederatedError(
                f"Expected `training_step` to log numbers over a fleet, got Metric {next(iter(recorder.metrics))!r}, "
                "of which each node has a part: log its value of the batch."
            )
        return rows_of(recorder, self.kinds)

    def close(self, lost: dict[int, str], divergence: DivergenceWatch) -> tuple[Facts, Tensors]:
        """Returns what is sent: the clients that entered, those left out with why, and what was logged."""
        rest = self.logged()
        left_out = [*{client: divergence.failed.get(client) for client in divergence.clients}.items(), *lost.items()]
        facts = {"clients": self.rows, "left_out": left_out, "log": self.kinds, "rest": rest}
        return facts, self.tensors or self.totals()

    def reduce(self, round: int) -> ReducedUpdate:
        return ReducedUpdate(round, tuple(self._clients))


class Outbox(SumsBox):
    """Keeps the update of each client as it is sent."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(state, Need.NOTHING)

    def add(self, update: Update, average_buffers: bool) -> None:
        packed = {
            name: part if isinstance(part, tuple) else (part, 8 * part.element_size())
            for name, part in (update.packed or {}).items()
        }
        nothing = not packed and not update.bytes_up and not update.delta.any()
        held = {} if packed or nothing else {"delta": update.delta}
        held |= {f"packed.{name}": squeezed(*part) for name, part in packed.items()}
        held |= {name: value for name in ("gradient", "loss") if (value := getattr(update, name)) is not None}
        held |= {f"buffer.{name}": value for name, value in update.buffers.items()} if average_buffers else {}
        start: Any = self.state.start_gradients
        same = {"delta": update.delta, "gradient": update.gradient, "row": start.row_of(update.client)}
        sums = {}
        for name, value in update.sums.items():  # what is sent anyway is named instead
            kept = {key: other for key, other in same.items() if other is not None and other.dtype == value.dtype}
            alias = next((key for key, other in kept.items() if torch.equal(value, other)), None)
            sums[name] = [update.factors.get(name, 1.0), name in update.implied, alias]
            held |= {} if alias else {f"sum.{name}": value}
        if logged := self.logged():
            held["log"] = torch.tensor(logged, dtype=torch.float64)
        self.tensors |= {f"{update.client.id}.{name}": value.detach().clone() for name, value in held.items()}
        kinds = {name: [bits, list(value.shape), NAMES[value.dtype]] for name, (value, bits) in packed.items()}
        self._note(update, bytes_up=update.bytes_up, sums=sums, packed=kinds, nothing=nothing)
        self._clients.append(update.client)
