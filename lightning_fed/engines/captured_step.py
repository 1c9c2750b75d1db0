"""A local step whose gradient is captured once as a CUDA graph and replayed for all batches and clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.engines.capturable import capture_refusal, runs_between_steps
from lightning_fed.engines.capturing_step import Captured, CapturingStep
from lightning_fed.engines.graphs import CannotCapture, CudaGraphs
from lightning_fed.engines.module_watch import ModuleWatch

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer

__all__ = ["CapturedStep"]

_MOST_GRAPHS = 64
_MANY_CAPTURES = 3


class CapturedStep(CapturingStep):
    """Replays the gradient of a batch: zeroing, forward, loss and backward; hooks, clipping and the step are as ever.

    There is a graph for each shape of batch, captured when the shape is first met and then compared with a step that
    is not captured. Python code of the module runs for a capture alone. When an attribute of the module changes that
    it may read, everything is captured again.

    Args:
        trainer: The trainer, set up for ``fit``.
        module: The resident module.
        recorder: Takes what is logged.
        graphs: Makes graphs.
        strict: Whether a shape that cannot be captured ends the run; otherwise its steps are taken without a graph.

    Attributes:
        captures: Graphs captured so far.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        module: LightningModule,
        recorder: MetricRecorder,
        graphs: CudaGraphs,
        strict: bool,
    ) -> None:
        super().__init__(trainer, module, recorder, graphs)
        self.strict, self.captures = strict, 0
        self._captured: dict[Any, list[Captured | None]] = {}
        self._watch = ModuleWatch(module, self.vector.device)
        self._watch_always = runs_between_steps(trainer, module)
        self._changes = 0

    def _gradient(self, batch: Any, batch_idx: int, first: bool) -> tuple[Any, Tensor]:
        if self._watch_always or (first and self.trainer.local_step == 0):
            self._expect_unchanged()
        leaves, structure = tree_flatten(batch)
        captured = self._find(leaves, structure, first)
        if captured is None:
            return super()._gradient(batch, batch_idx, first)
        self.replay(captured, leaves, first)
        output = tree_map(_kept, captured.output) if self.gives_output else None
        return output, captured.loss

    def _expect_unchanged(self) -> None:
        """Forgets all graphs if an attribute of the module is another one since they were captured."""
        changed = self._watch.changed()
        if changed is None:
            return
        self._changes += bool(self._captured)
        self._captured.clear()
        self._watch = ModuleWatch(self.module, self.vector.device)
        if self._changes == _MANY_CAPTURES:
            rank_zero_warn(
                f"The local step is captured again whenever an attribute of {type(self.module).__name__} changes, such "
                f"as `{changed}`: if that is often, `--trainer.cuda_graphs false` is faster."
            )

    def _find(self, leaves: list[Any], structure: Any, first: bool) -> Captured | None:
        """Returns the graph for a batch, captured now if there is none; None if there can be none."""
        key = (first, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves))
        for known in self._captured.setdefault(key, []):
            if known is None or known.structure == structure:
                return known
        try:
            if sum(map(len, self._captured.values())) >= _MOST_GRAPHS:
                raise CannotCapture(f"its batches have more than {_MOST_GRAPHS} shapes, each with a graph of its own")
            captured: Captured | None = self.capture(leaves, structure, first)
            self.captures += 1
        except CannotCapture as reason:
            if self.strict:
                raise capture_refusal(reason) from reason
            captured = None
            rank_zero_warn(f"Some batches are trained on without a CUDA graph, as {reason}.")
        self._captured[key].append(captured)
        return captured


def _kept(leaf: Any) -> Any:
    """Copies what the next replay would change."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
