"""The gradients of the samples of a step's batch, for an algorithm that combines them."""

from typing import Any

from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Client
from lightning_fed.engines.base import TrainingParts
from lightning_fed.engines.trial import agree, random_states
from lightning_fed.engines.vectorized.refusals import CannotStack, first_sentence
from lightning_fed.engines.vectorized.step import StackedStep
from lightning_fed.errors import FederatedError

__all__ = ["SampleGradients"]


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
