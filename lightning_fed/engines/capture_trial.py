"""Tries, before a run, whether its local step can be captured as a CUDA graph, and what a replay takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_fed.core.overrides import batch_transfer
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.engines import graphs
from lightning_fed.engines.capturable import expect_capturable
from lightning_fed.engines.captured_step import CapturedStep
from lightning_fed.engines.graphs import CannotCapture
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.preflight import fastest
from lightning_fed.engines.vectorized.step import first_sentence

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["CaptureTrial", "expect_device"]


def expect_device(device: torch.device) -> None:
    """Refuses a device that has no graphs.

    Raises:
        CannotCapture: If it is no GPU of CUDA's.
    """
    if graphs.graphs_for(device) is None:
        raise CannotCapture(f"the run is on {device.type}, not on a GPU under CUDA (`--trainer.accelerator gpu`)")


class CaptureTrial:
    """Captures a step of a run that is about to begin, compares and times it, and leaves nothing changed.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        source: The clients' batches; those of the two largest clients are taken.

    Raises:
        CannotCapture: If the step cannot be captured, or gives something else than without a graph.
    """

    def __init__(self, trainer: FederatedTrainer, module: LightningModule, source: Any) -> None:
        self.trainer, self.module = trainer, module
        expect_device(trainer.vector.device)
        expect_capturable(trainer, module)
        made = graphs.graphs_for(trainer.vector.device)
        assert trainer.local_optimizer is not None
        assert made is not None
        self._local, before = trainer.local_optimizer, trainer.local_optimizer.flat_step
        self.step = CapturedStep(trainer, module, MetricRecorder(), made, strict=True)
        self._local.flat_step = before  # the engine that is chosen says how the optimizer steps
        with self.step.trying():
            try:
                self._batches = self._read(source)
            except Exception as error:  # whatever the user's data raise
                raise CannotCapture(f"its batches cannot be read ({first_sentence(error)})") from error
        self._capture()

    def _read(self, source: Any) -> list[Any]:
        """Reads the first batches of the largest clients."""
        transfer = batch_transfer(self.trainer.fabric, self.module, self.trainer.datamodule, resident=True)
        batches = []
        for client in np.argsort(-source.sizes, kind="stable")[:2].tolist():
            if source.sizes[client]:
                order = torch.arange(int(source.sizes[client]))
                batches += list(islice(source.batches(client, order, self.trainer.seed), 1))
        return batches if transfer is None else [transfer(batch, 0) for batch in batches]

    def _capture(self) -> None:
        leaves, structure = tree_flatten(self._batches[0])
        captured = self.step.capture(leaves, structure, first=True)
        for batch in self._batches[1:]:
            others, other_structure = tree_flatten(batch)
            if structure == other_structure and list(map(_shape, leaves)) == list(map(_shape, others)):
                self.step.expect_same(captured, others, first=True)

    def seconds_alone(self) -> float:
        """Measures a step without a graph."""
        return self._seconds(lambda: LocalStep._gradient(self.step, self._batches[0], 0, True))

    def seconds_captured(self) -> float:
        """Measures a step with one."""
        return self._seconds(lambda: self.step._gradient(self._batches[0], 0, True))

    def _seconds(self, take: Callable[[], Any]) -> float:
        vector = self.trainer.vector

        def step() -> None:
            take()
            self._local.optimizer.step()

        with self.step.trying(), recording(self.module, self.step.recorder):
            seconds = fastest(step, vector.device)
        vector.data.copy_(self.trainer.weights)
        vector.zero_grad()
        self._local.start_client()
        return seconds


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None
