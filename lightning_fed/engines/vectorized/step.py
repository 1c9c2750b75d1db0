"""The gradients of many clients, or of the samples of each, at once: ``training_step`` under ``torch.func.vmap``."""

import dis
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import ClientLosses
from lightning_fed.core.devices import is_device_fault, wide_dtype
from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import accepts, loss_of
from lightning_fed.engines.base import TrainingParts
from lightning_fed.engines.trial import agree, random_states
from lightning_fed.engines.vectorized.refusals import MANY_CLIENTS, CannotStack, first_sentence, of_one_client
from lightning_fed.errors import FederatedError

__all__ = ["LaneLog", "SampleGradients", "StackedStep"]


class StackedStep:
    """Computes ∇ of the loss of n clients on a batch of each, at n weight vectors.

    What the module draws from the global stream differs from client to client.

    Args:
        state: What ``fit`` works on; of the module's own parameters only frozen ones are used, and no buffers.
        unasked: Whether the user did not ask for many clients at once: then a step may not print or use the trainer.
        client_losses: Changes the losses of clients whose ``own`` tensors are given; None if no algorithm does.

    Attributes:
        reads_batch_idx: Whether the training step may depend on the batch's number within its epoch.
        losses: The clients' losses in the last call, shape (n,), as ``training_step`` returned them.
    """

    def __init__(self, state: TrainState, unasked: bool, client_losses: ClientLosses | None = None) -> None:
        knowing = [part for part in state.module.modules() if vars(part).get("_trainer") is not None]
        self.refusing: Any = partial(of_one_client, knowing) if unasked else nullcontext
        self.state, self.module, self.vector = state, state.module, state.vector
        self.precision: Precision = state.fabric.strategy.precision
        self.takes_batch_idx = accepts(self.module.training_step, "batch_idx", 2)
        self.reads_batch_idx = self.takes_batch_idx and _reads(self.module.training_step, "batch_idx")
        self.parameter_places = _parameter_places(self.module, self.vector.all_parameters)
        self.buffer_places, self.further_places = state.buffers.live.places, state.buffers.live.further
        # Each one's dimensions in the order of memory, counted from 1.
        strides = [(0, *p.stride()) for p in self.vector.all_parameters]
        self.orders = [sorted(range(1, len(each)), key=each.__getitem__, reverse=True) for each in strides]
        self.starts = [place.start for place in self.vector.all_places().values()]
        self.recorder, self.touched = MetricRecorder(), set[str]()
        self.losses = self.vector.data.new_empty(0)
        self.client_losses = client_losses
        # Names of buffers, what the batch is, its number, and who changes the loss.
        self._call: tuple[tuple[str, ...], TreeSpec, int, ClientLosses | None]
        self._replaced: tuple[str, ...]
        self._gradients = grad_and_value(self._loss, has_aux=True)
        self._stacked = vmap(self._flat_gradients, randomness="different")
        self._stacked_losses = vmap(self._flat_loss, randomness="different")

    def __call__(
        self, weights: Tensor, buffers: dict[str, Tensor], batch: Any, batch_idx: int, size: int, out: Tensor | None,
        own: Any = (),
    ) -> tuple[dict[str, LoggedValue], dict[str, Tensor]]:  # fmt: skip
        """Computes gradients.

        Args:
            weights: A weight vector of each client, shape (n, d).
            buffers: Their buffers by name, shape (n, ...); changed in place as training changes them.
            batch: A batch of each; tensors of shape (n, b, ...).
            batch_idx: Number of the batch within its epoch.
            size: b.
            out: Receives the gradients, shape (n, d); None for ``losses`` alone, without a backward pass.
            own: Tensors of each client for ``client_losses``, shape (n, ...); empty for the module's own loss.

        Returns:
            What was logged by name, and its totals for each client, shape (n,).

        Raises:
            CannotStack: If a parameter that is trained has no gradient.
        """
        self.recorder = MetricRecorder()
        self.recorder.batch_size = size
        self.touched.clear()
        with recording(self.module, self.recorder), self._restoring(), torch.set_grad_enabled(out is not None):
            leaves, spec = tree_flatten((batch, own) if own else batch)
            self._call = tuple(buffers), spec, batch_idx, self.client_losses if own else None
            compute = self._stacked_losses if out is None else self._stacked
            found = compute(*self._pieces(weights), *buffers.values(), *leaves)
        count = 0 if out is None else len(self.starts)
        gradients, (self.losses, *further) = found[:count], found[count:]
        logged = self.recorder.series
        totals = dict(zip(logged, further, strict=False))
        if self.losses.requires_grad:  # it depends on the module's own parameters, not on a client's
            raise CannotStack(f"{type(self.module).__name__} reaches its parameters in another way than as attributes")
        if out is not None:
            by_parameter = zip(gradients, self.orders, strict=True)
            torch.cat([gradient.permute(0, *order).flatten(1) for gradient, order in by_parameter], 1, out=out)
        # Buffers replaced by assignment; those changed in place are in the rows already.
        for name, value in zip(self._replaced, further[len(totals) :], strict=True):
            buffers[name].copy_(value)
        if out is not None and (missing := [name for name in self.vector.all_names if name not in self.touched]):
            raise CannotStack(f"its parameter `{missing[0]}` gets no gradient, which vmap cannot tell from one of zero")
        self.recorder.log_default("train/loss", 0.0)
        if logged["train/loss"].is_default:  # not under vmap, where each operation costs ten times as much
            totals["train/loss"] = self.losses.to(wide_dtype(weights.device)) * size
        for series in logged.values():  # nothing of vmap's own tensors may leave it
            series.total, series.last = None, 0.0
        return logged, totals

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        """Views rows of the length of the flat vector as parameters, each of shape (n, ...).

        One for each parameter, because the gradient of a whole row would be joined in a matrix larger than the cache.
        """
        row, first = rows.stride(0), rows.storage_offset()
        return [
            rows.as_strided((len(rows), *p.shape), (row, *p.stride()), first + start)
            for p, start in zip(self.vector.all_parameters, self.starts, strict=True)
        ]

    def _flat_gradients(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The gradients and loss of one client, and what ``_loss`` returns besides: vmap is slow with trees."""
        gradients, (_, found) = self._gradients(inputs[: len(self.starts)], *inputs[len(self.starts) :])
        return (*gradients, *found)

    def _flat_loss(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The loss of one client, and what ``_loss`` returns besides."""
        return self._loss(inputs[: len(self.starts)], *inputs[len(self.starts) :])[1]

    def _loss(self, pieces: tuple[Tensor, ...], *rest: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What is differentiated for one client; its loss, totals of what it logged, and buffers that it replaced."""
        names, spec, batch_idx, changed = self._call
        buffers, given = dict(zip(names, rest, strict=False)), tree_unflatten(rest[len(names) :], spec)
        (batch, own), step = (given, None) if changed is None else given, self.module.training_step
        step = step if changed is None else partial(changed.step, step, own=own)
        for name, places, value in zip(self.vector.all_names, self.parameter_places, pieces, strict=True):
            if torch.is_grad_enabled():
                value.register_hook(lambda _, name=name: self.touched.add(name))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for owner, key in places:
                owner._parameters[key] = value  # type: ignore[assignment]  # stands in for a parameter
        for name, value in buffers.items():
            for owner, key in (self.buffer_places[name], *self.further_places.get(name, ())):
                owner._buffers[key] = value
        with self.precision.forward_context():  # autocast does not cover the backward pass
            output = step(*((batch, batch_idx) if self.takes_batch_idx else (batch,)))
            if output is None:
                raise CannotStack("its `training_step` returns None for a batch, which many at once cannot skip")
            loss = loss_of(output, self.module)
            loss = total = loss.reshape(()) if loss.ndim else loss
            if changed is not None:
                total = changed.total(loss, batch, self.recorder, own)
        if self.recorder.metrics:
            raise CannotStack("it logs torchmetrics objects in `training_step`, whose state vmap cannot keep apart")
        totals = [torch.as_tensor(series.total) for series in self.recorder.series.values()]
        live = {name: owner._buffers[key] for name, (owner, key) in self.buffer_places.items()}
        replaced = {name: b.detach() for name, b in live.items() if b is not None and b is not buffers[name]}
        if other := [name for name, b in replaced.items() if b.shape != buffers[name].shape]:
            raise CannotStack(f"its buffer `{other[0]}` changes its shape")
        self._replaced = tuple(replaced)
        return total, (loss, *totals, *replaced.values())

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Gives the module its own parameters and buffers back, and the state its client."""
        client, self.state.client = self.state.client, MANY_CLIENTS
        live = self.state.buffers.live
        kept = [(o, k, o._buffers[k]) for o, k in (*live.places.values(), *sum(live.further.values(), []))]
        caches = [(owner, key, owner._buffers.get(key)) for owner, key in live.caches]
        try:
            with self.refusing():
                yield
            if replaced := [key for owner, key, value in caches if owner._buffers.get(key) is not value]:
                raise CannotStack(f"training replaces the buffer `{replaced[0]}`, which clients at once would share")
        finally:
            self.state.client = client
            for places, parameter in zip(self.parameter_places, self.vector.all_parameters, strict=True):
                for owner, key in places:
                    owner._parameters[key] = parameter
            for owner, key, buffer in (*kept, *caches):
                owner._buffers[key] = buffer


def _parameter_places(module: nn.Module, parameters: tuple[Tensor, ...]) -> list[list[tuple[nn.Module, str]]]:
    """Finds where each parameter hangs in the module: tied ones hang in several places."""
    return [
        [(owner, key) for owner in module.modules() for key, value in owner._parameters.items() if value is parameter]
        for parameter in parameters
    ]


def _reads(function: Any, name: str) -> bool:
    """Says whether a function's own code reads an argument; True where its code cannot be seen."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or name not in code.co_varnames or name in code.co_cellvars:
        return True
    return any(name in (i.argval if isinstance(i.argval, tuple) else (i.argval,)) for i in dis.get_instructions(code))


class LaneLog:
    """What n clients trained at once have logged, a number for each, until it is known which of them enter the round.

    Args:
        num_lanes: n.
    """

    def __init__(self, num_lanes: int) -> None:
        self._count = num_lanes
        self._series: dict[str, LoggedValue] = {}
        self._totals: dict[str, Tensor] = {}
        self._lasts: dict[str, Tensor] = {}
        self._weights: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        self._seen: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

    def add(self, lanes: slice, logged: dict[str, LoggedValue], totals: dict[str, Tensor]) -> None:
        """Folds in what one step of some clients logged.

        Args:
            lanes: The clients.
            logged: Each name's reduction over the step.
            totals: Its total for each of these clients, shape (m,).
        """
        for key, series in logged.items():
            if key not in self._series or (self._series[key].is_default and not series.is_default):
                self._open(key, series, totals[key])
            into, seen, value = self._totals[key][lanes], self._seen[key][lanes], totals[key].detach()
            if series.reduction in ("mean", "sum"):
                into.add_(value)
            elif not seen.any():
                into.copy_(value)
            else:
                (torch.minimum if series.reduction == "min" else torch.maximum)(into, value.to(into), out=into)
            if series.options.both:
                self._lasts[key][lanes] = value / (series.weight or 1.0) if series.reduction == "mean" else value
            self._weights[key][lanes] += series.weight
            seen[:] = True

    def _open(self, key: str, series: LoggedValue, like: Tensor) -> None:
        self._series[key] = series
        start = {"min": torch.inf, "max": -torch.inf}.get(series.reduction, 0.0)
        self._totals[key] = torch.full((self._count,), start, dtype=like.dtype, device=like.device)
        self._lasts[key] = torch.zeros_like(self._totals[key])
        self._weights[key], self._seen[key] = np.zeros(self._count), np.zeros(self._count, dtype=bool)

    def total(self, key: str) -> Tensor | None:
        """Returns the totals of a name, shape (n,), zero for those that did not log it; None if nobody did."""
        if key not in self._totals:
            return None
        totals, seen = self._totals[key], self._seen[key]
        if seen.all() or self._series[key].reduction in ("mean", "sum"):
            return totals
        return torch.where(torch.from_numpy(seen).to(totals.device), totals, torch.zeros_like(totals))

    def of(self, lanes: list[int]) -> dict[str, LoggedValue]:
        """Reduces what some clients logged to one number for each name."""
        result = {}
        for key, template in self._series.items():
            seen = [lane for lane in lanes if self._seen[key][lane]]
            if not seen:
                continue
            result[key] = series = template.copy()
            values = self._totals[key]
            if len(seen) < self._count:  # several need an index, which is sent to the device
                values = values[seen] if len(seen) > 1 else values[seen[0]]
            reduce = {"min": torch.amin, "max": torch.amax}.get(series.reduction, torch.sum)
            series.total, series.weight = reduce(values), float(self._weights[key][seen].sum())
            series.last = self._lasts[key][seen[-1]]
        return result


class SampleGradients:
    """Takes the gradient of each sample of a client's batch, one in a lane, at weights that all lanes share.

    What the module logs is dropped; what it draws comes from a stream of the client's step, the same in every engine.
    A module is refused if the gradient of its first batch is not the mean of those of the samples.
    """

    def __init__(self, parts: TrainingParts, algorithm: ClientAlgorithm, step: StackedStep | None = None) -> None:
        self.state, self.trainer, self.algorithm = parts.state, parts.hooks.trainer, algorithm
        self.step = step or StackedStep(parts.state, unasked=False)
        self.rows, self.tried = parts.state.vector.all_data.new_empty(0), False

    def __call__(
        self, client: Client, batch: Any, batch_idx: int, weights: Tensor, buffers: dict[str, Tensor], out: Tensor
    ) -> None:
        """Writes what the algorithm makes of the gradients at weights of shape (d + p,) to ``out``, of that shape."""
        size = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 0)
        if len(self.rows) < size:
            self.rows = weights.new_empty(size, len(weights))
        rows, at = self.rows[:size], (client.round, client.id, self.state.local_step)
        seed_everywhere(seed_for(self.state.seed, Purpose.LOCAL, *at))
        try:
            self._take(batch, 1, batch_idx, weights, buffers, rows)
            if not self.tried:
                before, whole = random_states(rows.device), rows.new_empty(1, len(weights))
                self._take(batch, 0, batch_idx, weights, buffers, whole)
                narrow = rows.element_size() < 4 or isinstance(self.step.precision, MixedPrecision)
                same = agree(rows.mean(0), whole[0], 0.3 if narrow else 1e-2)
                if not same and random_states(rows.device) == before:
                    raise CannotStack("the gradient of a batch is not the mean of those of its samples")
        except Exception as error:
            if self.tried or is_device_fault(error):
                raise
            why = str(error) if isinstance(error, CannotStack) else first_sentence(error)
            why = "its training changes buffers" if "single memory location" in why else why
            raise FederatedError(
                f"Expected {type(self.step.module).__name__} to have a loss of each sample for "
                f"{type(self.algorithm).__name__}, but {why}: use GroupNorm in place of BatchNorm, and return the mean "
                "of the samples' losses from `training_step`."
            ) from error
        self.tried = True
        for part in self.state.untrained:
            rows[:, part] = 0
        self.algorithm.combine(self.trainer, client, batch_idx, rows, out)

    def _take(
        self, batch: Any, at: int, batch_idx: int, weights: Tensor, buffers: dict[str, Tensor], out: Tensor
    ) -> None:
        """Takes the gradients of samples, ``at`` 1, or at 0 that of the batch; a change of the buffers is an error."""
        held = {name: buffer.expand(len(out), *buffer.shape) for name, buffer in buffers.items()}
        parts = tree_map(lambda leaf: leaf.unsqueeze(at) if isinstance(leaf, Tensor) else leaf, batch)
        self.step(weights.expand(len(out), -1), held, parts, batch_idx, 1, out)
