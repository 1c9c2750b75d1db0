"""Validation, test and prediction of one model by the LightningModule's own steps."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.recorder import LoggedMetrics, MetricRecorder, recording
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for, seed_generators
from lightning_fed.core.user_code import Held, accepts, batch_transfer, overrides, requires
from lightning_fed.distributed.sharing import gather_logged, logging_alone
from lightning_fed.engines.fleet.evaluation import AtNodes, SetAtNodes
from lightning_fed.engines.trial import without_trace
from lightning_fed.models.classifier import class_scores
from lightning_fed.trainer.lightning_names import LightningNames
from lightning_fed.trainer.options import batch_limit, expect_module, known_length

__all__ = [
    "STEPS", "by_set", "eval_mode", "evaluate", "in_stage", "loaders_in_fit", "named_loaders", "predict",
    "print_results", "run_batches", "say_whose", "scored_batches", "seed_evaluation",
]  # fmt: skip

STEPS = {RunningStage.VALIDATING: "validation", RunningStage.TESTING: "test", RunningStage.PREDICTING: "predict"}
_UNNAMED = "dataloader_idx_"  # Lightning's name for the loaders of a list


def named_loaders(loaders: Any) -> dict[str, Iterable[Any]]:
    """Names the loaders that a ``*_dataloader`` method returns as one loader, a list, a dict or None."""
    if loaders is None:
        return {}
    if isinstance(loaders, dict):
        return dict(loaders)
    if isinstance(loaders, (list, tuple)):
        return {f"{_UNNAMED}{i}": loader for i, loader in enumerate(loaders)}
    return {"": loaders}


def loaders_in_fit(trainer: LightningNames, kind: Literal["val", "test"]) -> dict[str, Any]:
    """Names the sets on which ``fit`` evaluates: the server's own, those of nodes, or both."""
    where = getattr(trainer.fleet, "evaluates", "server")
    own = {} if where == "nodes" else named_loaders(getattr(trainer.datamodule, f"{kind}_dataloader")())
    return own if where == "server" else {**own, "/nodes": AtNodes(kind, "" if where == "nodes" else "/nodes")}


@contextmanager
def eval_mode(module: LightningModule, name: str) -> Iterator[None]:
    """Puts every submodule in eval mode without gradients, and back in its own mode afterwards.

    The module's own ``on_*_model_eval`` and ``on_*_model_train`` are called instead, as in Lightning.
    """
    modes = {m: m.training for m in module.modules()}
    getattr(module, f"on_{name}_model_eval")()
    try:
        with torch.no_grad():
            yield
    finally:
        if name != "predict" and overrides(module, f"on_{name}_model_train"):
            getattr(module, f"on_{name}_model_train")()
        else:
            for m, training in modes.items():
                m.training = training


@contextmanager
def in_stage(trainer: LightningNames, stage: RunningStage) -> Iterator[None]:
    """Sets the stage within the block, so that a module can read it, for example as ``trainer.validating``."""
    former, trainer.state.stage = trainer.state.stage, stage
    try:
        yield
    finally:
        trainer.state.stage = former


def evaluate(trainer: LightningNames, loaders: dict[str, Iterable[Any]], stage: RunningStage) -> list[LoggedMetrics]:
    """Runs ``validation_step`` or ``test_step`` over data sets by name, and returns the metrics of each, in order.

    A set's name is a suffix of its metrics if the datamodule gave it or there are several sets. What epoch hooks log is
    added to the metrics of each set. The list is empty if the stage is limited to 0 batches, or no node replies. Where
    the server evaluates too, callbacks do not hear of what nodes count.
    """
    own = {name: loader for name, loader in loaders.items() if not isinstance(loader, AtNodes)}
    limit = trainer.limit_val_batches if stage == RunningStage.VALIDATING else trainer.limit_test_batches
    expect_module(trainer.lightning_module, f"{STEPS[stage]}_step")
    results: list[LoggedMetrics] = []
    for place in loaders.values() if limit else ():
        if isinstance(place, AtNodes) and (sets := place.sets()):
            results += _evaluate(trainer, sets, stage, limit, place.whose)
    return results + (_evaluate(trainer, own, stage, limit) if own and limit else [])


