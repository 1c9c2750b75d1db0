"""What a node sends of a round: its clients' updates as they leave them, in place of sums."""

from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.updates import Need, ReducedUpdate, Update
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.fleet.packets import Facts, Tensors, name_of, squeezed
from lightning_fed.errors import FederatedError

__all__ = ["Outbox"]


class Outbox(RoundReducer):
    """Takes updates as the reducer of an engine does, and makes packets of them."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(state.weights, Need.NOTHING)
        self.state = state

    def reset(self, cohort_size: int) -> None:
        super().reset(cohort_size)
        self.rows, self.tensors, self.kinds = list[Facts](), Tensors(), list[list[Any]]()

    def add(self, update: Update, average_buffers: bool) -> None:
        at, held = f"{update.client.id}.", Tensors()
        packed = {
            name: part if isinstance(part, tuple) else (part, 8 * part.element_size())
            for name, part in (update.packed or {}).items()
        }
        nothing = not packed and not update.bytes_up and not update.delta.any()
        if not (packed or nothing):
            held["delta"] = update.delta
        held |= {f"packed.{name}": squeezed(*part) for name, part in packed.items()}
        held |= {name: value for name in ("gradient", "loss") if (value := getattr(update, name)) is not None}
        held |= {f"buffer.{name}": value for name, value in update.buffers.items()} if average_buffers else {}
        start: Any = self.state.start_gradients
        same = {"delta": update.delta, "gradient": update.gradient, "row": start.row_of(update.client)}
        sums = {}
        for name, value in update.sums.items():
            alias = next((key for key, other in same.items() if other is not None and _equal(value, other)), None)
            sums[name] = [update.factors.get(name, 1.0), name in update.implied, alias]
            held |= {} if alias else {f"sum.{name}": value}
        self.tensors |= {at + name: value.detach().clone() for name, value in held.items()}
        self.rows.append({
            "id": update.client.id, "num_steps": update.num_steps, "bytes_up": update.bytes_up, "sums": sums,
            "optimizer_steps": self.state.optimizer_steps, "optimizer_distance": float(update.optimizer_distance),
            "packed": {name: [bits, list(v.shape), name_of(v.dtype)] for name, (v, bits) in packed.items()},
            "nothing": nothing,
        })  # fmt: skip
        self._log(at + "log")
        self._clients.append(update.client)

    def _log(self, name: str) -> None:
        """Takes what was logged since the last client."""
        recorder = self.state.recorder
        if recorder.metrics:
            raise FederatedError(
                f"Expected `training_step` to log numbers over a fleet, got the Metric {next(iter(recorder.metrics))!r}, "
                "of which each node has a part: log its value of the batch."
            )
        recorder.read()
        numbers, recorder.series = recorder.series, {}
        rows = [
            [self._place(key, value), value.total, value.weight, value.last]
            for key, value in numbers.items()
            if value.total is not None
        ]
        if rows:
            self.tensors[name] = torch.tensor(rows, dtype=torch.float64)

    def _place(self, key: str, value: LoggedValue) -> int:
        kind = [key, list(vars(value.options).values()), value.reduction, value.is_default]
        self.kinds += [] if kind in self.kinds else [kind]
        return self.kinds.index(kind)

    def close(self, lost: dict[int, str], divergence: DivergenceWatch) -> tuple[Facts, Tensors]:
        """Returns what is sent: the clients that entered, those left out with why, and what was logged."""
        self._log("rest.log")
        left_out = {str(client): divergence.failed.get(client) for client in divergence.clients}
        left_out |= {str(client): why for client, why in lost.items()}
        return {"clients": self.rows, "left_out": left_out, "log": self.kinds}, self.tensors

    def reduce(self, round: int) -> ReducedUpdate:
        return ReducedUpdate(round, tuple(self._clients))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
