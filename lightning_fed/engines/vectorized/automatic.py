"""``engine: auto``: when many clients train at once although nobody asked for it, and what becomes of what fails."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from lightning_fed.core import is_news
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.updates import Client, Update
from lightning_fed.core.user_code import is_own, own_places
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.client_batches import samples_in_epoch
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.trial import Attributes, random_states
from lightning_fed.engines.vectorized.batches import LaneBatches, gathers
from lightning_fed.engines.vectorized.engine import VectorizedEngine
from lightning_fed.engines.vectorized.refusals import FEWEST_LANES, CannotStack, NotQuicker, attempt, tell, unsaid
from lightning_fed.engines.vectorized.step import LaneLog

__all__ = ["LARGEST_CHUNK", "AutomaticEngine", "expect_worthwhile", "own_share"]

# A larger chunk is no faster and only takes memory: the fixed cost of a step is already small for each client.
LARGEST_CHUNK = 128
# Measured limits (docs/engines.md): with a larger model or batch, a step is so long that sharing it gains nothing.
_MOST_WEIGHTS, _LARGEST_BATCH = {"cpu": 2**17, "cuda": 10_000_000}, 300  # of single precision
# Layers of torch with weights whose step was measured to be quicker for many clients at once, on a CPU.
_QUICK = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.PReLU,
    nn.ModuleList, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip


def expect_worthwhile(state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
    """Refuses a run that may not be faster, or may not give the same result, with many clients at once.

    Raises:
        CannotStack: If the device, model, data or a callback rules it out. A trial step tests the rest later.
    """
    if state.engine_choice is None:
        _expect_quicker(state, options)
    elif state.engine_choice["engine"] != "vectorized":
        raise CannotStack("the run trained this way before it was resumed")
    for hook in ("on_client_end", "on_client_entered"):
        for method in hooks.methods(hook):
            owner = getattr(method, "__self__", method)
            if is_own(type(owner)) and not getattr(owner, "stacks", False):
                raise unsaid(owner, hook)
    for part in state.module.modules():
        if any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)):
            raise CannotStack(f"{type(part).__name__} has forward or backward hooks, which are for one client")


def own_share(state: TrainState) -> int:
    """Returns how many clients of a round one process trains."""
    return -(-state.cohort_size // processes_of(state.fabric).size)


def _expect_quicker(state: TrainState, options: LocalOptions) -> None:
    device, source = state.vector.device.type, state.source
    most = _MOST_WEIGHTS.get(device, 0) * 4 // max(4, state.vector.data.element_size())
    if state.vector.all_numel > most:
        raise NotQuicker(f"the model has more than {most:,} weights, above which it is not faster on {device}")
    if (slow := next((part for part in state.module.modules() if not _is_quick(part)), None)) is not None:
        raise NotQuicker(f"{type(slow).__name__} is not known to be quicker for many clients at once")
    if not gathers(source, state.transfer):
        raise NotQuicker("samples are read or changed one by one, which takes longer than the step of a small model")
    if (batch := min(source.batch_size, int(np.max(source.sizes)))) > _LARGEST_BATCH:
        raise NotQuicker(f"a step on {batch:,} samples is not faster for many clients at once")
    if (lanes := _lanes_of_a_call(state, options)) < FEWEST_LANES:
        raise NotQuicker(f"only {lanes:.1f} clients on average would share a step, too few: {FEWEST_LANES} are needed")


def _is_quick(part: nn.Module) -> bool:
    """Returns whether a part is faster for many clients: a known layer or the user's own, with at most 2-D weights."""
    own = [parameter for parameter in part._parameters.values() if parameter is not None]
    of_torch = next(kind for kind in type(part).__mro__ if kind.__module__.startswith("torch.nn."))
    return not own or ((of_torch is nn.Module or isinstance(part, _QUICK)) and all(p.ndim <= 2 for p in own))