def _evaluate(
    trainer: LightningNames, loaders: Mapping[str, Any], stage: RunningStage, limit: int | float, whose: str = ""
) -> list[LoggedMetrics]:
    name, module = STEPS[stage], trainer.lightning_module
    hooks: Any = (lambda hook: getattr(module, hook)()) if whose else trainer.hooks
    results: list[LoggedMetrics] = []
    epoch = recorder = MetricRecorder(whose=whose)
    held: list[tuple[Metric, dict[str, Any]]] = []
    with in_stage(trainer, stage), eval_mode(module, name):
        with recording(module, epoch):
            hooks(f"on_{name}_start")
            hooks(f"on_{name}_epoch_start")
        for index, (set_name, loader) in enumerate(loaders.items()):
            named = len(loaders) > 1 or not set_name.startswith(_UNNAMED)
            recorder = MetricRecorder(f"/{set_name}" if set_name and named else "", whose)
            if isinstance(loader, SetAtNodes):
                loader.fill(recorder, module)
            else:
                with recording(module, recorder), logging_alone(trainer.processes, recorder):
                    for _ in run_batches(trainer, name, loader, index, len(loaders), limit, recorder):
                        pass
                gather_logged(trainer.processes, recorder, module)
            results.append(recorder.compute())
            trainer.metrics.update(results[-1])
            if index < len(loaders) - 1:  # each set has its own totals
                held += recorder.set_metrics_aside()
        recorder.take_metrics_back(held)
        seed_evaluation(trainer, name, len(loaders))
        with recording(module, epoch):
            hooks(f"on_{name}_epoch_end")
        shared = epoch.compute()
        recorder.reset_metrics()
        epoch.reset_metrics()
        for metric, _ in held:
            metric.reset()
        for metrics in (*results, trainer.metrics):
            metrics.update(shared)
        hooks(f"on_{name}_end")
    return results


def predict(trainer: LightningNames, loaders: dict[str, Iterable[Any]], keep: bool = True) -> list[Any]:
    """Runs ``predict_step``; returns a list of batches, or such a list of each set, empty if nobody is to keep them."""
    module, limit = trainer.lightning_module, trainer.limit_predict_batches
    if limit == 0:
        return []
    outputs: list[list[Any]] = []
    keep |= any(isinstance(cb, BasePredictionWriter) and cb.interval.on_epoch for cb in trainer.callbacks)
    # Lightning's writers of predictions read this; as with many loaders there, a batch's sample indices are unknown.
    trainer.predict_loop = SimpleNamespace(current_batch_indices=[])
    recorder = MetricRecorder()
    with in_stage(trainer, RunningStage.PREDICTING), eval_mode(module, "predict"), recording(module, recorder):
        trainer.hooks("on_predict_start")
        trainer.hooks("on_predict_epoch_start")
        for index, loader in enumerate(loaders.values()):
            with trainer.processes.working_alone():
                batches = run_batches(trainer, "predict", loader, index, len(loaders), limit, recorder)
                own = {number: output for number, output in batches if keep}
            if trainer.processes.size > 1:
                everyone = trainer.processes.exchange(move_data_to_device(own, "cpu"), "predictions")
                own = {number: output for part in everyone for number, output in part.items()}
            outputs.append([own[number] for number in sorted(own)])
        trainer.predict_loop.predictions = outputs[0] if len(outputs) == 1 else outputs
        trainer.predict_loop.epoch_batch_indices = [[] for _ in outputs]
        seed_evaluation(trainer, "predict", len(loaders))
        trainer.hooks("on_predict_epoch_end")
        trainer.hooks("on_predict_end")
    return outputs[0] if len(outputs) == 1 else outputs


def by_set(loaders: dict[str, Iterable[Any]], predictions: list[Any]) -> Any:
    """Returns the predictions of several sets by their names, if they have any; else as they are."""
    named = predictions and len(loaders) > 1 and not next(iter(loaders)).startswith(_UNNAMED)
    return dict(zip(loaders, predictions, strict=True)) if named else predictions


