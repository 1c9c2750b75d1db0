"""Validation of a model on the samples of each client apart: one of all clients, or one for each."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric, classification, regression
from torchmetrics.utilities.data import dim_zero_cat

from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core import is_news
from lightning_fed.core.recorder import MetricRecorder, recording
from lightning_fed.core.seeding import Purpose, seed_for
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import accepts, batch_transfer, overrides
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.engines.client_batches import read_batches
from lightning_fed.engines.plain import all_parameters, plain_training
from lightning_fed.engines.trial import without_trace
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.evaluation import eval_mode, in_stage, run_batches, seed_evaluation
from lightning_fed.trainer.lightning_names import LightningNames
from lightning_fed.trainer.options import expect_module

__all__ = ["evaluate_clients", "plain_updates"]

_Values: TypeAlias = dict[int, dict[str, float]]

_KINDS = ("Binary", "Multiclass", "Multilabel")
_CURVES, _PRECISIONS = (
    tuple(getattr(classification, f"{kind}{name}") for kind in _KINDS)
    for name in ("PrecisionRecallCurve", "AveragePrecision")
)
_MEANINGLESS = ("should be meaningless", "recall is undefined")  # torchmetrics' functions say so

_AROUND_VALIDATION = tuple(
    f"on_validation_{at}" for at in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)


def evaluate_clients(
    trainer: LightningNames,
    source: BatchSource,
    clients: Sequence[int],
    batch_size: int | None,
    model: Literal["live", "tuned", "own"] = "live",
    steps: int | None = None,
    epochs: int | None = None,
) -> _Values:
    """Runs ``validation_step`` over the samples of each client, as if they were a validation set of their own.

    The module's own hooks of validation are called for each. A module that says by ``evaluate_samples`` what it
    measures of each sample is asked that instead, of several clients at once where they share a model. Callbacks hear
    nothing of it, and the module and the random streams are left as they were. Of several processes each takes clients
    in turn; where a client's own state is part of its model, a process that holds it does. Within the training of
    clients, a process evaluates those that it is asked for.

    Every client has samples; without a batch size they come in the source's own. What is returned, by client and name,
    is what the step logs for loggers, or the means over samples.

    Args:
        trainer: The trainer, within ``fit``.
        source: The samples.
        clients: Whose.
        batch_size: Samples that go through the module at once.
        model: What is evaluated: the ``live`` model; that ``tuned`` from it on each client's training samples, for so
            many local steps or epochs; or each client's ``own``.
        steps: Local steps of ``tuned``.
        epochs: Local epochs of ``tuned``, in place of steps.
    """
    processes = trainer.processes
    expect_module(trainer.lightning_module, "validation_step")
    if not accepts(source.batches, "batch_size", 4):  # a source of the user's own
        batch_size = None
    together = processes.are_together()
    mine = _share(trainer, clients, by_holder=model != "live") if together else clients
    own: _Values = {}
    with processes.working_alone() if together else nullcontext():
        if model == "live":
            own = _evaluate(trainer, source, mine, batch_size)
        else:
            with _tuning(trainer, steps, epochs) if model == "tuned" else nullcontext(_own(trainer)) as put_in:
                for client in put_in(mine):
                    own |= _evaluate(trainer, source, [client], batch_size)
    everyone = processes.exchange(own, "clients") if together else [own]
    found = {client: values for part in everyone for client, values in part.items()}
    return {client: found[client] for client in clients}


def plain_updates(trainer: LightningNames, clients: Sequence[int]) -> Tensor:
    """Returns what plain local training from the live model makes of clients: their δ_i, shape (n, d), in their order.

    Between two clients, in a hook that every process calls; each trains those that it can. It is training without the
    run's method, as for ``tuned``, of the options' length; nothing of it is logged or counted, or stays.
    """
    processes, vector = trainer.processes, trainer.vector
    together, start = processes.are_together(), trainer.vector.data.to(trainer.weights.dtype, copy=True)
    mine = _share(trainer, clients, by_holder=True) if together else clients
    given, own = trainer.options, dict[int, Tensor]()
    with (
        processes.working_alone() if together else nullcontext(),
        _tuning(trainer, given.local_steps, given.local_epochs) as train,
    ):
        for client in train(mine):
            own[client] = vector.data.to(start.dtype) - start
    everyone = processes.exchange({at: each.cpu() for at, each in own.items()}, "plain") if together else [own]
    found = {client: delta for part in everyone for client, delta in part.items()}
    return torch.stack([found[client] for client in clients]).to(start)


def _share(trainer: LightningNames, clients: Sequence[int], by_holder: bool) -> Sequence[int]:
    """Returns the clients that this process evaluates: in turn, of those that can."""
    processes = trainer.processes
    if not by_holder:
        return clients[processes.rank :: processes.size]
    here = {client for client in clients if not trainer.client_states.elsewhere(client)}
    held = processes.exchange(here, "holders")
    able = [[rank for rank, part in enumerate(held) if client in part] for client in clients]
    shares = zip(clients, (ranks[number % len(ranks)] for number, ranks in enumerate(able)), strict=True)
    return [client for client, rank in shares if rank == processes.rank]


def _own(trainer: LightningNames) -> Callable[[Sequence[int]], Iterator[int]]:
    """Returns what puts in one client's own model after another, with the buffers that it keeps, if it keeps any."""
    algorithm = next(cb for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm) and cb.has_own_model)

    def put_in(clients: Sequence[int]) -> Iterator[int]:
        for client in clients:
            with without_trace(trainer.lightning_module, all_parameters(trainer.train_state)):
                trainer.buffers.load(Client(client, int(trainer.client_sizes[client]), trainer.round))
                algorithm.load_own(trainer, client)
                yield client

    return put_in


