"""The two halves of every engine: who trains the clients of a round, and the books that their updates enter."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks.payload import expect_noise_holds, payloads_of
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.logged_values import LoggedValue
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client, Cohort, Need, ReducedUpdate, RoundCounts, Update
from lightning_fed.distributed.sharing import Assignment, SharedReducer, logged_here, logging_alone, merge_logged
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.client_batches import Phases
from lightning_fed.engines.divergence import DivergenceWatch
from lightning_fed.engines.start_gradients import ClientGradients, ComputedStartGradients
from lightning_fed.engines.watch import ModuleWatch
from lightning_fed.errors import FederatedError, add_note
from lightning_fed.functional.clients import optimizer_distance

__all__ = ["ClientTrainer", "Engine", "FinishedClient", "TrainingParts"]


class TrainingParts:
    """What the two halves of an engine work with.

    Args:
        state: What ``fit`` works on.
        options: How clients train.
        hooks: Calls the hooks of all callbacks.

    Attributes:
        start: w as live weights have it, from which the round's clients start, in the global vector's dtype.
        at_work: Clients that train at once now, or the one whose update enters the round.
        cohort: The round's clients, those of other processes too.
        counts: What the round has taken so far.
        needs_distance: Whether ``Update.distance`` is asked for, and so the rates of each step.
        asks_twice: The client algorithm that asks for second gradients of steps, None if none does.
        combines: The client algorithm that makes a step's gradient of those of its samples, None if none does.
        watched: Whether a client is looked at for attributes that it changes.
    """

    def __init__(self, state: TrainState, options: LocalOptions, hooks: HookCaller, watched: bool = True) -> None:
        self.state, self.options, self.hooks, self.module = state, options, hooks, state.module
        self.watched = watched
        self.processes = processes_of(state.fabric)
        self.aggregator: Aggregator = hooks.trainer.aggregator
        self.algorithms = [callback for callback in hooks.callbacks if isinstance(callback, ClientAlgorithm)]
        self.phases = Phases(state, options, hooks)
        self.divergence = DivergenceWatch(state, options, self.processes)
        self.counts = RoundCounts()
        self.start_gradients = ComputedStartGradients(state, options, hooks, self.counts)
        self.gradients = ClientGradients(self.start_gradients, self.divergence)
        by_aggregator = Need.NORMALIZED_MEAN in self.aggregator.all_needs
        self.needs_distance = by_aggregator or any(each.needs_distance for each in self.algorithms)
        self.asks_twice = next((type(each).__name__ for each in self.algorithms if each.takes_second_gradient), None)
        self.combines = next((each for each in self.algorithms if each.takes_sample_gradients), None)
        self.at_work: tuple[Client, ...] = ()
        self.cohort = Cohort(0, ())
        self.start_round()

    def start_round(self) -> None:
        """Takes the global model as what clients start from, and begins to count."""
        # The live model's dtype can be narrower than the global vector's: updates are measured from the rounded start.
        self.start = self.state.weights.to(self.state.vector.dtype)
        self.counts.take(RoundCounts())


@dataclass
class FinishedClient:
    """What a client hands over when it has trained; its tensors hold until the next client is asked for.

    Attributes:
        update: δ_i and K_i; a gradient in the ``last_step`` or at the ``end``, with the loss there, if it has one.
        origin: The point that δ_i is measured from, shape (d,).
        weights: Where it ended, shape (d + p,); None if the resident module is there.
        buffers: Its buffers by name; None if the resident module has them.
        rates: Learning rate and momentum of each step, if ``needs_distance``.
        logged: What it logged, one collection after another, unless the recorder has it already.
        checked: Whether weights, loss and buffers are known to be finite.
        sent: Whether it trained elsewhere, where all that is a client's own business was seen to.
    """

    update: Update
    origin: Tensor
    weights: Tensor | None = None
    buffers: dict[str, Tensor] | None = None
    rates: Sequence[tuple[float, float]] = ()
    logged: Sequence[dict[str, LoggedValue]] = ()
    checked: bool = False
    sent: bool = False

    def put_in(self, state: TrainState) -> None:
        """Makes the resident module the client's trained model."""
        state.origin = self.origin
        if self.weights is not None:
            state.vector.all_data.copy_(self.weights)
        if self.buffers is not None:
            state.buffers.live.load(self.buffers)


