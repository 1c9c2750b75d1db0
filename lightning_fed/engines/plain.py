"""Trains clients as no method would, for their evaluation, and puts everything back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import Tensor

from lightning_fed.aggregators import FedAvg
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client, Update
from lightning_fed.engines.client_batches import explained_batches, local_steps
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.trial import without_trace
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.engines.vectorized.refusals import attempt, tell
from lightning_fed.engines.vectorized.step import LaneLog

__all__ = ["all_parameters", "plain_training"]

_Train: TypeAlias = Callable[[Sequence[int]], Iterator[int]]


class _OneByOne(SequentialEngine):
    """Trains one client and leaves it in the module."""

    def fit(self, client: Client) -> None:
        """Trains a client from ``start``."""
        with explained_batches((client,), self.state.source.batch_size):
            self._start_client(client)
            self._run_local_steps(client)
        self._leave_client()


class _AtOnce(VectorizedEngine):
    """Trains a chunk of clients, then puts one after another into the module, whatever has become of it."""

    def _finish(
        self, batches: LaneBatches, clients: tuple[Client, ...], log: LaneLog, options: list[tuple[float, float]]
    ) -> Iterator[Update]:
        for lane, client in enumerate(batches.clients):
            if (update := self._update(client, lane, [], batches.steps[lane])) is not None:
                yield update


@contextmanager
def plain_training(state: TrainState, options: LocalOptions, hooks: HookCaller) -> Iterator[_Train]:
    """Lends local training without the run's method, of which nothing shows when the block is over.

    The module's own hooks are called and those of callbacks are not; nothing is logged or counted. The optimizer is the
    run's, fresh for each client, with the rates that the round's clients have, and a client starts with the buffers
    that its training starts with. Random numbers come from streams of their own.

    Args:
        state: What ``fit`` works on, between two clients; the module holds w, from which clients train.
        options: How long a client trains, and how.
        hooks: Calls the hooks of the run's callbacks.

    Yields:
        What trains clients that it is given, as many at once as the run does, and yields the id of each while the
        module holds what has become of it: w itself if it has no batch to train on.
    """
    trainer, optimizer, strategy = hooks.trainer, state.optimizer, state.fabric.strategy
    # What the run's engine has set there, and a second one sets anew.
    flat_step, of_strategy = optimizer.flat_step, dict(vars(strategy))
    listening = [dict(each._optimizer_step_post_hooks) for each in optimizer.optimizers]
    buffers, seed = state.buffers.aside(), seed_for(state.seed, Purpose.TUNE)
    gradient = state.vector.all_grad.clone()
    trainer.train_state = own = replace(state, seed=seed, recorder=MetricRecorder(), buffers=buffers)
    try:
        nobody = copy(trainer)
        nobody.callbacks, nobody.aggregator = [], FedAvg(buffers="keep")
        parts = own, options, HookCaller(nobody), None
        chosen = state.engine_choice or {}
        at_once = None
        if chosen.get("engine") == "vectorized":
            at_once = _AtOnce(*parts, chunk_size=chosen["chunk_size"], stack_full_gradients=False)
        engine = _OneByOne(*parts)
        own.buffers.start_round()
        engine.start = state.vector.data.clone()
        with recording(state.module, own.recorder):
            yield partial(_train, engine, at_once, partial(without_trace, state.module, all_parameters(state)))
    finally:
        trainer.train_state = state
        buffers.load()
        for name in vars(strategy).keys() - of_strategy.keys():
            delattr(strategy, name)
        vars(strategy).update(of_strategy)
        for each, hooks_of in zip(optimizer.optimizers, listening, strict=True):
            each._optimizer_step_post_hooks.clear()
            each._optimizer_step_post_hooks.update(hooks_of)
        optimizer.flat_step = flat_step
        optimizer.start_client()
        state.vector.zero_grad()
        state.vector.all_grad.copy_(gradient)


def all_parameters(state: TrainState) -> list[Tensor]:
    """Returns all that a client's model may have other values of: trained, kept by it, or moved while frozen."""
    parameters = (*state.vector.all_parameters, *state.optimizer.parameters, *state.buffers.parameters)
    return list({id(parameter): parameter for parameter in parameters}.values())


def _train(
    engine: _OneByOne, at_once: _AtOnce | None, undone: Callable[[], AbstractContextManager[None]], ids: Sequence[int]
) -> Iterator[int]:
    """Trains clients; see ``plain_training``."""
    source = engine.state.source
    clients = [Client(each, int(source.sizes[each]), engine.state.round) for each in ids]
    idle = [client for client in clients if not local_steps(source, engine.options, client.num_samples)]
    yield from (client.id for client in idle)
    left = tuple(client for client in clients if client not in idle)
    while at_once is not None and left:
        at_once.start, chunk = engine.start, left[: at_once.chunk_size]
        with undone():
            trained, reason, _ = attempt(partial(at_once._train_chunk, chunk), partial(len, chunk))
            for update in trained or ():
                yield update.client.id
        if trained is None:
            tell(f"Clients are tuned one after another in round {engine.state.round}, as {reason}.")
            engine.state.leave_client()
            at_once._make_room(0)
            break
        left = left[len(chunk) :]
    for client in left:
        with undone():
            engine.fit(client)
            yield client.id