def _tuning(
    trainer: LightningNames, steps: int | None, epochs: float | None
) -> AbstractContextManager[Callable[[Sequence[int]], Iterator[int]]]:
    """Makes a block in which clients are tuned from the live model."""
    given = trainer.options
    options = LocalOptions(
        engine=given.engine,
        local_steps=1 if given.fast_dev_run else steps,
        local_epochs=None if given.fast_dev_run else epochs,
        gradient_clip_val=given.gradient_clip_val,
        gradient_clip_algorithm=given.gradient_clip_algorithm,
        accumulate_grad_batches=given.accumulate_grad_batches,
    )
    return plain_training(trainer.train_state, options, trainer.hooks)


def _evaluate(trainer: LightningNames, source: BatchSource, clients: Sequence[int], batch_size: int | None) -> _Values:
    """Evaluates the live model on the samples of clients."""
    module = trainer.lightning_module

    def read(client: int) -> Iterator[Any]:
        seed = seed_for(trainer.seed, Purpose.EVALUATE, trainer.round, client)
        order = torch.arange(int(source.sizes[client]), device=getattr(source, "order_device", "cpu"))
        return read_batches(source, client, order, seed, batch_size)

    with in_stage(trainer, RunningStage.VALIDATING), without_trace(module), eval_mode(module, "validation"):
        if not _knows_samples(module):
            return {client: _evaluate_alone(trainer, read(client)) for client in clients}
        batches = ((place, batch) for place, client in enumerate(clients) for batch in read(client))
        means = _evaluate_together(trainer, _gathered(batches, batch_size or source.batch_size), len(clients))
        return dict(zip(clients, means, strict=True))


def _knows_samples(module: LightningModule) -> bool:
    """Says whether ``evaluate_samples`` measures what validation does; a subclass's validation may measure more."""
    owner = next(base for base in (module, *type(module).__mro__) if "validation_step" in vars(base))
    return "evaluate_samples" in vars(owner) and not any(overrides(module, hook) for hook in _AROUND_VALIDATION)


def _gathered(batches: Iterable[tuple[int, Any]], size: int) -> Iterator[list[tuple[int, Any]]]:
    """Gathers batches of several owners, which come with them, up to a number of samples."""
    held: list[tuple[int, Any]] = []
    for owner, batch in batches:
        if not isinstance(batch, (list, tuple)) or not all(isinstance(part, Tensor) for part in batch):
            raise FederatedError(
                f"Expected batches that are lists of tensors for `evaluate_samples`, got {type(batch).__name__}: leave "
                "that method out, so that `validation_step` evaluates each client by itself."
            )
        if held:
            count = len(batch[0]) + sum(len(other[0]) for _, other in held)
            if count > size or [part.shape[1:] for part in batch] != [part.shape[1:] for part in held[0][1]]:
                yield held
                held = []
        held.append((owner, batch))
    if held:
        yield held


def _evaluate_together(
    trainer: LightningNames, gathered: Iterable[list[tuple[int, Any]]], count: int
) -> list[dict[str, float]]:
    """Returns the means over samples of what the module measures of each, by owner; all have samples."""
    module: Any = trainer.lightning_module
    transfer = batch_transfer(trainer.fabric, module, trainer.datamodule, resident=False)
    sums: dict[str, Any] = {}
    sizes: Any = np.zeros(count)
    for number, held in enumerate(gathered):
        owners = np.repeat([owner for owner, _ in held], [len(batch[0]) for _, batch in held])
        batch = [torch.cat(parts) for parts in zip(*(batch for _, batch in held), strict=True)]
        seed_evaluation(trainer, "validation", 0, 2 * number + 1)
        with trainer.fabric.autocast():
            values = module.evaluate_samples(batch if transfer is None else transfer(batch, 0))
        for name, each in values.items():
            if each.shape != owners.shape:
                raise FederatedError(
                    f"Expected `evaluate_samples` to return {name!r} of each of {len(owners)} samples, got a tensor of "
                    f"shape {tuple(each.shape)}: return one number for each sample."
                )
            sums[name] = sums.get(name, 0) + np.bincount(owners, each.cpu().double(), count)
        sizes += np.bincount(owners, minlength=count)
    return [{name: float(total[owner] / sizes[owner]) for name, total in sums.items()} for owner in range(count)]


