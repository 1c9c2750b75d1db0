"""What every way of training a cohort shares: who takes part, what an update holds, and how it enters the round."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, Update
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.sources import BatchSource
from lightning_fed.distributed.assignment import Assignment
from lightning_fed.distributed.logs import logged_here, logging_alone, merge_logged
from lightning_fed.distributed.reducer import SharedReducer
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.client_batches import Phases
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.engines.start_gradients import ComputedStartGradients, asks_for_full_gradients
from lightning_fed.engines.watch import ModuleWatch
from lightning_fed.errors import FederatedError, add_note
from lightning_fed.functional.fednova import optimizer_distance

__all__ = ["Engine"]


class Engine(ABC):
    """Trains the clients of a round; a subclass says how, in ``updates``.

    Args:
        state: What ``fit`` works on.
        options: How clients train.
        hooks: Calls the hooks of all callbacks.
        reducer: Takes every update in ascending order of client id.

    Attributes:
        max_steps: Local steps of the client that took most in this round, or its optimizers' if it steps them itself.
        bytes_up: What the updates of this round took on their way to the server.
        samples: Samples that went through local steps in this round.
        more_samples: Samples whose gradient or loss was taken besides, at a client's end or at other points of steps.
        divergence: Who was left out in this round.
        at_work: Clients that train at once now, or the one whose update enters the round.
    """

    def __init__(self, state: TrainState, options: LocalOptions, hooks: HookCaller, reducer: RoundReducer) -> None:
        self.state, self.options, self.hooks, self.reducer = state, options, hooks, reducer
        self.module, self.recorder, self.optimizer = state.module, state.recorder, state.optimizer
        self.processes = processes_of(state.fabric)
        self.aggregator: Aggregator = hooks.trainer.aggregator
        self.algorithms = [callback for callback in hooks.callbacks if isinstance(callback, ClientAlgorithm)]
        self.watch = ModuleWatch(state)
        self.client_end_hooks, self.client_entered_hooks = (
            self.watch.guarded(name, hooks.bound(name)) for name in ("on_client_end", "on_client_entered")
        )
        self.phases = Phases(state, options, hooks)
        self.step_start_hooks = hooks.bound("on_local_step_start")
        self.max_steps = self.samples = self.more_samples = self.bytes_up = 0
        self.at_work: tuple[Client, ...] = ()
        self.divergence = DivergenceWatch(state, options, self.processes)
        most = state.source.batch_size if options.local_steps is not None else None
        self.assignment = Assignment(self.processes, (state.client_states, state.buffers), most)
        self._set_up_gradients()

    def _set_up_gradients(self) -> None:
        """Prepares what the aggregator and client algorithms ask for beyond the updates."""
        state, aggregator = self.state, self.aggregator
        self.full_gradient = FullGradient(state, self.options, self._gradients_over())
        self.start_gradients = ComputedStartGradients(state, aggregator, self.hooks, self.full_gradient)
        if Need.LOSSES in aggregator.all_needs and not aggregator.reads_start_losses:
            held_out = self._held_out() if aggregator.losses_over == "held_out" else None
            self.start_gradients.own_losses = FullGradient(state, self.options, held_out=held_out)
        asked = bool(aggregator.all_needs & Need.ANY_GRADIENT)
        self.gradient_at = aggregator.gradient_at if asked else None
        if self.gradient_at not in (None, "start") and self.start_gradients.wants_losses:
            raise FederatedError(
                f"Expected `gradient_at` start of {type(aggregator).__name__}, which needs losses at the global model "
                f"too, got {self.gradient_at}: change the class given as `--aggregator`."
            )
        # A gradient that is not finite would spoil a sum; a method that gets every gradient checks them itself.
        self.sums_gradients = bool(aggregator.all_needs & (Need.GRADIENT_MEAN | Need.GRADIENT_SIGN_SUM))
        self.gradient = torch.empty_like(state.weights) if self.gradient_at in ("end", "last_step") else None
        by_aggregator = Need.NORMALIZED_MEAN in aggregator.all_needs
        self.needs_distance = by_aggregator or any(algorithm.needs_distance for algorithm in self.algorithms)
        self.distance_option = "--aggregator" if by_aggregator else "--client"

    def _held_out(self) -> BatchSource:
        """Returns the batches of what the data hold out of each client; refuses data where one that trains has none."""
        data, rule = self.hooks.trainer.datamodule, type(self.aggregator).__name__
        if not isinstance(data, FederatedDataModule):
            raise FederatedError(
                f"Expected a FederatedDataModule for {rule}, which reads losses over held-out samples, got "
                f"{type(data).__name__}: wrap it as `source`, or set `--aggregator.losses_over train`."
            )
        source = data.held_out_source("val").to(self.state.vector.device)
        self.state.held_out.append(source)
        lacking = np.flatnonzero((np.asarray(self.state.source.sizes) > 0) & (np.asarray(source.sizes) == 0))
        if len(lacking):
            raise FederatedError(
                f"Expected held-out samples of every client for {rule}, got none of client {lacking[0]} and "
                f"{len(lacking) - 1} others: raise `--data.val_fraction`, or set `--aggregator.losses_over train`."
            )
        return source

    def _gradients_over(self) -> Literal["data", "batch"]:
        """Returns over which samples gradients at w are taken; refuses parts that want different samples."""
        by_batch = [algorithm for algorithm in self.algorithms if algorithm.over == "batch"]
        others = [part for part in self.hooks.callbacks if part not in by_batch and asks_for_full_gradients(part)]
        if by_batch and others:
            raise FederatedError(
                "Expected all gradients at the global model to be over the same samples, got "
                f"{type(others[0]).__name__}, which takes them over all of a client's data, beside `--client.over "
                "batch`: leave one of them out."
            )
        return "batch" if by_batch else "data"

    @abstractmethod
    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains clients and yields the updates of those that took a step and did not diverge.

        Args:
            clients: Those that train, in ascending order of id; updates come in the same order.

        Yields:
            An update whose tensors hold until the next one is asked for; meanwhile the resident module is the client's
            trained model, and what the client logged has been recorded since the recorder's last mark.
        """

    @property
    def full_gradient_samples(self) -> int:
        """Samples whose gradient, or loss alone, an algorithm had computed in this round apart from local steps."""
        return self.start_gradients.samples + self.more_samples

    def train(self, cohort: Cohort) -> ReducedUpdate:
        """Trains every client of the cohort and reduces their updates.

        Args:
            cohort: The round's clients, in ascending order of id.

        Returns:
            The reduced update; no client in it if none took a step.
        """
        state = self.state
        own = self.assignment.own(cohort)
        self.reducer.reset(len(own))
        self.divergence.start_round(len(cohort.clients))
        self.max_steps = self.samples = self.more_samples = self.bytes_up = 0
        state.start_round()
        state.buffers.start_round()
        self.watch.expect_parameters()
        # The live model's dtype can be narrower than the global vector's: updates are measured from the rounded start.
        self.start, ahead = state.weights.to(state.vector.dtype), self.aggregator.ahead
        state.received = state.weights if ahead is None else self.start.clone().add_(ahead).to(state.weights.dtype)
        self.written = state.weights._version
        try:
            clients = self._exchange(cohort, own)
            with logging_alone(self.processes, self.recorder):
                for update in self.updates(clients):
                    self._enter(update)
                self.recorder.position = self.reducer.last_id
        except Exception as error:
            self._note_place(error)
            if not is_device_fault(error):  # else nothing can be read any more
                self.divergence.read()  # who diverged before is named first
                if told := self.optimizer.refusal(error):
                    raise told from error
            raise
        self.divergence.read()
        self._expect_weights("the training of the clients")
        self.watch.expect_parameters()
        self.optimizer.start_client()  # hooks between rounds find, and may change, the round's hyper-parameters
        if self.processes.size > 1:
            self._gather_training()
        return self.reducer.reduce(cohort.round)

    def _note_place(self, error: Exception) -> None:
        """Adds a note to an exception in local training: which client it was, and where in the run."""
        state = self.state
        ids = [state.called(c.id) for c in (self.at_work if state.client is None else [state.client])]
        if not ids:
            return
        who = f"client {ids[0]}" if len(ids) == 1 else f"one of clients {', '.join(ids)}"
        if is_device_fault(error):
            who += " or of one before it, as a device reports its faults late"
        rank = f", process {self.processes.rank}" if self.processes.size > 1 else ""
        count, size = self.recorder.batch_size or 0, state.source.batch_size
        short = state.client is not None and state.is_last_batch and 1 <= count < size
        what = f" Its batch has {count:g} of {size} samples; `--data.drop_last true` leaves such batches out."
        place = f"In the training of {who}: round {state.round}, local step {state.local_step}{rank}."
        add_note(error, place + what * short)

    def _gather_training(self) -> None:
        """Brings together what each process has found out about its own clients of a round, in one exchange."""
        assert isinstance(self.reducer, SharedReducer)
        start, kept = self.start_gradients, self.assignment.keeps
        counts = (self.samples, self.more_samples, start.samples, self.bytes_up, self.max_steps)
        logged = logged_here(self.recorder, self.module)
        left_out = self.divergence.clients, self.divergence.failed
        everyone = self.processes.exchange((counts, left_out, kept, self.reducer.entries(), logged), "training")
        numbers, all_left_out, keep, entries, all_logged = zip(*everyone, strict=True)
        self.samples, self.more_samples, start.samples, self.bytes_up = map(sum, list(zip(*numbers, strict=True))[:4])
        self.max_steps = max(part[4] for part in numbers)
        failed = {client: what for _, part in all_left_out for client, what in part.items()}
        self.divergence.settle(sorted(client for part, _ in all_left_out for client in part), failed)
        self.assignment.take_note(keep)
        self.reducer.everyone = list(entries)
        merge_logged(all_logged, self.recorder, self.module)

    def _exchange(self, cohort: Cohort, own: tuple[Client, ...]) -> tuple[Client, ...]:
        """Computes the cohort's gradients at w, if they are asked for; returns those of its own that have one."""
        self.at_work = own
        sizes = self.start_gradients.begin_round(cohort, own)
        self.at_work = ()
        if sizes is None:
            return own
        finite = self.divergence.finite(own, sizes)
        if all(self.processes.exchange(all(finite), "start gradients")):
            return own
        for client, good in zip(own, finite, strict=True):
            if not good:
                self.divergence.leave_out(client)
        kept = tuple(client for client, good in zip(own, finite, strict=True) if good)
        self.start_gradients.keep(kept)
        return kept

    def _expect_weights(self, what: str) -> None:
        """Refuses a write to the global model, from which the next client would start."""
        if self.state.weights._version != self.written:
            raise FederatedError(
                f"Expected {what} to leave `trainer.weights` and `trainer.origin` as they are, but it wrote to them: "
                "write to `trainer.vector.data`, or do so in `on_after_server_step`."
            )

    def _enter(self, update: Update) -> None:
        """Lets callbacks edit an update, adds it to the round's sums, and calls ``on_client_entered``."""
        state, client = self.state, update.client
        self.at_work = (client,)
        self._expect_weights(f"the training of client {client.id}")
        update.weight = self.aggregator.client_weight(client)
        update.bytes_up = state.vector.numel * state.vector.data.element_size()
        for hook in self.client_end_hooks:
            hook(update)
        beside = [vector for each in self.algorithms for vector in each.own_vectors(self.hooks.trainer)]
        # An edit may have gone wrong, and so may what the client has trained beside the live weights.
        if (self.client_end_hooks or beside) and self.divergence.found(client, update.delta, *beside):
            return
        self.reducer.add(update, average_buffers=self.aggregator.buffers == "average")
        state.buffers.store(client)
        state.keep_own(client.id)
        for hook in self.client_entered_hooks:
            hook(update)
        self.max_steps = max(self.max_steps, update.num_steps, state.optimizer_steps)
        self.bytes_up += update.bytes_up
        self.at_work = ()

    def _take_gradient(self, update: Update) -> bool:
        """Adds the gradient and the loss that the aggregator asks for; False if the client is left out for them."""
        client, start = update.client, self.start_gradients
        if self.gradient_at == "start":
            update.gradient, update.loss = start.gradient, start.loss
        elif self.gradient is not None:
            update.gradient = self.gradient
            if self.gradient_at == "end":
                update.loss = self._end_gradient(client, self.gradient)
        if start.wants_losses or start.own_losses is not None:
            update.loss = start.loss if start.own_losses is None else self._own_loss(client, start.own_losses)
            if self.divergence.found(client, update.loss):
                return False
        if self.gradient is None or not self.sums_gradients:
            return True
        return not self.divergence.found(client, self.gradient)

    def _end_gradient(self, client: Client, out: Tensor) -> Tensor:
        """Computes the gradient where the client ended, without a displacement of its start; returns the loss."""
        self.more_samples += client.num_samples
        return self._at_end(self.full_gradient, client, out)

    def _at_end(self, gradient: FullGradient, client: Client, out: Tensor | None) -> Tensor:
        state, weights = self.state, self.state.vector.data
        if state.origin is self.start:
            return gradient.compute(client, out)
        end, displaced = weights.clone(), (state.origin != self.start).any()  # one of 0 must leave no rounding
        weights.copy_(torch.where(displaced, end - state.origin + self.start, end))
        loss = gradient.compute(client, out)
        weights.copy_(end)
        return loss

    def _own_loss(self, client: Client, losses: FullGradient) -> Tensor:
        """Computes f_i by a pass of its own, at w or where the client ended; the module stays the trained one."""
        state = self.state
        self.more_samples += losses.count(client)
        if self.aggregator.losses_at == "end":
            return self._at_end(losses, client, None)
        weights, buffers = state.vector.all_data.clone(), state.buffers.live.copy()
        loss = losses.compute_at_start((client,), None)[0]
        state.vector.all_data.copy_(weights)
        state.buffers.live.load(buffers)
        return loss

    def _distance(self, options: list[tuple[float, float]]) -> float:
        """Computes a_i of a client whose steps had these learning rates and momenta."""
        rates, momenta = [lr for lr, _ in options], [momentum for _, momentum in options]
        pull = sum(algorithm.pull for algorithm in self.algorithms)
        distance = optimizer_distance(self.optimizer.optimizer, rates, momenta, pull, self.distance_option)
        if any(rates) and distance <= 1e-9 * sum(rates):
            raise FederatedError(
                f"Expected a client's {len(rates)} local steps to move it, as `{self.distance_option}` divides its "
                f"update by the distance, got {distance:.3g} for learning rates up to {max(rates):g} and a pull of "
                f"{pull:g} to the global model, which cancels the steps: choose a learning rate below 1 / pull."
            )
        return distance
