"""The gradients of many clients at once: ``training_step`` under ``torch.func.vmap``, one flat vector for each."""

import dis
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.user_code import accepts
from lightning_fed.engines.local_step import loss_of
from lightning_fed.engines.vectorized.refusals import MANY_CLIENTS, CannotStack, of_one_client

__all__ = ["StackedStep"]


class StackedStep:
    """Computes ∇ of the loss of n clients on a batch of each, at n weight vectors.

    What the module draws from the global stream differs from client to client.

    Args:
        state: What ``fit`` works on; of the module's own parameters only frozen ones are used, and no buffers.
        unasked: Whether nobody asked for many clients at once: a step that prints or uses the trainer is refused then.

    Attributes:
        reads_batch_idx: Whether the training step may depend on the batch's number within its epoch.
        losses: The clients' losses in the last call, shape (n,).
    """

    def __init__(self, state: TrainState, unasked: bool) -> None:
        knowing = [part for part in state.module.modules() if vars(part).get("_trainer") is not None]
        self.refusing: Any = partial(of_one_client, knowing) if unasked else nullcontext
        self.state, self.module, self.vector = state, state.module, state.vector
        self.precision: Precision = state.fabric.strategy.precision
        self.takes_batch_idx = accepts(self.module.training_step, "batch_idx", 2)
        self.reads_batch_idx = self.takes_batch_idx and _reads(self.module.training_step, "batch_idx")
        self.parameter_places = _parameter_places(self.module, self.vector.parameters)
        self.buffer_places = state.buffers.live.places
        self.further_places = state.buffers.live.further
        self.sizes = [p.numel() for p in self.vector.parameters]
        stepped = {id(p) for p in state.optimizer.parameters}
        named = zip(self.vector.names, self.vector.parameters, strict=True)
        self.trained = [name for name, parameter in named if id(parameter) in stepped]
        self.recorder = MetricRecorder()
        self.touched: set[str] = set()
        self.losses = self.vector.data.new_empty(0)
        gradients = grad_and_value(self._loss, has_aux=True)
        self._gradients = vmap(gradients, in_dims=(0, 0, 0, None), randomness="different")

    def __call__(
        self, weights: Tensor, buffers: dict[str, Tensor], batch: Any, batch_idx: int, size: int, out: Tensor
    ) -> tuple[dict[str, LoggedValue], dict[str, Tensor]]:
        """Computes gradients.

        Args:
            weights: A weight vector of each client, shape (n, d).
            buffers: Their buffers by name, shape (n, ...); changed in place as training changes them.
            batch: A batch of each; tensors of shape (n, b, ...).
            batch_idx: Number of the batch within its epoch.
            size: b.
            out: Receives the gradients, shape (n, d).

        Returns:
            What was logged by name, and its totals for each client, shape (n,).

        Raises:
            CannotStack: If a parameter that is trained has no gradient.
        """
        self.recorder = MetricRecorder()
        self.recorder.batch_size = size
        self.touched.clear()
        with recording(self.module, self.recorder), self._restoring():
            # By parameter: as parts of one vector their gradients would be joined, a matrix larger than the cache.
            pieces = tuple(self._pieces(weights))
            gradients, (self.losses, (totals, replaced)) = self._gradients(pieces, buffers, batch, batch_idx)
        if self.losses.requires_grad:  # of the resident parameters: autograd knows no client's outside of vmap
            raise CannotStack(f"{type(self.module).__name__} reaches its parameters in another way than as attributes")
        for place, gradient in zip(self._pieces(out), gradients, strict=True):
            place.copy_(gradient)
        for name, value in replaced.items():  # by assignment; what is changed in place is in the rows already
            buffers[name].copy_(value)
        if len(self.touched) < len(self.sizes):
            missing = next(name for name in self.vector.names if name not in self.touched)
            raise CannotStack(
                f"its parameter `{missing}` gets no gradient, which vmap cannot tell from a gradient of zero"
            )
        for series in self.recorder.series.values():  # nothing of vmap's own tensors may leave it
            series.total, series.last = None, 0.0
        return self.recorder.series, totals

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        """Views rows of the length of the flat vector as parameters, each of shape (n, ...)."""
        columns = torch.split(rows, self.sizes, dim=1)
        return [_shaped(part, like) for part, like in zip(columns, self.vector.parameters, strict=True)]

    def _loss(
        self, pieces: tuple[Tensor, ...], buffers: dict[str, Tensor], batch: Any, batch_idx: int
    ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The loss of one client, the totals of what it logged and the buffers that it replaced."""
        for name, places, value in zip(self.vector.names, self.parameter_places, pieces, strict=True):
            value.register_hook(_note(self.touched, name))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for owner, key in places:
                owner._parameters[key] = value  # type: ignore[assignment]  # stands in for a parameter
        for name, value in buffers.items():
            for owner, key in (self.buffer_places[name], *self.further_places.get(name, ())):
                owner._buffers[key] = value
        with self.precision.forward_context():  # the backward pass is none of autocast's
            output = self.module.training_step(*((batch, batch_idx) if self.takes_batch_idx else (batch,)))
        if output is None:
            raise CannotStack("its `training_step` returns None for a batch, which many clients at once cannot skip")
        loss = loss_of(output, self.module)
        self.recorder.log_default("train/loss", loss)
        if self.recorder.metrics:
            raise CannotStack("it logs torchmetrics objects in `training_step`, whose state vmap cannot keep apart")
        totals = {key: torch.as_tensor(series.total) for key, series in self.recorder.series.items()}
        return loss.reshape(()), (totals, self._replaced(buffers))

    def _replaced(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        live = {name: owner._buffers[key] for name, (owner, key) in self.buffer_places.items()}
        return {name: b.detach() for name, b in live.items() if b is not None and b is not buffers[name]}

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Gives the module its own parameters and buffers back, and the state no client."""
        self.state.client = MANY_CLIENTS
        kept = {name: owner._buffers[key] for name, (owner, key) in self.buffer_places.items()}
        try:
            with self.refusing():
                yield
        finally:
            self.state.client = None
            for places, parameter in zip(self.parameter_places, self.vector.parameters, strict=True):
                for owner, key in places:
                    owner._parameters[key] = parameter
            for name, value in kept.items():
                for owner, key in (self.buffer_places[name], *self.further_places.get(name, ())):
                    owner._buffers[key] = value


def _parameter_places(module: nn.Module, parameters: tuple[Tensor, ...]) -> list[list[tuple[nn.Module, str]]]:
    """Finds where each parameter hangs in the module: tied ones hang in several places."""
    return [
        [(owner, key) for owner in module.modules() for key, value in owner._parameters.items() if value is parameter]
        for parameter in parameters
    ]


def _note(touched: set[str], name: str) -> Any:
    return lambda gradient: touched.add(name)


def _shaped(columns: Tensor, like: Tensor) -> Tensor:
    """Views columns of flat vectors, shape (n, k), with a parameter's shape and memory layout, shape (n, ...)."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True) if not like.is_contiguous() else range(like.ndim)
    inverse = sorted(range(like.ndim), key=list(order).__getitem__)
    viewed = columns.view(len(columns), *(like.shape[dim] for dim in order))
    return viewed.permute(0, *(dim + 1 for dim in inverse))


def _reads(function: Any, name: str) -> bool:
    """Says whether a function's own code reads an argument; True where its code cannot be seen."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or name not in code.co_varnames:
        return True
    if name in code.co_cellvars:
        return True
    return any(name in (i.argval if isinstance(i.argval, tuple) else (i.argval,)) for i in dis.get_instructions(code))