def scored_batches(trainer: LightningNames) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Yields a classifier's scores on the batches of all test sets, or of the validation sets if there are none.

    Each item is the set's name, the batch, scores of shape (B, C) and labels of shape (B,), on all processes. Hooks of
    callbacks are not called. At the end module and random streams are as before.
    """
    module, options, stage = trainer.lightning_module, trainer.options, RunningStage.TESTING
    loaders, limit = _loaders(trainer, "test_dataloader"), options.limit_test_batches
    if not loaders:
        stage, loaders, limit = RunningStage.VALIDATING, _loaders(trainer, "val_dataloader"), options.limit_val_batches
    name, alone = STEPS[stage], trainer.processes.working_alone()

    def step(batch: Any) -> tuple[Any, Tensor, Tensor]:
        return batch, *class_scores(module, batch)

    with in_stage(trainer, stage), without_trace(module), eval_mode(module, name), alone:
        for index, (set_name, loader) in enumerate(loaders.items()):
            recorder, silent = MetricRecorder(), lambda *_: None
            for _, found in run_batches(trainer, name, loader, index, len(loaders), limit, recorder, silent, step):
                yield set_name, *found


def _loaders(trainer: LightningNames, method: str) -> dict[str, Iterable[Any]]:
    data = trainer.datamodule
    return named_loaders(getattr(data, method)()) if overrides(data, method) else {}


def run_batches(
    trainer: LightningNames, name: str, loader: Iterable[Any], index: int, num_loaders: int, limit: int | float,
    recorder: MetricRecorder, hooks: Callable[..., None] | None = None, step: Callable[..., Any] | None = None,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Yields number and output of each batch of one data set; several processes take batches in turn.

    If ``hooks`` are given instead of the trainer's, this process takes all batches. ``step`` replaces the module's.

    Random numbers drawn in a step, or to read a batch, depend only on the batch's number. So all processes shuffle in
    the same way, and the results are those of a single process.
    """
    module = trainer.lightning_module
    if resident := hasattr(loader, "to"):
        loader = loader.to(trainer.fabric.device)
    transfer = batch_transfer(trainer.fabric, module, trainer.datamodule, resident)
    step = getattr(module, f"{name}_step") if step is None else step
    # Arguments are passed by position: Lightning fixes their order, but the user names them.
    takes_batch = accepts(step, "batch_idx", 2)
    takes_loader = accepts(step, "dataloader_idx", 3) if num_loaders > 1 else requires(step, "dataloader_idx")
    which = (index,) if num_loaders > 1 else ()
    rank, size = (trainer.processes.rank, trainer.processes.size) if hooks is None else (0, 1)
    hooks = trainer.hooks if hooks is None else hooks
    most = batch_limit(limit, known_length(loader))
    with closing(_read(trainer, name, loader, index, resident)) as batches:  # a failing step too ends its workers
        for batch_idx, batch in enumerate(batches):
            if most is not None and batch_idx >= most:
                break
            if batch_idx % size != rank:
                continue
            seed_evaluation(trainer, name, index, 2 * batch_idx + 1)
            if resident:  # copied: batches are slices of the data, and a step may change them in place
                batch = apply_to_collection(batch, Tensor, torch.clone)
            if transfer is not None:
                batch = transfer(batch, index)
            recorder.batch, recorder.batch_size, recorder.position = batch, None, batch_idx
            hooks(f"on_{name}_batch_start", batch, batch_idx, *which)
            args = (batch_idx, index) if takes_loader else (batch_idx,) if takes_batch else ()
            with trainer.fabric.autocast():
                output = step(batch, *args)
            hooks(f"on_{name}_batch_end", output, batch, batch_idx, *which)
            recorder.batch, recorder.batch_size = None, 1
            yield batch_idx, output


def _read(
    trainer: LightningNames, name: str, loader: Iterable[Any], index: int, resident: bool
) -> Generator[Any, None, None]:
    """Yields the batches of a set; random numbers drawn between two batches do not affect the reading."""
    seed_evaluation(trainer, name, index, 0)
    seed_generators(Held(loader).generators, torch.initial_seed())
    for number, batch in enumerate(loader, 1):
        yield batch
        if not resident:
            seed_evaluation(trainer, name, index, 2 * number)


def seed_evaluation(trainer: LightningNames, name: str, loader: int, place: int | None = None) -> None:
    """Seeds the global streams for a place in an evaluation: by round in ``fit``, elsewhere always the same."""
    purpose = Purpose.PREDICT if name == "predict" else Purpose.EVALUATE
    round = trainer.round if trainer.state.fn == TrainerFn.FITTING else 0
    seed_everywhere(seed_for(trainer.seed, purpose, round, loader, place))


def say_whose(callbacks: Iterable[Any]) -> None:
    """Says which model validation and test measure, where clients have others of their own."""
    for name in [type(each).__name__ for each in callbacks if getattr(each, "has_own_model", False)]:
        rank_zero_info(
            f"Validation and test measure the global model, not what {name} keeps for each client: that is `own` in "
            "`models` of ClientEvaluation."
        )


def print_results(names: list[str], results: list[dict[str, float]]) -> None:
    """Prints the metrics of an evaluation, one per line, under the name of their data set."""
    width = max((len(key) for metrics in results for key in metrics), default=0)
    for name, metrics in zip(names, results, strict=False):  # a limit of 0 batches gives no results
        if name:
            print(f"{name}:")
        for key, value in sorted(metrics.items()):
            print(f"  {key:<{width}}  {value:.6g}")
