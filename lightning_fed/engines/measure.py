"""Measures, before a run, what a step of one client and of many at once take: seconds and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_fed.engines.lane_batches import LaneBatches, Run
from lightning_fed.engines.local_step import loss_of
from lightning_fed.engines.stacked_step import CannotStack, StackedStep
from lightning_fed.flat_optimizer import FlatOptimizer
from lightning_fed.hooks import Client
from lightning_fed.metrics import MetricRecorder, metric_states, recording
from lightning_fed.transfer import batch_transfer

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["StepProbe"]

_REPEATS = 3


class StepProbe:
    """Takes steps of a run that is about to begin, and leaves nothing changed.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        source: The clients' batches; those of the largest client are taken.
    """

    def __init__(self, trainer: FederatedTrainer, module: LightningModule, source: Any) -> None:
        self.trainer, self.module = trainer, module
        self.step = StackedStep(trainer, module)
        largest = int(source.sizes.argmax())
        client = Client(largest, int(source.sizes[largest]), 1)
        transfer = batch_transfer(trainer.fabric, module, trainer.datamodule, resident=True)
        with isolate_rng():
            (self.run,) = list(LaneBatches(trainer, source, transfer, (client,), by_index=False).runs(0))

    def expect_stackable(self) -> bool:
        """Takes the gradients of two clients.

        Returns:
            Whether the module drew random numbers.

        Raises:
            CannotStack: If that fails, or changes torchmetrics objects.
        """
        counts, before = self._update_counts(), torch.default_generator.get_state()
        with isolate_rng(), self._undone():
            try:
                self._take(2)
            except CannotStack:
                raise
            except Exception as error:  # whatever vmap, or the module under it, raises
                self._expect_metrics_untouched(counts)
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise CannotStack(
                    f"{type(self.module).__name__} does not go through torch.func.vmap ({lines[0]})"
                ) from error
            draws = not torch.equal(before, torch.default_generator.get_state())
            self._expect_metrics_untouched(counts)
        return draws

    def _expect_metrics_untouched(self, counts: list[int]) -> None:
        if self._update_counts() != counts:
            raise CannotStack("it updates torchmetrics objects in training, whose state vmap cannot keep apart")

    def seconds_alone(self) -> float:
        """Measures the step of one client."""
        trainer, vector, local = self.trainer, self.trainer.vector, self.trainer.local_optimizer
        assert local is not None

        def step() -> None:
            vector.zero_grad()
            loss = self._loss_alone()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            local.optimizer.step()

        with isolate_rng(), self._undone():
            seconds = self._fastest(step)
        vector.data.copy_(trainer.weights)
        vector.zero_grad()
        local.start_client()
        return seconds

    def seconds_together(self, count: int) -> float:
        """Measures the step of so many clients at once."""
        local, weights = self.trainer.local_optimizer, self._weights(count)
        assert local is not None
        optimizer = FlatOptimizer(local.optimizer, self.trainer.vector, weights, torch.zeros_like(weights), fuse=True)
        optimizer.start(count)
        with isolate_rng(), self._undone():
            return self._fastest(lambda: optimizer.step(self._take(count, weights)))

    def lanes_that_fit(self) -> int:
        """Estimates for how many clients there is room: what autograd keeps for one, and its vectors, count twice."""
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with isolate_rng(), self._undone(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._loss_alone()
        vectors = 8 * self.trainer.vector.numel * self.trainer.weights.element_size()
        device = self.trainer.vector.device
        sharing = self.trainer.processes.size if device.type == "cpu" else 1  # of one machine, as a rule
        return max(1, _free_bytes(device) // sharing // (2 * sum(kept.values()) + vectors))

    def _loss_alone(self) -> Tensor:
        batch = tree_map(lambda part: part[0] if isinstance(part, Tensor) else part, self.run.batch)
        args = (batch, 0) if self.step.takes_batch_idx else (batch,)
        with recording(self.module, MetricRecorder()), self.step.precision.forward_context():
            return loss_of(self.module.training_step(*args), self.module)

    def _weights(self, count: int) -> Tensor:
        return self.trainer.vector.data.expand(count, -1).clone()

    def _take(self, count: int, weights: Tensor | None = None) -> Tensor:
        """Computes the gradients of ``count`` clients, all on the same batch."""
        run: Run = self.run
        batch = tree_map(lambda part: part.repeat(count, *[1] * (part.ndim - 1)), run.batch)
        live = self.trainer.buffers.live.tensors()
        buffers = {name: b.unsqueeze(0).repeat(count, *[1] * b.ndim) for name, b in live.items()}
        weights = self._weights(count) if weights is None else weights
        gradients, _, _ = self.step(weights, buffers, batch, run.batch_idx, run.size)
        return gradients

    def _fastest(self, step: Callable[[], Any]) -> float:
        times = []
        for _ in range(_REPEATS + 1):  # the first one is slower
            started = time.perf_counter()
            step()
            if self.trainer.vector.device.type == "cuda":
                torch.cuda.synchronize(self.trainer.vector.device)
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def _update_counts(self) -> list[int]:
        return [metric._update_count for metric in self.module.modules() if isinstance(metric, Metric)]

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Puts buffers and metric objects back."""
        buffers, metrics = self.trainer.buffers.live, metric_states(self.module.modules())
        kept = buffers.copy()
        try:
            yield
        finally:
            buffers.load(kept)
            for metric, state in metrics:
                vars(metric).update(state)


def _free_bytes(device: torch.device) -> int:
    """What may be filled: half of a GPU's free memory, a quarter of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return 2**30 if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // 4
