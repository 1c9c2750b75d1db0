"""One call of the trainer from start to end: attaches model and data, sets up, tears down."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch.autograd import set_detect_anomaly

from lightning_fed.callbacks.lightning_callbacks import unfrozen
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.client_algorithms.personal_parameters import personal_parameters
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.hooks import is_stock
from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.core.recorder import LoggedMetrics
from lightning_fed.core.seeding import run_seed
from lightning_fed.core.train_state import NoState, TrainState
from lightning_fed.core.user_code import batch_transfer, overrides
from lightning_fed.core.vector import ParameterVector
from lightning_fed.data.collation import close_workers
from lightning_fed.distributed.consistency import expect_same_data, share_model
from lightning_fed.distributed.sharing import sync_metrics
from lightning_fed.engines.fleet.terms import expect_carried
from lightning_fed.errors import FederatedError, expect
from lightning_fed.runs.checkpoint_files import expect_layout, read_checkpoint, records_of_checkpoints
from lightning_fed.runs.folder import RunFolder
from lightning_fed.runs.log import RunLog
from lightning_fed.runs.loggers import RoundWandbLogger
from lightning_fed.sampling import cohort_size
from lightning_fed.trainer.bookkeeping import StopRequest
from lightning_fed.trainer.callback_order import add_module_callbacks, expect_covered
from lightning_fed.trainer.checkpoint_contents import load_weights, restore_data, restore_state
from lightning_fed.trainer.evaluation import loaders_in_fit, named_loaders
from lightning_fed.trainer.fabric import announce_device, launch, lay_out, move_to_device, show_optimizers
from lightning_fed.trainer.lightning_names import LightningNames
from lightning_fed.trainer.loop import RoundLoop
from lightning_fed.trainer.options import expect_datamodule, expect_module

__all__ = ["attached", "evaluating", "prepare", "train"]


@contextmanager
def attached(
    trainer: LightningNames, model: LightningModule, datamodule: LightningDataModule, fn: TrainerFn
) -> Iterator[None]:
    """Connects model and data for one call, and tells callbacks if it fails."""
    trainer.lightning_module, trainer.datamodule = model, datamodule
    trainer.seed = run_seed() if trainer.options.seed is None else trainer.options.seed
    trainer.state.fn, trainer.state.status = fn, TrainerStatus.RUNNING
    trainer.state.stage = RunningStage.TRAINING if fn == TrainerFn.FITTING else RunningStage(fn.value)
    trainer.should_stop, trainer.hooks.stopper = False, ""
    launch(trainer.fabric)
    model.trainer = datamodule.trainer = cast(Any, trainer)
    try:
        trainer.callbacks = add_module_callbacks(trainer.callbacks, model)
        with trainer.processes.at_work(lambda: trainer.books.position(trainer)):
            yield
            trainer.processes.exchange(None, "end")
        trainer.state.status = TrainerStatus.FINISHED
        for callback in trainer.callbacks:
            if is_stock(callback, "OnExceptionCheckpoint"):
                callback.teardown(cast(Any, trainer), model, fn.value)
    except BaseException as raised:
        trainer.state.status = TrainerStatus.INTERRUPTED
        error = _exit_refused(trainer, raised) if isinstance(raised, SystemExit) else raised
        trainer.processes.tell(error)
        trainer.hooks("on_exception", error, module=False)
        datamodule.on_exception(error)
        if error is not raised:
            raise error from raised
        raise
    finally:
        for kind in ("val", "test", "predict"):
            for loader in getattr(trainer, f"{kind}_loaders").values():
                close_workers(loader)
        datamodule.teardown(fn.value)
        trainer.hooks("teardown", fn.value)
        if isinstance(trainer.train_state, TrainState):
            trainer.train_state = cast(TrainState, trainer.train_state.close())
            if trainer.options.memory_format == "auto" and trainer.train_state.memory_format == "channels_last":
                model.to(memory_format=torch.contiguous_format)  # the user did not ask for channels_last
        model.cpu()  # as Lightning does


def _exit_refused(trainer: LightningNames, error: SystemExit) -> FederatedError:
    """Turns a ``sys.exit`` during a call into an error, because it would look like a normal end of the script."""
    place = f" in round {trainer.round}" if trainer.state.fn == TrainerFn.FITTING else ""
    whose = f", in the training of client {trainer.client.id}" if trainer.client is not None else ""
    return FederatedError(
        f"Expected no `sys.exit` in {type(trainer.lightning_module).__name__}, its data or callbacks, got an exit "
        f"({error.code!r}){place}{whose}: raise an exception, or set `trainer.should_stop` to end after the round."
    )


def train(trainer: Any, stop: StopRequest, ckpt_path: str | None, weights: str | None) -> None:
    """Sets up ``fit``, new or from a checkpoint, and runs its rounds."""
    books = trainer.books
    _set_up_data(trainer, "fit")
    path, former = books.find(trainer, ckpt_path, to_train=True)
    checkpoint = read_checkpoint(path, "--ckpt_path") if path is not None else None
    books.open_run(trainer, ckpt_path, former, found=path is not None)
    trainer.reads_length = any(getattr(cb, "reads_length", False) for cb in trainer.callbacks)
    try:
        _call_setups(trainer, "fit")
        _set_up_training(trainer, books.run, weights, checkpoint, str(path))
    except BaseException:
        books.clear_away(trainer)
        raise
    _say_if_done(trainer, ckpt_path)
    log = RunLog(trainer.options.logger, books.run, checkpoint, former, trainer.is_global_zero)
    trainer.loggers, status = log.loggers, "failed"
    try:
        with set_detect_anomaly(trainer.options.detect_anomaly):
            RoundLoop(trainer, log, stop).run()
        status = "success"
    except Exception:  # rows still in memory are written before it is raised again
        if trainer.processes.size == 1:  # else other processes would wait to hear of the failure
            with suppress(Exception):
                log.catch_up()
        raise
    finally:
        log.close(status)
        # Our own W&B run is finished now; the user's loggers stay, as in Lightning.
        trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, RoundWandbLogger)]
    books.report_end(trainer, stop.signum)


def prepare(trainer: LightningNames) -> None:
    """Sets up the state of ``fit`` as in a new run that writes nothing, for a node of a fleet."""
    _set_up_data(trainer, "fit")
    trainer.reads_length = any(getattr(cb, "reads_length", False) for cb in trainer.callbacks)
    _call_setups(trainer, "fit")
    _set_up_training(trainer, None, None, None, "")


def _say_if_done(trainer: LightningNames, ckpt_path: str | None) -> None:
    """Prints why, if a resumed run has nothing left to do."""
    if ckpt_path != "last":  # a changed config may no longer stop the run
        trainer.should_stop = False
    if trainer.resumed and trainer.should_stop:
        rank_zero_info(f"A callback ended this run at round {trainer.round}: start a new one to train longer.")
    elif trainer.resumed and trainer.round >= trainer.max_rounds:
        rank_zero_info(f"The run already has its {trainer.round} rounds: raise `--trainer.max_rounds` to go on.")


@contextmanager
def evaluating(
    trainer: LightningNames, name: str, model: LightningModule | None, dataloaders: Any,
    datamodule: LightningDataModule | None, ckpt_path: str | None, weights: str | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Sets up ``validate``, ``test`` or ``predict``; the block gets the data sets by name."""
    books = trainer.books
    books.interrupted, books.stop_message = None, ""
    kind = "val" if name == "validate" else name
    if model is None and trainer.lightning_module is not None:
        model = trainer.lightning_module
        if dataloaders is None and datamodule is None:
            datamodule = trainer.datamodule
        if weights is None:
            ckpt_path = books.own_checkpoint(trainer, ckpt_path)
    model = expect_module(model, "validation_step" if name == "validate" else f"{name}_step")
    data = expect_datamodule(model, datamodule, **{kind: dataloaders})
    with attached(trainer, model, data, TrainerFn(name)):
        weights, option = books.find_weights(trainer, ckpt_path, weights)
        trainer.metrics = LoggedMetrics({}, {}, {})
        _set_up_data(trainer, name)
        _call_setups(trainer, name)
        move_to_device(trainer.fabric, model)
        if weights is not None:
            checkpoint = read_checkpoint(Path(weights), option)
            load_weights(model, checkpoint, weights, option)
            if option == "--ckpt_path":
                restore_data(trainer, checkpoint, weights)
        share_model(trainer.processes, model)
        method = f"{kind}_dataloader"
        vars(trainer)[f"{kind}_loaders"] = loaders = named_loaders(getattr(trainer.datamodule, method)())
        expect(loaders, f"Expected the datamodule to give data from `{method}`, got none: change `--data`.")
        yield loaders


