"""A node's half of an evaluation: the global model over what the node holds out, as counts and sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.user_code import overrides
from lightning_fed.data.batch_sources import BatchSource, num_samples
from lightning_fed.distributed.sharing import logged_here
from lightning_fed.engines.client_batches import read_batches
from lightning_fed.engines.fleet.evaluation import MOST_SAMPLES, expect_adds_up, metrics_of
from lightning_fed.engines.fleet.logs import rows_of
from lightning_fed.engines.fleet.packets import Facts, Tensors
from lightning_fed.engines.trial import Attributes, of_torch, without_trace
from lightning_fed.errors import FederatedError, expect
from lightning_fed.trainer.evaluation import STEPS, eval_mode, in_stage, run_batches
from lightning_fed.trainer.lightning_names import LightningNames

__all__ = ["OwnBatches", "count", "samples_of"]

_STAGES = {"val": RunningStage.VALIDATING, "test": RunningStage.TESTING}


class OwnBatches:
    """The batches of what is held out of some clients, one client after the other."""

    def __init__(self, source: BatchSource, clients: Sequence[int]) -> None:
        self._source, self._sizes = source, {client: int(source.sizes[client]) for client in clients}
        self.num_samples = sum(self._sizes.values())

    def __len__(self) -> int:
        return sum(-(-size // self._source.batch_size) for size in self._sizes.values())

    def __iter__(self) -> Iterator[Any]:
        for client, size in self._sizes.items():
            yield from read_batches(self._source, client, torch.arange(size), torch.initial_seed())


def samples_of(loader: Any) -> int:
    """Returns how many samples a set has, or at most has if it has no length."""
    try:
        return num_samples(loader)
    except (AttributeError, FederatedError, TypeError, NotImplementedError):  # a loader of another kind, a stream
        return MOST_SAMPLES


def count(trainer: LightningNames, kind: str, names: Sequence[str]) -> tuple[Facts, Tensors]:
    """Runs the module's own validation or test steps over the node's sets; ``names`` are those of all nodes.

    The module is left as it was. What its epoch hooks make of the sums, they make on the server.
    """
    module, stage, loaders = trainer.lightning_module, _STAGES[kind], getattr(trainer, f"{kind}_loaders")
    name, said, sent = STEPS[stage], dict[str, Facts](), Tensors()
    with in_stage(trainer, stage), without_trace(module), eval_mode(module, name):
        with recording(module, MetricRecorder()):
            getattr(module, f"on_{name}_start")()
            getattr(module, f"on_{name}_epoch_start")()
        kept = _kept(module)  # what these hooks set, they set on the server too
        for index, set_name in enumerate(names):
            if set_name in loaders:
                recorder, at = MetricRecorder(f"/{set_name}" if set_name else ""), len(said)
                samples = _run(trainer, kind, loaders[set_name], index, len(names), recorder)
                facts, own = _counted(module, recorder)
                said[set_name] = facts | {"samples": samples}
                sent |= {f"{at}.{place}": value for place, value in own.items()}
        changed = kept() if any(overrides(module, f"on_{name}_{end}") for end in ("epoch_end", "end")) else []
        expect(
            not changed,
            f"Expected `{name}_step` to log what it finds or to update Metric objects, for an evaluation at nodes, got "
            f"{', '.join(changed)} of {type(module).__name__}, which stays at the node: `on_{name}_epoch_end` on the "
            "server would not see it.",
        )
    return {"sets": said}, sent


def _kept(module: LightningModule) -> Callable[[], list[str]]:
    """Returns what names the attributes and tensors, but for those of metrics, that have changed since."""
    parts = [part for part in module.modules() if not (isinstance(part, (Metric, MetricCollection)) or of_torch(part))]
    held = [(key, value) for part in parts for key, value in {**vars(part), **part._buffers}.items()]
    tensors = [(key, tensor, tensor._version) for key, tensor in held if isinstance(tensor, Tensor)]
    before, ours = Attributes(module), {*map(id, parts)}

    def changed() -> list[str]:
        names = [key for part, key in before.changes() if id(part) in ours]
        return [*dict.fromkeys(names + [key for key, tensor, version in tensors if tensor._version != version])]

    return changed


def _run(trainer: LightningNames, kind: str, loader: Any, index: int, num_sets: int, recorder: MetricRecorder) -> int:
    """Runs the steps over one set, with the module's hooks of batches; returns the number of samples."""
    module, name, samples = trainer.lightning_module, STEPS[_STAGES[kind]], 0

    def hook(called: str, *args: Any) -> None:
        nonlocal samples
        samples += int(recorder.weight()) if called == f"on_{name}_batch_end" else 0
        getattr(module, called)(*args)

    for metric in metrics_of(module).values():
        metric.reset()
    limit: Any = getattr(trainer, f"limit_{kind}_batches")
    with recording(module, recorder):
        for _ in run_batches(trainer, name, loader, index, num_sets, limit, recorder, hook):
            pass
    return samples


def _counted(module: LightningModule, recorder: MetricRecorder) -> tuple[Facts, Tensors]:
    """Returns what was logged, and the states of the Metric objects that were updated."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # those that share a state have it only now
    updated = {place: metric for place, metric in metrics_of(module).items() if metric._update_count}
    for place, metric in updated.items():
        expect_adds_up(place, metric)
    logged = logged_here(recorder, module).metrics
    unknown = next((key for key, (place, _, _) in logged.items() if place is None), None)
    expect(
        unknown is None,
        f"Expected every Metric that is logged to be an attribute of {type(module).__name__}, for an evaluation at "
        f"nodes, got {unknown!r}: make it one in `__init__`.",
    )
    kinds, shown = list[list[Any]](), {key: [at, [*vars(how).values()]] for key, (at, how, _) in logged.items()}
    rows = rows_of(recorder, kinds)
    states = {f"{place}.{state}": getattr(m, state).clone() for place, m in updated.items() for state in m._defaults}
    return {"log": kinds, "rest": rows, "metrics": shown, "updated": [*updated]}, states
