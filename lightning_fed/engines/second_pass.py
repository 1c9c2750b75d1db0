"""A second pass over the batch of a local step, at another point."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fed.client_algorithms.losses import ClientLosses
from lightning_fed.core.seeding import kept_streams
from lightning_fed.core.user_code import loss_of
from lightning_fed.engines.base import TrainingParts
from lightning_fed.engines.trial import without_trace
from lightning_fed.errors import FederatedError, expect

__all__ = ["BatchGradient", "StackedBatchGradient"]


class SecondGradient(ABC):
    """``trainer.gradient_at``: the gradient of the step's batch at other live weights, by the function of the first.

    The second pass finds the random streams and buffers that the first one found, so that at the live weights it gives
    the first gradient again. It goes through ``training_step`` and ``backward``, not through hooks around these, and
    leaves no trace: what it logs is dropped; buffers, attributes, random streams and the first gradient stay. With a
    displacement the gradient is taken at the point less that. Its samples count as gradients, not as trained samples.
    Both gradients are zero where no client's optimizer steps, so that no length counts, and no point moves, there.

    Raises:
        FederatedError: If a step of the run has several gradients of its own already, or is compiled.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self.parts, self.state, self.module = parts, parts.state, parts.module
        self._is_open, self._noted = False, list[Any]()
        options, why = parts.options, f"for {parts.asks_twice}, which takes a second gradient of the batch of each step"
        expect(
            options.accumulate_grad_batches == 1,
            f"Expected `--trainer.accumulate_grad_batches 1` {why}, got {options.accumulate_grad_batches}: choose a "
            "larger `--data.batch_size` instead.",
        )
        expect(
            not isinstance(self.state.optimizer.optimizer, LBFGS),
            f"Expected an optimizer that takes one gradient in a step {why}, got LBFGS: change `--model.optimizer`.",
        )
        expect(
            options.compile_mode is None,
            f"Expected `--trainer.compile false` {why}, got {options.compile_mode}: leave it out.",
        )
        self.state.gradient_at = self

    def within(self, hooks: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Makes of the hooks before a step one that lets them ask."""

        def call(*args: Any) -> None:
            self._is_open = True
            for place in self.state.untrained:
                self.state.vector.grad[..., place] = 0
            try:
                for hook in hooks:
                    hook(*args)
            finally:
                self._is_open, self._noted = False, []  # lets go of the batch

        return [call]

    def __call__(self, point: Tensor, out: Tensor, part: tuple[int, int] | None = None) -> None:
        """Computes the gradient.

        Args:
            point: Live weights, shape (d,), or (m, d) for m clients at once.
            out: Receives the gradients, of the same shape.
            part: (k, n) for the k-th, from 0, of n parts of the batch as equal as can be.
        """
        if not self._is_open:
            raise FederatedError(
                "Expected `trainer.gradient_at` to be called in `on_before_optimizer_step`, got a call where there is "
                "no batch of a local step: move it there."
            )
        if part is not None and not 0 <= part[0] < part[1]:
            raise FederatedError(f"Expected `part` of `trainer.gradient_at` to be (k, n) with 0 ≤ k < n, got {part!r}.")
        with without_trace(self.module, self.state.buffers.parameters, quick=True):
            self._compute(point, out, part)
        for place in self.state.untrained:
            out[..., place] = 0

    @abstractmethod
    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        """Computes it; what is to be put back in the end is taken care of, but for weights and gradients."""

    def take(self, batch: Any, size: int, part: tuple[int, int] | None, dim: int) -> tuple[Any, int]:
        """Takes a part of a batch of a size, whose samples lie along a dimension; returns it and its size."""
        if part is None:
            return batch, size
        start, stop = (size * place // part[1] for place in (part[0], part[0] + 1))
        leaves, spec = tree_flatten(batch)
        cut = [isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == size for leaf in leaves]
        if start == stop or not any(cut):
            raise FederatedError(
                f"Expected batches of at least {part[1]} samples, in tensors, of which {self.parts.asks_twice} takes "
                f"{part[1]} parts, got one of {size}: choose another `--data.batch_size`, or set `--data.drop_last "
                "true`."
            )
        taken = [t.narrow(dim, start, stop - start) if own else t for t, own in zip(leaves, cut, strict=True)]
        return tree_unflatten(taken, spec), stop - start


class BatchGradient(SecondGradient):
    """Notes what the first pass gets, draws and finds, and takes the second by the resident module.

    Args:
        parts: What the engine's halves share.
        forward: The step's ``training_step``, as ``losses`` change it.
        losses: Adds terms to the loss; None if no client algorithm does.
    """

    def __init__(self, parts: TrainingParts, forward: Callable[..., Any], losses: ClientLosses | None) -> None:
        super().__init__(parts)
        self._forward, self._losses = forward, losses

    def note(self, args: tuple[Any, ...]) -> None:
        """Notes what a first pass is about to get."""
        self._noted = [args, kept_streams(), self.state.buffers.live.copy()]

    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        (whole, *rest), put_streams_back, buffers = self._noted
        vector, recorder = self.state.vector, self.state.recorder
        batch, count = self.take(whole, int(recorder.batch_size or 1), part, dim=0)
        self.parts.counts.gradients += count
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
            with torch.enable_grad(), self.state.fabric.autocast():
                loss = loss_of(self._forward(batch, *rest), self.module)
                loss = loss if self._losses is None else self._losses.total(loss, batch, recorder)
            self.module.backward(loss)
        finally:
            recorder.series, recorder.metrics = logged
        vector.copy_gradients(out)
        vector.data.copy_(weights)
        for parameter, gradient in zip(vector.all_parameters, first, strict=True):
            parameter.grad = gradient
        vector.collect_gradients()


class StackedBatchGradient(SecondGradient):
    """Notes the groups of a step's batches, and takes the gradients of all of them again.

    Args:
        parts: What the engine's halves share.
        step: Computes the gradients of a group, as ``StackedStep`` does.
        lanes: Returns the ``Lanes`` of the clients that train now.
    """

    def __init__(self, parts: TrainingParts, step: Callable[..., Any], lanes: Callable[[], Any]) -> None:
        super().__init__(parts)
        self._step, self._lanes, self._vector = step, lanes, parts.state.vector

    def begin(self) -> None:
        """Begins a step, of which nothing is noted yet."""
        self._noted = []

    def note(self, group: Any, buffers: dict[str, Tensor], *more: Any) -> None:
        """Notes a group whose first gradients are about to be taken, with its buffers and what else the step gets."""
        self._noted.append((group, kept_streams(), {name: rows.clone() for name, rows in buffers.items()}, more))

    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        lanes, state = self._lanes(), self.state
        live, stacked = lanes.weights[: lanes.active], state.vector
        state.vector = self._vector  # as in the first pass, not what stands in for it in hooks
        weights, gradients = live.clone(), torch.empty_like(live)
        live[:, : out.shape[-1]].copy_(point)
        for group, put_streams_back, found, more in self._noted:
            batch, count = self.take(group.batch, group.size, part, dim=1)
            self.parts.counts.gradients += count * (group.lanes.stop - group.lanes.start)
            buffers = {name: rows.clone() for name, rows in found.items()}
            put_streams_back()
            points, rows = lanes.gradient_points(group.lanes), gradients[group.lanes]
            self._step(points, buffers, batch, group.batch_idx, count, rows, *more)
        state.vector = stacked
        live.copy_(weights)
        out.copy_(gradients[:, : out.shape[-1]])
