"""A node's half of an evaluation: the global model over what the node holds out, as counts and sums."""

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

import torch
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
from lightning_fed.errors import expect
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

    def to(self, device: torch.device) -> "OwnBatches":
        """Moves the samples to a device, once; returns itself."""
        self._source = self._source.to(device)
        return self

    def __iter__(self) -> Iterator[Any]:
        device = getattr(self._source, "order_device", torch.device("cpu"))
        for client, size in self._sizes.items():
            order = torch.arange(size, device=device)
            yield from read_batches(self._source, client, order, torch.initial_seed()) if size else ()


def samples_of(loader: Any) -> int:
    """Returns how many samples a set has, or at most has if it has no length."""
    try:
        return num_samples(loader)
    except Exception:  # of a stream, or a loader of another kind
        return MOST_SAMPLES


def count(trainer: LightningNames, kind: str, names: Sequence[str]) -> tuple[Facts, Tensors]:
    """Runs the module's own validation or test steps over the node's sets; ``names`` are those of all nodes.

    The module is left as it was. What its epoch hooks make of the sums, they make on the server.
    """
    module, stage, loaders = trainer.lightning_module, _STAGES[kind], getattr(trainer, f"{kind}_loaders")
    name, said, sent = STEPS[stage], dict[str, Facts](), Tensors()

    def hook(called: str, *args: Any) -> None:
        getattr(module, called)(*args)

    with in_stage(trainer, stage), without_trace(module), eval_mode(module, name):
        before, tensors = Attributes(module), dict(_tensors(module))
        versions = {key: tensor._version for key, tensor in tensors.items()}
        with recording(module, MetricRecorder()):
            hook(f"on_{name}_start")
            hook(f"on_{name}_epoch_start")
        for index, set_name in enumerate(names):
            if set_name in loaders:
                at = str(len(said))
                said[set_name], own = _count_set(trainer, kind, loaders[set_name], index, len(names), set_name)
                sent |= {f"{at}.{place}": value for place, value in own.items()}
        if any(overrides(module, f"on_{name}_{end}") for end in ("epoch_end", "end")):
            ours = (Metric, MetricCollection)
            kept = [key for part, key in before.changes() if not (isinstance(part, ours) or of_torch(part))]
            kept += [key for key, tensor in tensors.items() if tensor._version != versions[key]]
            expect(
                not kept,
                f"Expected `{name}_step` to log what it finds or to update Metric objects, for an evaluation at nodes, "
                f"got {', '.join(dict.fromkeys(kept))} of {type(module).__name__}, which stays at the node: "
                f"`on_{name}_epoch_end` on the server would not see it.",
            )
    return {"sets": said}, sent


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a module holds besides parameters, but for those of metrics and of torch's own parts."""
    for part in module.modules():
        if not (isinstance(part, Metric) or of_torch(part)):
            held: Iterable[tuple[str, Any]] = {**vars(part), **part._buffers}.items()
            yield from ((name, value) for name, value in held if isinstance(value, Tensor))


def _count_set(
    trainer: LightningNames, kind: str, loader: Any, index: int, num_sets: int, set_name: str
) -> tuple[Facts, Tensors]:
    """Returns what is logged of one set, and the states of the Metric objects that were updated."""
    module, name = trainer.lightning_module, STEPS[_STAGES[kind]]
    metrics, recorder = metrics_of(module), MetricRecorder(f"/{set_name}" if set_name else "")
    for metric in metrics.values():
        metric.reset()
    samples = 0

    def hook(called: str, *args: Any) -> None:
        nonlocal samples
        samples += int(recorder.weight()) if called == f"on_{name}_batch_end" else 0
        getattr(module, called)(*args)

    limit: Any = getattr(trainer, f"limit_{kind}_batches")
    with recording(module, recorder):
        for _ in run_batches(trainer, name, loader, index, num_sets, limit, recorder, hook):
            pass
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values(copy_state=False)  # those that share a state have it only now
    updated = {place: metric for place, metric in metrics.items() if metric._update_count}
    for place, metric in updated.items():
        expect_adds_up(place, metric)
    shown = {}
    for key, (where, options, last) in logged_here(recorder, module).metrics.items():
        expect(
            where is not None,
            f"Expected every Metric that is logged to be an attribute of {type(module).__name__}, for an evaluation at "
            f"nodes, got {key!r}: make it one in `__init__`.",
        )
        last = float(last) if options.both and isinstance(last, Tensor) and last.numel() == 1 else None
        shown[key] = [where, list(vars(options).values()), last if last is not None and isfinite(last) else None]
    kinds = list[list[Any]]()
    rows = rows_of(recorder, kinds)
    states = {f"{place}.{state}": getattr(m, state) for place, m in updated.items() for state in m._defaults}
    facts = {"samples": samples, "log": kinds, "rest": rows, "metrics": shown, "updated": [*updated]}
    return facts, {place: value.detach().clone() for place, value in states.items()}
