"""Tests, before a run, whether many clients can take a step at once, and how many fit into memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from warnings import catch_warnings, simplefilter

import torch
from lightning.fabric.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fed.core.devices import free_memory, full_precision, out_of_memory
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import loss_of, own_places
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.trial import Attributes, agree, holds_stacked_tensors, random_states, without_trace
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.refusals import CannotStack, first_sentence
from lightning_fed.engines.vectorized.step import StackedStep

__all__ = ["StepProbe"]

# For all processes together, which usually share a machine; on a GPU half of the free memory is used.
_BYTES_ON_CPU = 2 << 30


class StepProbe:
    """Takes trial steps before a run begins, and undoes what they change.

    Args:
        state: What ``fit`` works on; batches of the largest client are taken.
        options: How clients train. If ``engine`` is ``auto``, a step is refused that uses what exists for one client
            only, or that changes what clients would share: attributes and global variables.
    """

    def __init__(self, state: TrainState, options: LocalOptions) -> None:
        unasked = options.engine == "auto"
        self._places = own_places(state.module) if unasked else None
        self.state, self.module, source = state, state.module, state.source
        self.processes = processes_of(state.fabric)
        self.step = StackedStep(state, unasked)
        self.precision = self.step.precision
        largest = int(getattr(source, "own_sizes", source.sizes).argmax())  # a node of a fleet has few of all
        client = Client(largest, int(source.sizes[largest]), 1)
        one_step = replace(options, local_epochs=None, local_steps=1, accumulate_grad_batches=1)
        self._before = random_states(state.vector.device)
        with without_trace(self.module):
            try:
                batches = LaneBatches(state, one_step, (client,), by_index=False)
                (self.group,) = list(batches.groups(0))
                self._draws = random_states(state.vector.device) != self._before
            except (TypeError, RuntimeError) as error:  # torch's errors for tensors that cannot be stacked
                if out_of_memory(error):
                    raise
                raise CannotStack(f"its batches cannot be stacked ({first_sentence(error)})") from error
        in_epoch = -(-client.num_samples // self.group.size)
        held = sum(leaf.nbytes for leaf in tree_leaves(self.group.batch) if isinstance(leaf, Tensor))
        self._read_ahead = 0 if batches.gathers else in_epoch * held

    def expect_stackable(self, in_eval: bool = False) -> bool:
        """Compares the gradients of two clients trained at once with those of one trained alone.

        Args:
            in_eval: Whether the module is in eval mode, as where gradients over all of a client's data are taken.

        Returns:
            Whether random numbers were drawn.

        Raises:
            CannotStack: If that fails, gives other gradients or buffers, or changes something that vmap cannot keep
                apart for each client.
        """
        name = type(self.module).__name__
        with self._on_trial(in_eval):
            before = Attributes(self.module, self._places)
            try:
                gradients, buffers = self._take(2)
            except Exception as error:  # whatever vmap, or the module under it, raises
                if isinstance(error, CannotStack) or out_of_memory(error):
                    raise
                self._expect_metrics_untouched(before)
                if "expected scalar type" in str(error) and isinstance(self.precision, MixedPrecision):
                    raise CannotStack(
                        f"under {self.precision.precision} torch.func.vmap takes no gradient of layers such as "
                        "BatchNorm and LayerNorm, whose weights stay in single precision"
                    ) from error
                raise CannotStack(f"{name} does not go through torch.func.vmap ({first_sentence(error)})") from error
            self._expect_metrics_untouched(before)
            if kept := holds_stacked_tensors(self.module):
                raise CannotStack(f"{name} keeps tensors in its attribute `{kept}` during training")
            if self._places is not None and (changed := before.shared()):
                raise CannotStack(f"{name} changes `{changed}` in training, which clients trained at once would share")
            ours, theirs = random_states(self.state.vector.device), self._before
            if ours[1:3] != theirs[1:3]:
                raise CannotStack(f"{name} draws from NumPy's or Python's random stream, once for all clients")
            draws = self._draws or ours != theirs
        if not draws:
            with self._on_trial(in_eval), self._without_autocast():
                if self.step.precision is not self.precision:
                    gradients, buffers = self._take(2)
                self._expect_the_same_alone(gradients[0], {key: rows[0] for key, rows in buffers.items()})
        return draws

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        """Computes in the dtype of the weights: two ways to one gradient differ by a tenth of it under autocast."""
        if isinstance(self.precision, MixedPrecision):
            self.step.precision = Precision()
        try:
            yield
        finally:
            self.step.precision = self.precision

    @contextmanager
    def _on_trial(self, in_eval: bool) -> Iterator[None]:
        """Undoes what a step changes and hides its warnings; refuses a step that moves frozen parameters."""
        buffers = self.state.buffers
        buffers.start_round()
        try:
            with without_trace(self.module, places=self._places), catch_warnings():
                simplefilter("ignore")
                if in_eval:
                    self.module.eval()
                with full_precision():
                    yield
        finally:
            moved = buffers.take_in_moved()
            buffers.live.load({**buffers.live.copy(), **moved})
        if moved:
            raise CannotStack(f"its training moves `{next(iter(moved))}`, which is frozen")

    def _expect_the_same_alone(self, gradient: Tensor, buffers: dict[str, Tensor]) -> None:
        """Refuses a module that reads parameters or buffers other than as attributes: they are not the client's."""
        vector = self.state.vector
        coarse = 0.1 if vector.data.element_size() < 4 else 1e-2  # ResNet-18 in bfloat16: 0.02 to 0.04
        vector.zero_grad()
        self._loss_alone().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        vector.collect_gradients()
        pairs = [(gradient, vector.all_grad), *((buffers[k], b) for k, b in self.state.buffers.live.tensors().items())]
        same = all(agree(a, b, coarse) for a, b in pairs)
        vector.zero_grad()
        if not same:
            raise CannotStack(f"{type(self.module).__name__} gives another gradient, or other buffers, under vmap")

    def _expect_metrics_untouched(self, before: Attributes) -> None:
        if any(isinstance(owner, Metric) for owner, _ in before.changes()):
            raise CannotStack("it updates torchmetrics objects in training, whose state vmap cannot keep apart")

    def lanes_that_fit(self, second_gradients: bool = False) -> int:
        """Estimates how many clients fit into memory: twice what autograd keeps, 8 or 16 vectors and data for each."""
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with without_trace(self.module), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._loss_alone()
        vectors = (8 + 8 * second_gradients) * self.state.vector.all_numel * self.state.weights.element_size()
        device = self.state.vector.device
        budget = free_memory(device) // 2 if device.type == "cuda" else _BYTES_ON_CPU // self.processes.size
        return max(1, budget // (2 * sum(kept.values()) + vectors + self._read_ahead))

    def _loss_alone(self) -> Tensor:
        batch = tree_map(lambda part: part[0] if isinstance(part, Tensor) else part, self.group.batch)
        args = (batch, 0) if self.step.takes_batch_idx else (batch,)
        with recording(self.module, MetricRecorder()), self.step.precision.forward_context():
            return loss_of(self.module.training_step(*args), self.module)

    def _take(self, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the gradients of ``count`` clients, all on the same batch; returns their buffers after it too."""
        weights, live = self.state.vector.all_data.expand(count, -1).clone(), self.state.buffers.live.tensors()
        buffers = {name: b.unsqueeze(0).repeat(count, *[1] * b.ndim) for name, b in live.items()}
        batch = tree_map(lambda part: part.repeat(count, *[1] * (part.ndim - 1)), self.group.batch)
        gradients = torch.empty_like(weights)
        self.step(weights, buffers, batch, self.group.batch_idx, self.group.size, gradients)
        return gradients, buffers