def _evaluate_alone(trainer: LightningNames, batches: Iterable[Any]) -> dict[str, float]:
    """Returns what the module logs of a validation set that no other process and no callback sees."""
    module, recorder = trainer.lightning_module, MetricRecorder()

    def hooks(name: str, *args: Any) -> None:
        getattr(module, name)(*args)

    for part in module.modules():
        if isinstance(part, Metric):
            part.reset()
    with recording(module, recorder), _nan_without_value(module):
        hooks("on_validation_start")
        hooks("on_validation_epoch_start")
        for _ in run_batches(trainer, "validation", batches, 0, 1, 1.0, recorder, hooks):
            pass
        seed_evaluation(trainer, "validation", 1)
        hooks("on_validation_epoch_end")
        hooks("on_validation_end")
        found = recorder.compute()
    trainer.metrics.goals.update(found.goals)
    return found.logged


@contextmanager
def _nan_without_value(module: LightningModule) -> Iterator[None]:
    """Lets Metric objects compute NaN within the block where a client's samples give them no value."""
    held: list[tuple[Any, Any]] = [(part, part.compute) for part in module.modules() if isinstance(part, Metric)]
    try:
        for metric, compute in held:
            metric.compute = partial(_computed, metric, compute)
        yield
    finally:
        for metric, compute in held:
            metric.compute = compute


def _computed(metric: Metric, compute: Callable[[], Any]) -> Any:
    """Computes a metric; NaN where it fails, or warns that it means nothing, and for what ``_undefined`` marks."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            value = compute()
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        first = f"{type(metric).__name__} has no value for some clients, as it fails on their samples: {error}"
        if is_news("metric", first):
            rank_zero_warn(first.split("\n")[0])
        return torch.tensor(torch.nan, device=metric.device)
    undefined = _undefined(metric)
    if undefined is None:
        undefined = torch.tensor(any(word in str(each.message) for each in said for word in _MEANINGLESS))
    if not isinstance(value, Tensor) or not undefined.any():
        return value
    nan = torch.full(value.shape, torch.nan, device=value.device)
    return torch.where(undefined, nan, value) if undefined.shape == value.shape else nan


def _undefined(metric: Any) -> Tensor | None:
    """Marks outputs or classes for which torchmetrics divides 0 by 0 and returns 0 or 1; None for other metrics."""
    if isinstance(metric, (regression.R2Score, regression.RelativeSquaredError)):
        return _constant(metric.sum_squared_error, metric.sum_error / metric.total, metric.total)
    if isinstance(metric, regression.ExplainedVariance):
        return _constant(metric.sum_squared_target, metric.sum_target / metric.num_obs, metric.num_obs)
    if isinstance(metric, regression.PearsonCorrCoef):
        pairs, count = ((metric.var_x, metric.mean_x), (metric.var_y, metric.mean_y)), metric.n_total
        return torch.stack([_constant(var + count * mean**2, mean, count) for var, mean in pairs]).any(0)
    if isinstance(metric, regression.SpearmanCorrCoef):
        parts = map(dim_zero_cat, (metric.preds, metric.target))
        return torch.stack([part.amax(0) == part.amin(0) for part in parts]).any(0)
    if not isinstance(metric, _CURVES):
        return None
    average = getattr(metric, "average", None)
    if metric.thresholds is not None:
        negatives, positives = metric.confmat[0].sum(-1).unbind(-1)
    else:
        labels = dim_zero_cat(metric.target)
        labels = (
            one_hot(labels, metric.num_classes) if isinstance(metric, _CURVES[1]) and average != "micro" else labels
        )
        negatives, positives = (labels == 0).sum(0), (labels == 1).sum(0)
    if average == "micro":
        negatives, positives = negatives.sum(), positives.sum()
    lacking: Tensor = (positives == 0) | ((negatives == 0) & (not isinstance(metric, _PRECISIONS)))
    return lacking & (positives > 0) if average == "weighted" and bool((positives > 0).any()) else lacking


def _constant(squares: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Whether values, given by the sum of their squares, are equal but for rounding, as one value is."""
    return (count < 2) | (squares - count * mean**2 <= 16 * torch.finfo(squares.dtype).eps * squares)
