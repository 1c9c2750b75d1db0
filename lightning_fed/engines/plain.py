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
from lightning_fed.core.updates import Client
from lightning_fed.engines.base import TrainingParts
from lightning_fed.engines.client_batches import local_steps
from lightning_fed.engines.sequential import SequentialTrainer
from lightning_fed.engines.trial import without_trace
from lightning_fed.engines.vectorized import VectorizedTrainer
from lightning_fed.engines.vectorized.refusals import attempt, tell

__all__ = ["all_parameters", "plain_training"]

_Train: TypeAlias = Callable[[Sequence[int]], Iterator[int]]


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
    trainer = hooks.trainer
    buffers, gradient = state.buffers.aside(), state.vector.all_grad.clone()
    own = replace(state, seed=seed_for(state.seed, Purpose.TUNE), recorder=MetricRecorder(), buffers=buffers)
    own.source = getattr(state.source, "plain", state.source)
    nobody, alone = copy(trainer), None
    nobody.callbacks, nobody.aggregator = [], FedAvg(buffers="keep")
    trainer.train_state = own
    try:
        parts = TrainingParts(own, options, HookCaller(nobody), watched=False)
        parts.start = state.vector.data.clone()
        chosen, many = state.engine_choice or {}, None
        if chosen.get("engine") == "vectorized":
            many = VectorizedTrainer(parts, chosen["chunk_size"], stack_full_gradients=False)
        alone = SequentialTrainer(parts)
        own.buffers.start_round()
        with recording(state.module, own.recorder):
            yield partial(_train, alone, many, partial(without_trace, state.module, all_parameters(state)))
    finally:
        trainer.train_state = state
        buffers.load()
        if alone is not None:
            alone.step.close()
        state.optimizer.start_client()
        state.vector.zero_grad()
        state.vector.all_grad.copy_(gradient)


def all_parameters(state: TrainState) -> list[Tensor]:
    """Returns all that a client's model may have other values of: trained, kept by it, or moved while frozen."""
    parameters = (*state.vector.all_parameters, *state.optimizer.parameters, *state.buffers.parameters)
    return list({id(parameter): parameter for parameter in parameters}.values())


def _train(
    alone: SequentialTrainer,
    many: VectorizedTrainer | None,
    undone: Callable[[], AbstractContextManager[None]],
    ids: Sequence[int],
) -> Iterator[int]:
    """Trains clients; see ``plain_training``."""
    state, source = alone.state, alone.state.source
    clients = [Client(each, int(source.sizes[each]), state.round) for each in ids]
    idle = [client for client in clients if not local_steps(source, alone.options, client.num_samples)]
    yield from (client.id for client in idle)
    left = tuple(client for client in clients if client not in idle)
    while many is not None and left:
        chunk = left[: many.chunk_size]
        with undone():
            trained, reason, _ = attempt(partial(many.train_chunk, chunk), partial(len, chunk))
            finished_clients = [many.hand_over(trained, lane) for lane in range(len(chunk))] if trained else []
            for finished in finished_clients:
                finished.put_in(state)
                yield finished.update.client.id
        if trained is None:
            tell(f"Clients are tuned one after another in round {state.round}, as {reason}.")
            state.leave_client()
            many.make_room(0)
            break
        left = left[len(chunk) :]
    for client in left:
        with undone():
            alone.train_client(client)
            yield client.id
