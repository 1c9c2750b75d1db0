"""The attributes of a trainer that its parts, LightningModules and callbacks read, with Lightning's names if any."""

import math
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import RunningStage, TrainerState, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.aggregators import Aggregator
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import ClientStates
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.core.recorder import LoggedMetrics
from lightning_fed.core.train_state import CompileMode, TrainState
from lightning_fed.core.updates import Client, StartGradients
from lightning_fed.core.vector import ParameterVector
from lightning_fed.distributed.processes import Processes
from lightning_fed.distributed.strategy import processes_of
from lightning_fed.engines.client_batches import samples_in_epoch, steps_in_epochs
from lightning_fed.engines.fleet import Fleet
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import Availability, ClientSampler, ClientWork, Stragglers
from lightning_fed.trainer.forwarding import Refused, RefusedBut, derived, fixed, forwarded, option
from lightning_fed.trainer.options import TrainerOptions, batch_limit, known_length

__all__ = ["LightningNames"]


def _in_stage(stage: RunningStage) -> Callable[[Any], bool]:
    return lambda trainer: bool(trainer.state.stage == stage)


def _of_kind(kind: type) -> Callable[[Any], list[Any]]:
    return lambda trainer: [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def _given(kind: str) -> Callable[[Any], Any]:
    """Returns loaders in the form in which a ``*_dataloader`` method returned them, before ``named_loaders``."""

    def given(trainer: Any) -> Any:
        loaders = getattr(trainer, f"{kind}_loaders")
        if list(loaders) in ([], [""]):
            return loaders.get("")
        unnamed = all(name.startswith("dataloader_idx_") for name in loaders)
        return list(loaders.values()) if unnamed else dict(loaders)

    return given


def _counted(kind: str) -> Callable[[Any], list[int | float]]:
    def counted(trainer: Any) -> list[int | float]:
        limit, counts = getattr(trainer, f"limit_{kind}_batches"), []
        for loader in getattr(trainer, f"{kind}_loaders").values():
            most = (batch_limit(limit, length := known_length(loader)), length)
            counts.append(min(math.inf if count is None else count for count in most))
        return counts

    return counted


def _precision_of(trainer: Any) -> Precision:
    plugin = Precision()
    vars(plugin)["forward_context"] = trainer.fabric.strategy.precision.forward_context
    return plugin


class LightningNames:
    """Attributes that forward to the trainer's parts, which its constructor makes; an epoch is a round here."""

    options: TrainerOptions
    fabric: Fabric
    callbacks: list[Callback]
    hooks: HookCaller
    aggregator: Aggregator
    sampler: ClientSampler
    train_state: TrainState
    state: TrainerState
    lightning_module: LightningModule
    datamodule: Any
    seed: int
    metrics: LoggedMetrics
    round_metrics: dict[str, float]
    validated: bool
    resumed: bool
    reads_length: bool
    should_stop: bool
    loggers: list[Logger]
    val_loaders: dict[str, Any]
    test_loaders: dict[str, Any]
    predict_loaders: dict[str, Any]
    books: Any
    fleet: Fleet | None = None
    plain_updates: Callable[[Sequence[int]], Tensor]

    # The state of fit

    weights: Tensor = forwarded("train_state.weights", "The global vector w, shape (d,), on the device.")
    vector: ParameterVector = forwarded("train_state.vector", "The live module's flat vector.")
    origin: Tensor = forwarded("train_state.origin", "What a client's update is measured from, (d,).", settable=True)
    received: Tensor = forwarded("train_state.received", "The model that the round's clients get, (d,).")
    displacement: Tensor | None = forwarded("train_state.displacement", "That of gradients, (d,).", settable=True)
    start_gradients: StartGradients = forwarded("train_state.start_gradients", "Gradients at w that were asked for.")
    client_states: ClientStates = forwarded("train_state.client_states", "What clients keep between their rounds.")
    client: Client | None = forwarded("train_state.client", "The client that trains now.")
    local_step: int = forwarded("train_state.local_step", "Local steps of the current client.")
    round: int = forwarded("train_state.round", "Index of the round, 0 before training.")
    finished_round: int = forwarded("train_state.finished_round", "The last finished round.")
    totals: dict[str, float] = forwarded("train_state.totals", "Counts over the run.")
    buffers: GlobalBuffers = forwarded("train_state.buffers", "The global model's buffers.")
    local_optimizer: LocalOptimizer = forwarded("train_state.optimizer", "The clients' optimizer and schedules.")
    source: Any = forwarded("train_state.source", "The clients' batches, on the device.")
    cohort_size: int = forwarded("train_state.cohort_size", "Clients drawn in a round.")
    client_sizes: npt.NDArray[np.int64] = forwarded("train_state.source.sizes", "Training samples of each client.")
    batch_size: int = forwarded("train_state.source.batch_size", "Samples in a batch of a client.")
    gradient_at: Callable[..., None] = forwarded("train_state.gradient_at", "A second gradient of a step's batch.")
    by_samples: bool = forwarded("aggregator.by_samples", "Whether a client's weight depends on its samples.")
    update_weight: Callable[[Client], float] = forwarded("aggregator.update_weight", "A client's weight in the step.")
    engine_choice: dict[str, Any] | None = forwarded("train_state.engine_choice", "The engine in use, and why.")

    # Options

    max_rounds: int = option("max_rounds", flag="reads_length")
    max_time: Any = option("max_time")
    clients_per_round: int | float = option("clients_per_round")
    check_val_every_n_rounds: int = option("check_val_every_n_rounds")
    check_test_every_n_rounds: int | None = option("check_test_every_n_rounds")
    limit_val_batches: int | float = option("limit_val_batches")
    limit_test_batches: int | float = option("limit_test_batches")
    limit_predict_batches: int | float = option("limit_predict_batches")
    fast_dev_run: bool | int = option("fast_dev_run")
    logger_choice: Any = option("logger")
    engine: str = option("engine")
    chunk_size: int | None = option("chunk_size")
    local_epochs: float | None = option("local_epochs", at="options.epochs")
    local_steps: int | None = option("local_steps")
    local_schedule: Literal["restart", "continue"] = option("local_schedule")
    max_diverged: float = option("tolerance.max_diverged")
    gradient_clip_val: float | None = option("gradient_clip_val")
    gradient_clip_algorithm: Any = option("gradient_clip_algorithm", kind=GradClipAlgorithmType)
    accumulate_grad_batches: int = option("accumulate_grad_batches")
    deterministic: bool | Literal["warn"] = option("deterministic")
    availability: Availability | None = option("participation.availability")
    stragglers: Stragglers | None = option("participation.stragglers")
    work: ClientWork | None = option("participation.work")
    compile: CompileMode | None = option("compile", at="options.compile_mode")
    full_gradient_mode: str = option("full_gradients.mode")
    full_gradient_batch_size: int | None = option("full_gradients.batch_size")
    full_gradient_weight_decay: bool = option("full_gradients.weight_decay")

    # Length

    barebones: bool = fixed(False, "Logging, checkpoints and bars are left out by options of their own.")
    current_epoch: int = forwarded("train_state.epochs", "Rounds that are over: 0 in the first, as in Lightning.")
    max_epochs: int = forwarded("options.max_rounds", "The number of rounds.", flag="reads_length")
    max_steps: int = fixed(-1, "A run's length is given in rounds.")
    min_steps: int | None = fixed(None, "A run's length is given in rounds.")
    min_epochs: int = fixed(0, "A callback may stop a run after any round.")
    limit_train_batches: float = fixed(1.0, "Clients train on all of their batches, or for ``local_steps``.")
    overfit_batches: float = fixed(0.0, "There is no such mode; ``fast_dev_run`` is for trials.")
    log_every_n_steps: int = fixed(50, "Lightning's default, for code that logs by itself; a row is a round.")
    num_sanity_val_steps: int = fixed(0, "Round 0 evaluates everything before any training.")
    reload_dataloaders_every_n_epochs: int = fixed(0, "Clients keep their data for the whole run.")
    check_val_every_n_epoch: int = forwarded("options.check_val_every_n_rounds", "Rounds between validations.")
    val_check_interval: float = fixed(1.0, "Validation happens after a round, never within one.")

    @property
    def global_step(self) -> int:
        """Optimizer steps of the longest client in each round, summed, plus those of the client that trains now."""
        state = self.train_state
        return state.steps_before_round + max(state.local_step, state.optimizer_steps if state.client else 0)

    @property
    def num_training_batches(self) -> int:
        """Batches in one local epoch of the client with the most samples."""
        return -(-int(samples_in_epoch(self.source, max(self.source.sizes))) // int(self.source.batch_size))

    val_check_batch: int = forwarded("num_training_batches", "Batches before a validation, for progress bars.")

    @property
    def estimated_stepping_batches(self) -> int:
        """The most steps that a schedule with interval ``step`` takes.

        These are the steps of the client with the most samples: in one round, as schedules restart in each, or in all
        rounds if ``local_schedule`` is ``continue``.
        """
        per_epoch = -(-self.num_training_batches // self.accumulate_grad_batches)
        steps = self.local_steps or int(steps_in_epochs(self.local_epochs or 1, per_epoch))
        if self.work is not None:
            steps = self.work.most(steps, per_epoch)
        return steps * self.max_rounds if self.local_schedule == "continue" else steps

    # Stage

    sanity_checking: bool = fixed(False, "Round 0 is a real evaluation, not a check.")

    training: bool = derived(_in_stage(RunningStage.TRAINING), "Whether clients are being trained.")
    validating: bool = derived(_in_stage(RunningStage.VALIDATING), "Whether a validation runs, within ``fit`` too.")
    testing: bool = derived(_in_stage(RunningStage.TESTING), "Whether a test runs.")
    predicting: bool = derived(_in_stage(RunningStage.PREDICTING), "Whether predictions are being made.")
    evaluating: bool = derived(lambda self: self.validating or self.testing, "Whether a validation or a test runs.")
    interrupted_or_failed: bool = derived(
        lambda self: self.state.status == TrainerStatus.INTERRUPTED, "Whether a signal or an error ended the last call."
    )

    # Metrics, loggers, optimizers

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of every metric, for callbacks that monitor one."""
        return {name: torch.tensor(value) for name, value in self.metrics.callback.items()}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of every metric that was sent to the loggers."""
        return {name: torch.tensor(value) for name, value in self.metrics.logged.items()}

    progress_bar_metrics: dict[str, float] = forwarded("metrics.progress_bar", "Newest values, for the bar.")

    enable_autolog_hparams: bool = fixed(True, "Every logger gets the run's config.")
    profiler: Profiler = fixed(PassThroughProfiler(), "It measures nothing: put torch.profiler around ``fit``.")
    scaler: None = fixed(None, "There is no loss scale: it would couple the clients.")

    logger: Logger | None = derived(lambda self: next(iter(self.loggers), None), "The first logger, if there is one.")
    optimizers: list[Optimizer] = derived(
        lambda self: self.local_optimizer.optimizers if hasattr(self, "local_optimizer") else [],
        "A list of the clients' optimizer or optimizers; empty before ``fit``.",
    )
    lr_scheduler_configs: list[LRSchedulerConfig] = derived(
        lambda self: self.local_optimizer.schedulers if hasattr(self, "local_optimizer") else [],
        "The module's learning-rate schedules.",
    )
    model: LightningModule = forwarded("lightning_module", "The module.")

    # Processes and precision

    processes: Processes = derived(lambda self: processes_of(self.fabric), "The processes that share the run.")
    init_module: Any = forwarded("fabric.init_module", "A context in which a model is made on its device.")

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the processes in place, for sums over all clients; returns it."""
        self.processes.sum(tensor, what="reduce_sum")
        return tensor

    strategy: Strategy = forwarded("fabric.strategy", "Fabric's strategy.")
    accelerator: Accelerator = forwarded("fabric.accelerator", "Fabric's accelerator.")
    is_global_zero: bool = forwarded("fabric.is_global_zero", "Whether this process writes files.")
    global_rank: int = forwarded("fabric.global_rank", "Index of this process over all nodes.")
    local_rank: int = forwarded("fabric.local_rank", "Index of this process on its node.")
    node_rank: int = forwarded("fabric.node_rank", "Index of this node.")
    world_size: int = forwarded("fabric.world_size", "Number of processes.")
    print: Any = forwarded("fabric.print", "Prints once, whatever the number of processes.")
    precision: str = forwarded("fabric.strategy.precision.precision", "Its name in Lightning, such as ``bf16-mixed``.")
    precision_plugin = derived(_precision_of, "Used by ``LightningModule.clip_gradients`` and for the summary.")
    num_devices: int = derived(
        lambda self: int(getattr(self.fabric.strategy, "num_processes", 1)), "Devices used here, one for each process."
    )
    num_nodes: int = derived(lambda self: int(getattr(self.fabric.strategy, "num_nodes", 1)), "Number of nodes.")
    device_ids: list[int] = derived(lambda self: [self.fabric.device.index or 0], "Index of the device used here.")

    # Data

    @property
    def is_last_batch(self) -> bool:
        """Whether the client's current batch is the last of its local epoch."""
        state = self.train_state
        return getattr(state.client, "id", None) is not None and bool(state.is_last_batch)

    enable_validation: bool = derived(
        lambda self: bool(self.val_loaders) and self.limit_val_batches > 0, "Whether ``fit`` validates."
    )
    val_dataloaders: Any = derived(_given("val"), "What ``val_dataloader`` of the data returned.")
    test_dataloaders: Any = derived(_given("test"), "What ``test_dataloader`` of the data returned.")
    predict_dataloaders: Any = derived(_given("predict"), "What ``predict_dataloader`` of the data returned.")
    num_val_batches: list[int | float] = derived(_counted("val"), "Batches evaluated of each; infinity if unknown.")
    num_test_batches: list[int | float] = derived(_counted("test"), "Batches evaluated of each test set.")
    num_predict_batches: list[int | float] = derived(_counted("predict"), "Batches of each prediction set.")
    num_sanity_val_batches: list[int | float] = derived(lambda self: [0] * len(self.val_loaders), "Always 0.")
    ckpt_path: str | None = forwarded("books.ckpt_path", "The checkpoint that the last call resumed from or evaluated.")
    received_sigterm: bool = derived(
        lambda self: self.books.interrupted == signal.SIGTERM, "Whether SIGTERM ended the last call early."
    )

    # Attributes that do not exist here

    train_dataloader = Refused(
        "every client has batches of its own: read `num_training_batches` or `datamodule`", none_before_training=True
    )
    distributed_sampler_kwargs = Refused("each client is trained by one process, and no sampler splits a data set")
    validate_loop = Refused("evaluation has a loop of its own: read `val_dataloaders` or `num_val_batches`")
    test_loop = Refused("evaluation has a loop of its own: read `test_dataloaders` or `num_test_batches`")
    predict_loop: Any = Refused("only prediction has one: read `predict_dataloaders` or `num_predict_batches`")
    _accelerator_connector = Refused("Fabric chooses the devices: read `strategy`, `device_ids` or `world_size`")
    _checkpoint_connector = Refused("it restores Lightning's loops: use `save_checkpoint` and `ckpt_path` of `fit`")
    _logger_connector = Refused("a round's metrics are one row: use `self.log`, read `callback_metrics` or `loggers`")

    @property
    def _data_connector(self) -> RefusedBut:
        """Tells which hooks bring a batch to the device: for the summary, ``to_onnx`` and traced TorchScript."""
        hooks = _DataHookSelector(self.lightning_module, self.datamodule)
        return RefusedBut("_data_connector", "clients have their own data: read `datamodule`", _datahook_selector=hooks)

    @property
    def fit_loop(self) -> RefusedBut:
        """Tells whether there is a validation, which modules read to choose a ``monitor``; all else is refused."""
        why = "rounds have a loop of their own: read `current_epoch`, `global_step` or `local_step`"
        source = RefusedBut("fit_loop.epoch_loop.val_loop._data_source", why, is_defined=lambda: bool(self.val_loaders))
        validation = RefusedBut("fit_loop.epoch_loop.val_loop", why, _data_source=source)
        return RefusedBut("fit_loop", why, epoch_loop=RefusedBut("fit_loop.epoch_loop", why, val_loop=validation))

    # Callbacks

    early_stopping_callbacks: list[EarlyStopping] = derived(_of_kind(EarlyStopping), "Every EarlyStopping.")
    early_stopping_callback: EarlyStopping | None = derived(
        lambda self: next(iter(self.early_stopping_callbacks), None), "The first EarlyStopping; None if there is none."
    )
    checkpoint_callbacks: list[Checkpoint] = derived(_of_kind(Checkpoint), "The callbacks that write checkpoints.")
    checkpoint_callback: Checkpoint | None = derived(
        lambda self: next(iter(self.checkpoint_callbacks), None), "The first that writes checkpoints, if there is one."
    )

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar; ``LightningModule.print`` writes above it."""
        return next((cb for cb in self.callbacks if hasattr(cb, "is_enabled") and hasattr(cb, "print")), None)

    @property
    def _results(self) -> Any:
        """Reached if ``LightningModule.log`` is called outside the hooks that collect values."""
        raise FederatedError(
            "Expected `self.log` only in steps and in the hooks of a round, a batch, a validation or a test, as in "
            "Lightning, got a call elsewhere: move it there, for example to `on_train_epoch_start`."
        )
