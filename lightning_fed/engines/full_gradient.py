"""The gradient of a client's loss over all its training data, or the loss alone, for every method that asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.devices import wide_dtype
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.seeding import Purpose, generator_for, seed_everywhere, seed_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import accepts, loss_of
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.engines.client_batches import explained_batches, read_batches, send_order
from lightning_fed.engines.trial import without_trace
from lightning_fed.errors import FederatedError

__all__ = ["FullGradient"]

_CHANGE = "change `--trainer.full_gradients.batch_size`, or set `--trainer.full_gradients.mode eval`"


class FullGradient:
    """Computes ∇f_i and f_i at the live weights, f_i the mean loss of ``training_step`` over the client's samples.

    It does not affect the client's training: attributes, buffers and random streams are restored, logged values are
    dropped, and random numbers come from separate streams. Weight decay is not included, unless the options'
    ``full_gradients.weight_decay`` asks for it: then the optimizer's wd w is added. Inputs are not augmented: f_i is
    over the client's data as they are.

    Args:
        options: ``full_gradients.mode`` says whether the module is in eval mode, ``full_gradients.batch_size`` how many
            samples go through it at once.
        over: ``batch`` for f_i over only the first batch of the client's local steps, with the same augmentation.
        held_out: Batches of the clients' other samples, for f_i over these.
    """

    def __init__(
        self,
        state: TrainState,
        options: LocalOptions,
        over: Literal["data", "batch"] = "data",
        held_out: BatchSource | None = None,
    ) -> None:
        self.state, self.options, self.module, self.transfer = state, options, state.module, state.transfer
        self.over, self.held_out = over, held_out
        self.source = state.source if over == "batch" else getattr(state.source, "unaugmented", state.source)
        if held_out is not None:
            self.source = held_out
        given = None if over == "batch" else options.full_gradients.batch_size
        self.size = given or self.source.batch_size
        self.takes_batch_idx = accepts(self.module.training_step, "batch_idx", 2)
        self.wide = wide_dtype(self.state.vector.device)

    def compute(self, client: Client, out: Tensor | None) -> Tensor:
        """Computes the gradient at the module's live weights.

        Args:
            client: The client.
            out: Receives ∇f_i, shape (d,); None for f_i alone, by forward passes that record no gradient.

        Returns:
            f_i, shape (), on the device.
        """
        state, vector, before = self.state, self.state.vector, self.state.client
        seed = seed_for(state.seed, Purpose.GRADIENT, client.round, client.id)
        if out is not None:
            vector.zero_grad()
            out.zero_()
        with self._unnoticed((client,)), torch.set_grad_enabled(out is not None), self._explained(out is None):
            state.client = client
            seed_everywhere(seed)
            loss = self._accumulate(client, seed, out)
        state.client = before
        if out is not None:
            out.add_(vector.grad)
            vector.zero_grad()
            self._complete(vector.data, out)
        return loss

    def count(self, client: Client) -> int:
        """Returns how many samples of a client f_i is over."""
        if self.held_out is not None:
            return int(self.held_out.sizes[client.id])
        return min(client.num_samples, self.size) if self.over == "batch" else client.num_samples

    def compute_at_start(self, clients: tuple[Client, ...], out: Tensor | None) -> Tensor:
        """Computes the gradients of clients at the global model, each with the buffers that it starts from.

        Args:
            clients: The clients.
            out: Receives ∇f_i of each, shape (n, d); None for the f_i alone.

        Returns:
            f_i of each, shape (n,), on the device.
        """
        self.state.vector.data.copy_(self.state.weights)
        losses = []
        for client, row in zip(clients, repeat(None) if out is None else out, strict=out is not None):
            self.state.load_own(client.id)
            self.state.buffers.load(client)
            losses.append(self.compute(client, row))
        self.state.vector.personal.copy_(self.state.initial)
        return torch.stack(losses) if losses else self.state.weights.new_empty(0)

    @contextmanager
    def _unnoticed(self, clients: tuple[Client, ...]) -> Iterator[None]:
        """Undoes what a pass over the data changes; Metric objects are reset before the pass."""
        state = self.state
        with (
            explained_batches(clients, self.size, _CHANGE),
            without_trace(self.module, state.buffers.parameters),
            recording(self.module, MetricRecorder()),
        ):
            for part in self.module.modules():
                if isinstance(part, Metric):
                    part.reset()
            # Otherwise each part stays in the mode that it trains in: the user may keep some in eval.
            if self.options.full_gradients.mode == "eval":
                self.module.eval()
            yield
        if moved := state.buffers.take_in_moved():
            state.buffers.live.load({**state.buffers.live.copy(), **moved})

    @contextmanager
    def _explained(self, forward_alone: bool) -> Iterator[None]:
        """Says what to change where a pass without gradients meets a step that takes some itself."""
        try:
            yield
        except RuntimeError as error:
            if not (forward_alone and "does not require grad" in str(error)):
                raise
            raise FederatedError(
                f"Expected `training_step` of {type(self.module).__name__} to give its loss without gradients, as an "
                "aggregator reads losses by forward passes alone, got one that takes gradients itself: put "
                "what does into `with torch.enable_grad():`, or change `--aggregator`."
            ) from error

    def _accumulate(self, client: Client, seed: int, out: Tensor | None) -> Tensor:
        """Leaves Σ of the batches' gradients in the live gradient and ``out`` together; returns the loss."""
        vector, size = self.state.vector, self.size
        total = torch.zeros((), dtype=self.wide, device=vector.device)
        samples = self.count(client)
        if self.over == "batch":  # the samples, and what is random in reading them, are those of the step
            stream = generator_for(self.state.seed, Purpose.SHUFFLE, client.round, client.id)
            order = send_order(self.source, torch.randperm(client.num_samples, generator=stream)[:samples])
            seed = seed_for(self.state.seed, Purpose.READ, client.round, client.id, 0)
        else:
            order = torch.arange(samples, device=getattr(self.source, "order_device", "cpu"))
        for index, batch in enumerate(read_batches(self.source, client.id, order, seed, size)):
            share = min(size, samples - index * size)
            if self.transfer is not None:
                batch = self.transfer(batch, 0)
            with self.state.fabric.autocast():
                output = self.module.training_step(*((batch, index) if self.takes_batch_idx else (batch,)))
            if output is None:  # training skips it too
                continue
            loss = loss_of(output, self.module) * (share / samples)
            total += loss.detach()
            if out is None:
                continue
            self.module.backward(loss)
            if vector.dtype != out.dtype:  # a sum over many batches in bfloat16 would lose the small ones
                vector.collect_gradients()
                out.add_(vector.grad)
                vector.zero_grad()
        if out is not None:
            vector.collect_gradients()
        return total

    def _complete(self, weights: Tensor, out: Tensor) -> None:
        """Adds the optimizer's weight decay, if asked to, to gradients at some weights, shape (d,) or (n, d)."""
        groups = self.state.optimizer.optimizer.param_groups if self.options.full_gradients.weight_decay else []
        places = self.state.vector.places() if groups else {}
        for group in groups:
            for p in group["params"]:
                if p in places and p.requires_grad and group.get("weight_decay"):
                    out[..., places[p]].add_(weights[..., places[p]], alpha=float(group["weight_decay"]))
        for part in self.state.untrained:  # clients do not move the model there, so no gradient may either
            out[..., part] = 0
