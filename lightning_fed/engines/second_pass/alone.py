"""The second gradient of a client that trains alone."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.seeding import kept_streams
from lightning_fed.engines.base import Engine
from lightning_fed.engines.local_step import LocalStep, loss_of
from lightning_fed.engines.second_pass.base import SecondGradient

__all__ = ["BatchGradient"]


class BatchGradient(SecondGradient):
    """Notes what the first pass gets, draws and finds, and takes the second by the resident module.

    Args:
        engine: See ``SecondGradient``.
        step: The local step, whose ``training_step`` it listens to.
    """

    def __init__(self, engine: Engine, step: LocalStep) -> None:
        super().__init__(engine)
        self._step, self._forward, step.training_step = step, step.training_step, self._first_pass
        step.before_step = self.within(step.before_step)
        self._noted: tuple[Any, ...] = ()

    def _first_pass(self, *args: Any) -> Any:
        self._noted = args, kept_streams(), self.state.buffers.live.copy()
        return self._forward(*args)

    def forget(self) -> None:
        """Lets go of the batch."""
        self._noted = ()

    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        (whole, *rest), put_streams_back, buffers = self._noted
        vector, recorder = self.state.vector, self.state.recorder
        batch, count = self.take(whole, int(recorder.batch_size or 1), part, dim=0)
        self.engine.more_samples += count
        vector.collect_gradients()
        first = [p.grad for p in vector.all_parameters]  # views of the flat one, which stays
        weights, logged = vector.data.clone(), (recorder.series, recorder.metrics)
        vector.data.copy_(point)
        if self.state.displacement is not None:
            vector.data.sub_(self.state.displacement)
        self.state.buffers.live.load(buffers)
        recorder.series, recorder.metrics = {}, {}
        vector.drop_gradients()
        put_streams_back()
        try:
            self._backward(batch, *rest)
        finally:
            recorder.series, recorder.metrics = logged
        vector.copy_gradients(out)
        vector.data.copy_(weights)
        for parameter, gradient in zip(vector.all_parameters, first, strict=True):
            parameter.grad = gradient
        vector.collect_gradients()

    def _backward(self, batch: Any, *rest: Any) -> None:
        """Leaves the gradient at the live weights where backward passes do."""
        changes = self._step.client_losses
        forward = self._forward if changes is None else partial(changes.step, self._forward)
        with torch.enable_grad(), self.state.fabric.autocast():
            loss = loss_of(forward(batch, *rest), self.module)
            loss = loss if changes is None else changes.total(loss, batch, self.state.recorder)
        self.module.backward(loss)
