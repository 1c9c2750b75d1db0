"""The second gradients of clients that train at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.seeding import kept_streams
from lightning_fed.engines.second_pass import SecondGradient
from lightning_fed.engines.vectorized.batches import BatchGroup

__all__ = ["StackedBatchGradient"]


class StackedBatchGradient(SecondGradient):
    """Notes the groups of a step's batches, and takes the gradients of all of them again.

    Args:
        engine: See ``SecondGradient``.
    """

    engine: Any  # the vectorized engine, which makes this object and so cannot be imported

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._noted: list[tuple[BatchGroup, Callable[[], None], dict[str, Tensor], Any]] = []

    def note(self, group: BatchGroup, buffers: dict[str, Tensor], *more: Any) -> None:
        """Notes a group whose first gradients are about to be taken, with its buffers and what else the step gets."""
        self._noted.append((group, kept_streams(), {name: rows.clone() for name, rows in buffers.items()}, more))

    def forget(self) -> None:
        """Lets go of the batches."""
        self._noted = []

    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        lanes, state = self.engine.lanes, self.state
        live, stacked = lanes.weights[: lanes.active], state.vector
        state.vector = self.engine.step.vector  # as in the first pass, not what stands in for it in hooks
        weights, gradients = live.clone(), torch.empty_like(live)
        live[:, : out.shape[-1]].copy_(point)
        for group, put_streams_back, found, more in self._noted:
            batch, count = self.take(group.batch, group.size, part, dim=1)
            self.engine.more_samples += count * (group.lanes.stop - group.lanes.start)
            buffers = {name: rows.clone() for name, rows in found.items()}
            put_streams_back()
            points, rows = lanes.gradient_points(group.lanes), gradients[group.lanes]
            self.engine.step(points, buffers, batch, group.batch_idx, count, rows, *more)
        state.vector = stacked
        live.copy_(weights)
        out.copy_(gradients[:, : out.shape[-1]])
