"""Captures the gradient of a batch as a graph, replays it, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map, tree_unflatten
from torchmetrics import Metric

from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.engines.capturable import UNREAD, drawn_on_host, guarded
from lightning_fed.engines.captured_log import CapturedLog
from lightning_fed.engines.graphs import CannotCapture, CudaGraphs
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.module_watch import ModuleWatch
from lightning_fed.engines.preflight import close
from lightning_fed.engines.trial import random_states, untouched
from lightning_fed.engines.vectorized.step import first_sentence
from lightning_fed.errors import FederatedError

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["Captured", "CapturingStep"]


@dataclass
class Captured:
    """One graph: where its inputs go, what does its work, and where what it computes lies."""

    structure: Any
    inputs: list[Tensor | None]
    log: CapturedLog
    reached: tuple[Tensor, ...]
    output: Any
    loss: Tensor
    again: Callable[[], None]


class CapturingStep(LocalStep):
    """A local step that can capture its gradient and replay it; by itself it takes it as ever.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        recorder: Takes what is logged.
        graphs: Makes graphs.
    """

    def __init__(
        self, trainer: FederatedTrainer, module: LightningModule, recorder: MetricRecorder, graphs: CudaGraphs
    ) -> None:
        super().__init__(trainer, module, recorder)
        self.graphs = graphs
        self.gives_output = bool(self.hooks("on_train_batch_end"))

    def capture(self, leaves: list[Any], structure: Any, first: bool) -> Captured:
        """Captures the gradient of batches of one shape, and leaves nothing changed.

        Args:
            leaves: A batch, flattened.
            structure: Its structure.
            first: Whether the batch opens an accumulation window.

        Raises:
            CannotCapture: If that fails, or a replay is not what a step without a graph is.
        """
        self._expect_inputs(leaves)
        inputs = [None if leaf is None else leaf.detach().clone() for leaf in leaves]
        work = partial(self._work, tree_unflatten(inputs, structure), first)
        name = type(self.module).__name__
        try:
            with self.trying():
                self._expect_repeatable(work)
                again, (log, reached, output, loss) = self.graphs.capture(work)
            captured = Captured(structure, inputs, log, reached, output, loss, again)
            self.expect_same(captured, leaves, first)
        except (CannotCapture, FederatedError):
            raise
        except Exception as error:  # whatever torch, or the module under it, raises
            raise CannotCapture(f"`training_step` of {name} cannot be captured ({first_sentence(error)})") from error
        return captured

    def _expect_inputs(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise CannotCapture(f"its batches hold a {type(leaf).__name__}, and a graph takes tensors alone")
            if leaf is not None and leaf.requires_grad:
                raise CannotCapture("its batches ask for gradients")
            if leaf is not None and leaf.device != self.vector.device:
                raise CannotCapture(f"its batches hold a tensor on {leaf.device}, not on {self.vector.device}")

    def _expect_repeatable(self, work: Callable[[], Any]) -> None:
        """Does the work without capturing it, and refuses what Python does in it besides.

        Raises:
            CannotCapture: If it changes attributes or Metric objects, or draws random numbers on the host.
        """
        name, states, counts = type(self.module).__name__, random_states(), self._update_counts()
        watch = ModuleWatch(self.module, self.vector.device)
        failure: Exception | None = None
        try:
            self.graphs.warm_up(work)
        except Exception as error:  # Metric objects may be why, as they look at their values
            failure = error
        if self._update_counts() != counts:
            raise CannotCapture(f"{name} updates torchmetrics objects in `training_step`, which a graph does not")
        if failure is not None:
            raise failure
        if (changed := watch.changed()) is not None:
            raise CannotCapture(f"{name} changes its `{changed}` in `training_step`, which a graph does not")
        if (stream := drawn_on_host(states, random_states(), self.vector.device)) is not None:
            raise CannotCapture(f"{name} draws from {stream} random stream on the host, which a graph does not")

    def _update_counts(self) -> list[int]:
        return [metric._update_count for metric in self.module.modules() if isinstance(metric, Metric)]

    def _work(self, batch: Any, first: bool) -> tuple[CapturedLog, tuple[Tensor, ...], Any, Tensor]:
        """What is captured: the gradient of a batch as ever, and all that is read of it brought to fixed addresses.

        Returns:
            What was logged; the parameters that the backward pass reached; what ``training_step`` returned; the loss.
        """
        vector, log = self.vector, CapturedLog(self.vector.device)
        if not first:
            vector.show_gradients()
        with self._logging_to(log), guarded(self.module, self.trainer), self._buffers_in_place():
            output, loss = LocalStep._gradient(self, batch, UNREAD, first)
        vector.collect_gradients()
        if any(p.grad is None for p in vector.parameters):
            raise CannotCapture(f"{type(self.module).__name__} takes gradients away while they are computed")
        log.close()
        output = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        return log, vector.reached, output if self.gives_output else None, loss.detach()

    @contextmanager
    def _logging_to(self, recorder: MetricRecorder) -> Iterator[None]:
        kept, self.recorder = self.recorder, recorder
        try:
            with recording(self.module, recorder):
                yield
        finally:
            self.recorder = kept

    @contextmanager
    def _buffers_in_place(self) -> Iterator[None]:
        """Copies buffers that are replaced by assignment into the ones that were there, which the next replay reads."""
        live = self.trainer.buffers.live
        kept = {name: owner._buffers[key] for name, (owner, key) in live.places.items()}
        yield
        for name, (owner, key) in live.places.items():
            old, new = kept[name], owner._buffers[key]
            if new is old or old is None:
                continue
            if new is None or name in live.further or new.shape != old.shape:
                raise CannotCapture(
                    f"it replaces its buffer `{name}` by another kind of tensor, or in one of its places"
                )
            old.copy_(new.detach())
            owner._buffers[key] = old

    def replay(self, captured: Captured, leaves: list[Any], first: bool) -> None:
        """Computes the gradient of a batch by its graph, and records what the module logs.

        Args:
            captured: The graph of batches like this one.
            leaves: The batch, flattened.
            first: Whether it opens an accumulation window.
        """
        for static, leaf in zip(captured.inputs, leaves, strict=True):
            if static is not None:
                static.copy_(leaf)
        if first:
            self.vector.show_gradients()
        captured.again()
        self.vector.note_reached(captured.reached)
        captured.log.send(self.recorder)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Puts back what steps change: gradients, buffers, attributes of the module, random streams."""
        error: Exception | None = None
        with isolate_rng(), untouched(self.module), self.vector.keeping_gradients():
            try:
                yield
            except Exception as raised:  # the random streams are put back after a block that ends well
                error = raised
        if error is not None:
            raise error

    def expect_same(self, captured: Captured, leaves: list[Any], first: bool) -> None:
        """Compares a replay with a step that is not captured, at other weights than those of now.

        Raises:
            CannotCapture: If gradients, buffers or logged values differ by more than rounding.
        """
        batch, weights = tree_unflatten(leaves, captured.structure), self.vector.data.clone()
        self.vector.data.add_(_noise(weights))
        try:
            plain = self._outcome(lambda: LocalStep._gradient(self, batch, 0, first))
            again = self._outcome(lambda: self.replay(captured, leaves, first))
        finally:
            self.vector.data.copy_(weights)
        name = type(self.module).__name__
        if plain.keys() != again.keys():
            raise CannotCapture(f"{name} logs, or has gradients of, other things in a graph")
        for what, value in plain.items():
            if not close(again[what], value, self.vector.dtype):
                raise CannotCapture(f"{name} gives another {what} in a graph")

    def _outcome(self, take: Callable[[], Any]) -> dict[str, Tensor]:
        """Returns what a gradient leaves behind, by what it is."""
        recorder = MetricRecorder()
        with self.trying():
            with self._logging_to(recorder):
                take()
            self.vector.collect_gradients()
            found = {"gradient": self.vector.grad.clone()}
            found.update({f"buffer `{name}`": value for name, value in self.trainer.buffers.live.copy().items()})
            ids = [id(p) for p in self.vector.reached]
            found.update({f"gradient of `{n}`": torch.zeros(1) for n, p in self._named() if id(p) in ids})
        for name, series in recorder.series.items():
            found[f"value logged as `{name}`"] = torch.as_tensor(series.result())
        return found

    def _named(self) -> Any:
        return zip(self.vector.names, self.vector.parameters, strict=True)


def _noise(weights: Tensor) -> Tensor:
    """Returns small numbers to add to weights, always the same, shape (d,)."""
    stream = torch.Generator(weights.device).manual_seed(0)
    size = weights.float().norm() / weights.numel() ** 0.5
    noise = torch.randn(weights.shape, generator=stream, device=weights.device)
    noise.mul_(0.1 * size)
    return noise.to(weights.dtype)