def _set_up_data(trainer: LightningNames, stage: str) -> None:
    """Prepares the data, before the run folder is made, so that a mistake leaves no folder behind."""
    data, options = trainer.datamodule, trainer.options
    for part in (data, trainer.lightning_module):  # one process of each machine prepares for all on it
        if trainer.is_global_zero or (trainer.local_rank == 0 and part.prepare_data_per_node):
            part.prepare_data()
    trainer.processes.exchange(None, "data")
    data.setup(stage)
    if stage == "fit":
        if trainer.fleet is not None:
            expect_carried(trainer)
        source = data.train_source().to(trainer.fabric.device)
        size = cohort_size(options.clients_per_round, len(source.sizes))
        trainer.aggregator.check_cohort(size)
        expect_same_data(trainer.processes, trainer.seed, source.sizes, getattr(data, "split_hash", None))
        trainer.train_state = cast(TrainState, NoState(source=source, cohort_size=size))


def _call_setups(trainer: LightningNames, stage: str) -> None:
    """Calls every ``setup`` other than the data's, in Lightning's order."""
    model = trainer.lightning_module
    announce_device(trainer.fabric, model)
    done = getattr(trainer.datamodule, "model_set_up_for", ())  # stages set up already, for the model's own loaders
    trainer.hooks("setup", stage, module=stage not in done)
    for hook in ("configure_sharded_model", "configure_model"):  # the former has gone from later versions
        getattr(model, hook, lambda: None)()
    sync_metrics(trainer.processes, model)


