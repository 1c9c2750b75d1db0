"""When ``auto`` trains many clients at once: where that is known to be faster and to give the same result."""

import numpy as np
from torch import nn

from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.core.user_code import is_own
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.client_batches import samples_in_epoch
from lightning_fed.engines.vectorized.batches import gathers
from lightning_fed.engines.vectorized.refusals import FEWEST_LANES, CannotStack, NotQuicker, unsaid

__all__ = ["LARGEST_CHUNK", "expect_quicker_and_the_same", "own_share"]

# A larger chunk is no faster and only takes memory: the fixed cost of a step is already small for each client.
LARGEST_CHUNK = 128
# Measured limits (docs/engines.md): with a larger model or batch, a step is so long that sharing it gains nothing.
_MOST_WEIGHTS, _LARGEST_BATCH = {"cpu": 2**17, "cuda": 10_000_000}, 300  # of single precision
# Layers of torch with weights whose step was measured to be quicker for many clients at once, on a CPU.
_QUICK = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.PReLU,
    nn.ModuleList, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip


def expect_quicker_and_the_same(state: TrainState, options: LocalOptions, hooks: HookCaller) -> None:
    """Refuses a run that may not be faster, or may not give the same result, with many clients at once.

    Args:
        state: What ``fit`` works on; a resumed run has the ``engine_choice`` of its checkpoint.
        options: How clients train.
        hooks: Knows the callbacks.

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