def _lanes_of_a_call(state: TrainState, options: LocalOptions) -> float:
    """Estimates how many clients share a call of the step: those of one chunk with batches of one size at that step.

    It assumes a cohort whose sizes are spread evenly over those of all clients.
    """
    source = state.source
    sizes = samples_in_epoch(source, np.asarray(source.sizes))
    sizes = sizes[sizes > 0]
    count = min(own_share(state), options.chunk_size or LARGEST_CHUNK)
    cohort = np.quantile(sizes, np.linspace(0, 1, count), method="nearest")
    most = options.local_steps or int(cohort.max())
    full = np.minimum(cohort // source.batch_size, most)
    rest = cohort[(cohort % source.batch_size > 0) & (full < most)]
    return float((full.sum() + len(rest)) / (full.max() + len(np.unique(rest))))


class AutomaticEngine(VectorizedEngine):
    """Trains clients in chunks, each chunk at once; if one fails, it and all later clients train one after another.

    A chunk enters the round only after all its steps are taken, so that it can be trained again if it fails.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make_alone = partial(SequentialEngine, *args)
        self.alone: SequentialEngine | None = None
        self.places = own_places(self.module)

    def updates(self, clients: tuple[Client, ...]) -> Iterator[Update]:
        """Trains chunk after chunk; see ``Engine.updates``."""
        while clients and self.alone is None:
            chunk = clients[: self.chunk_size]
            if (trained := self._try_chunk(chunk)) is not None:
                yield from trained
                clients = clients[len(chunk) :]
        if (alone := self.alone) is not None:
            alone.start, alone.samples, alone.more_samples = self.start, 0, 0
            yield from alone.updates(clients)
            self.samples += alone.samples
            self.more_samples += alone.more_samples

    def _try_chunk(self, clients: tuple[Client, ...]) -> Iterator[Update] | None:
        """Trains clients at once; None if that failed for any reason: the next try is with fewer, or one at a time."""
        state, logged = self.state, self.recorder.series
        counted = self.start_gradients.samples, self.more_samples
        trained, reason, fewer = attempt(lambda: self._train_chunk(clients), lambda: len(clients))
        if trained is None:
            self.recorder.series, (self.start_gradients.samples, self.more_samples) = logged, counted
            state.leave_client()
            state.vector.refresh()
            if fewer:
                self._shrink(fewer, reason)
            else:
                self._fall_back(reason)
        return trained

    def _run_steps(self, batches: LaneBatches, log: LaneLog) -> list[tuple[float, float]]:
        before = Attributes(self.module, self.places)
        try:
            options = super()._run_steps(batches, log)
            self._expect_the_same(batches, before)
        except Exception:  # any error is raised again: these clients then train again from the same attributes
            before.put_back()
            raise
        return options

    def _expect_the_same(self, batches: LaneBatches, before: Attributes) -> None:
        """Refuses steps that drew random numbers or changed what clients share, even if the trial step did not."""
        first = min(batches.clients, key=lambda client: client.id)
        seed, device = seed_for(self.state.seed, Purpose.LOCAL, first.round, first.id), self.state.vector.device
        drawn = random_states(device)
        seed_everywhere(seed)
        if random_states(device) != drawn:
            raise CannotStack("its training draws random numbers, which would differ for many clients at once")
        if name := before.shared():
            where = type(self.module).__name__
            raise CannotStack(f"{where} changes `{name}` in training, which clients trained at once would share")

    def _shrink(self, size: int, reason: str) -> None:
        """Lets fewer clients train at once, in a resumed run too."""
        is_news("engine", f"chunks of {size}")  # so that the next run prints its own line
        tell(f"Engine: vectorized in chunks of {size} from round {self.state.round} on, as {reason}.")
        self.chunk_size = size
        self.state.engine_choice = {**(self.state.engine_choice or {}), "chunk_size": size}
        self._make_room(0)

    def _fall_back(self, reason: str) -> None:
        """Prints why, and trains clients one after another from here on."""
        is_news("engine", f"sequential from round {self.state.round} on")
        tell(f"Engine: sequential from round {self.state.round} on, as {reason}.")
        self.state.engine_choice = {"engine": "sequential", "reason": reason}
        self.alone = self.make_alone()
        # Of this round, which has begun.
        self.alone.start_gradients, self.alone.divergence = self.start_gradients, self.divergence
        self.start_gradients.full_gradient, self.at_work = self.full_gradient, ()
        self._make_room(0)  # frees the matrices