class ClientTrainer(ABC):
    """Trains clients; how it does, and where, a subclass says in ``train``.

    Attributes:
        facts: What the row of a round says besides.
    """

    facts: Mapping[str, float] = MappingProxyType({})

    def __init__(self, parts: TrainingParts) -> None:
        self.parts, self.state, self.options, self.hooks = parts, parts.state, parts.options, parts.hooks
        self.module, self.recorder, self.optimizer = self.state.module, self.state.recorder, self.state.optimizer
        self.algorithms, self.phases = parts.algorithms, parts.phases
        self.start_gradients, self.divergence = parts.start_gradients, parts.divergence
        self.watch = ModuleWatch(self.state, parts.watched)

    def begin_round(self) -> None:  # noqa: B027  # most have nothing to get ready
        """Called between two rounds, before any hook of the next."""

    @abstractmethod
    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        """Trains clients and hands them over one by one; one that has diverged may be left out already.

        Args:
            clients: Those that train, in ascending order of id, in which they are handed over too.
        """


class Engine:
    """Keeps the books of a round: takes over what each client has trained, checks it, and reduces the updates.

    Args:
        parts: What it shares with the trainer.
        trainer: Trains the clients.
        reducer: Takes every update in ascending order of client id.
    """

    def __init__(self, parts: TrainingParts, trainer: ClientTrainer, reducer: RoundReducer) -> None:
        self.parts, self.trainer, self.reducer = parts, trainer, reducer
        self.state, self.options, self.processes = parts.state, parts.options, parts.processes
        self.aggregator, self.algorithms = parts.aggregator, parts.algorithms
        self.counts, self.divergence, self.start_gradients = parts.counts, parts.divergence, parts.start_gradients
        self.recorder, self.optimizer = self.state.recorder, self.state.optimizer
        self.distance_option = "--aggregator" if Need.NORMALIZED_MEAN in self.aggregator.all_needs else "--client"
        self.noisy = [payload for payload in payloads_of(parts.hooks.callbacks) if payload.adds_noise]
        self.watch = ModuleWatch(self.state)
        self.client_end_hooks, self.client_entered_hooks = (
            self.watch.guarded(name, parts.hooks.bound(name)) for name in ("on_client_end", "on_client_entered")
        )
        most = self.state.source.batch_size if self.options.local_steps is not None else None
        self.assignment = Assignment(self.processes, (self.state.client_states, self.state.buffers), most)
        self.state.client_states.elsewhere, self.state.start_gradients = self.assignment.elsewhere, self.start_gradients

    @property
    def samples(self) -> int:
        """Samples that went through local steps in this round."""
        return self.counts.samples

    @property
    def max_steps(self) -> int:
        """Local steps of the round's client that took most."""
        return self.counts.max_steps

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
        state.start_round()
        state.buffers.start_round()
        self.watch.expect_parameters()
        self.parts.start_round()
        self.parts.cohort = cohort
        start, ahead = self.parts.start, self.aggregator.ahead
        state.received = state.weights if ahead is None else start.clone().add_(ahead).to(state.weights.dtype)
        self.written, self.summed = state.weights._version, frozenset[str]()
        try:
            clients = self._exchange(cohort, own)
            with logging_alone(self.processes, self.recorder):
                for finished in self.trainer.train(clients):
                    self._enter(finished)
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
        ids = [state.called(c.id) for c in (self.parts.at_work if state.client is None else [state.client])]
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
        left_out, kept = (self.divergence.clients, self.divergence.failed), self.assignment.keeps
        logged = logged_here(self.recorder, self.state.module)
        everyone = self.processes.exchange((self.counts, left_out, kept, self.reducer.entries(), logged), "training")
        counts, all_left_out, keep, entries, all_logged = zip(*everyone, strict=True)
        self.counts.take(*counts)
        failed = {client: what for _, part in all_left_out for client, what in part.items()}
        self.divergence.settle(sorted(client for part, _ in all_left_out for client in part), failed)
        self.assignment.take_note(keep)
        self.reducer.everyone = list(entries)
        merge_logged(all_logged, self.recorder, self.state.module)

    def _exchange(self, cohort: Cohort, own: tuple[Client, ...]) -> tuple[Client, ...]:
        """Computes the cohort's gradients at w, if they are asked for; returns those of its own that have one."""
        self.parts.at_work = own
        sizes = self.start_gradients.begin_round(cohort, own)
        self.parts.at_work = ()
        if sizes is None:
            return own
        finite = self.divergence.finite(own, sizes)
        if all(self.processes.exchange(all(finite), "start gradients")):
            return own
        for client, good in zip(own, finite, strict=True):
            if not good and client.id not in self.divergence.clients:
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

    def _enter(self, finished: FinishedClient) -> None:
        """Adds what a client sends to the round's sums, unless it is left out; then it keeps what it keeps."""
        state, update = self.state, finished.update
        if not (finished.sent or self._send(finished)):
            return
        if self.aggregator.buffers == "average":
            # Sums of frozen parameters begin with the first client that moves them: others count as they were.
            values = self.state.buffers.values
            for name in (update.buffers.keys() - self.summed) & values.keys():
                self.reducer.begin_buffer(name, values[name])
            self.summed = frozenset(update.buffers)
        self.reducer.add(update, average_buffers=self.aggregator.buffers == "average")
        if not finished.sent:
            state.buffers.store(update.client)
            state.keep_own(update.client.id)
        for hook in self.client_entered_hooks:
            hook(update)
        self.counts.max_steps = max(self.counts.max_steps, update.num_steps, state.optimizer_steps)
        self.counts.bytes_up += update.bytes_up + update.numbers_beside * state.vector.data.element_size()
        self.parts.at_work = ()

    def _send(self, finished: FinishedClient) -> bool:
        """The client's half: takes it over, and lets callbacks edit its update; False if it is left out."""
        state, update, client = self.state, finished.update, finished.update.client
        if not self._complete(finished):
            return False
        self.parts.at_work = (client,)
        self._expect_weights(f"the training of client {client.id}")
        update.weight = self.aggregator.client_weight(client)
        update.bytes_up = state.vector.numel * state.vector.data.element_size()
        for hook in self.client_end_hooks:
            hook(update)
        if self.noisy:
            expect_noise_holds(update, self.noisy)
        beside = [vector for each in self.algorithms for vector in each.own_vectors(self.parts.hooks.trainer)]
        beside += update.sums.values()
        # An edit may have gone wrong, and so may what the client has trained beside the live weights.
        return not ((self.client_end_hooks or beside) and self.divergence.found(client, update.delta, *beside))

    def _complete(self, finished: FinishedClient) -> bool:
        """Puts a client into the resident module and completes its update; False if it is left out of the round."""
        state, update, start = self.state, finished.update, self.start_gradients
        if finished.logged and self.options.tolerance.max_diverged:
            self.recorder.mark()
        for series in finished.logged:
            self.recorder.merge(series)
        finished.put_in(state)
        if not finished.checked:
            gradient = [start.gradient, start.loss] if start.method_level == "client" else []
            personal = [state.vector.personal] if state.num_personal else []
            if self.divergence.found(update.client, update.delta, *gradient, *personal):
                return False
        if not self.parts.gradients.complete(update, self.parts.start):
            return False
        update.buffers = state.buffers.of_client()
        if self.parts.needs_distance and update.num_steps:
            update.distance = self._distance(finished.rates)
        return update.took_step

    def _distance(self, steps: Sequence[tuple[float, float]]) -> float:
        """Computes a_i of a client whose steps had these learning rates and momenta."""
        rates, momenta = [lr for lr, _ in steps], [momentum for _, momentum in steps]
        pull = sum(algorithm.pull for algorithm in self.algorithms)
        distance = optimizer_distance(self.optimizer.optimizer, rates, momenta, pull, self.distance_option)
        if any(rates) and distance <= 1e-9 * sum(rates):
            raise FederatedError(
                f"Expected a client's {len(rates)} local steps to move it, as `{self.distance_option}` divides its "
                f"update by the distance, got {distance:.3g} for learning rates up to {max(rates):g} and a pull of "
                f"{pull:g} to the global model, which cancels the steps: choose a learning rate below 1 / pull."
            )
        return distance