def _set_up_training(
    trainer: LightningNames, run: RunFolder | None, weights: str | None, checkpoint: dict[str, Any] | None, source: str
) -> None:
    """Builds the state of ``fit``, new, from a ``checkpoint`` read from ``source``, or from ``weights``."""
    model, options = trainer.lightning_module, trainer.options
    if checkpoint is not None:
        expect_layout(checkpoint, source)  # before a hook of the module may change the checkpoint
    move_to_device(trainer.fabric, model)  # first: else loading could round the weights
    with unfrozen(trainer.callbacks, model):  # its `state_dict` may hold only trained weights
        if weights is not None and checkpoint is None:
            load_weights(model, read_checkpoint(Path(weights), "--weights"), weights, "--weights")
        if checkpoint is not None:
            # With Lightning's WeightAveraging `state_dict` is the average; training goes on from the model beside it.
            average, beside = checkpoint.get("state_dict"), checkpoint.get("current_model_state")
            checkpoint |= {} if beside is None else {"state_dict": beside}
            load_weights(model, checkpoint, source, "--ckpt_path")
            checkpoint |= {} if beside is None else {"state_dict": average}
            restore_data(trainer, checkpoint, source)
    trainer.resumed, trainer.validated = checkpoint is not None, False
    trainer.metrics, trainer.round_metrics = LoggedMetrics({}, {}, {}), {}
    share_model(trainer.processes, model)
    kept = None if checkpoint is None else checkpoint["federated"].get("memory_format", "preserve")
    memory_format = lay_out(trainer.fabric, model, trainer.callbacks, options.memory_format, kept)
    has_validation = overrides(model, "validation_step")  # `configure_optimizers` may ask for it
    trainer.val_loaders = loaders_in_fit(trainer, "val") if has_validation else {}
    trainer.train_state = _make_state(trainer, run)
    trainer.train_state.memory_format = memory_format
    trainer.train_state.length = trainer.options.max_rounds if trainer.reads_length else None
    show_optimizers(trainer.fabric, trainer.optimizers)
    in_between = options.check_test_every_n_rounds is not None
    trainer.test_loaders = loaders_in_fit(trainer, "test") if in_between else {}
    for callback in trainer.callbacks:
        if isinstance(callback, ClientAlgorithm):
            callback.check(trainer)
    expect_covered(trainer)
    if checkpoint is not None:
        restore_state(trainer, checkpoint, source)


def _leave_buffers(trainer: LightningNames) -> None:
    """Leaves buffers with their clients where an algorithm needs that; refuses ``keep``, which is no default."""
    needs = [type(cb).__name__ for cb in trainer.callbacks if getattr(cb, "needs_local_buffers", False)]
    if needs and trainer.aggregator.buffers == "keep":
        raise FederatedError(f"Expected `--aggregator.buffers local` for {needs[0]}, got keep: leave it out.")
    if needs and trainer.aggregator.buffers == "average":
        trainer.aggregator.buffers = "local"
        rank_zero_info(f"{needs[0]} sets `--aggregator.buffers local`: its clients keep their buffers.")


def _make_state(trainer: LightningNames, run: RunFolder | None) -> TrainState:
    model = trainer.lightning_module
    optimizer = LocalOptimizer(model, restart=trainer.options.local_schedule == "restart")
    with unfrozen(trainer.callbacks, model):
        vector = ParameterVector(model, personal_parameters(trainer.callbacks, model))
    weights = vector.data.to(torch.promote_types(vector.dtype, torch.float32), copy=True)
    if any(True for _ in model.buffers()):
        _leave_buffers(trainer)
    keeps = trainer.checkpoint_callback is not None
    return TrainState(
        fabric=trainer.fabric,
        module=model,
        vector=vector,
        weights=weights,
        buffers=GlobalBuffers(model, trainer.aggregator.buffers, vector.all_names),
        optimizer=optimizer,
        client_states=ClientStates(
            trainer.options.client_states,
            weights,
            None if run is None else run.path,
            records_of_checkpoints(run) if run is not None and keeps else None,
            tolerant=trainer.options.tolerance.on_write_error == "continue",
            num_clients=len(trainer.source.sizes),
        ),
        source=trainer.source,
        transfer=batch_transfer(trainer.fabric, model, trainer.datamodule, resident=True),
        cohort_size=trainer.cohort_size,
        seed=trainer.seed,
        origin=weights,
        client_names=lambda: getattr(trainer.datamodule, "client_names", None),
    )
